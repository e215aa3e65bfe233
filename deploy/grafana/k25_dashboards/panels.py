"""How things look: a panel of each kind with a house style, and Grafana's vocabulary where we use it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from grafana_foundation_sdk.builders import barchart, heatmap, prometheus, stat, table, timeseries
from grafana_foundation_sdk.builders import common as common_builders
from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.models import common, units
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models import heatmap as heatmap_models
from grafana_foundation_sdk.models import prometheus as prometheus_models

from vllm_k25_instrument.model import LIVE_CATEGORIES
from vllm_k25_instrument.palette import CATEGORY_COLORS

SECONDS: Final = units.Seconds
SHARE: Final = units.PercentUnit
BYTES: Final = units.BytesIEC
BYTES_PER_SECOND: Final = units.BytesPerSecondIEC
COUNT: Final = units.Short
PER_SECOND: Final = "reqps"

DATASOURCE: Final = common.DataSourceRef(type_val="prometheus", uid="${datasource}")

GREEN, YELLOW, RED = "green", "#d4a72c", "#d1495b"


@dataclass(frozen=True, slots=True)
class Query:
    """An expression, and what its series are called. `instant` asks for the end of the time range only."""

    expression: str
    legend: str = ""
    instant: bool = False
    as_table: bool = False
    as_heatmap: bool = False

    def target(self, ref_id: str) -> prometheus.Dataquery:
        query = (
            prometheus.Dataquery()
            .ref_id(ref_id)
            .datasource(DATASOURCE)
            .editor_mode(prometheus_models.QueryEditorMode.CODE)
            .expr(self.expression)
            .legend_format(self.legend or "__auto")
        )
        query = query.instant() if self.instant else query.range()
        if self.as_table:
            return query.format(prometheus_models.PromQueryFormat.TABLE)
        if self.as_heatmap:
            return query.format(prometheus_models.PromQueryFormat.HEATMAP)
        return query.format(prometheus_models.PromQueryFormat.TIME_SERIES)


@dataclass(frozen=True, slots=True)
class Place:
    """A panel's id (stable: alerts link to it), its title, what its figures mean, and its size in the grid of 24."""

    id: int
    title: str
    description: str
    width: int = 12
    height: int = 9


def _common(panel: Any, place: Place, queries: Sequence[Query], unit: str) -> Any:
    panel = (
        panel.id(place.id)
        .title(place.title)
        .description(place.description)
        .datasource(DATASOURCE)
        .span(place.width)
        .height(place.height)
        .unit(unit)
        .no_value("no data")
    )
    for query, ref_id in zip(queries, "ABCDEFGHIJ", strict=False):
        panel = panel.with_target(query.target(ref_id))
    return panel


def steps_of(limits: Iterable[tuple[float, str]]) -> builders.ThresholdsConfig:
    """Thresholds: green below the first limit."""
    steps = [models.Threshold(value=None, color=GREEN)]
    steps += [models.Threshold(value=value, color=color) for value, color in limits]
    return builders.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(steps)


def _fixed(color: str) -> models.DynamicConfigValue:
    return models.DynamicConfigValue(id_val="color", value={"mode": "fixed", "fixedColor": color})


def _in_category_colors(panel: Any) -> Any:
    for category in LIVE_CATEGORIES:
        panel = panel.override_by_name(category, [_fixed(CATEGORY_COLORS[category])])
    return panel


def stat_panel(
    place: Place,
    query: Query,
    unit: str,
    *,
    limits: Sequence[tuple[float, str]] = (),
    with_name: bool = False,
    decimals: int | None = None,
) -> stat.Panel:
    """One figure, the latest one, with its course behind it unless the query is instant."""
    panel = _common(stat.Panel(), place, [query], unit)
    if decimals is not None:
        panel = panel.decimals(decimals)
    return (
        panel.thresholds(steps_of(limits))
        .color_scheme(builders.FieldColor().mode(models.FieldColorModeId.THRESHOLDS))
        .color_mode(common.BigValueColorMode.VALUE)
        .graph_mode(common.BigValueGraphMode.NONE if query.instant else common.BigValueGraphMode.AREA)
        .text_mode(common.BigValueTextMode.VALUE_AND_NAME if with_name else common.BigValueTextMode.VALUE)
        .reduce_options(common_builders.ReduceDataOptions().calcs(["lastNotNull"]).values(False))
    )


def lines(
    place: Place,
    queries: Sequence[Query],
    unit: str,
    *,
    stacked: bool = False,
    by_category: bool = False,
    alert_above: float | None = None,
    up_to: float | None = None,
) -> timeseries.Panel:
    """Series over time; `stacked` where they add up to something, a dashed line where an alert's threshold is."""
    panel = (
        _common(timeseries.Panel(), place, queries, unit)
        .min(0)
        .color_scheme(builders.FieldColor().mode(models.FieldColorModeId.PALETTE_CLASSIC_BY_NAME))
        .line_width(0 if stacked else 1)
        .fill_opacity(75 if stacked else 0)
        .show_points(common.VisibilityMode.NEVER)
        .legend(
            common_builders.VizLegendOptions()
            .display_mode(common.LegendDisplayMode.TABLE)
            .placement(common.LegendPlacement.BOTTOM)
            .show_legend(True)
            .calcs(["mean", "lastNotNull"])
        )
        .tooltip(
            common_builders.VizTooltipOptions()
            .mode(common.TooltipDisplayMode.MULTI)
            .sort(common.SortOrder.NONE if stacked else common.SortOrder.DESCENDING)
        )
    )
    if stacked:
        panel = panel.stacking(common_builders.StackingConfig().mode(common.StackingMode.NORMAL).group("A"))
    if by_category:
        panel = _in_category_colors(panel)
    if up_to is not None:
        panel = panel.max(up_to)
    if alert_above is not None:
        panel = panel.thresholds(steps_of([(alert_above, RED)])).thresholds_style(
            common_builders.GraphThresholdsStyleConfig().mode(common.GraphThresholdsStyleMode.DASHED)
        )
    return panel


def _transformation(name: str, **options: Any) -> models.DataTransformerConfig:
    return models.DataTransformerConfig(id_val=name, options=options)


def _sorted_by(field: str) -> models.DataTransformerConfig:
    return _transformation("sortBy", sort=[{"field": field}])


def stacked_bars(place: Place, query: Query, unit: str, *, bar: str) -> barchart.Panel:
    """A stacked bar of categories for each value of the label `bar`, in its order. The query is an instant table."""
    return _in_category_colors(
        _common(barchart.Panel(), place, [query], unit)
        .color_scheme(builders.FieldColor().mode(models.FieldColorModeId.PALETTE_CLASSIC_BY_NAME))
        .transformations(
            [
                _sorted_by("category"),  # so that all bars are stacked alike: sorting again keeps the order
                _sorted_by(bar),
                _transformation(
                    "groupingToMatrix", columnField="category", rowField=bar, valueField="Value", emptyValue="null"
                ),
            ]
        )
        .stacking(common.StackingMode.NORMAL)
        .show_value(common.VisibilityMode.NEVER)
        .fill_opacity(80)
        .legend(
            common_builders.VizLegendOptions()
            .display_mode(common.LegendDisplayMode.LIST)
            .placement(common.LegendPlacement.BOTTOM)
            .show_legend(True)
            .calcs([])
        )
        .tooltip(common_builders.VizTooltipOptions().mode(common.TooltipDisplayMode.MULTI))
    )


def buckets(place: Place, query: Query) -> heatmap.Panel:
    """The buckets of a histogram over time. The query is one of rates, as a heatmap."""
    return (
        _common(heatmap.Panel(), place, [query], PER_SECOND)
        .calculate(False)
        .color(
            heatmap.HeatmapColorOptions()
            .mode(heatmap_models.HeatmapColorMode.SCHEME)
            .scheme("Oranges")
            .steps(64)
            .fill("dark-orange")
            .exponent(0.5)
            .reverse(False)
        )
        .y_axis(heatmap.YAxisConfig().unit(SECONDS))
        .cell_gap(1)
        .tooltip(heatmap.HeatmapTooltip().mode(common.TooltipDisplayMode.SINGLE).y_histogram(True))
    )


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table: the field as the query calls it, its heading, and the limits of its colours."""

    field: str
    heading: str
    unit: str = ""
    limits: tuple[tuple[float, str], ...] = ()
    decimals: int | None = None

    def properties(self) -> list[models.DynamicConfigValue]:
        found: dict[str, Any] = {}
        if self.unit:
            found["unit"] = self.unit
        if self.decimals is not None:
            found["decimals"] = self.decimals
        if self.limits:
            found["thresholds"] = steps_of(self.limits).build()
            found["custom.cellOptions"] = {"type": "color-text"}
        return [models.DynamicConfigValue(id_val=name, value=value) for name, value in found.items()]


def table_panel(
    place: Place, queries: Sequence[Query], columns: Sequence[Column], *, hidden: Sequence[str]
) -> table.Panel:
    """Instant queries side by side, a row for each set of labels that they have in common."""
    panel = _common(table.Panel(), place, queries, COUNT).transformations(
        [
            _transformation("merge"),
            _transformation(
                "organize",
                excludeByName=dict.fromkeys(hidden, True),
                indexByName={column.field: index for index, column in enumerate(columns)},
                renameByName={column.field: column.heading for column in columns},
            ),
        ]
    )
    for column in columns:
        if properties := column.properties():
            panel = panel.override_by_name(column.heading, properties)
    return panel.show_header(True).cell_height(common.TableCellHeight.SM).cell_options(common.TableAutoCellOptions())


def matrix(place: Place, query: Query, *, row: str, column: str, words: dict[str, tuple[str, str]]) -> table.Panel:
    """A word for the value of each pair of labels; `words` maps a value to its word and colour."""
    mapping = models.ValueMap(
        options={value: models.ValueMappingResult(text=text, color=color) for value, (text, color) in words.items()}
    )
    return (
        _common(table.Panel(), place, [query], COUNT)
        .transformations(
            [
                _sorted_by(row),
                _transformation("groupingToMatrix", columnField=column, rowField=row, valueField="Value"),
            ]
        )
        .mappings([mapping])
        .override_by_field_type(
            "number", [models.DynamicConfigValue(id_val="custom.cellOptions", value={"type": "color-text"})]
        )
        .show_header(True)
        .cell_height(common.TableCellHeight.SM)
        .cell_options(common.TableAutoCellOptions())
    )
