"""Ranks: which one is different, and in what."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard

from k25_dashboards import board
from k25_dashboards.figures import (
    ADDS_UP,
    ALL_PHASES,
    ALL_STEPS,
    LINED_UP,
    SAMPLED,
    per_sampled_step,
    slowest_share,
    step_quantile,
    wait_per_step,
)
from k25_dashboards.panels import SECONDS, SHARE, Place, Query, lines, stacked_bars
from k25_dashboards.queries import PHASE, RANK, SERVER, mean, over, padded, total
from vllm_k25_instrument.export.families import (
    OVERHEAD,
    STEP_CATEGORY,
    STEP_DURATION,
    STEP_HOST,
    STEPS_SAMPLED,
)


def dashboard() -> Dashboard:
    """The dashboard, whole."""
    base = board.dashboard(
        "ranks",
        "Ranks",
        "The ranks of one server side by side: which one is different, and in what.",
        [board.model(), board.server(), board.phase(), board.rank(), board.category()],
    )
    return _host(_categories(_steps(_slowest(base))))


def _slowest(base: Dashboard) -> Dashboard:
    return (
        base.with_row(board.row(10, "Who waits for whom"))
        .with_panel(
            lines(
                Place(
                    11,
                    "Steps in which the others waited for a rank",
                    f"As a share. {LINED_UP} The dashed line is where K25SlowRank begins, if more than a fifth of the "
                    "all-reduce time is waiting. Two ranks at one half each is what chance looks like.",
                ),
                [Query(slowest_share(), "rank {{rank}}")],
                SHARE,
                alert_above=0.8,
                up_to=1,
            )
        )
        .with_panel(
            lines(
                Place(
                    12,
                    "Waiting per step",
                    f"What a rank waits in all all-reduces of a step. {LINED_UP} {ALL_PHASES} The slow rank is the one "
                    "that does not wait.",
                ),
                [Query(wait_per_step("rank"), "rank {{rank}}")],
                SECONDS,
            )
        )
    )


def _steps(base: Dashboard) -> Dashboard:
    by_bucket = "Estimated from buckets: right to a bucket's width."
    together = "Ranks of a tensor-parallel group end a step together, so that a slow one does not stand out here."
    return (
        base.with_row(board.row(20, "Steps"))
        .with_panel(
            lines(
                Place(21, "Step p50", f"{ALL_STEPS} {by_bucket} {together}"),
                [Query(step_quantile(0.5, "rank"), "rank {{rank}}")],
                SECONDS,
            )
        )
        .with_panel(
            lines(
                Place(22, "Step p99", f"{ALL_STEPS} {by_bucket} {together}"),
                [Query(step_quantile(0.99, "rank"), "rank {{rank}}")],
                SECONDS,
            )
        )
    )


def _categories(base: Dashboard) -> Dashboard:
    one = mean(STEP_CATEGORY, SERVER, PHASE, RANK, 'category="$category"', by=("rank",))
    return (
        base.with_row(board.row(30, "Where a rank's step goes"))
        .with_panel(
            stacked_bars(
                Place(
                    31,
                    "A step, by rank",
                    f"Mean of the last minutes. {SAMPLED} {ADDS_UP} A rank with more moe_experts and less all_reduce "
                    "than the others has the hot experts; with more unattributed or input_preparation, a host that "
                    "holds it up.",
                ),
                Query(padded(per_sampled_step("rank"), "rank", 2), instant=True, as_table=True),
                SECONDS,
                bar="rank_sorted",
            )
        )
        .with_panel(
            lines(
                Place(32, "$category, by rank", f"Mean exposed time per step of one category. {SAMPLED} {ADDS_UP}"),
                [Query(one, "rank {{rank}}")],
                SECONDS,
            )
        )
    )


def _host(base: Dashboard) -> Dashboard:
    cost = over(
        total(OVERHEAD.name, SERVER, RANK, by=("rank",)),
        total(STEPS_SAMPLED.name, SERVER, RANK, by=("rank",)),
    )
    return (
        base.with_row(board.row(40, "Host"))
        .with_panel(
            lines(
                Place(
                    41,
                    "Host time beside step time",
                    "Means over all steps. Host: from execute_model to the end of sampling by the host's clock. Step: "
                    "the GPU's time where there is a GPU, else the same. With asynchronous scheduling the host may be "
                    "done long before the GPU; a host time above the step's is a rank that its host holds up.",
                ),
                [
                    Query(mean(STEP_HOST, SERVER, PHASE, RANK, by=("rank",)), "host, rank {{rank}}"),
                    Query(mean(STEP_DURATION, SERVER, PHASE, RANK, by=("rank",)), "step, rank {{rank}}"),
                ],
                SECONDS,
            )
        )
        .with_panel(
            lines(
                Place(
                    42,
                    "Instrument's own time per sampled step",
                    "What the instrument took inside of sampled steps, all phases, as far as it can time itself. It is "
                    "in the step's duration. Steps that are not sampled pay nothing of it.",
                ),
                [Query(cost, "rank {{rank}}")],
                SECONDS,
            )
        )
    )
