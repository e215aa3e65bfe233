"""The figures that several dashboards show, each asked for in one way; thresholds are those of the alerts."""

from __future__ import annotations

from typing import Final

from k25_dashboards.panels import RED, YELLOW
from k25_dashboards.queries import PHASE, RANK, SERVER, mean, over, quantile, total
from vllm_k25_instrument.export.families import (
    ALIGNMENT_STEPS,
    ALL_REDUCE,
    ALL_REDUCE_WAIT,
    BATCH_CATEGORY,
    BATCH_STEP,
    SLOWEST_RANK,
    STEP_CATEGORY,
    STEP_DURATION,
    STEPS_SAMPLED,
)
from vllm_k25_instrument.model import Category

ALL_REDUCE_LIMITS: Final = ((0.35, YELLOW), (0.5, RED))
WAIT_LIMITS: Final = ((0.2, YELLOW), (0.4, RED))
SLOWEST_LIMITS: Final = ((0.8, RED),)
UNATTRIBUTED_LIMITS: Final = ((0.4, YELLOW), (0.6, RED))
LOST_LIMITS: Final = ((0.01, YELLOW), (0.1, RED))

SAMPLED: Final = "Sampled steps only (every 16th unless K25_SAMPLE_EVERY says otherwise)."
ALL_STEPS: Final = "All steps, sampled or not."
ADDS_UP: Final = (
    "An instant counts once: calls inside of others are taken out of them, and where streams overlap the main one has "
    "it. So the categories add up to the step, and each is what the step would win at most if it took no time."
)
ALL_PHASES: Final = "All-reduce metrics are of all phases together."
LINED_UP: Final = (
    "Of the sampled steps that were lined up over all ranks of a tensor-parallel group, since the exporter started."
)


def step_quantile(q: float, *by: str) -> str:
    """Of step durations, all steps."""
    return quantile(q, STEP_DURATION, SERVER, PHASE, RANK, by=by)


def per_sampled_step(*by: str, where: tuple[str, ...] = ()) -> str:
    """Mean exposed time per sampled step by category and `by`."""
    labels = f"on ({', '.join(by)}) group_left ()" if by else "on () group_left ()"
    return over(
        total(STEP_CATEGORY.name + "_sum", SERVER, PHASE, RANK, *where, by=("category", *by)),
        total(STEPS_SAMPLED.name, SERVER, PHASE, RANK, by=by),
        matching=labels,
    )


def per_step_of_a_batch(*where: str, by_batch: bool) -> str:
    """Mean exposed time per sampled step by category, of steps of like batch size."""
    by = ("batch",) if by_batch else ()
    return over(
        total(BATCH_CATEGORY.name + "_sum", SERVER, PHASE, RANK, *where, by=("category", *by)),
        total(BATCH_STEP.name + "_count", SERVER, PHASE, RANK, *where, by=by),
        matching=f"on ({', '.join(by)}) group_left ()",
    )


def share_of_the_step(category: Category, *by: str) -> str:
    """Exposed time of a category as a share of the time of sampled steps."""
    name = STEP_CATEGORY.name + "_sum"
    return over(
        total(name, SERVER, PHASE, RANK, f'category="{category}"', by=by),
        total(name, SERVER, PHASE, RANK, by=by),
    )


def wait_share(*by: str) -> str:
    """Mean wait over mean duration of an all-reduce, and not sum over sum: steps not lined up have no wait."""
    return over(
        f"({mean(ALL_REDUCE_WAIT, SERVER, RANK, by=by)})",
        f"({mean(ALL_REDUCE, SERVER, RANK, by=by)})",
    )


def wait_per_step(*by: str) -> str:
    """Waiting in all all-reduces of a lined-up step."""
    return over(
        total(ALL_REDUCE_WAIT.name + "_sum", SERVER, RANK, by=by),
        total(ALIGNMENT_STEPS.name, SERVER, RANK, by=by),
    )


def slowest_share() -> str:
    """In which part of the lined-up steps the others waited for a rank."""
    return over(
        total(SLOWEST_RANK.name, SERVER, RANK, by=("rank",)),
        total(ALIGNMENT_STEPS.name, SERVER, RANK, by=("rank",)),
    )
