"""The figures of one window: what its client measured beside what its steps did. Means, ns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from vllm_k25_instrument.alignment import AllReduces, LeftOut, align
from vllm_k25_instrument.campaign.live import AFTER, BEFORE, METRICS, RING, read_live
from vllm_k25_instrument.campaign.load import WindowLoad, read_load
from vllm_k25_instrument.campaign.samples_file import RankSamples, read_samples
from vllm_k25_instrument.campaign.scrapes import metrics_figures, queue_seconds
from vllm_k25_instrument.model import Category, Phase, StepSample, exposed_ns
from vllm_k25_instrument.report.breakdown import Breakdown, Source, StepTally
from vllm_k25_instrument.report.digest import digest_step

FULL: Final = 0.9
"""Decode steps with at least this share of the window's largest batch are those of its concurrency."""


@dataclass(frozen=True, slots=True)
class Component:
    """One category, or one all-reduce path, per step, mean over the ranks. None: the source does not tell."""

    exposed_ns: float
    sum_ns: float | None
    calls: float | None

    @property
    def ns_per_call(self) -> float | None:
        """Mean duration of a call."""
        return self.sum_ns / self.calls if self.calls and self.sum_ns is not None else None


@dataclass(frozen=True, slots=True)
class LiveFigures:
    """The decode steps of a window at its full batch.

    `gap_ns` is the device's time from the step before to this one, `others_ns` what steps of other kinds (prefills in
    between, partly filled batches) make of the time per token, on balance, and `unsampled_ns` how much longer all
    executed decode steps take than the sampled ones, in the mean (less: being sampled costs time). `wait_ns` and
    `transfer_ns` are those of a step's all-reduces, mean over the ranks.
    """

    source: str
    batch: float
    largest_batch: int
    steps: int
    step_ns: float
    components: Mapping[str, Component]
    paths: Mapping[str, Component] = field(default_factory=dict)
    gap_ns: float | None = None
    others_ns: float | None = None
    unsampled_ns: float | None = None
    wait_ns: float | None = None
    transfer_ns: float | None = None
    graph_modes: Mapping[str, int] = field(default_factory=dict)
    ranks_found: int = 1
    ranks_expected: int = 1
    overhead_ns: float | None = None


@dataclass(frozen=True, slots=True)
class Window:
    """One repetition at one concurrency. `live` is None where nothing live was measured."""

    concurrency: int
    number: int
    load: WindowLoad
    live: LiveFigures | None
    queue_s: float | None = None
    """Mean time that requests waited to be scheduled; None where the server does not say."""
    warnings: tuple[str, ...] = ()

    @property
    def tpot_ns(self) -> float:
        """Time per output token, as the client saw it."""
        return 0.0 if self.load.tpot is None else self.load.tpot.mean_ns

    @property
    def unexplained_ns(self) -> float | None:
        """What is left of the time per output token beside step, gap and other steps; None without a live source."""
        if self.live is None:
            return None
        live = self.live
        known = (live.gap_ns, live.others_ns, live.unsampled_ns)
        return self.tpot_ns - live.step_ns - sum(part for part in known if part is not None)


def read_window(folder: Path, concurrency: int, number: int) -> Window:
    """The window whose raw output is in `folder`. Raises CampaignError where that is damaged."""
    load = read_load(folder)
    about = read_live(folder)
    warnings = [str(warning.get("message", "")) for warning in about.get("warnings", [])]
    lost = about.get("lost") or {}
    if lost:
        texts = ", ".join(f"{count:,} {reason}" for reason, count in lost.items())
        warnings.append(f"steps that were due for sampling left no sample: {texts}")
    live: LiveFigures | None = None
    if about.get("source") == RING:
        executed = about.get("decode") or {}
        live = ring_figures(
            read_samples(folder),
            ranks_expected=int(about.get("ranks_expected", 0)),
            decode_ns=executed["duration_ns"] / executed["steps"] if executed.get("steps") else None,
        )
    elif about.get("source") == METRICS:
        live = _of_scrapes(folder, load)
    if live is not None and live.ranks_found < live.ranks_expected:
        warnings.append(f"{live.ranks_found} of {live.ranks_expected} ranks have samples")
    return Window(concurrency, number, load, live, queue_seconds(folder / BEFORE, folder / AFTER), tuple(warnings))


def _of_scrapes(folder: Path, load: WindowLoad) -> LiveFigures | None:
    found = metrics_figures(folder / BEFORE, folder / AFTER, load.concurrency)
    if found is None:
        return None
    return LiveFigures(
        source=METRICS,
        batch=found.batch,
        largest_batch=0,
        steps=found.steps,
        step_ns=found.step_ns,
        components={
            name: Component(
                ns,
                found.all_reduce_sum_ns if name == Category.ALL_REDUCE else None,
                found.all_reduce_calls if name == Category.ALL_REDUCE else None,
            )
            for name, ns in found.category_ns.items()
        },
        paths={
            path: Component(calls * mean, calls * mean, calls) for path, (calls, mean) in found.all_reduce_paths.items()
        },
        unsampled_ns=found.unsampled_ns,
        wait_ns=found.wait_ns,
        ranks_found=found.ranks,
        ranks_expected=found.ranks,
        graph_modes=found.graph_modes,
    )


def full_steps(ranks: Sequence[RankSamples]) -> tuple[dict[int, list[StepSample]], dict[int, list[StepSample]], int]:
    """By rank the decode steps at full batch, and all steps; and the largest batch of any decode step."""
    every = {rank.rank: list(rank.samples()) for rank in ranks}
    decode = {rank: [s for s in samples if s.phase is Phase.DECODE] for rank, samples in every.items()}
    largest = max((s.requests for samples in decode.values() for s in samples), default=0)
    full = {rank: [s for s in samples if s.requests >= FULL * largest] for rank, samples in decode.items()}
    return {rank: samples for rank, samples in full.items() if samples}, every, largest


def ring_figures(
    ranks: Sequence[RankSamples], *, ranks_expected: int, decode_ns: float | None = None
) -> LiveFigures | None:
    """The figures of the samples of a window; None where no decode step was sampled.

    `decode_ns`: mean duration of all decode steps that were executed in it, sampled or not.
    """
    full, every, largest = full_steps(ranks)
    if not full:
        return None
    of_ranks = [_rank_components(samples) for samples in full.values()]
    names = sorted({name for components, _ in of_ranks for name in components})
    paths = sorted({path for _, found in of_ranks for path in found})
    graphs: dict[str, int] = {}
    for sample in next(iter(full.values())):
        graphs[str(sample.graph_mode)] = graphs.get(str(sample.graph_mode), 0) + 1
    waits = _waits(ranks, full, ranks_expected)
    gaps = [fmean(s.gap_ns for s in samples) for samples in full.values()]
    steps = [fmean(s.duration_ns for s in samples) for samples in full.values()]
    base = fmean(steps) + fmean(gaps)
    with_all = [value for rank in full if (value := _per_token(every[rank], largest)) is not None]
    return LiveFigures(
        source=RING,
        batch=fmean(s.requests for samples in full.values() for s in samples),
        largest_batch=largest,
        steps=max(len(samples) for samples in full.values()),
        step_ns=fmean(steps),
        components={name: _mean([components.get(name) for components, _ in of_ranks]) for name in names},
        paths={path: _mean([found.get(path) for _, found in of_ranks]) for path in paths},
        gap_ns=fmean(gaps),
        others_ns=fmean(with_all) - base if with_all else None,
        unsampled_ns=None if decode_ns is None else decode_ns - _decode_mean(every),
        wait_ns=None if waits is None else waits[0],
        transfer_ns=None if waits is None else waits[1],
        graph_modes=graphs,
        ranks_found=len(full),
        ranks_expected=max(ranks_expected, len(full)),
        overhead_ns=fmean(s.overhead_ns for samples in full.values() for s in samples),
    )


def _decode_mean(every: Mapping[int, Sequence[StepSample]]) -> float:
    return fmean(s.duration_ns for samples in every.values() for s in samples if s.phase is Phase.DECODE)


def _per_token(samples: Iterable[StepSample], largest: int) -> float | None:
    """Mean time between two tokens of a request, over all steps: each step counts for the requests it keeps waiting.

    A decode or mixed step gives each of its requests a token; a prefill gives none, and keeps those waiting that were
    decoding before it and can do so beside it. `samples` by step.
    """
    time = tokens = 0.0
    decoding = 0
    for sample in samples:
        prefill = sample.phase is Phase.PREFILL
        kept = min(decoding, max(0, largest - sample.requests)) if prefill else sample.requests
        time += kept * (sample.duration_ns + sample.gap_ns)
        tokens += 0 if prefill else kept
        decoding = decoding if prefill else sample.requests
    return time / tokens if tokens else None


def _rank_components(samples: Sequence[StepSample]) -> tuple[dict[str, Component], dict[str, Component]]:
    """By category and by all-reduce path, per step of one rank."""
    sums: dict[tuple[str, str], list[int]] = {}
    rest = 0
    for sample in samples:
        attributed = 0
        for r, own in zip(sample.ranges, exposed_ns(sample), strict=True):
            if r.category is Category.UNATTRIBUTED:
                continue
            attributed += own
            path = r.detail if r.category is Category.ALL_REDUCE else ""
            total = sums.setdefault((str(r.category), path), [0, 0, 0])
            total[0] += own
            total[1] += r.duration_ns
            total[2] += 1
        rest += sample.duration_ns - attributed
    n = len(samples)
    components: dict[str, Component] = {}
    for (name, _), (own, whole, count) in sums.items():
        before = components.get(name, Component(0.0, 0.0, 0.0))
        components[name] = Component(
            before.exposed_ns + own / n, (before.sum_ns or 0.0) + whole / n, (before.calls or 0.0) + count / n
        )
    components[str(Category.UNATTRIBUTED)] = Component(rest / n, None, None)
    paths = {
        path or "unknown": Component(own / n, whole / n, count / n)
        for (name, path), (own, whole, count) in sums.items()
        if name == Category.ALL_REDUCE
    }
    return components, paths


def _mean(components: Sequence[Component | None]) -> Component:
    """Over the ranks; a rank without the category spent no time on it."""
    count = len(components)
    there = [component for component in components if component is not None]
    known = all(component.sum_ns is not None for component in there)
    return Component(
        sum(component.exposed_ns for component in there) / count,
        sum(component.sum_ns or 0.0 for component in there) / count if known else None,
        sum(component.calls or 0.0 for component in there) / count if known else None,
    )


def _waits(
    ranks: Sequence[RankSamples], full: Mapping[int, Sequence[StepSample]], expected: int
) -> tuple[float, float] | None:
    """Mean wait and transfer of a step's all-reduces, over groups, ranks and the steps that all of a group have."""
    if len(full) < max(expected, 2):
        return None
    groups: dict[tuple[int, int], list[int]] = {}
    for rank in ranks:
        place = rank.identity.coordinates
        groups.setdefault((place.pp, place.dp), []).append(rank.rank)
    waits: list[float] = []
    transfers: list[float] = []
    for members in groups.values():
        by_step: dict[int, dict[int, AllReduces]] = {}
        for rank_number in members:
            for sample in full.get(rank_number, ()):
                by_step.setdefault(sample.step, {})[rank_number] = AllReduces.of(sample)
        for those in by_step.values():
            aligned = align(those) if len(those) == len(members) else LeftOut.MISSING_RANK
            if not isinstance(aligned, LeftOut):
                waits.append(float(aligned.wait_ns.sum(axis=1).mean()))
                transfers.append(float(aligned.transfer_ns.sum()))
    return (fmean(waits), fmean(transfers)) if waits else None


def breakdown_of_windows(folders: Iterable[Path]) -> tuple[Breakdown, list[RankSamples]]:
    """The decode steps at full batch of several windows as one breakdown, and all their samples."""
    tally = StepTally()
    found: list[RankSamples] = []
    expected = 0
    for folder in folders:
        ranks = read_samples(folder)
        expected = max(expected, *(rank.identity.coordinates.world_size for rank in ranks), 0)
        full, _, _ = full_steps(ranks)
        for rank, samples in full.items():
            for sample in samples:
                tally.add(digest_step(rank, sample))
        found += ranks
    return (
        tally.breakdown(
            source=Source.RING, ranks_found={rank.rank for rank in found}, ranks_expected=expected, caveats=()
        ),
        found,
    )


def as_json(window: Window) -> dict[str, Any]:
    """What the report's document keeps of a window."""
    live = window.live
    return {
        "window": window.number,
        "tpot_ns": round(window.tpot_ns),
        "ttft_ns": None if window.load.ttft is None else round(window.load.ttft.mean_ns),
        "tokens_per_second": round(window.load.tokens_per_second, 3),
        "requests": window.load.requests,
        "failed": window.load.failed,
        "seconds": round(window.load.seconds, 3),
        "source": None if live is None else live.source,
        "steps": None if live is None else live.steps,
        "batch": None if live is None else round(live.batch, 2),
        "step_ns": None if live is None else round(live.step_ns),
    }
