"""Fleet: several servers side by side, and whether what they say can be trusted."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard

from k25_dashboards import board
from k25_dashboards.figures import (
    ALL_PHASES,
    ALL_REDUCE_LIMITS,
    ALL_STEPS,
    LINED_UP,
    LOST_LIMITS,
    SAMPLED,
    UNATTRIBUTED_LIMITS,
    WAIT_LIMITS,
    share_of_the_step,
    step_quantile,
    wait_share,
)
from k25_dashboards.panels import (
    BYTES,
    COUNT,
    GREEN,
    PER_SECOND,
    RED,
    SECONDS,
    SHARE,
    Column,
    Place,
    Query,
    lines,
    matrix,
    stat_panel,
    table_panel,
)
from k25_dashboards.queries import RANK, SERVER, aggregate, over, total
from vllm_k25_instrument.export.families import (
    BUILD,
    HOOK_ATTACHED,
    HOOK_ERRORS,
    OVERHEAD,
    SAMPLES_LOST,
    STEPS,
    STEPS_SAMPLED,
    TWIN_BYTES,
    TWIN_CAPTURE,
)
from vllm_k25_instrument.model import Category

EACH = ("instance",)
HERE = "{" + SERVER + "}"


def dashboard() -> Dashboard:
    """The dashboard, whole."""
    base = board.dashboard(
        "fleet",
        "Fleet",
        "Several servers side by side; samples lost, hooks missing, versions.",
        [board.model(), board.servers(), board.phase(), board.rank()],
    )
    return _instrument(_trust(_compared(_servers(base))))


def lost_share(*by: str) -> str:
    """Samples lost over the steps that were due for sampling."""
    lost = total(SAMPLES_LOST.name, SERVER, RANK, by=EACH)
    due = f"(\n{total(STEPS_SAMPLED.name, SERVER, RANK, by=EACH)}\n  +\n{lost}\n)"
    return over(total(SAMPLES_LOST.name, SERVER, RANK, by=(*EACH, *by)), due, "on (instance) group_left ()")


def _servers(base: Dashboard) -> Dashboard:
    firing = f'ALERTS{{alertname=~"K25.*", alertstate="firing", {SERVER}}}'

    def column(expression: str) -> Query:
        return Query(expression, instant=True, as_table=True)

    return (
        base.with_panel(
            stat_panel(
                Place(
                    1,
                    "Exporters that answer",
                    "Share of the exporters (job vllm-k25) that the last scrape got an answer from. A server goes on "
                    "without its exporter.",
                    width=6,
                    height=4,
                ),
                Query(f'avg(up{{job="vllm-k25", {SERVER}}})'),
                SHARE,
                limits=(),
                decimals=0,
            )
        )
        .with_panel(
            stat_panel(
                Place(
                    2,
                    "Servers",
                    "Exporters that have a server's metrics, whether it lives or has died.",
                    width=6,
                    height=4,
                ),
                Query(f"count(count by (instance) ({BUILD.name}_info{HERE}))"),
                COUNT,
            )
        )
        .with_panel(
            stat_panel(
                Place(
                    3,
                    "Alerts that fire",
                    "Of these servers, K25 alerts only. Needs the rules of deploy/prometheus.",
                    width=6,
                    height=4,
                ),
                Query(f"count({firing}) or vector(0)"),
                COUNT,
                limits=((1, RED),),
            )
        )
        .with_panel(
            stat_panel(
                Place(
                    4,
                    "Hooks missing",
                    "Hooks that are not attached on some rank of some server; which ones is in the table below.",
                    width=6,
                    height=4,
                ),
                Query(f"sum(1 - {aggregate('min', HOOK_ATTACHED.name + HERE, ('instance', 'hook'))})"),
                COUNT,
                limits=((1, RED),),
            )
        )
        .with_panel(
            table_panel(
                Place(
                    11,
                    "Servers",
                    f"Of the chosen phase, the last minutes. p99: {ALL_STEPS} Estimated from buckets. Shares: {SAMPLED}"
                    f" Waiting: {LINED_UP} {ALL_PHASES} Servers with unlike load have unlike steps.",
                    width=24,
                ),
                [
                    column(aggregate("max", BUILD.name + "_info" + HERE, (*EACH, "model", "version", "vllm_version"))),
                    column(step_quantile(0.99, *EACH)),
                    column(share_of_the_step(Category.ALL_REDUCE, *EACH)),
                    column(wait_share(*EACH)),
                    column(share_of_the_step(Category.UNATTRIBUTED, *EACH)),
                    column(aggregate("sum", lost_share("reason"), EACH)),
                ],
                [
                    Column("instance", "server"),
                    Column("model", "model"),
                    Column("vllm_version", "vLLM"),
                    Column("version", "instrument"),
                    Column("Value #B", "step p99", SECONDS),
                    Column("Value #C", "all-reduce", SHARE, ALL_REDUCE_LIMITS, 1),
                    Column("Value #D", "waiting of that", SHARE, WAIT_LIMITS, 1),
                    Column("Value #E", "unattributed", SHARE, UNATTRIBUTED_LIMITS, 1),
                    Column("Value #F", "samples lost", SHARE, LOST_LIMITS, 2),
                ],
                hidden=("Time", "Value #A"),
            )
        )
        .with_panel(
            lines(
                Place(
                    12,
                    "Alerts that fire, by server",
                    "Number of K25 alerts by name, zero when all is well. Needs the rules of deploy/prometheus.",
                    width=24,
                    height=6,
                ),
                [
                    Query(
                        aggregate("count", firing, ("instance", "alertname"))
                        + f"\n  or\n0 * {aggregate('count', BUILD.name + '_info' + HERE, EACH)}",
                        "{{instance}} {{alertname}}",
                    )
                ],
                COUNT,
            )
        )
    )


def _compared(base: Dashboard) -> Dashboard:
    def by_server(place: Place, expression: str, unit: str, alert_above: float | None = None) -> object:
        return lines(
            place,
            [Query(expression, "{{instance}}")],
            unit,
            alert_above=alert_above,
            up_to=1 if unit == SHARE else None,
        )

    panels = [
        by_server(
            Place(
                21,
                "Step p99",
                f"{ALL_STEPS} Estimated from buckets: right to a bucket's width. More requests at once make a step "
                "longer: a server above the others may only be busier.",
                width=8,
            ),
            step_quantile(0.99, *EACH),
            SECONDS,
        ),
        by_server(
            Place(
                22,
                "All-reduce, share of the step",
                f"Exposed time, waiting included. {SAMPLED} The dashed line is where K25AllReduceDominates begins.",
                width=8,
            ),
            share_of_the_step(Category.ALL_REDUCE, *EACH),
            SHARE,
            0.5,
        ),
        by_server(
            Place(
                23,
                "Waiting, share of all-reduce",
                f"Mean wait over mean duration of a call. {LINED_UP} {ALL_PHASES} The dashed line is where "
                "K25WaitingDominates begins.",
                width=8,
            ),
            wait_share(*EACH),
            SHARE,
            0.4,
        ),
        by_server(
            Place(
                24,
                "Unattributed, share of the step",
                f"Time in no hooked call. {SAMPLED} The dashed line is where K25UnattributedHigh begins.",
            ),
            share_of_the_step(Category.UNATTRIBUTED, *EACH),
            SHARE,
            0.6,
        ),
        by_server(
            Place(25, "Steps per second", "Of all ranks chosen and all phases together, sampled or not."),
            total(STEPS.name, SERVER, RANK, by=EACH),
            PER_SECOND,
        ),
    ]
    base = base.with_row(board.row(20, "Compared"))
    for panel in panels:
        base = base.with_panel(panel)
    return base


def _trust(base: Dashboard) -> Dashboard:
    hooks = aggregate("min", HOOK_ATTACHED.name + HERE, ("instance", "hook"))
    return (
        base.with_row(board.row(30, "Can it be trusted"))
        .with_panel(
            lines(
                Place(
                    31,
                    "Samples lost, by reason",
                    "Share of the steps that were due for sampling and left no sample. What is shown is right, of "
                    "fewer steps. The dashed line is where K25SamplesLost begins; its runbook has the remedies.",
                ),
                [Query(lost_share("reason"), "{{instance}} {{reason}}")],
                SHARE,
                alert_above=0.1,
            )
        )
        .with_panel(
            lines(
                Place(
                    32,
                    "Hook errors",
                    "Per second. The first error of a hook turns it off until the server's next start: one blip here "
                    "is a hook that stays missing.",
                ),
                [Query(total(HOOK_ERRORS.name, SERVER, RANK, by=EACH), "{{instance}}")],
                PER_SECOND,
            )
        )
        .with_panel(
            matrix(
                Place(
                    33,
                    "Hooks",
                    "Missing on some rank: its target is not in this vLLM, or it failed and is quiet. Its time counts "
                    "as unattributed, or as the range around it. Hooks that were not asked for have no row.",
                    width=24,
                    height=12,
                ),
                Query(hooks, instant=True, as_table=True),
                row="hook",
                column="instance",
                words={"1": ("attached", GREEN), "0": ("missing", RED)},
            )
        )
    )


def _instrument(base: Dashboard) -> Dashboard:
    cost = over(total(OVERHEAD.name, SERVER, RANK, by=EACH), total(STEPS_SAMPLED.name, SERVER, RANK, by=EACH))
    return (
        base.with_row(board.row(40, "What the instrument costs"))
        .with_panel(
            lines(
                Place(
                    41,
                    "Own time per sampled step",
                    "Mean over the ranks, as far as the instrument can time itself. Other steps pay nothing of it.",
                    width=8,
                ),
                [Query(cost, "{{instance}}")],
                SECONDS,
            )
        )
        .with_panel(
            lines(
                Place(
                    42,
                    "GPU memory of the twin graphs",
                    "Of the rank with most. Zero where nothing replays CUDA graphs, or K25_GRAPHS is not twin.",
                    width=8,
                ),
                [Query(aggregate("max", TWIN_BYTES.name + HERE, EACH), "{{instance}}")],
                BYTES,
            )
        )
        .with_panel(
            lines(
                Place(
                    43,
                    "Capture of the twin graphs",
                    "Seconds that they added to the start, of the rank with most. Zero as beside.",
                    width=8,
                ),
                [Query(aggregate("max", TWIN_CAPTURE.name + HERE, EACH), "{{instance}}")],
                SECONDS,
            )
        )
    )
