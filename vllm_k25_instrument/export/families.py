"""A rank's counters as Prometheus metric families: names, types, labels and units in one place.

Every label value comes from a closed set, so that the number of series is bounded whatever a server is asked to
do (see cardinality.py). Series appear once they have been touched, but for the counters that alert rules watch
from the start: those begin at zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Final

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
    Sample,
    SummaryMetricFamily,
)

from vllm_k25_instrument.export.unattributed import UnattributedTotals
from vllm_k25_instrument.export.waits import WaitTotals
from vllm_k25_instrument.hooks.names import HOOK_NAMES
from vllm_k25_instrument.hooks.point import HookState
from vllm_k25_instrument.model import (
    ALL_REDUCE_PATHS,
    INF_BUCKET,
    LIVE_CATEGORIES,
    LOST_REASONS,
    NS_PER_SECOND,
    PHASES,
    SIZE_LABELS,
    Category,
    RankIdentity,
)
from vllm_k25_instrument.totals import MAX_HOOKS, OTHER_LABEL, Histogram, Totals

PREFIX: Final = "vllm_k25_"

HOOK_LABELS: Final = (*HOOK_NAMES, OTHER_LABEL)
"""All values of the `hook` label; hooks that this version does not know come as `other`."""

_NOT_EXPECTED: Final = frozenset({HookState.OFF, HookState.NOT_IN_VERSION})
"""States of a hook that nobody misses: it was not asked for, or this vLLM has no such place."""


@dataclass(frozen=True, slots=True)
class Family:
    """Name (as queries write it, without the suffixes of a histogram's series), labels and help text."""

    name: str
    labels: tuple[str, ...]
    documentation: str

    def histogram(self) -> HistogramMetricFamily:
        return HistogramMetricFamily(self.name, self.documentation, labels=self.labels)

    def summary(self) -> SummaryMetricFamily:
        return SummaryMetricFamily(self.name, self.documentation, labels=self.labels)

    def counter(self) -> CounterMetricFamily:
        return CounterMetricFamily(self.name, self.documentation, labels=self.labels)

    def gauge(self) -> GaugeMetricFamily:
        return GaugeMetricFamily(self.name, self.documentation, labels=self.labels)

    def info(self) -> InfoMetricFamily:
        """An info metric; its labels are given with its value."""
        return InfoMetricFamily(self.name, self.documentation)


STEP_DURATION: Final = Family(
    PREFIX + "step_duration_seconds",
    ("rank", "phase"),
    "Duration of executed model steps in seconds, all steps, sampled or not: the GPU's time where there is a GPU.",
)
STEP_HOST: Final = Family(
    PREFIX + "step_host_seconds",
    ("rank", "phase"),
    "Host time of executed model steps in seconds, from execute_model to the end of sampling, all steps.",
)
STEP_CATEGORY: Final = Family(
    PREFIX + "step_category_seconds",
    ("rank", "phase", "category"),
    "Exclusive time of a category per sampled step in seconds; over all categories (unattributed is one) the sums add "
    "up to the duration of the sampled steps.",
)
BATCH_STEP: Final = Family(
    PREFIX + "batch_step_seconds",
    ("rank", "phase", "graph_mode", "batch"),
    "Duration of steps in seconds by batch size (batch is the upper bound in requests), sampled steps only, so that "
    "batch_category_seconds adds up to it.",
)
BATCH_CATEGORY: Final = Family(
    PREFIX + "batch_category_seconds",
    ("rank", "phase", "graph_mode", "batch", "category"),
    "Exclusive time of a category in seconds by batch size (batch is the upper bound in requests), sampled steps only; "
    "over all categories the sums add up to batch_step_seconds.",
)
ALL_REDUCE: Final = Family(
    PREFIX + "all_reduce_seconds",
    ("rank", "path"),
    "Duration of all-reduces in seconds by the path really taken, sampled steps only; includes waiting for the slowest "
    "rank.",
)
ALL_REDUCE_BYTES: Final = Family(
    PREFIX + "all_reduce_bytes_total",
    ("rank", "path", "size"),
    "Bytes of all-reduced messages by path and message size (size is the upper bound in bytes), sampled steps only.",
)
ALL_REDUCE_TRANSFER: Final = Family(
    PREFIX + "all_reduce_transfer_seconds",
    ("path",),
    "Transfer of all-reduces in seconds by the path really taken: of each, the least duration of any rank of its "
    "tensor-parallel group; sampled steps that were lined up over all ranks only.",
)
ALL_REDUCE_WAIT: Final = Family(
    PREFIX + "all_reduce_wait_seconds",
    ("rank",),
    "Waiting in all-reduces in seconds: of each, the rank's duration minus the transfer; sampled steps that were lined "
    "up over all ranks only.",
)
SLOWEST_RANK: Final = Family(
    PREFIX + "slowest_rank_steps_total",
    ("rank",),
    "Lined-up steps in which the other ranks of the tensor-parallel group waited for this one: it waited least.",
)
ALIGNMENT_STEPS: Final = Family(
    PREFIX + "alignment_steps_total",
    ("rank",),
    "Sampled steps whose all-reduces were lined up with those of the other ranks, since the exporter started.",
)
ALIGNMENT_SKIPPED: Final = Family(
    PREFIX + "alignment_steps_skipped_total",
    ("reason",),
    "Sampled steps of a tensor-parallel group whose all-reduces were not lined up over its ranks.",
)
UNATTRIBUTED: Final = Family(
    PREFIX + "unattributed_seconds_total",
    ("phase", "position"),
    "Unattributed time in seconds by its position between hooked ranges, inferred, over all ranks; of the steps that "
    "unattributed_steps_total counts, some of the sampled ones. What has no position is unnamed; all add up to what is "
    "unattributed in those steps.",
)
UNATTRIBUTED_STEPS: Final = Family(
    PREFIX + "unattributed_steps_total",
    ("phase",),
    "Sampled steps, of all ranks, whose unattributed time was taken apart by position.",
)
STEPS: Final = Family(PREFIX + "steps_total", ("rank", "phase"), "Executed model steps; idle calls are not steps.")
STEPS_SAMPLED: Final = Family(
    PREFIX + "steps_sampled_total", ("rank", "phase"), "Executed model steps whose ranges were timed and recorded."
)
SAMPLES_LOST: Final = Family(
    PREFIX + "samples_lost_total", ("rank", "reason"), "Steps that were due for sampling and left no sample."
)
OVERHEAD: Final = Family(
    PREFIX + "instrument_overhead_seconds_total",
    ("rank",),
    "Time that the instrumentation itself took inside steps in seconds, as far as it can time itself.",
)
TWIN_BYTES: Final = Family(
    PREFIX + "graph_twin_bytes", ("rank",), "GPU memory that the instrumented twins of CUDA graphs took, in bytes."
)
TWIN_CAPTURE: Final = Family(
    PREFIX + "graph_twin_capture_seconds",
    ("rank",),
    "How long the capture of the instrumented twins of CUDA graphs took, in seconds.",
)
HOOK_ERRORS: Final = Family(
    PREFIX + "hook_errors_total",
    ("rank", "hook"),
    "Errors inside a hook's own code; the first one turns the hook off, vLLM goes on.",
)
HOOK_ATTACHED: Final = Family(
    PREFIX + "hook_attached",
    ("rank", "hook"),
    "Whether a hook is attached and working (1) or not (0); hooks that were not asked for or do not exist in this "
    "vLLM have no series.",
)
BUILD: Final = Family(
    PREFIX + "build",
    ("version", "vllm_version", "model"),
    "Versions of the instrumentation and of vLLM, and the model served.",
)


def empty_families() -> list[Metric]:
    """All families, without samples, in the order of exposition."""
    return list(_Families().in_order())


class _Families:
    """One set of families being filled."""

    def __init__(self) -> None:
        self.step_duration = STEP_DURATION.histogram()
        self.step_host = STEP_HOST.histogram()
        self.step_category = STEP_CATEGORY.histogram()
        self.batch_step = BATCH_STEP.summary()
        self.batch_category = BATCH_CATEGORY.summary()
        self.all_reduce = ALL_REDUCE.histogram()
        self.all_reduce_bytes = ALL_REDUCE_BYTES.counter()
        self.all_reduce_transfer = ALL_REDUCE_TRANSFER.histogram()
        self.all_reduce_wait = ALL_REDUCE_WAIT.histogram()
        self.slowest_rank = SLOWEST_RANK.counter()
        self.alignment_steps = ALIGNMENT_STEPS.counter()
        self.alignment_skipped = ALIGNMENT_SKIPPED.counter()
        self.unattributed = UNATTRIBUTED.counter()
        self.unattributed_steps = UNATTRIBUTED_STEPS.counter()
        self.steps = STEPS.counter()
        self.steps_sampled = STEPS_SAMPLED.counter()
        self.samples_lost = SAMPLES_LOST.counter()
        self.overhead = OVERHEAD.counter()
        self.twin_bytes = TWIN_BYTES.gauge()
        self.twin_capture = TWIN_CAPTURE.gauge()
        self.hook_errors = HOOK_ERRORS.counter()
        self.hook_attached = HOOK_ATTACHED.gauge()
        self.build = BUILD.info()

    def in_order(self) -> tuple[Metric, ...]:
        return tuple(vars(self).values())


def rank_families(identity: RankIdentity, totals: Totals) -> list[Metric]:
    """The families of one rank, filled. Raises ValueError where the counters contradict themselves."""
    families = _Families()
    rank = str(identity.coordinates.global_rank)
    categories = _with_time(totals)
    _add_steps(families, rank, totals, categories)
    _add_batches(families, rank, totals, tuple(categories))
    _add_all_reduces(families, rank, totals)
    _add_instrument(families, rank, identity, totals)
    return list(families.in_order())


def wait_families(totals: WaitTotals) -> list[Metric]:
    """The families of what the ranks of a server waited for each other, filled; the others are empty."""
    families = _Families()
    for path_code, transfer in totals.transfer.items():
        path = ALL_REDUCE_PATHS[path_code]
        _add_histogram(families.all_reduce_transfer, ALL_REDUCE_TRANSFER, (path,), transfer)
    for rank, wait in sorted(totals.wait.items()):
        labels = (str(rank),)
        _add_histogram(families.all_reduce_wait, ALL_REDUCE_WAIT, labels, wait)
        families.slowest_rank.add_metric(labels, totals.slowest[rank])
        families.alignment_steps.add_metric(labels, totals.steps[rank])
    for reason, steps in totals.left_out.items():
        families.alignment_skipped.add_metric((reason,), steps)
    return list(families.in_order())


def unattributed_families(totals: UnattributedTotals) -> list[Metric]:
    """The families of what is between the hooked ranges, filled; the others are empty."""
    families = _Families()
    for phase_code, steps in totals.steps.items():
        phase = PHASES[phase_code]
        families.unattributed_steps.add_metric((phase,), steps)
        for position, ns in totals.gaps_ns[phase_code].items():
            families.unattributed.add_metric((phase, position), seconds(ns))
    return list(families.in_order())


def join_ranks(ranks: Iterable[Sequence[Metric]]) -> list[Metric]:
    """The families of several ranks of one server, and of what concerns all of them, as one list.

    ``build_info``, one per server, is the first rank's.
    """
    joined = empty_families()
    for families in ranks:
        for whole, part in zip(joined, families, strict=True):
            if whole.type != "info" or not whole.samples:
                whole.samples += part.samples
    return joined


def seconds(ns: int) -> float:
    """Nanoseconds as seconds: the float nearest to the exact quotient."""
    return ns / NS_PER_SECOND


def _with_time(totals: Totals) -> dict[Category, list[Histogram]]:
    """By phase, the histograms of the categories that a rank has ever spent time on. The others, of models of another
    kind, have no series: text is what a scrape costs most of.
    """
    histograms = {
        category: [totals.category(phase, code) for phase in range(len(PHASES))]
        for code, category in enumerate(LIVE_CATEGORIES)
    }
    return {category: those for category, those in histograms.items() if any(one.sum_ns for one in those)}


def _add_steps(
    families: _Families, rank: str, totals: Totals, categories: Mapping[Category, Sequence[Histogram]]
) -> None:
    for phase_code, phase in enumerate(PHASES):
        families.steps.add_metric((rank, phase), totals.steps(phase_code))
        families.steps_sampled.add_metric((rank, phase), totals.sampled(phase_code))
        _add_histogram(families.step_duration, STEP_DURATION, (rank, phase), totals.step_duration(phase_code))
        _add_histogram(families.step_host, STEP_HOST, (rank, phase), totals.step_host(phase_code))
        for category, histograms in categories.items():
            _add_histogram(families.step_category, STEP_CATEGORY, (rank, phase, category), histograms[phase_code])


def _add_batches(families: _Families, rank: str, totals: Totals, categories: tuple[Category, ...]) -> None:
    seen: set[tuple[str, ...]] = set()
    for row in totals.batch_rows():
        labels = (rank, row.phase, row.graph_mode, row.batch)
        if labels in seen:
            # Two series of one name would make Prometheus reject the scrape of every rank.
            raise ValueError(f"corrupted: two rows of counters for {row.phase}, {row.graph_mode}, batch {row.batch}")
        seen.add(labels)
        families.batch_step.add_metric(labels, row.steps, seconds(row.step_ns))
        samples = families.batch_category.samples
        for category, with_category in zip(categories, _with_categories(labels, categories), strict=True):
            samples.append(Sample(BATCH_CATEGORY.name + "_count", with_category, row.steps))
            samples.append(Sample(BATCH_CATEGORY.name + "_sum", with_category, seconds(row.category_ns[category])))


def _add_all_reduces(families: _Families, rank: str, totals: Totals) -> None:
    for path_code, path in enumerate(ALL_REDUCE_PATHS):
        _add_histogram(families.all_reduce, ALL_REDUCE, (rank, path), totals.all_reduce(path_code))
        for size_code, size in enumerate(SIZE_LABELS):
            nbytes = totals.all_reduce_bytes(path_code, size_code)
            if nbytes:
                families.all_reduce_bytes.add_metric((rank, path, size), nbytes)


def _add_instrument(families: _Families, rank: str, identity: RankIdentity, totals: Totals) -> None:
    for reason_code, reason in enumerate(LOST_REASONS):
        families.samples_lost.add_metric((rank, reason), totals.lost(reason_code))
    families.overhead.add_metric((rank,), seconds(totals.overhead_ns))
    families.twin_bytes.add_metric((rank,), totals.twin_bytes)
    families.twin_capture.add_metric((rank,), seconds(totals.twin_capture_ns))
    for index, hook in enumerate(HOOK_NAMES):
        families.hook_errors.add_metric((rank, hook), totals.hook_errors(index))
    unknown_errors = sum(totals.hook_errors(index) for index in range(len(HOOK_NAMES), MAX_HOOKS))
    if unknown_errors:
        families.hook_errors.add_metric((rank, OTHER_LABEL), unknown_errors)
    for hook, attached in _attached(identity.hooks.items()).items():
        families.hook_attached.add_metric((rank, hook), attached)
    families.build.add_metric(
        (),
        {"version": identity.plugin_version, "vllm_version": identity.vllm_version, "model": identity.model},
    )


def _attached(states: Iterable[tuple[str, str]]) -> dict[str, int]:
    attached: dict[str, int] = {}
    for name, state in states:
        if state not in _NOT_EXPECTED:
            hook = name if name in HOOK_NAMES else OTHER_LABEL
            attached[hook] = max(attached.get(hook, 0), int(state == HookState.ATTACHED))
    return attached


def _add_histogram(metric: Metric, family: Family, labels: tuple[str, ...], histogram: Histogram) -> None:
    """Add the series of one histogram, once it has observed something.

    The count is the sum of the buckets, so that the two agree even in a snapshot taken while the writer was between
    them.
    """
    if not any(histogram.counts):
        return
    plain, by_bound = _with_bounds(family.labels, labels, histogram.bounds_ns)
    bucket = family.name + "_bucket"
    samples = [
        Sample(bucket, below, count) for below, count in zip(by_bound, accumulate(histogram.counts), strict=True)
    ]
    samples.append(Sample(family.name + "_count", plain, histogram.count))
    samples.append(Sample(family.name + "_sum", plain, seconds(histogram.sum_ns)))
    metric.samples += samples


# Labels are made once: thousands of small dictionaries would be a fifth of a scrape, and scrapes run in vLLM's event
# loop. There are no more of them than there are series (see cardinality.py); nobody changes them.


@cache
def _with_bounds(
    names: tuple[str, ...], values: tuple[str, ...], bounds_ns: tuple[int, ...]
) -> tuple[dict[str, str], tuple[dict[str, str], ...]]:
    """The labels of a histogram's sum and count, and those of its buckets.

    The `le` labels are in seconds: the shortest decimals that read back as the same floats.
    """
    plain = dict(zip(names, values, strict=True))
    bounds = (*(repr(seconds(bound)) for bound in bounds_ns), INF_BUCKET)
    return plain, tuple({**plain, "le": bound} for bound in bounds)


@cache
def _with_categories(values: tuple[str, ...], categories: tuple[Category, ...]) -> tuple[dict[str, str], ...]:
    """The labels of one row of a rank, for each of these categories."""
    return tuple(dict(zip(BATCH_CATEGORY.labels, (*values, category), strict=True)) for category in categories)
