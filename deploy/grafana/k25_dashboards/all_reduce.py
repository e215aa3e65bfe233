"""All-reduce: which path, which sizes, what is waiting and what transfer, and who is late."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard

from k25_dashboards import board
from k25_dashboards.figures import (
    LINED_UP,
    SAMPLED,
    SLOWEST_LIMITS,
    WAIT_LIMITS,
    slowest_share,
    wait_per_step,
    wait_share,
)
from k25_dashboards.panels import (
    BYTES,
    BYTES_PER_SECOND,
    COUNT,
    PER_SECOND,
    SECONDS,
    SHARE,
    Place,
    Query,
    buckets,
    lines,
    stat_panel,
)
from k25_dashboards.queries import RANK, SERVER, mean, over, quantile, total
from vllm_k25_instrument.export.families import (
    ALIGNMENT_SKIPPED,
    ALL_REDUCE,
    ALL_REDUCE_BYTES,
    ALL_REDUCE_TRANSFER,
    ALL_REDUCE_WAIT,
    STEPS_SAMPLED,
)

CALLS = ALL_REDUCE.name + "_count"


def dashboard() -> Dashboard:
    """The dashboard, whole."""
    base = board.dashboard(
        "all-reduce",
        "All-reduce",
        "All-reduces of one server: path, size, waiting and transfer, the slowest rank. All phases together.",
        [board.model(), board.server(), board.rank()],
    )
    return _lining_up(_messages(_paths(_waiting(_now(base)))))


def _now(base: Dashboard) -> Dashboard:
    per_step = over(total(CALLS, SERVER, RANK), total(STEPS_SAMPLED.name, SERVER, RANK))
    size = over(total(ALL_REDUCE_BYTES.name, SERVER, RANK), total(CALLS, SERVER, RANK))
    return (
        base.with_panel(
            stat_panel(
                Place(
                    1,
                    "Calls per step",
                    f"All-reduces of a rank in a step. {SAMPLED} Kimi-K2.5 makes two per layer: 122. Calls that run in "
                    "a CUDA graph without an instrumented twin are not seen.",
                    width=6,
                    height=4,
                ),
                Query(per_step),
                COUNT,
                decimals=1,
            )
        )
        .with_panel(
            stat_panel(
                Place(2, "Bytes per call", f"Mean size of a message. {SAMPLED}", width=6, height=4), Query(size), BYTES
            )
        )
        .with_panel(
            stat_panel(
                Place(
                    3,
                    "Waiting, share of the time",
                    f"Mean wait over mean duration of a call. {LINED_UP} What is waiting no faster all-reduce wins.",
                    width=6,
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
                    4,
                    "Slowest rank",
                    f"The rank that the others waited for most often, and in which share of the steps. {LINED_UP}",
                    width=6,
                    height=4,
                ),
                Query(f"topk(1, {slowest_share()})", "rank {{rank}}", instant=True),
                SHARE,
                limits=SLOWEST_LIMITS,
                with_name=True,
                decimals=0,
            )
        )
    )


def _waiting(base: Dashboard) -> Dashboard:
    return (
        base.with_row(board.row(10, "Waiting and transfer"))
        .with_panel(
            lines(
                Place(
                    11,
                    "A call: transfer and waiting",
                    "Transfer: the least duration of any rank. Waiting: a rank's duration minus that, the mean over "
                    f"the ranks chosen; the slowest rank's is near zero, and in the mean. {LINED_UP}",
                    width=8,
                ),
                [
                    Query(mean(ALL_REDUCE_TRANSFER, SERVER), "transfer"),
                    Query(mean(ALL_REDUCE_WAIT, SERVER, RANK), "waiting"),
                ],
                SECONDS,
                stacked=True,
            )
        )
        .with_panel(
            lines(
                Place(
                    12,
                    "Waiting per step, by rank",
                    f"What a rank waits in all all-reduces of a step. {LINED_UP} The slow rank is the one that does "
                    "not wait.",
                    width=8,
                ),
                [Query(wait_per_step("rank"), "rank {{rank}}")],
                SECONDS,
            )
        )
        .with_panel(
            lines(
                Place(
                    13,
                    "Steps in which the others waited for a rank",
                    f"As a share. {LINED_UP} The dashed line is where K25SlowRank begins, if more than a fifth of the "
                    "time is waiting.",
                    width=8,
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
                    14,
                    "Waiting in a call, p99 by rank",
                    f"One call in a hundred waits longer. {LINED_UP} Estimated from buckets, which are wide (20 us, 50 "
                    "us, 100 us, 250 us, 1 ms, 10 ms, 1 s).",
                ),
                [Query(quantile(0.99, ALL_REDUCE_WAIT, SERVER, RANK, by=("rank",)), "rank {{rank}}")],
                SECONDS,
            )
        )
        .with_panel(
            lines(
                Place(
                    15,
                    "Waiting, share of the time by rank",
                    f"Mean wait over mean duration of a rank's calls. {LINED_UP} The dashed line is where "
                    "K25WaitingDominates begins, in the mean of the ranks.",
                ),
                [Query(wait_share("rank"), "rank {{rank}}")],
                SHARE,
                alert_above=0.4,
                up_to=1,
            )
        )
    )


def _paths(base: Dashboard) -> Dashboard:
    by_path = over(
        total(CALLS, SERVER, RANK, by=("path",)),
        total(STEPS_SAMPLED.name, SERVER, RANK),
        matching="on () group_left ()",
    )
    return (
        base.with_row(board.row(20, "Paths"))
        .with_panel(
            lines(
                Place(
                    21,
                    "Calls per step, by path",
                    f"The path really taken: it depends on the message. {SAMPLED}",
                    width=8,
                ),
                [Query(by_path, "{{path}}")],
                COUNT,
                stacked=True,
            )
        )
        .with_panel(
            lines(
                Place(
                    22,
                    "Transfer, by path",
                    f"Mean of the least duration of any rank: what the path itself takes. {LINED_UP} Over PCIe the "
                    "custom path has cost 1,125 us a call where NCCL took 78 us.",
                    width=8,
                ),
                [Query(mean(ALL_REDUCE_TRANSFER, SERVER, by=("path",)), "{{path}}")],
                SECONDS,
            )
        )
        .with_panel(
            lines(
                Place(
                    23,
                    "Duration, p99 by path",
                    f"One call in a hundred takes longer, waiting included. {SAMPLED} Estimated from buckets, which "
                    "are wide.",
                    width=8,
                ),
                [Query(quantile(0.99, ALL_REDUCE, SERVER, RANK, by=("path",)), "{{path}}")],
                SECONDS,
            )
        )
        .with_panel(
            buckets(
                Place(
                    24,
                    "Calls per second, by duration",
                    f"Waiting included. {SAMPLED} Two bands are two kinds of call: two paths, two sizes, or some that "
                    "wait and some that do not.",
                    width=24,
                    height=8,
                ),
                Query(total(ALL_REDUCE.name + "_bucket", SERVER, RANK, by=("le",)), "{{le}}", as_heatmap=True),
            )
        )
    )


def _messages(base: Dashboard) -> Dashboard:
    throughput = over(
        total(ALL_REDUCE_BYTES.name, SERVER, RANK, by=("path",)),
        total(ALL_REDUCE.name + "_sum", SERVER, RANK, by=("path",)),
    )
    return (
        base.with_row(board.row(30, "Messages"))
        .with_panel(
            lines(
                Place(
                    31,
                    "Bytes per second, by size of the message",
                    f"Of all ranks chosen; size is an upper bound in bytes. {SAMPLED} Multiply by K25_SAMPLE_EVERY for "
                    "an estimate of all steps.",
                ),
                [Query(total(ALL_REDUCE_BYTES.name, SERVER, RANK, by=("size",)), "up to {{size}} B")],
                BYTES_PER_SECOND,
                stacked=True,
            )
        )
        .with_panel(
            lines(
                Place(
                    32,
                    "Throughput of a call, by path",
                    "Bytes of the message over the call's duration, waiting included: not the link's throughput, over "
                    f"which 2(n-1)/n of the message goes. {SAMPLED}",
                ),
                [Query(throughput, "{{path}}")],
                BYTES_PER_SECOND,
            )
        )
    )


def _lining_up(base: Dashboard) -> Dashboard:
    return base.with_row(board.row(40, "What transfer and waiting leave out")).with_panel(
        lines(
            Place(
                41,
                "Steps that were not lined up, by reason",
                "Per second. missing_rank: a rank has no ring, lost the sample, or is on another node. counts_differ, "
                "incomplete: a hook is quiet on one rank. late: a rank's sample came too late. backlog: more is "
                "sampled than a scrape reads; no fault.",
                width=24,
            ),
            [Query(total(ALIGNMENT_SKIPPED.name, SERVER, by=("reason",)), "{{reason}}")],
            PER_SECOND,
            stacked=True,
        )
    )
