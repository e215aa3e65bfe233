"""Overview: what an on-call engineer opens first. One server, one phase."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard

from k25_dashboards import board
from k25_dashboards.figures import (
    ADDS_UP,
    ALL_PHASES,
    ALL_REDUCE_LIMITS,
    ALL_STEPS,
    LINED_UP,
    SAMPLED,
    SLOWEST_LIMITS,
    UNATTRIBUTED_LIMITS,
    WAIT_LIMITS,
    per_sampled_step,
    per_step_of_a_batch,
    share_of_the_step,
    slowest_share,
    step_quantile,
    wait_per_step,
    wait_share,
)
from k25_dashboards.panels import PER_SECOND, SECONDS, SHARE, Place, Query, lines, stacked_bars, stat_panel
from k25_dashboards.queries import PHASE, RANK, SERVER, mean, over, padded, total
from vllm_k25_instrument.export.families import ALL_REDUCE, STEPS, UNATTRIBUTED, UNATTRIBUTED_STEPS
from vllm_k25_instrument.model import Category


def dashboard() -> Dashboard:
    """The dashboard, whole."""
    base = board.dashboard(
        "overview",
        "Overview",
        "Where the time of a step goes: by category, by batch size, by rank.",
        [board.model(), board.server(), board.phase(), board.rank(), board.batches()],
    )
    for part in (_now, _steps, _categories, _all_reduce, _by_batch):
        base = part(base)
    return base


def _now(base: Dashboard) -> Dashboard:
    return (
        base.with_panel(
            stat_panel(
                Place(
                    1,
                    "Step p50",
                    f"Half of the steps take no longer. {ALL_STEPS} Estimated from buckets: right to a bucket's width.",
                    width=4,
                    height=4,
                ),
                Query(step_quantile(0.5)),
                SECONDS,
            )
        )
        .with_panel(
            stat_panel(
                Place(
                    2,
                    "Step p99",
                    f"One step in a hundred takes longer. {ALL_STEPS} Estimated from buckets: right to a bucket's "
                    "width. More requests at once make a step longer too: compare at one batch size below.",
                    width=4,
                    height=4,
                ),
                Query(step_quantile(0.99)),
                SECONDS,
            )
        )
        .with_panel(
            stat_panel(
                Place(
                    3,
                    "All-reduce, share of the step",
                    f"Exposed time of all-reduces over the time of the steps. {SAMPLED} Waiting for the slowest rank "
                    "is in it. Red: K25AllReduceDominates.",
                    width=4,
                    height=4,
                ),
                Query(share_of_the_step(Category.ALL_REDUCE)),
                SHARE,
                limits=ALL_REDUCE_LIMITS,
                decimals=1,
            )
        )
        .with_panel(
            stat_panel(
                Place(
                    4,
                    "Waiting, share of all-reduce",
                    f"Mean wait over mean duration of an all-reduce. {LINED_UP} {ALL_PHASES} What is waiting no faster "
                    "all-reduce will win back.",
                    width=4,
                    height=4,
                ),
                Query(wait_share()),
                SHARE,
                limits=WAIT_LIMITS,
                decimals=1,
            )
        )
        .with_panel(
            stat_panel(
                Place(
                    5,
                    "Slowest rank",
                    f"The rank that the others waited for most often, and in which share of the steps. {LINED_UP} Of "
                    "equal ranks one is always ahead by chance: it means something together with the waiting.",
                    width=4,
                    height=4,
                ),
                Query(f"topk(1, {slowest_share()})", "rank {{rank}}", instant=True),
                SHARE,
                limits=SLOWEST_LIMITS,
                with_name=True,
                decimals=0,
            )
        )
        .with_panel(
            stat_panel(
                Place(
                    6,
                    "Unattributed, share of the step",
                    f"Time of the step in no hooked call. {SAMPLED} Not lost: projections, norms, and the host's time "
                    "between kernels in eager steps. Red: K25UnattributedHigh.",
                    width=4,
                    height=4,
                ),
                Query(share_of_the_step(Category.UNATTRIBUTED)),
                SHARE,
                limits=UNATTRIBUTED_LIMITS,
                decimals=1,
            )
        )
    )


def _steps(base: Dashboard) -> Dashboard:
    return (
        base.with_row(board.row(10, "Steps"))
        .with_panel(
            lines(
                Place(
                    11,
                    "Step time",
                    f"p50 and p99 of the step's duration over the ranks. {ALL_STEPS} The GPU's time where there is a "
                    "GPU. Estimated from buckets: a level may jump by a bucket's width where the steps moved little.",
                ),
                [Query(step_quantile(0.5), "p50"), Query(step_quantile(0.99), "p99")],
                SECONDS,
            )
        )
        .with_panel(
            lines(
                Place(
                    12,
                    "Steps per second, by phase",
                    "Executed steps of one rank (the mean of those chosen), all phases, sampled or not. Idle calls of "
                    "the engine are not steps.",
                ),
                [
                    Query(
                        total(STEPS.name, SERVER, RANK, by=("phase",))
                        + f"\n  / on () group_left ()\ncount(count by (rank) ({STEPS.name}{{{SERVER}, {RANK}}}))",
                        "{{phase}}",
                    )
                ],
                PER_SECOND,
            )
        )
    )


def _categories(base: Dashboard) -> Dashboard:
    positions = over(
        total(UNATTRIBUTED.name, SERVER, PHASE, by=("position",)),
        total(UNATTRIBUTED_STEPS.name, SERVER, PHASE),
        matching="on () group_left ()",
    )
    return (
        base.with_row(board.row(20, "Where a step goes"))
        .with_panel(
            lines(
                Place(21, "A step, by category", f"Mean over the ranks chosen. {SAMPLED} {ADDS_UP}", width=16),
                [Query(per_sampled_step(), "{{category}}")],
                SECONDS,
                stacked=True,
                by_category=True,
            )
        )
        .with_panel(
            lines(
                Place(
                    22,
                    "Unattributed",
                    "Share of the step in no hooked call. The dashed line is where K25UnattributedHigh begins.",
                    width=8,
                ),
                [Query(share_of_the_step(Category.UNATTRIBUTED, "rank"), "rank {{rank}}")],
                SHARE,
                alert_above=0.6,
                up_to=1,
            )
        )
        .with_panel(
            lines(
                Place(
                    23,
                    "Unattributed, by position",
                    "What lies between which hooked calls, per step, over all ranks: norm and q/kv projections before "
                    "attention, the output projection after it. Inferred from where the time lies, not measured. Of "
                    "some of the sampled steps, the newest of each scrape; what has no such neighbours is unnamed.",
                    width=24,
                ),
                [Query(positions, "{{position}}")],
                SECONDS,
                stacked=True,
            )
        )
    )


def _all_reduce(base: Dashboard) -> Dashboard:
    return (
        base.with_row(board.row(30, "All-reduce and waiting"))
        .with_panel(
            lines(
                Place(
                    31,
                    "All-reduce, by path",
                    f"Mean duration of a call by the path really taken, waiting included. {SAMPLED} {ALL_PHASES}",
                ),
                [Query(mean(ALL_REDUCE, SERVER, RANK, by=("path",)), "{{path}}")],
                SECONDS,
            )
        )
        .with_panel(
            lines(
                Place(
                    32,
                    "Waiting per step, by rank",
                    f"What a rank waits in all all-reduces of a step. {LINED_UP} {ALL_PHASES} The slow rank is the one "
                    "that does not wait.",
                ),
                [Query(wait_per_step("rank"), "rank {{rank}}")],
                SECONDS,
            )
        )
    )


def _by_batch(base: Dashboard) -> Dashboard:
    at_most = "64 is 17 to 64 requests, Inf more than 256; other is what a rank has no room to keep apart."
    return (
        base.with_row(board.row(40, "By batch size"))
        .with_panel(
            stacked_bars(
                Place(
                    41,
                    "A step, by batch size",
                    f"Mean of the last minutes. {at_most} {SAMPLED} {ADDS_UP}",
                    width=24,
                ),
                Query(padded(per_step_of_a_batch(by_batch=True), "batch", 3), instant=True, as_table=True),
                SECONDS,
                bar="batch_sorted",
            )
        )
        .with_panel(
            lines(
                Place(
                    42,
                    "Steps of $batch requests at most",
                    f"At one batch size load does not hide what has become slower. {at_most} {SAMPLED} {ADDS_UP}",
                ),
                [Query(per_step_of_a_batch('batch=~"$batch"', by_batch=False), "{{category}}")],
                SECONDS,
                stacked=True,
                by_category=True,
            )
            .repeat("batch")
            .repeat_direction("h")
            .max_per_row(3)
        )
    )
