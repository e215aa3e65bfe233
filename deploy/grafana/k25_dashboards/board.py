"""What all dashboards share: variables, annotations, links to each other, and the rows that panels stand in."""

from __future__ import annotations

from typing import Any, Final

from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models.dashboard import Dashboard, Panel
from grafana_foundation_sdk.models.table import Options as TableOptions

from k25_dashboards.panels import DATASOURCE, RED
from vllm_k25_instrument.export.families import BATCH_STEP, BUILD, STEP_CATEGORY, STEPS
from vllm_k25_instrument.model import Phase

TAG: Final = "vllm-k25"
_ALL: Final = models.VariableOption(selected=True, text="All", value="$__all")
_SERVERS: Final = f'{BUILD.name}_info{{model=~"$model"}}'


def _query_variable(name: str, label: str, labels_of: str, wanted: str, description: str) -> builders.QueryVariable:
    query = f"label_values({labels_of}, {wanted})"
    return (
        builders.QueryVariable(name)
        .label(label)
        .description(description)
        .datasource(DATASOURCE)
        .query({"query": query, "refId": f"variable-{name}"})
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.NATURAL_ASC)
    )


def datasource() -> builders.DatasourceVariable:
    """Which Prometheus."""
    return builders.DatasourceVariable("datasource").label("Prometheus").type("prometheus")


def model() -> builders.QueryVariable:
    """Narrows the choice of servers."""
    what = "Narrows the servers to those of a model."
    return (
        _query_variable("model", "Model", f"{BUILD.name}_info", "model", what)
        .include_all(True)
        .all_value(".*")
        .current(_ALL)
    )


def server() -> builders.QueryVariable:
    """One server: its ranks are looked at together. Several exporters where one server spans nodes."""
    what = "The exporter of a server. Choose several only where one server spans nodes: ranks are told apart by number."
    return _query_variable("instance", "Server", _SERVERS, "instance", what).multi(True)


def servers() -> builders.QueryVariable:
    """All servers, side by side."""
    what = "The servers to compare, each by its exporter."
    return (
        _query_variable("instance", "Servers", _SERVERS, "instance", what).multi(True).include_all(True).current(_ALL)
    )


def phase() -> builders.QueryVariable:
    """One phase: times of decode and prefill steps have no common mean that means anything."""
    what = "Phase of the steps. All-reduce metrics are of all phases: see the panels."
    return _query_variable("phase", "Phase", f'{STEPS.name}{{instance=~"$instance"}}', "phase", what).current(
        models.VariableOption(selected=True, text=Phase.DECODE, value=Phase.DECODE)
    )


def rank() -> builders.QueryVariable:
    """Global ranks."""
    what = "Global ranks. Transfer and steps that were left out belong to no rank."
    return (
        _query_variable("rank", "Rank", f'{STEPS.name}{{instance=~"$instance"}}', "rank", what)
        .multi(True)
        .include_all(True)
        .current(_ALL)
    )


def category() -> builders.QueryVariable:
    """One category, for the panels that compare ranks in it."""
    what = "The category that the ranks are compared in."
    return _query_variable(
        "category", "Category", f'{STEP_CATEGORY.name}_count{{instance=~"$instance"}}', "category", what
    )


def batches() -> builders.QueryVariable:
    """The batch sizes that occur, unseen: a panel is repeated for each."""
    labels_of = f'{BATCH_STEP.name}_count{{instance=~"$instance", phase="$phase"}}'
    return (
        _query_variable("batch", "Batch", labels_of, "batch", "Upper bounds of the requests in a step.")
        .multi(True)
        .include_all(True)
        .current(_ALL)
        .hide(models.VariableHide.HIDE_VARIABLE)
    )


def _firing() -> builders.AnnotationQuery:
    return (
        builders.AnnotationQuery()
        .name("Alerts that fire")
        .datasource(DATASOURCE)
        .enable(True)
        .icon_color(RED)
        .expr('ALERTS{alertname=~"K25.*", alertstate="firing", instance=~"$instance"}')
        .title_format("{{alertname}}")
        .text_format("{{instance}} {{rank}}")
        .step("30s")
    )


def _to_the_others() -> builders.DashboardLink:
    return (
        builders.DashboardLink("vLLM K2.5")
        .type(models.DashboardLinkType.DASHBOARDS)
        .tags([TAG])
        .as_dropdown(True)
        .include_vars(True)
        .keep_time(True)
    )


def dashboard(name: str, title: str, description: str, variables: list[Any]) -> builders.Dashboard:
    """A dashboard without panels; its uid is ``vllm-k25-<name>``."""
    board = (
        builders.Dashboard(f"vLLM K2.5 / {title}")
        .uid(f"{TAG}-{name}")
        .description(description)
        .tags([TAG])
        .timezone("browser")
        .time("now-1h", "now")
        .refresh("30s")
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .annotation(_firing())
        .link(_to_the_others())
        .with_variable(datasource())
    )
    for variable in variables:
        board = board.with_variable(variable)
    return board


def finished(board: Dashboard) -> Dashboard:
    """The same without what the SDK writes unasked: fields that belong to other kinds of variables and panels, and a
    place in the menu for what we want to be seen.
    """
    for panel in board.panels or []:
        if isinstance(panel, Panel) and isinstance(panel.options, TableOptions):
            panel.options.footer = None
    for variable in board.templating.list_val or []:
        variable.auto = variable.auto_min = variable.auto_count = None
    for annotation in board.annotations.list_val or []:
        annotation.placement = None
    for link in board.links or []:
        link.placement = None
    return board


def row(id_: int, title: str) -> builders.Row:
    """A heading over the panels that follow; its id is stable as theirs are."""
    return builders.Row(title).id(id_)
