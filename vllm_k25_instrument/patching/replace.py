"""Files of a tree are replaced, all of them or none.

Everything is written beside the files first; then each is renamed into place, which is atomic. What fails on the way is
undone. A process that is killed between two renames leaves some files new and some old, each of them whole: since a
file's text tells which it is, the next apply or revert goes on from there without a journal. In the order of a series
(reverted from its end) vLLM works at every point between: nothing imports a mark that is not there.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from vllm_k25_instrument.patching.series import FileReport, FileState, PatchError

SUFFIX: Final = ".k25-new"


class ReplaceError(PatchError):
    """Some file could not be written. `undone` says whether the tree is what it was."""

    def __init__(self, message: str, *, undone: bool) -> None:
        super().__init__(message)
        self.undone = undone


def bring_to(root: Path, reports: Sequence[FileReport], wanted: FileState) -> list[str]:
    """Bring the files to PATCHED or CLEAN; returns the paths of those that were not yet.

    Raises PatchError where a file is neither of the two (then nothing is touched), ReplaceError where one cannot be
    written.
    """
    for report in reports:
        if report.state not in (FileState.CLEAN, FileState.PATCHED):
            raise PatchError(
                f"{root.parent / report.path}: {report.problem}: it is not the release's file; nothing was changed"
            )
    todo = [report for report in reports if report.state is not wanted]
    if wanted is FileState.CLEAN:
        todo.reverse()
    with _alone(root):
        remove_leftovers(root, [report.path for report in reports])
        _replace_all(
            {
                root.parent / report.path: (report.old, report.patched if wanted is FileState.PATCHED else report.clean)
                for report in todo
            }
        )
    return [report.path for report in todo]


def remove_leftovers(root: Path, paths: Sequence[str]) -> None:
    """Remove what a killed run has written beside the files."""
    for path in paths:
        with contextlib.suppress(OSError):
            _beside(root.parent / path).unlink()


def _replace_all(changes: Mapping[Path, tuple[str, str]]) -> None:
    written: list[Path] = []
    replaced: list[Path] = []
    try:
        for path, (old, new) in changes.items():
            written.append(path)
            _write_beside(path, new)
            if path.read_bytes() != old.encode("utf-8"):
                raise PatchError(f"{path} has been changed by somebody else just now; nothing was changed")
        for path in changes:
            os.replace(_beside(path), path)
            replaced.append(path)
            _forget_compiled(path)
    except OSError as error:
        undone = _undo(replaced, changes)
        where = error.filename2 or error.filename or "a file"
        raise ReplaceError(
            f"{where} cannot be written: {error.strerror}: "
            + ("nothing was changed" if undone else "some files are changed; run it again, or revert")
            + "; run it as the owner of vLLM's files"
            * (isinstance(error, PermissionError) or error.errno == 30),  # a read-only file system
            undone=undone,
        ) from error
    finally:
        for path in written:
            with contextlib.suppress(OSError):
                _beside(path).unlink()


def _undo(replaced: Sequence[Path], changes: Mapping[Path, tuple[str, str]]) -> bool:
    try:
        for path in reversed(replaced):
            _write_beside(path, changes[path][0])
            os.replace(_beside(path), path)
            _forget_compiled(path)
    except OSError:
        return False
    return True


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}{SUFFIX}")


def _write_beside(path: Path, text: str) -> None:
    """A new file, never the old one opened: that may be shared with a package cache by a hard or a symbolic link."""
    about = path.stat()
    descriptor = os.open(_beside(path), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "wb") as file:
        file.write(text.encode("utf-8"))
        file.flush()
        os.fchmod(descriptor, about.st_mode & 0o7777)
        with contextlib.suppress(PermissionError):
            os.fchown(descriptor, about.st_uid, about.st_gid)
        os.fsync(descriptor)


def _forget_compiled(path: Path) -> None:
    """Remove a module's bytecode: Python would not look at the source of one compiled with ``unchecked-hash``."""
    for compiled in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
        with contextlib.suppress(OSError):
            compiled.unlink()


@contextmanager
def _alone(root: Path) -> Iterator[None]:
    """Hold the folder against another apply or revert. Raises PatchError where there is one."""
    try:
        descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise PatchError(f"{root} cannot be opened: {error.strerror}") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PatchError(f"another `vllm-k25 patch` is at work in {root}") from None
        except OSError:
            pass  # a file system without locks
        yield
    finally:
        os.close(descriptor)
