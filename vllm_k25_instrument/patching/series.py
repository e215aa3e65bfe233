"""The series of patches of a vLLM release, and what of it is applied to a tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from packaging.version import InvalidVersion, Version

from vllm_k25_instrument.hooks.resolve import version_of
from vllm_k25_instrument.patching.unified import DiffError, FileDiff, HunkError, parse

PATCHES: Final = Path(__file__).parent.parent / "patches"
"""A folder per release; in a checkout a link to `patches/` at its top."""


class PatchError(Exception):
    """What was asked for cannot be done. The message is one line, with the remedy."""


class FileState(StrEnum):
    """A file of a tree, held against the patches."""

    CLEAN = "clean"  # as released, as far as the patches look
    PATCHED = "patched"
    CHANGED = "changed"  # neither
    MISSING = "missing"


class TreeState(StrEnum):
    """A whole tree."""

    APPLIED = "applied"
    NOT_APPLIED = "not applied"
    PARTLY = "partly applied"  # an apply or revert was cut short; either of them goes on from there
    MISMATCH = "mismatch"


@dataclass(frozen=True, slots=True)
class Patch:
    """One file of a series."""

    name: str
    files: tuple[FileDiff, ...]


@dataclass(frozen=True, slots=True)
class FileReport:
    """One file of a tree: `old` is its text, `clean` and `patched` what it is without and with the patches.

    Where it is neither, `problem` names the patch and the hunk that do not fit.
    """

    path: str
    state: FileState
    old: str = ""
    clean: str = ""
    patched: str = ""
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Series:
    """The patches of one release, in the order to apply them in."""

    release: str
    patches: tuple[Patch, ...]

    @property
    def paths(self) -> list[str]:
        """The files that it touches, the one that all others import from first."""
        return list(dict.fromkeys(diff.path for patch in self.patches for diff in patch.files))

    def examine(self, root: Path) -> list[FileReport]:
        """Each of its files as it is in the tree whose folder `vllm` is `root`. Changes nothing. Raises PatchError."""
        return [self._examine(root, path) for path in self.paths]

    def _examine(self, root: Path, path: str) -> FileReport:
        try:
            text = (root.parent / path).read_bytes().decode("utf-8")
        except FileNotFoundError:
            return FileReport(path, FileState.MISSING, problem="it is not there")
        except (OSError, UnicodeDecodeError) as error:
            raise PatchError(f"{root.parent / path} cannot be read: {error}") from error
        diffs = [(patch.name, diff) for patch in self.patches for diff in patch.files if diff.path == path]
        patched, why_not = _apply(text, diffs)
        if patched is not None:
            return FileReport(path, FileState.CLEAN, text, text, patched)
        clean, why_not_back = _apply(text, [(name, diff.reversed()) for name, diff in reversed(diffs)])
        if clean is not None:
            return FileReport(path, FileState.PATCHED, text, clean, text)
        marked = "k25" in text
        return FileReport(path, FileState.CHANGED, text, problem=why_not_back if marked else why_not)


def _apply(text: str, diffs: Sequence[tuple[str, FileDiff]]) -> tuple[str | None, str]:
    for name, diff in diffs:
        try:
            text = diff.apply(text)
        except HunkError as error:
            return None, f"{name}: {error}"
    return text, ""


def tree_state(reports: Sequence[FileReport]) -> TreeState:
    """What the files of a tree add up to."""
    states = {report.state for report in reports}
    if states & {FileState.CHANGED, FileState.MISSING}:
        return TreeState.MISMATCH
    if states == {FileState.PATCHED}:
        return TreeState.APPLIED
    return TreeState.NOT_APPLIED if states == {FileState.CLEAN} else TreeState.PARTLY


def is_patched(root: Path) -> bool:
    """Whether the patches of its own release are applied to a tree. Raises PatchError."""
    return tree_state(load_series(release_of(root)).examine(root)) is TreeState.APPLIED


# --- which series ------------------------------------------------------------------------------------------


def releases(folder: Path = PATCHES) -> list[str]:
    """The releases that there are patches for, the oldest first."""
    try:
        names = [path.name for path in folder.iterdir() if path.is_dir()]
    except OSError:
        return []
    return sorted(names, key=Version)


def load_series(release: str, folder: Path = PATCHES) -> Series:
    """The patches of a release, ``0.32.0``. Raises PatchError where there are none."""
    if release not in releases(folder):
        raise PatchError(
            f"there are no patches for vLLM {release}; there are for {', '.join(releases(folder)) or 'none'}: use the "
            "plugin, or try the nearest with --release, which is refused unless every line is where it should be"
        )
    patches = []
    for path in sorted((folder / release).glob("*.patch")):
        try:
            patches.append(Patch(path.name, tuple(parse(path.read_bytes().decode("utf-8")))))
        except (OSError, UnicodeDecodeError, DiffError) as error:
            raise PatchError(f"{path} cannot be used: {error}; reinstall vllm-k25-instrument") from error
    return Series(release, tuple(patches))


def find_tree(given: Path | None, installed: Path | None) -> Path:
    """The folder `vllm` that is meant: `given` itself, the one in it (a checkout), or the installed one.

    Raises PatchError.
    """
    if given is None:
        if installed is None:
            raise PatchError("vLLM is not installed for this Python: name its folder with --vllm")
        return installed.resolve()
    for folder in (given, given / "vllm"):
        if folder.name == "vllm" and (folder / "plugins" / "__init__.py").is_file():
            return folder.resolve()
    raise PatchError(f"{given} is not vLLM's folder: give the package's folder vllm, or a checkout")


def release_of(root: Path) -> str:
    """The release that a tree says it is, ``0.32.0`` of ``0.32.0+cpu``. Raises PatchError where it says nothing."""
    try:
        return Version(version_of(root)).base_version
    except InvalidVersion:
        raise PatchError(f"{root / '_version.py'} names no version: name the release with --release") from None
