"""Is the process that made this file still there? Asked of the kernel, not of a process id.

A process holds an open-file-description lock on its file for as long as it lives; the kernel drops the lock
with the process, however it dies. Unlike a pid this survives pid reuse and works between containers that
share a tmpfs but not a pid namespace. Asking takes no lock, so readers never disturb each other.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import struct
from pathlib import Path

# struct flock: l_type, l_whence, l_start, l_len (0 = whole file), l_pid (must be 0 for OFD locks)
_FLOCK = struct.Struct("hhqqi4x")

# A link to itself and a socket are no files that anybody could hold.
_NO_SUCH_FILE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO)


def hold(fd: int) -> None:
    """Mark the open file as held by this process until `fd` is closed. Raises OSError where another holds it."""
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))


def is_held(path: Path) -> bool:
    """Whether a living process holds the file; False where there is no such file.

    Raises OSError where the file cannot be asked (it belongs to somebody else).
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe of that name must not block us
    except OSError as error:
        if error.errno in _NO_SUCH_FILE:
            return False
        raise
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return False
        answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0))
    finally:
        os.close(fd)
    return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)
