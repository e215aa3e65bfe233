"""`vllm-k25 patch`: the hooks as patches of vLLM's source, for those who load no plugins."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from vllm_k25_instrument.commands.documents import fail
from vllm_k25_instrument.commands.terminal import Terminal, messages
from vllm_k25_instrument.hooks.resolve import installed_vllm
from vllm_k25_instrument.patching.replace import ReplaceError, bring_to
from vllm_k25_instrument.patching.series import (
    FileReport,
    FileState,
    PatchError,
    Series,
    TreeState,
    find_tree,
    load_series,
    release_of,
    tree_state,
)

SCHEMA: Final = "vllm_k25.patch/1"


class Exit(IntEnum):
    """Exit codes of `patch`."""

    DONE = 0
    NOT_APPLIED = 1
    REFUSED = 2
    PARTLY = 3


_CHECK: Final = {
    TreeState.APPLIED: Exit.DONE,
    TreeState.NOT_APPLIED: Exit.NOT_APPLIED,
    TreeState.MISMATCH: Exit.REFUSED,
    TreeState.PARTLY: Exit.PARTLY,
}

patch: Final = typer.Typer(
    name="patch", help="Put the hooks into vLLM's source, for those who load no plugins.", no_args_is_help=True
)

VllmOption = Annotated[
    Path | None,
    typer.Option("--vllm", metavar="DIR", help="vLLM's folder, or a checkout of it (default: the installed one)."),
]
ReleaseOption = Annotated[
    str | None,
    typer.Option("--release", metavar="X.Y.Z", help="Whose patches to use (default: what vLLM's _version.py says)."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


@dataclass(frozen=True, slots=True)
class _Target:
    """A tree, the patches that are meant for it, and how its files stand to them."""

    root: Path
    series: Series
    reports: list[FileReport]

    @property
    def state(self) -> TreeState:
        return tree_state(self.reports)

    @property
    def problems(self) -> list[FileReport]:
        return [report for report in self.reports if report.problem]

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "vllm": str(self.root),
            "release": self.series.release,
            "state": self.state,
            "patches": [one.name for one in self.series.patches],
            "files": {report.path: report.state for report in self.reports},
            "problems": {report.path: report.problem for report in self.problems},
        }


@patch.command()
def check(vllm: VllmOption = None, release: ReleaseOption = None, as_json: JsonOption = False) -> None:
    """Say whether the patches are applied. Changes nothing.

    Exit codes: 0 applied; 1 not applied; 2 cannot tell: there are no patches for this release, or a file is not the
    release's; 3 partly applied, by an apply or revert that was cut short.
    """
    target = _find("check", vllm, release)
    _show(target, as_json)
    raise typer.Exit(_CHECK[target.state])


@patch.command()
def apply(vllm: VllmOption = None, release: ReleaseOption = None, as_json: JsonOption = False) -> None:
    """Patch vLLM's source: all of it, or nothing. Finishes what was cut short; does nothing where it is done.

    Exit codes: 0 it is patched now; 2 refused, with file and hunk, nothing was changed; 3 cut short: some files could
    neither be written nor put back.
    """
    _bring("apply", FileState.PATCHED, vllm, release, as_json)


@patch.command()
def revert(vllm: VllmOption = None, release: ReleaseOption = None, as_json: JsonOption = False) -> None:
    """Take the patches out of vLLM's source again: its files are byte for byte what they were.

    Exit codes: as of `apply`.
    """
    _bring("revert", FileState.CLEAN, vllm, release, as_json)


def _bring(command: str, wanted: FileState, vllm: Path | None, release: str | None, as_json: bool) -> None:
    target = _find(command, vllm, release)
    try:
        changed = bring_to(target.root, target.reports, wanted)
    except PatchError as error:
        undone = not isinstance(error, ReplaceError) or error.undone
        fail(messages(), f"patch {command}", Exit.REFUSED if undone else Exit.PARTLY, str(error))
    target = _Target(target.root, target.series, target.series.examine(target.root))
    _show(target, as_json, changed)


def _find(command: str, vllm: Path | None, release: str | None) -> _Target:
    try:
        root = find_tree(vllm, installed_vllm())
        series = load_series(release or release_of(root))
        return _Target(root, series, series.examine(root))
    except PatchError as error:
        fail(messages(), f"patch {command}", Exit.REFUSED, str(error))


def _show(target: _Target, as_json: bool, changed: list[str] | None = None) -> None:
    if as_json:
        document = target.to_json() | ({} if changed is None else {"changed": changed})
        typer.echo(json.dumps(document, indent=2))
        return
    out = Terminal(soft_wrap=True)
    done = "" if changed is None else f", {len(changed)} changed now"
    out.print(
        f"{target.root}: vLLM {target.series.release}, {len(target.series.patches)} patches of "
        f"{len(target.reports)} files: {target.state}{done}"
    )
    for report in target.problems:
        out.print(f"  {report.path}: {report.problem}")
    if target.state is TreeState.PARTLY:
        left = [report.path for report in target.reports if report.state is FileState.CLEAN]
        out.print(f"  {len(left)} files are not patched, {left[0]} for one: run apply to finish, revert to undo")
