"""The pipeline: paths -> files -> findings of each rank -> one report."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from vllm_k25_instrument.analysis.capture import NO_RANK, CaptureError, Source
from vllm_k25_instrument.analysis.cross_rank import compare_ranks
from vllm_k25_instrument.analysis.findings import StepRange
from vllm_k25_instrument.analysis.inputs import Input, expand
from vllm_k25_instrument.analysis.workers import Advance, Done, Job, Mapper, run_on_cores
from vllm_k25_instrument.plain_text import one_line
from vllm_k25_instrument.report import breakdown as report_breakdown
from vllm_k25_instrument.report.breakdown import StepTally
from vllm_k25_instrument.report.caveats import Caveat, CaveatCode, format_ranks, is_complete
from vllm_k25_instrument.report.gpu import GpuFindings, RankFindings
from vllm_k25_instrument.report.rings import Report
from vllm_k25_instrument.report.subject import Subject
from vllm_k25_instrument.report.words import explain

MAX_RANKS: Final = 1 << 16
"""More ranks than any server has."""

SAME_SAID: Final = 3
"""More files than this that have the same to say share one line."""


@dataclass(frozen=True, slots=True)
class Options:
    """What to analyse, and how. `expect_ranks` 0: as many as the files say."""

    rules: Path | None = None
    only: StepRange | None = None
    expect_ranks: int = 0


def analyze(
    paths: Sequence[Path],
    options: Options | None = None,
    *,
    run: Mapper = run_on_cores,
    advance: Advance | None = None,
    inputs: Sequence[Input] | None = None,
    ignored: Sequence[Path] = (),
) -> Report:
    """Analyse the files at `paths` as the ranks of one run.

    `inputs` and `ignored`: what ``expand(paths, ignored)`` has already found.

    Raises CaptureError where there is nothing that can be analysed: a path that is not there, files of no known kind,
    files of two kinds of capture, or not one that can be read.
    """
    options = options or Options()
    aside: list[Path] = list(ignored)
    chosen = _one_source(expand(paths, aside) if inputs is None else inputs)
    if aside:
        chosen = replace(chosen, caveats=(*chosen.caveats, _no_captures(aside)))
    jobs = [Job(each, options.rules, options.only) for each in chosen.inputs]
    done = run(jobs, advance or (lambda count: None))
    failures = [each.failure for each in done if each.failure is not None]
    if len(failures) == len(done):
        raise failures[0].error()
    caveats = [*chosen.caveats, *_said(done, chosen.source)]
    caveats += [Caveat(CaveatCode.FILE_UNREADABLE, str(failure.error())) for failure in failures]
    ranks, about_ranks = _by_rank(done)
    caveats += about_ranks
    # A file that calls itself rank 5 has at least five others, whether it says how many or not.
    said = max(max(rank.world_size, rank.rank + 1) for rank in ranks)
    expected = max(len(ranks), options.expect_ranks or said)
    is_table = chosen.source is Source.KEY_AVERAGES
    comparison = compare_ranks(ranks, expected)
    if is_table:
        comparison = replace(comparison, cross_rank=replace(comparison.cross_rank, reason="a table has no steps"))
    if len(ranks) > 1 and not is_table and any(rank.clock_base_ns is None for rank in ranks):
        without = format_ranks(rank.rank for rank in ranks if rank.clock_base_ns is None)
        caveats.append(
            Caveat(
                CaveatCode.CLOCKS_NOT_COMMON,
                f"{without}: the file does not say how its clock relates to that of others: no skew between ranks",
            )
        )
    tally = StepTally()
    for rank in ranks:
        if not rank.totals.graphs:  # opaque graphs have no categories
            for step in rank.steps:
                if step.averaged:
                    tally.add(step.digest())
    breakdown = tally.breakdown(
        source=report_breakdown.Source(str(chosen.source)),
        ranks_found=[rank.rank for rank in ranks],
        ranks_expected=expected,
        caveats=_once(caveats),
    )
    findings = GpuFindings(
        ranks=tuple(ranks),
        cross_rank=comparison.cross_rank,
        words=explain(ranks, breakdown.groups, table=is_table),
        table_rows=is_table,
    )
    subject = Subject(instance=_title(chosen.inputs), ranks_found=breakdown.ranks_found, ranks_expected=expected)
    return Report(replace(breakdown, gpu=findings), subject, comparison.slowest)


@dataclass(frozen=True, slots=True)
class _Chosen:
    source: Source
    inputs: tuple[Input, ...]
    caveats: tuple[Caveat, ...] = ()


def _one_source(inputs: Sequence[Input]) -> _Chosen:
    """The files of one kind. Tables beside timelines say nothing new (vLLM writes both): they are set aside.

    Raises CaptureError where there are two kinds of timeline, or none of any kind.
    """
    kinds = {each.kind: each for each in inputs}
    timelines = [kind for kind in (Source.TORCH_TRACE, Source.NSYS) if kind in kinds]
    if len(timelines) > 1:
        raise CaptureError(
            kinds[Source.NSYS].path,
            f"an nsys export beside a torch trace ({kinds[Source.TORCH_TRACE].path})",
            "analyse them one by one, or set them side by side with `vllm-k25 compare A B`",
        )
    if not kinds:
        raise CaptureError(Path(), "no file to analyse")
    if not timelines and Source.KEY_AVERAGES not in kinds:
        raise CaptureError(kinds[Source.RING].path, "is a ring", "show it with `vllm-k25 report`")
    source = timelines[0] if timelines else Source.KEY_AVERAGES
    used = tuple(each for each in inputs if each.kind is source)
    aside = [each.path for each in inputs if each.kind is not source]
    caveats: tuple[Caveat, ...] = ()
    if aside:
        message = f"{_listed(aside)}: set aside, since the {source} captures beside say more"
        caveats = (Caveat(CaveatCode.FILES_SET_ASIDE, message, len(aside)),)
    return _Chosen(source, used, caveats)


def _no_captures(aside: Sequence[Path]) -> Caveat:
    return Caveat(CaveatCode.FILES_SET_ASIDE, f"{_listed(aside)}: no capture of a known kind, left out", len(aside))


def _listed(paths: Sequence[Path]) -> str:
    return ", ".join(str(path) for path in paths[:SAME_SAID]) + (", …" if len(paths) > SAME_SAID else "")


def _said(done: Iterable[Done], source: Source) -> Iterator[Caveat]:
    """What the readers had to say, each thing once."""
    for each in done:
        for reduced in each.reduced:
            for note in reduced.notes:
                # Of a table nobody expects steps.
                if not (source is Source.KEY_AVERAGES and note.code is CaveatCode.NO_STEPS):
                    yield replace(note, message=one_line(note.message))
            if not reduced.complete and is_complete(reduced.notes):
                yield Caveat(CaveatCode.TRUNCATED, f"{each.path}: incomplete: what is missing is not known")


def _once(caveats: Iterable[Caveat]) -> list[Caveat]:
    """Equal ones once; of many files with the same kind of thing to say, the first, and how many more there are."""
    by_code: dict[CaveatCode, list[Caveat]] = {}
    for caveat in dict.fromkeys(caveats):
        by_code.setdefault(caveat.code, []).append(caveat)
    shown: list[Caveat] = []
    for code, those in by_code.items():
        if len(those) <= SAME_SAID:
            shown += those
        else:
            message = f"{those[0].message} (and the like of {len(those) - 1} more files)"
            shown.append(Caveat(code, message, sum(caveat.count for caveat in those)))
    return shown


def _by_rank(done: Iterable[Done]) -> tuple[list[RankFindings], list[Caveat]]:
    """The findings sorted by rank, each rank once; and what had to be decided for that."""
    found = [_plausible(reduced.findings) for each in done for reduced in each.reduced]
    known: dict[int, RankFindings] = {}
    twice: list[str] = []
    for rank in found:
        if rank.rank == NO_RANK:
            continue
        if rank.rank not in known:
            known[rank.rank] = rank
            continue
        keep, leave = sorted((known[rank.rank], rank), key=lambda one: -one.totals.sum_ns)
        known[rank.rank] = keep
        twice.append(f"rank {rank.rank}: {_where(keep)} is used, {_where(leave)} is not")
    unknown = [rank for rank in found if rank.rank == NO_RANK]
    caveats = []
    if twice:
        caveats.append(
            Caveat(
                CaveatCode.RANK_TWICE,
                f"more than one capture of a rank ({'; '.join(twice)}): the one with more GPU work is used; name the "
                "files of one run",
                len(twice),
            )
        )
    free = (number for number in range(len(found) + len(known)) if number not in known)
    numbered = dict(zip(free, unknown, strict=False))
    if len(unknown) > 1 or (unknown and known):
        given = ", ".join(f"{_where(rank)} is called rank {number}" for number, rank in numbered.items())
        caveats.append(
            Caveat(CaveatCode.RANK_UNKNOWN, f"no rank is written in the file: {given}", len(unknown)),
        )
    known |= {number: _renumbered(rank, number) for number, rank in numbered.items()}
    return [known[number] for number in sorted(known)], caveats


def _plausible(rank: RankFindings) -> RankFindings:
    """Without the rank and world size that no server has: a damaged file may say anything."""
    if not 0 <= rank.rank < MAX_RANKS:
        rank = replace(rank, rank=NO_RANK)
    return rank if 0 <= rank.world_size <= MAX_RANKS else replace(rank, world_size=0)


def _where(rank: RankFindings) -> str:
    return f"{rank.path} (device {rank.device})"


def _renumbered(rank: RankFindings, number: int) -> RankFindings:
    return replace(
        rank,
        rank=number,
        steps=tuple(replace(step, rank=number) for step in rank.steps),
        timeline=None if rank.timeline is None else replace(rank.timeline, rank=number),
    )


def _title(inputs: Sequence[Input]) -> str:
    first = inputs[0].path
    return str(first) if len(inputs) == 1 else f"{first.parent} ({len(inputs)} files)"
