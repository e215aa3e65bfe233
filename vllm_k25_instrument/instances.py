"""Server instances: one folder each below the ring directory, with one ring per rank.

The first process of a server makes the folder and hands its name to the children through ``K25_INSTANCE``.
Folders whose processes are all gone are removed by the next server that starts, but for the most recent
ones: those are the flight recorders of a server that crashed and was restarted.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from vllm_k25_instrument.liveness import hold, is_held
from vllm_k25_instrument.ring import ring_paths

INSTANCE_VARIABLE: Final = "K25_INSTANCE"
_OWNER_FILE: Final = "instance.lock"


def default_ring_directory() -> Path:
    """``/dev/shm/vllm_k25-<uid>`` where there is a /dev/shm, else the same in the temporary directory."""
    shm = Path("/dev/shm")  # noqa: S108 (a tmpfs by definition; the folder is checked and private)
    base = shm if shm.is_dir() and os.access(shm, os.W_OK) else Path(tempfile.gettempdir())
    return base / f"vllm_k25-{os.getuid()}"


@dataclass(frozen=True, slots=True)
class Instance:
    """One server's folder."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def alive(self) -> bool:
        """Whether any process of the server lives."""
        return is_held(self.path / _OWNER_FILE) or any(is_held(ring) for ring in ring_paths(self.path))

    @property
    def modified(self) -> float:
        """When the instance last changed (Unix seconds): its newest ring, else the folder itself."""
        times = [ring.stat().st_mtime for ring in ring_paths(self.path)]
        return max(times, default=self.path.stat().st_mtime)


def ensure_private_directory(path: Path) -> None:
    """Make `path` with mode 0700, or check that it is ours and no link.

    Raises OSError: a folder of somebody else in a world-writable place is not one to write into.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(20, "not a directory (or a symbolic link)", str(path))
    if status.st_uid != os.getuid():
        raise PermissionError(1, f"belongs to user {status.st_uid}, not to {os.getuid()}", str(path))
    if status.st_mode & 0o077:
        path.chmod(0o700)


def open_instance(directory: Path, name: str) -> Instance:
    """The folder of the instance `name`, made where it is not there yet. Raises OSError."""
    ensure_private_directory(directory)
    path = directory / name
    ensure_private_directory(path)
    return Instance(path)


def create_instance(directory: Path, keep: int) -> tuple[Instance, int]:
    """A new instance owned by this process, and the descriptor that keeps it marked as alive.

    Removes what dead instances left, but for the `keep` most recent. Raises OSError where the directory cannot
    be used.
    """
    ensure_private_directory(directory)
    remove_dead_instances(directory, keep)
    name = f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{os.getpid()}"
    instance = open_instance(directory, name)
    fd = os.open(instance.path / _OWNER_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    hold(fd)
    return instance, fd


def list_instances(directory: Path) -> list[Instance]:
    """The instances below `directory`, most recent first."""
    with contextlib.suppress(OSError):
        found = [
            Instance(p) for p in directory.iterdir() if p.is_dir() and (ring_paths(p) or (p / _OWNER_FILE).exists())
        ]
        return sorted(found, key=lambda instance: (instance.modified, instance.name), reverse=True)
    return []


def remove_dead_instances(directory: Path, keep: int) -> list[str]:
    """Remove the folders of dead instances but for the `keep` most recent; returns the names removed."""
    dead = [instance for instance in list_instances(directory) if not instance.alive]
    removed = []
    for instance in dead[keep:]:
        shutil.rmtree(instance.path, ignore_errors=True)
        removed.append(instance.name)
    return removed


def find_rings(path: Path) -> Path:
    """What a user means by `path`: a ring, an instance's folder, or a ring directory's best instance.

    Of a ring directory the most recent living instance is taken, else the most recent dead one. Raises
    FileNotFoundError where there is no ring at all.
    """
    if not path.exists():
        raise FileNotFoundError(2, "no such file or directory", str(path))
    if path.is_file() or list(path.glob("*.ring")):
        return path
    instances = [instance for instance in list_instances(path) if ring_paths(instance.path)]
    if not instances:
        raise FileNotFoundError(2, "no rings here", str(path))
    return next((instance for instance in instances if instance.alive), instances[0]).path
