"""Two scrapes of ``/metrics``: what the counters grew by between them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from prometheus_client.parser import text_string_to_metric_families

from vllm_k25_instrument.model import BATCH_LABELS, NS_PER_SECOND, Phase, batch_label

_PREFIX: Final = "vllm_k25_"
_STEP: Final = "vllm_k25_step_duration_seconds"
_BATCH_STEP: Final = "vllm_k25_batch_step_seconds"
_BATCH_CATEGORY: Final = "vllm_k25_batch_category_seconds_sum"
_ALL_REDUCE: Final = "vllm_k25_all_reduce_seconds"
_WAIT: Final = "vllm_k25_all_reduce_wait_seconds"
_QUEUE: Final = "vllm:request_queue_time_seconds"

Labels = tuple[tuple[str, str], ...]
Series = Mapping[tuple[str, Labels], float]


@dataclass(frozen=True, slots=True)
class ScrapeFigures:
    """Decode steps of one batch label between two scrapes. Times are ns per step, mean over the ranks.

    `batch` is the concurrency, or the upper bound of another label that the steps have. All-reduces are not told apart
    by phase: theirs are means over all sampled steps.
    """

    batch: float
    steps: int
    step_ns: float
    category_ns: Mapping[str, float]
    ranks: int
    all_reduce_sum_ns: float | None = None
    all_reduce_calls: float | None = None
    all_reduce_paths: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Path -> calls per step, ns per call."""
    wait_ns: float | None = None
    unsampled_ns: float | None = None
    """How much longer all executed decode steps took than the sampled ones, in the mean."""
    graph_modes: Mapping[str, int] = field(default_factory=dict)


def read_scrape(path: Path) -> Series:
    """The samples of a scrape by name and labels; empty where there is none or it cannot be parsed."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    wanted = [line for line in text.splitlines() if line.startswith((_PREFIX, _QUEUE))]
    try:
        return {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families("\n".join(wanted) + "\n")
            for sample in family.samples
        }
    except ValueError:
        return {}


def growth(before: Series, after: Series) -> dict[tuple[str, Labels], float]:
    """What each series grew by; of a counter that has begun anew, what it stands at."""
    grown = {}
    for key, value in after.items():
        earlier = before.get(key, 0.0)
        grown[key] = value - earlier if value >= earlier else value
    return grown


def metrics_figures(before: Path, after: Path, concurrency: int) -> ScrapeFigures | None:
    """The decode steps of the window's batch: of its concurrency's label, or else of the label with most steps.

    None where no sampled decode step came between the scrapes.
    """
    grown = growth(read_scrape(before), read_scrape(after))
    decode = [(dict(labels), name, value) for (name, labels), value in grown.items()]
    counts: dict[str, float] = {}
    for labels, name, value in decode:
        if name == f"{_BATCH_STEP}_count" and labels.get("phase") == Phase.DECODE:
            counts[labels["batch"]] = counts.get(labels["batch"], 0.0) + value
    counts = {label: count for label, count in counts.items() if count > 0}
    if not counts:
        return None
    own = batch_label(concurrency)
    label = own if own in counts else max(counts, key=lambda each: counts[each])

    def of_batch(name: str) -> Iterable[tuple[dict[str, str], float]]:
        for labels, each, value in decode:
            if each == name and labels.get("phase") == Phase.DECODE and labels.get("batch") == label:
                yield labels, value

    steps = {labels["rank"]: 0.0 for labels, _ in of_batch(f"{_BATCH_STEP}_count")}
    graphs: dict[str, int] = {}
    for labels, value in of_batch(f"{_BATCH_STEP}_count"):
        steps[labels["rank"]] += value
        graphs[labels["graph_mode"]] = graphs.get(labels["graph_mode"], 0) + round(value)
    steps = {rank: count for rank, count in steps.items() if count}
    whole = sum(value for _, value in of_batch(f"{_BATCH_STEP}_sum"))
    total = sum(steps.values())
    categories: dict[str, float] = {}
    for labels, value in of_batch(_BATCH_CATEGORY):
        categories[labels["category"]] = categories.get(labels["category"], 0.0) + value * NS_PER_SECOND / total
    sampled = sum(value for labels, name, value in decode if name == f"{_PREFIX}steps_sampled_total")
    paths = _paths(decode, sampled)
    return ScrapeFigures(
        batch=float(label) if label != own and label in BATCH_LABELS[:-1] else float(concurrency),
        steps=round(total / len(steps)),
        step_ns=whole * NS_PER_SECOND / total,
        category_ns={name: ns for name, ns in categories.items() if ns},
        ranks=len(steps),
        all_reduce_sum_ns=sum(calls * mean for calls, mean in paths.values()) if paths else None,
        all_reduce_calls=sum(calls for calls, _ in paths.values()) if paths else None,
        all_reduce_paths=paths,
        wait_ns=_wait(decode),
        unsampled_ns=_unsampled(decode),
        graph_modes={mode: count for mode, count in graphs.items() if count},
    )


def _paths(grown: Iterable[tuple[dict[str, str], str, float]], sampled: float) -> dict[str, tuple[float, float]]:
    counts: dict[str, float] = {}
    sums: dict[str, float] = {}
    for labels, name, value in grown:
        if name == f"{_ALL_REDUCE}_count":
            counts[labels["path"]] = counts.get(labels["path"], 0.0) + value
        elif name == f"{_ALL_REDUCE}_sum":
            sums[labels["path"]] = sums.get(labels["path"], 0.0) + value
    return {
        path: (count / sampled, sums.get(path, 0.0) * NS_PER_SECOND / count)
        for path, count in counts.items()
        if count and sampled
    }


def _unsampled(grown: Iterable[tuple[dict[str, str], str, float]]) -> float | None:
    means = []
    listed = [(name, value) for labels, name, value in grown if labels.get("phase") == Phase.DECODE]
    for metric in (_STEP, _BATCH_STEP):
        steps = sum(value for name, value in listed if name == f"{metric}_count")
        time = sum(value for name, value in listed if name == f"{metric}_sum")
        means.append(time * NS_PER_SECOND / steps if steps else None)
    every, sampled = means
    return None if every is None or sampled is None else every - sampled


def _wait(grown: Iterable[tuple[dict[str, str], str, float]]) -> float | None:
    """Mean wait of a rank in a lined-up step, ns."""
    listed = list(grown)
    waited = sum(value for _, name, value in listed if name == f"{_WAIT}_sum")
    steps = sum(value for _, name, value in listed if name == f"{_PREFIX}alignment_steps_total")
    return waited * NS_PER_SECOND / steps if steps else None


def queue_seconds(before: Path, after: Path) -> float | None:
    """Mean time that the window's requests waited to be scheduled, from vLLM's own metrics; None without them."""
    grown = growth(read_scrape(before), read_scrape(after))
    total = sum(value for (name, _), value in grown.items() if name == f"{_QUEUE}_sum")
    count = sum(value for (name, _), value in grown.items() if name == f"{_QUEUE}_count")
    return total / count if count else None
