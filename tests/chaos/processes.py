"""What the processes of a server hold: descriptors, shared memory, resident memory."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

SHM = "/dev/shm/"


def session(leader: int) -> set[int]:
    """Living processes of the session of `leader`; a zombie does not live."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, *fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[2]) == leader and state not in "ZX":
                found.add(int(entry.name))
    return found


def files(pid: int) -> Counter[str]:
    """The files that a process has open, by name; sockets, pipes and the like are not counted."""
    found: Counter[str] = Counter()
    try:
        for descriptor in os.scandir(f"/proc/{pid}/fd"):
            try:
                target = os.readlink(descriptor.path).removesuffix(" (deleted)")
            except OSError:
                continue
            if target.startswith("/") and not target.startswith(("/dev/null", "/dev/pts")):
                found[target] += 1
    except OSError:
        pass
    return found


def shared_memory(pids: Iterable[int]) -> set[str]:
    """Names of the files in /dev/shm that these processes have open or mapped."""
    found = set()
    for pid in pids:
        found |= {name for name in files(pid) if name.startswith(SHM)}
        try:
            maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
        except OSError:
            continue
        found |= {line.split(maxsplit=5)[5] for line in maps if SHM in line}
    return {name for name in found if not name.endswith("(deleted)")}


def resident_mib(pid: int) -> float:
    """Resident memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
