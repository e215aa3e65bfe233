"""What a sound /metrics is: parses, has no series twice, and our families are exactly those of the table below."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Final

from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text
from prometheus_client.samples import Sample

PREFIX: Final = "vllm_k25_"

FAMILIES: Final[dict[str, tuple[str, frozenset[str]]]] = {
    "vllm_k25_step_duration_seconds": ("histogram", frozenset({"rank", "phase"})),
    "vllm_k25_step_host_seconds": ("histogram", frozenset({"rank", "phase"})),
    "vllm_k25_step_category_seconds": ("histogram", frozenset({"rank", "phase", "category"})),
    "vllm_k25_batch_step_seconds": ("summary", frozenset({"rank", "phase", "graph_mode", "batch"})),
    "vllm_k25_batch_category_seconds": (
        "summary",
        frozenset({"rank", "phase", "graph_mode", "batch", "category"}),
    ),
    "vllm_k25_all_reduce_seconds": ("histogram", frozenset({"rank", "path"})),
    "vllm_k25_all_reduce_bytes_total": ("counter", frozenset({"rank", "path", "size"})),
    "vllm_k25_all_reduce_transfer_seconds": ("histogram", frozenset({"path"})),
    "vllm_k25_all_reduce_wait_seconds": ("histogram", frozenset({"rank"})),
    "vllm_k25_slowest_rank_steps_total": ("counter", frozenset({"rank"})),
    "vllm_k25_alignment_steps_total": ("counter", frozenset({"rank"})),
    "vllm_k25_alignment_steps_skipped_total": ("counter", frozenset({"reason"})),
    "vllm_k25_unattributed_seconds_total": ("counter", frozenset({"phase", "position"})),
    "vllm_k25_unattributed_steps_total": ("counter", frozenset({"phase"})),
    "vllm_k25_steps_total": ("counter", frozenset({"rank", "phase"})),
    "vllm_k25_steps_sampled_total": ("counter", frozenset({"rank", "phase"})),
    "vllm_k25_samples_lost_total": ("counter", frozenset({"rank", "reason"})),
    "vllm_k25_instrument_overhead_seconds_total": ("counter", frozenset({"rank"})),
    "vllm_k25_graph_twin_bytes": ("gauge", frozenset({"rank"})),
    "vllm_k25_graph_twin_capture_seconds": ("gauge", frozenset({"rank"})),
    "vllm_k25_hook_errors_total": ("counter", frozenset({"rank", "hook"})),
    "vllm_k25_hook_attached": ("gauge", frozenset({"rank", "hook"})),
    "vllm_k25_build_info": ("gauge", frozenset({"version", "vllm_version", "model"})),
}
"""Family -> type and labels. The text format shows an info metric as a gauge."""

CLOSED_LABELS: Final = {
    "rank": re.compile(r"\d+"),
    "phase": re.compile("decode|prefill|mixed"),
    "category": re.compile(
        "all_reduce|collective|moe_experts|moe_routing|moe_shared_experts|mla_attention|attention|sampling|speculation"
        "|input_preparation|unattributed"
    ),
    "position": re.compile("between_[a-z_]+|unnamed"),
    "graph_mode": re.compile("none|piecewise|full|other"),
    "batch": re.compile(r"1|4|16|64|256|\+Inf|other"),
    "size": re.compile(r"4096|16384|65536|262144|1048576|4194304|\+Inf"),
    "path": re.compile(
        "custom|pynccl|symm_mem|nccl_symm_mem|quick_reduce|flashinfer|flashinfer_pcie_ipc|aiter|cpu_shm"
        "|torch_distributed|other"
    ),
    "reason": re.compile(
        "aborted|too_large|error|unread|untimed|overwritten"  # of a sample
        "|missing_rank|counts_differ|incomplete|late|backlog"  # of a step that was not lined up over its ranks
    ),
    "hook": re.compile("[a-z_]+"),
}

Series = tuple[str, frozenset[tuple[str, str]]]


def assert_exposition_is_sound(text: str) -> None:
    """Check the text of a whole /metrics, ours and whatever else is in it. Raises AssertionError, saying what."""
    families = list(parse_text(text))
    assert duplicated_series(text) == [], "series that appear twice"
    names = Counter(match[1] for match in re.finditer(r"^# TYPE (\S+)", text, re.MULTILINE))
    assert [name for name, times in names.items() if times > 1] == [], "families that appear twice"

    ours = {_exposed_name(family): family for family in families if family.name.startswith(PREFIX)}
    assert set(ours) == set(FAMILIES)
    for name, family in ours.items():
        kind, labels = FAMILIES[name]
        assert family.type == kind, name
        assert family.documentation, f"{name} has no help text"
        for sample in family.samples:
            _assert_sample_is_sound(sample, name, kind, labels)
        if kind == "histogram":
            for series in _by_labels(family.samples, but="le").values():
                _assert_histogram_is_sound(series)


def assert_openmetrics_is_sound(text: str) -> None:
    """Check a whole exposition in the OpenMetrics format; its parser itself is strict."""
    families = list(parse_openmetrics(text))
    series = Counter(_series(sample) for family in families for sample in family.samples)
    assert [s for s, times in series.items() if times > 1] == []
    assert {family.name for family in families if family.name.startswith(PREFIX)} == {
        name.removesuffix("_total").removesuffix("_info") for name in FAMILIES
    }


def duplicated_series(text: str) -> list[Series]:
    """The (name, labels) pairs that appear more than once: Prometheus drops such samples."""
    times = Counter(_series(sample) for family in parse_text(text) for sample in family.samples)
    return [series for series, count in times.items() if count > 1]


def our_samples(text: str) -> dict[Series, float]:
    """Every sample of our families, by name and labels."""
    return {
        _series(sample): sample.value
        for family in parse_text(text)
        if family.name.startswith(PREFIX)
        for sample in family.samples
    }


def value_of(text: str, name: str, **labels: str) -> float:
    """The value of one series. Raises KeyError where it is not there."""
    return our_samples(text)[name, frozenset(labels.items())]


def _exposed_name(family: Metric) -> str:
    """The name as in the exposition: the parser takes the suffix off a counter's."""
    return family.name + "_total" if family.type == "counter" else family.name


def _series(sample: Sample) -> Series:
    return sample.name, frozenset(sample.labels.items())


def _assert_sample_is_sound(sample: Sample, name: str, kind: str, labels: frozenset[str]) -> None:
    suffixes = {"histogram": ("_bucket", "_sum", "_count"), "summary": ("_sum", "_count")}.get(kind, ("",))
    assert sample.name in {name + suffix for suffix in suffixes}, sample
    expected = labels | {"le"} if sample.name == name + "_bucket" else labels
    assert frozenset(sample.labels) == expected, sample
    assert sample.value >= 0, sample
    for label, pattern in CLOSED_LABELS.items():
        if label in sample.labels:
            assert pattern.fullmatch(sample.labels[label]), sample


def _by_labels(samples: Iterable[Sample], but: str) -> dict[frozenset[tuple[str, str]], list[Sample]]:
    groups: dict[frozenset[tuple[str, str]], list[Sample]] = {}
    for sample in samples:
        key = frozenset(item for item in sample.labels.items() if item[0] != but)
        groups.setdefault(key, []).append(sample)
    return groups


def _assert_histogram_is_sound(series: list[Sample]) -> None:
    buckets = [sample for sample in series if sample.name.endswith("_bucket")]
    bounds = [float(sample.labels["le"]) for sample in buckets]
    counts = [sample.value for sample in buckets]
    assert bounds == sorted(set(bounds)), series
    assert counts == sorted(counts), f"buckets are cumulative: {series}"
    assert bounds[-1] == float("inf"), series
    assert counts[-1] == next(sample.value for sample in series if sample.name.endswith("_count")), series
    assert sum(sample.name.endswith("_sum") for sample in series) == 1, series
