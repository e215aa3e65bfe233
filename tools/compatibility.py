#!/usr/bin/env python3
"""Make docs/compatibility.md: the hook table against each release of vLLM, and the runs of tools/run_release.py.

    python tools/compatibility.py            write it; needs the trees (python tools/fetch_vllm.py --matrix)
    python tools/compatibility.py --check    exit 1 where it is not what this would write

With --check, columns of releases that are neither installed nor cached are taken to be as they are.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from fetch_vllm import tree as cached_tree  # noqa: E402

from vllm_k25_instrument.hooks.patcher import exists_in, version_matches  # noqa: E402
from vllm_k25_instrument.hooks.point import HookPoint  # noqa: E402
from vllm_k25_instrument.hooks.releases import ABSENCES, MATRIX  # noqa: E402
from vllm_k25_instrument.hooks.resolve import installed_vllm, target_exists, version_of  # noqa: E402
from vllm_k25_instrument.hooks.table import HOOK_TABLE, READ_VLLM, TESTED_VLLM  # noqa: E402

DOCUMENT = ROOT / "docs" / "compatibility.md"
RUNS = ROOT / "docs" / "releases"

THERE, OTHER_VERSION, MISSING = "yes", "-", "MISSING"

Columns = Mapping[str, Mapping[str, str]]
"""Release -> target -> cell."""


def root_of(release: str) -> Path | None:
    """The folder `vllm` of a release: the installed one, or the cached; None where there is neither."""
    installed = installed_vllm()
    if installed is not None and version_of(installed).partition("+")[0] == release:
        return installed
    cached = cached_tree(release)
    return cached if cached.is_dir() else None


def column(release: str, root: Path, points: Iterable[HookPoint] = HOOK_TABLE) -> dict[str, str]:
    """Target -> cell, of one release."""
    cells = {}
    for point in points:
        if exists_in(point, release):
            cells[point.id] = THERE if target_exists(point, root) else MISSING
        else:
            cells[point.id] = OTHER_VERSION
    return cells


def columns_of(text: str) -> dict[str, dict[str, str]]:
    """The columns of a document that `document` has written."""
    columns: dict[str, dict[str, str]] = {}
    releases: list[str] = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[:2] == ["hook", "target"]:
            releases = cells[2:]
        elif releases and line.startswith("| `") and len(cells) == len(releases) + 2:
            for release, cell in zip(releases, cells[2:], strict=True):
                columns.setdefault(release, {})["vllm." + cells[1].strip("`")] = cell
        elif releases and not line.startswith("|"):
            releases = []
    return columns


def load_runs(folder: Path = RUNS) -> list[dict[str, Any]]:
    """What tools/run_release.py has written, oldest release first."""
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("*.json")]
    return sorted(runs, key=lambda run: [int(part) for part in run["vllm"].split(".")])


# --- the document ----------------------------------------------------------------------------------------

HEAD = """# vLLM releases

<!-- Made by tools/compatibility.py (`make matrix`); do not edit. -->

Which hooks have a target in which release of vLLM. `make matrix` fetches the Python files of every release below and of
those between, and checks each target on the syntax tree: that it is there and can be wrapped, that the arguments a
hook reads are where it looks for them in every override, that vLLM calls it from where we think, that the attributes
hooks read exist, and that what the table says is of other releases is not there. Nothing of the trees is imported. CI
checks the pinned release and the newest.

Targets known: `{read}`. The whole suite runs against: `{tested}`. What happens with a newer release is in
[upgrading](upgrading.md).
"""

RUNS_HEAD = """## Run, release by release

`python tools/run_release.py VERSION` makes an environment with the CPU build of that release, serves the demo's tiny
Kimi-K2.5 on two tensor-parallel workers with the plugin on and every step sampled, sends it load, and counts what a
decode step of four layers must have: 9 all-reduces, 3 times experts, 4 times MLA decode.
"""

TARGETS_HEAD = """## Targets

`yes`: resolves. `-`: by the table, not in that release. `MISSING`: the table says it is there, and it is not.
"""


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [
        "| " + " | ".join(header) + " |",
        "|" + "---|" * len(header),
        *("| " + " | ".join(row) + " |" for row in rows),
    ]


def hook_rows(columns: Columns) -> Iterable[list[str]]:
    """A row per hook: how many of its targets resolve, or the number of the reason why there is none."""
    for name in dict.fromkeys(point.name for point in HOOK_TABLE):
        points = [point for point in HOOK_TABLE if point.name == name]
        row = [f"`{name}`"]
        for release in MATRIX:
            cells = [columns[release].get(point.id, "?") for point in points]
            wanted = [cell for cell in cells if cell != OTHER_VERSION]
            resolved = wanted.count(THERE)
            if wanted:
                row.append(str(resolved) if resolved == len(wanted) else f"{resolved} of {len(wanted)}")
            else:
                row.append(f"- ({reason_of(points, release)})")
        yield row


def reason_of(points: Sequence[HookPoint], release: str) -> str:
    """Number of the reason why none of a hook's targets is in a release."""
    names = {points[0].name, *(str(point.category) for point in points)}
    for number, absence in enumerate(ABSENCES, 1):
        if absence.what in names and version_matches(release, absence.versions):
            return str(number)
    return "?"


def run_rows(runs: Iterable[Mapping[str, Any]]) -> Iterable[list[str]]:
    for run in runs:
        counts = run.get("per_decode_step") or {}
        yield [
            run["vllm"],
            run["outcome"],
            " / ".join(str(counts.get(name, "")) for name in ("all_reduce", "moe_experts", "mla_attention"))
            if counts
            else "",
            run["how"],
            "; ".join(filter(None, (run.get("note"), run.get("remark")))),
        ]


def document(columns: Columns, runs: Sequence[Mapping[str, Any]]) -> str:
    """The text of docs/compatibility.md."""
    lines = [HEAD.format(read=READ_VLLM, tested=TESTED_VLLM)]
    lines += ["## Hooks", "", "How many targets of each hook resolve.", ""]
    lines += table(["hook", *MATRIX], hook_rows(columns))
    lines += ["", "Not hooked, and why:", ""]
    lines += [f"{n}. `{a.what.removeprefix('vllm.')}` in {a.versions}: {a.reason}." for n, a in enumerate(ABSENCES, 1)]
    lines += ["", RUNS_HEAD]
    lines += table(
        ["vLLM", "outcome", "all-reduces / experts / MLA per decode step", "how it was run", "what happened"],
        run_rows(runs),
    )
    lines += ["", TARGETS_HEAD]
    lines += table(
        ["hook", "target", *MATRIX],
        (
            [
                f"`{point.name}`",
                f"`{point.id.removeprefix('vllm.')}`",
                *(columns[release].get(point.id, "?") for release in MATRIX),
            ]
            for point in HOOK_TABLE
        ),
    )
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    written = DOCUMENT.read_text(encoding="utf-8") if DOCUMENT.is_file() else ""
    roots = {release: root_of(release) for release in MATRIX}
    absent = [release for release, root in roots.items() if root is None]
    if absent and not check:
        print(f"no tree of vLLM {', '.join(absent)}: python tools/fetch_vllm.py {' '.join(absent)}", file=sys.stderr)
        return 2
    kept = columns_of(written)
    columns = {
        release: kept.get(release, {}) if root is None else column(release, root) for release, root in roots.items()
    }
    text = document(columns, load_runs())
    missing = [
        f"{release}: {target}" for release in MATRIX for target, cell in columns[release].items() if cell == MISSING
    ]
    if missing:
        print("the table claims targets that are not there:\n" + "\n".join(missing), file=sys.stderr)
    if check and text != written:
        print(f"{DOCUMENT.relative_to(ROOT)} is out of date: make matrix", file=sys.stderr)
        return 1
    if not check:
        DOCUMENT.write_text(text, encoding="utf-8")
    looked_at = [release for release, root in roots.items() if root is not None]
    print(f"{DOCUMENT.relative_to(ROOT)}: {len(HOOK_TABLE)} targets in {len(looked_at)} of {len(MATRIX)} releases")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
