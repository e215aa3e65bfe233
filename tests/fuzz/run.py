"""Thousands of damaged files: each ends in a result that adds up, or in one clear line. Never a traceback or a hang.

python tests/fuzz/run.py --count 20000 [--seed 0] [--processes 2]
"""

from __future__ import annotations

import argparse
import io
import json
import multiprocessing
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

if __name__ == "__main__":  # the repository's root, for `tests`
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rich.console import Console

from tests.fuzz.mutations import Damaged, damage
from tests.traces import Dress, decode_rank, document, encode
from vllm_k25_instrument.analysis.analyze import analyze
from vllm_k25_instrument.analysis.capture import CaptureError
from vllm_k25_instrument.analysis.workers import run_here
from vllm_k25_instrument.report.compare import DocumentError, Side, compare_sides
from vllm_k25_instrument.report.html import to_html
from vllm_k25_instrument.report.markdown import to_markdown
from vllm_k25_instrument.report.rings import Report
from vllm_k25_instrument.report.table import ReportTable, caveat_lines

CASES = Path(__file__).parents[1] / "data" / "cases"
LIMIT_S = 20
GROWTH_MIB = 700
ADDRESS_SPACE = 6 << 30
SHOWN_EVERY = 10
"""Every n-th result is also rendered as a table, a page and Markdown."""


def seeds() -> list[tuple[str, str, bytes]]:
    """Files to damage: (name, kind, bytes). Small ones, so that there is time for many."""
    found = []
    for path in sorted(CASES.glob("*/*")):
        kind = {".json": "trace", ".gz": "gzip", ".txt": "table", ".sqlite": "nsys"}.get(path.suffix)
        if kind is not None and "02-truncated" not in path.parts:
            found.append((f"{path.parent.name}/{path.name}", kind, path.read_bytes()))
    for name, dress in (("plain", Dress()), ("array", Dress(container="array")), ("nested", Dress(container="nested"))):
        found.append((f"generated {name}", "trace", encode(document([decode_rank(6)], dress), dress)))
    packed = Dress(gzip_members=2)
    found.append(("generated gzip", "gzip", encode(document([decode_rank(6)], packed), packed)))
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        trace.write_bytes(encode(document([decode_rank(3)])))
        saved = json.dumps(analyze([trace], run=run_here).breakdown.to_json_dict())
    found.append(("saved breakdown", "breakdown", saved.encode()))
    return found


@dataclass
class Outcome:
    """What became of the files."""

    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    slowest_s: float = 0.0
    slowest: str = ""

    def merge(self, other: Outcome) -> None:
        self.counts += other.counts
        self.problems += other.problems
        if other.slowest_s > self.slowest_s:
            self.slowest_s, self.slowest = other.slowest_s, other.slowest


def fuzz(count: int, seed: int, keep: Path | None = None) -> Outcome:
    """Damage and analyse `count` files. `keep`: where a file that made trouble is left."""
    outcome = Outcome()
    material = seeds()
    # What blows up is to raise MemoryError, not to take the machine with it.
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, limits[1]))
    try:
        return _fuzz(count, seed, keep, outcome, material)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def _fuzz(
    count: int, seed: int, keep: Path | None, outcome: Outcome, material: list[tuple[str, str, bytes]]
) -> Outcome:
    before = _peak_mib()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for n in range(count):
            rng = random.Random(f"{seed}-{n}")
            which, kind, data = rng.choice(material)
            damaged = damage(data, kind, rng, folder)
            path = folder / f"input{n % 7}{rng.choice(('.json', '.json.gz', '.sqlite', '.txt', ''))}"
            path.write_bytes(damaged.data)
            what = f"seed {seed}-{n}: {which}: {damaged.how}"
            start = time.monotonic()
            try:
                with _limited():
                    ended = _end_of(path, kind, damaged, show=n % SHOWN_EVERY == 0)
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt):
                    raise
                ended = "problem"
                outcome.problems.append(f"{what}\n{''.join(traceback.format_exception(error)[-6:])}")
                if keep is not None:
                    (keep / f"{seed}-{n}{path.suffix}").write_bytes(damaged.data)
            took = time.monotonic() - start
            if took > outcome.slowest_s:
                outcome.slowest_s, outcome.slowest = took, what
            outcome.counts[ended] += 1
            path.unlink()
    grown = _peak_mib() - before
    if grown > GROWTH_MIB:
        outcome.problems.append(f"seed {seed}: memory grew by {grown:.0f} MiB")
    return outcome


def _end_of(path: Path, kind: str, damaged: Damaged, *, show: bool) -> str:
    if kind == "breakdown":
        return _compared(path)
    try:
        report = analyze([path], run=run_here)
    except CaptureError as error:
        text = str(error)
        assert str(path) in text, f"the file is not named: {text}"
        assert len(text.splitlines()) == 1, f"more than a line: {text!r}"
        assert "internal error" not in text, text
        return "error"
    _adds_up(report)
    for caveat in report.caveats:
        assert len(caveat.message.splitlines()) == 1, f"more than a line: {caveat.message!r}"
        assert "internal error" not in caveat.message, caveat.message
    json.dumps(report.breakdown.to_json_dict())
    if show:
        console = Console(file=io.StringIO(), width=120)
        console.print(*caveat_lines(report.caveats))
        console.print(ReportTable(report))
        to_html(report, per_rank=True)
        to_markdown(report)
    if not report.breakdown.complete:
        return "incomplete"
    assert not (damaged.cut and kind in ("trace", "gzip")), "a cut file passes as complete"
    return "complete, with warnings" if report.caveats else "complete"


def _adds_up(report: Report) -> None:
    findings = report.breakdown.gpu
    assert findings is not None
    for rank in findings.ranks:
        totals = rank.totals
        if totals.span_ns is None or totals.by_category is None:
            continue
        assert totals.idle_ns is not None
        assert totals.idle_ns >= 0
        exposed = sum(total.exposed_ns or 0 for total in totals.by_category.values())
        assert exposed + totals.idle_ns == totals.span_ns, "exposed and idle do not add up to the span"
        for step in rank.steps:
            assert step.span_ns >= step.busy_ns >= 0
            own = sum(total.exposed_ns or 0 for total in step.categories.values())
            assert own == step.busy_ns, "exposed times do not add up to the busy time of a step"


def _compared(path: Path) -> str:
    try:
        parsed = json.loads(path.read_bytes())
        side = Side.of(str(path), parsed)
    except (DocumentError, RecursionError, ValueError):
        return "error"
    json.dumps(compare_sides(side, side).to_json_dict())
    return "complete" if side.complete else "incomplete"


@contextmanager
def _limited() -> Iterator[None]:
    """TimeoutError for what takes longer than ``LIMIT_S``."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"not done after {LIMIT_S} s")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(LIMIT_S)
    try:
        yield
    finally:
        signal.alarm(0)


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="where files that make trouble are left")
    options = parser.parse_args()
    if options.keep is not None:
        options.keep.mkdir(parents=True, exist_ok=True)
    total = Outcome()
    share = -(-options.count // options.processes)
    jobs = [(share, options.seed * 1000 + n, options.keep) for n in range(options.processes)]
    start = time.monotonic()
    with ProcessPoolExecutor(options.processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        for outcome in pool.map(fuzz, *zip(*jobs, strict=True)):
            total.merge(outcome)
    for problem in total.problems[:20]:
        print(problem)
    print(f"{sum(total.counts.values())} files in {time.monotonic() - start:.0f} s: {dict(total.counts.most_common())}")
    print(f"slowest {total.slowest_s:.2f} s ({total.slowest}); {len(total.problems)} problems")
    return 1 if total.problems else 0


if __name__ == "__main__":
    sys.exit(main())
