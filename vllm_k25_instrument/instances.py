"""Server instances: one folder each below the ring directory, with one ring per rank.

The first process of a server makes the folder and hands its name to the children through ``K25_INSTANCE``.
Folders whose processes are all gone are removed by the next server that starts, but for the most recent
ones: those are the flight recorders of a server that crashed and was restarted.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import shutil
import stat
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from threading import get_ident
from typing import Final

from vllm_k25_instrument.liveness import hold, is_held
from vllm_k25_instrument.ring import RING_SUFFIX, ring_paths

INSTANCE_VARIABLE: Final = "K25_INSTANCE"
_OWNER_FILE: Final = "instance.lock"
_ENGINE_FILE: Final = "engine"
_NAME: Final = re.compile(r"\d{8}T\d{6}(-\d+)+")
_ABANDONED_S: Final = 3600


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
        """Whether any process of the server lives; True where that cannot be told, so that nothing is taken away."""
        try:
            return is_held(self.path / _OWNER_FILE) or any(is_held(ring) for ring in ring_paths(self.path))
        except OSError:
            return True

    @property
    def modified(self) -> float:
        """When the instance last changed (Unix seconds): its newest ring, else the folder itself; 0 if it is gone."""
        return max(map(_modified, ring_paths(self.path)), default=0.0) or _modified(self.path)


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # removed just now, or a link to nowhere
        return 0.0


def ensure_private_directory(path: Path) -> None:
    """Make `path` with mode 0700, or check that it is ours and no link, and give it that mode.

    Raises OSError: a folder of somebody else in a world-writable place is not one to write into, and one that is open
    to others and holds their things too (``/tmp``, a home) is not one to close to them.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(20, "not a directory (or a symbolic link)", str(path))
    if status.st_uid != os.getuid():
        raise PermissionError(1, f"belongs to user {status.st_uid}, not to {os.getuid()}", str(path))
    if status.st_mode & 0o077:
        _check_that_nobody_else_needs_it(path, stat.S_IMODE(status.st_mode))
        _close_to_others(path)


def _close_to_others(path: Path) -> None:
    """Give the directory mode 0700; never a thing that somebody has put in its place since it was looked at."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.fchmod(fd, 0o700)
    finally:
        os.close(fd)


def check_default_is_ours(path: Path) -> None:
    """Raise PermissionError where `path` is the default ring directory and somebody else's, or a link.

    Its name can be foretold and its parent is there for everybody, so that another user may have made it: what lies in
    it is then no ring of ours. A directory that was named outright is its reader's own choice.
    """
    if path != default_ring_directory():
        return
    try:
        status = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise PermissionError(
            errno.EPERM,
            f"is a link or a file, or belongs to another user (its owner is user {status.st_uid}): not read, name "
            "another directory with K25_RING_DIR",
            str(path),
        )


def _check_that_nobody_else_needs_it(path: Path, mode: int) -> None:
    strangers = (entry.name for entry in path.iterdir() if not _is_made_by_us(entry))
    what = "is there for everybody" if mode & stat.S_ISVTX else next((f"holds {name}" for name in strangers), "")
    if what:
        raise PermissionError(
            errno.EPERM, f"has mode {mode:04o} and {what}: give the rings a folder of their own in it", str(path)
        )


def _is_made_by_us(path: Path) -> bool:
    return path.name in (_OWNER_FILE, _ENGINE_FILE) or path.suffix in (RING_SUFFIX, ".partial") or _is_instance(path)


def _is_instance(path: Path) -> bool:
    if path.is_symlink() or not path.is_dir():
        return False
    return bool(_NAME.fullmatch(path.name) or ring_paths(path)) or (path / _OWNER_FILE).exists()


def open_instance(directory: Path, name: str) -> Instance:
    """The folder of the instance `name`, made where it is not there yet. Raises OSError."""
    if name in ("", "..") or Path(name).name != name:
        raise OSError(errno.EINVAL, f"{INSTANCE_VARIABLE} must be the name of a folder", name)
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
    path = _make_folder(directory)
    try:
        return Instance(path), _hold_new_file(path / _OWNER_FILE)
    except OSError:
        shutil.rmtree(path, ignore_errors=True)
        raise


def join_instance(directory: Path, name: str, keep: int) -> tuple[Instance, int | None]:
    """The instance `name` that several processes share, none of which has started the others; the first one owns it.

    Else as `create_instance`. The descriptor is None where another process is the owner.
    """
    ensure_private_directory(directory)
    remove_dead_instances(directory, keep)
    instance = open_instance(directory, name)
    owner = instance.path / _OWNER_FILE
    with contextlib.suppress(FileExistsError):
        if not owner.exists():
            return instance, _hold_new_file(owner)
    return instance, None


def launched_together() -> str:
    """Name of the instance of the processes that torchrun has started together with this one; "" without torchrun.

    They have a parent in common, and its start time. Raises OSError where /proc does not tell.
    """
    if not {"TORCHELASTIC_RUN_ID", "LOCAL_RANK"} <= os.environ.keys():
        return ""
    parent = os.getppid()
    # The name before the fields is in parentheses and may hold any character. Start time: field 22, ticks since boot.
    ticks = int(Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[19])
    (booted,) = (line for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime "))
    started = int(booted.split()[1]) + ticks // os.sysconf("SC_CLK_TCK")
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    return f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime(started))}-{parent}" + (f"-{restarts}" if restarts else "")


def instance_of_engine(directory: Path, name: str, engine: str) -> str:
    """The instance for the workers of `engine`, in a server whose instance is `name`: that, for the first engine.

    Another engine that the same process has started gets ``name-2``: its ranks count from 0 too. Raises OSError.
    """
    for attempt in itertools.count(1):
        candidate = name if attempt == 1 else f"{name}-{attempt}"
        claim = open_instance(directory, candidate).path / _ENGINE_FILE
        partial = claim.with_name(f"{_ENGINE_FILE}-{os.getpid()}-{get_ident()}.partial")
        partial.write_text(engine)
        try:
            os.link(partial, claim)  # the file appears whole, and once
        except FileExistsError:
            if claim.read_text() != engine:
                continue
        finally:
            partial.unlink()
        return candidate
    raise AssertionError


def _make_folder(directory: Path) -> Path:
    """A folder that was not there before: containers that share a directory may share process ids too."""
    now = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
    for attempt in itertools.count(1):
        path = directory / f"{now}{f'-{attempt}' if attempt > 1 else ''}-{os.getpid()}"
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
            break
    return path


def _hold_new_file(path: Path) -> int:
    """Make a file that has been held ever since it appeared, so that nobody takes the instance for a dead one."""
    partial = path.with_suffix(".partial")
    fd = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        hold(fd)
        partial.rename(path)
    except OSError:
        os.close(fd)
        raise
    return fd


def list_instances(directory: Path) -> list[Instance]:
    """The instances below `directory`, most recent first."""
    found = [Instance(p) for p in _folders(directory) if ring_paths(p) or (p / _OWNER_FILE).exists()]
    return sorted(found, key=lambda instance: (instance.modified, instance.name), reverse=True)


def _folders(directory: Path) -> list[Path]:
    try:
        return [path for path in directory.iterdir() if path.is_dir() and not path.is_symlink()]
    except OSError:
        return []


def remove_dead_instances(directory: Path, keep: int) -> list[str]:
    """Remove the folders of dead instances but for the `keep` most recent with rings; returns the names removed.

    Folders with names that we do not give (rings that somebody has put aside) are left alone.
    """
    dead = [instance for instance in list_instances(directory) if _NAME.fullmatch(instance.name) and not instance.alive]
    # A process that loads vLLM's plugins to look a model up leaves an instance without rings: no flight recorder.
    empty = [instance for instance in dead if not ring_paths(instance.path)]
    recorders = [instance for instance in dead if instance not in empty]
    removed = []
    for path in [*(instance.path for instance in (*recorders[keep:], *empty)), *_abandoned(directory)]:
        shutil.rmtree(path, ignore_errors=True)
        if not path.exists():
            removed.append(path.name)
    return removed


def _abandoned(directory: Path) -> list[Path]:
    """Folders of servers that ended before they had made anything in them, and a while ago."""
    long_ago = time.time() - _ABANDONED_S
    return [
        path
        for path in _folders(directory)
        if _NAME.fullmatch(path.name)
        and 0 < _modified(path) < long_ago
        and not ring_paths(path)
        and not (path / _OWNER_FILE).exists()
    ]


def find_rings(path: Path) -> Path:
    """What a user means by `path`: a ring, an instance's folder, or a ring directory's best instance.

    Of a ring directory the most recent living instance is taken, else the most recent dead one. Raises
    FileNotFoundError where there is no ring at all, and PermissionError as `check_default_is_ours`.
    """
    check_default_is_ours(path)
    if not path.exists():
        raise FileNotFoundError(2, "no such file or directory", str(path))
    if path.is_file() or ring_paths(path):
        return path
    instances = [instance for instance in list_instances(path) if ring_paths(instance.path)]
    if not instances:
        raise FileNotFoundError(2, "no rings here", str(path))
    return next((instance for instance in instances if instance.alive), instances[0]).path
