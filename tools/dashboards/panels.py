"""What dashboards are made of: panels, their common parts, variables and links.

Guarantees: every panel has a title, a description, a unit and thresholds; every dashboard asks for one run.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

with warnings.catch_warnings():
    # The newer kind of dashboard, which it recommends, can only be read by the newest Grafana.
    warnings.simplefilter("ignore", DeprecationWarning)
    from grafana_foundation_sdk.builders import bargauge, common, dashboard, prometheus, stat, table, timeseries
    from grafana_foundation_sdk.models import common as kinds
    from grafana_foundation_sdk.models import dashboard as model

SOURCE = kinds.DataSourceRef(type_val="prometheus", uid="${datasource}")

# What expressions ask for. A node's figures, all evaluations as one, and nothing of other runs.
RUN = 'run="$run"'
NODES = 'run="$run",node=~"$node"'
NODE = 'run="$run",node="$node"'
RATE = "[$__rate_interval]"

# Units of Grafana. With `si:` it adds k, M, G by itself; what it does not know, it writes behind the figure.
COUNT, SHARE, SECONDS, BYTES, REWARD = "short", "percentunit", "s", "bytes", "none"
TOKENS, PER_SECOND, PER_MINUTE, STEPS = "si:tok/s", "groups/s", "per min", "steps"

Step = tuple[str, float | None]
PLAIN: tuple[Step, ...] = (("green", None),)
ANY_IS_BAD: tuple[Step, ...] = (("green", None), ("red", 1))
NEUTRAL: tuple[Step, ...] = (("blue", None),)

TAG_COLOURS = {"failed": "dark-red", "hard": "orange", "mixed": "yellow", "easy": "light-green", "solved": "dark-green"}
ORIGIN_COLOURS = {"own": "blue", "swarm": "purple"}
WAIT_COLOURS = {"generators": "blue", "verifiers": "purple", "overdue": "red"}


@dataclass(frozen=True)
class Query:
    """One expression and what its lines are called."""

    expr: str
    legend: str = ""


@dataclass(frozen=True)
class Panel:
    """What is common to all panels. `w` of 24 columns; `colours` and `dashed` go by the names of lines."""

    title: str
    description: str
    queries: tuple[Query, ...]
    unit: str
    w: int = 8
    h: int = 8
    steps: tuple[Step, ...] = PLAIN
    decimals: int | None = None
    least: float | None = None
    most: float | None = None
    links: bool = False
    colours: dict[str, str] = field(default_factory=dict)


class Built:
    """What is built already, where a builder is wanted."""

    def __init__(self, made: Any) -> None:
        self._made = made

    def build(self) -> Any:
        return self._made


def or_none(expr: str, *labels: str) -> str:
    """Where nothing of the kind has happened: a line at 0 that is called none."""
    nothing = "vector(0)"
    for label, value in zip(labels, ("none", "-"), strict=False):
        nothing = f'label_replace({nothing}, "{label}", "{value}", "", "")'
    return f"{expr} or on () {nothing}"


def query(what: Query, ref: int, kind: str) -> prometheus.Dataquery:
    """A range of samples for lines, the last ones for all else."""
    made = prometheus.Dataquery().expr(what.expr).ref_id(chr(ord("A") + ref)).datasource(SOURCE)
    made = made.legend_format(what.legend or "__auto")
    if kind == "range":
        return made.range()
    return made.instant().format("table" if kind == "table" else "time_series")


def common_parts(builder: Any, panel: Panel, kind: str) -> Any:
    """Title, size, queries, unit, limits, thresholds, colours."""
    steps = [model.Threshold(value, colour) for colour, value in panel.steps]
    builder = (
        builder.title(panel.title)
        .description(panel.description)
        .datasource(SOURCE)
        .span(panel.w)
        .height(panel.h)
        .unit(panel.unit)
        .thresholds(dashboard.ThresholdsConfig().mode(model.ThresholdsMode.ABSOLUTE).steps(steps))
        .targets([query(one, ref, kind) for ref, one in enumerate(panel.queries)])
    )
    if panel.decimals is not None:
        builder = builder.decimals(panel.decimals)
    if panel.least is not None:
        builder = builder.min(panel.least)
    if panel.most is not None:
        builder = builder.max(panel.most)
    for name, colour in panel.colours.items():
        value = {"mode": "fixed", "fixedColor": colour}
        builder = builder.override_by_name(name, [model.DynamicConfigValue("color", value)])
    return builder


def finished(builder: Any, panel: Panel) -> Built:
    """With links to the node that a line is about."""
    made = builder.build()
    if panel.links:
        made.field_config.defaults.links = [
            {
                "title": "More about ${__field.labels.node}",
                "url": "/d/grapevine-node?var-node=${__field.labels.node}&${run:queryparam}&${datasource:queryparam}"
                "&${__url_time_range}",
            }
        ]
    return Built(made)


def lines(
    title: str,
    description: str,
    queries: Query | Iterable[Query],
    unit: str,
    *,
    stack: str = "",
    bars: bool = False,
    limit: bool = False,
    dashed: str = "",
    thick: str = "",
    **others: Any,
) -> Built:
    """Lines over time. `stack`: normal or percent; `limit`: thresholds are drawn; `dashed`, `thick`: a pattern of names."""
    panel = Panel(title, description, (queries,) if isinstance(queries, Query) else tuple(queries), unit, **others)
    legend = common.VizLegendOptions().display_mode(kinds.LegendDisplayMode.LIST).placement(kinds.LegendPlacement.BOTTOM)
    tooltip = common.VizTooltipOptions().mode(kinds.TooltipDisplayMode.MULTI).sort(kinds.SortOrder.DESCENDING)
    builder = (
        common_parts(timeseries.Panel(), panel, "range")
        .legend(legend.show_legend(True).calcs([]))
        .tooltip(tooltip)
        .draw_style(kinds.GraphDrawStyle.BARS if bars else kinds.GraphDrawStyle.LINE)
        .line_width(1)
        .fill_opacity(60 if bars else 30 if stack else 5)
        .show_points(kinds.VisibilityMode.NEVER)
        .color_scheme(dashboard.FieldColor().mode(model.FieldColorModeId.PALETTE_CLASSIC))
    )
    if panel.least is None:
        builder = builder.axis_soft_min(0)
    if stack:
        builder = builder.stacking(common.StackingConfig().mode(kinds.StackingMode(stack)).group("A"))
    if limit:
        style = common.GraphThresholdsStyleConfig().mode(kinds.GraphThresholdsStyleMode.DASHED)
        builder = builder.thresholds_style(style)
    if dashed:
        value = {"fill": "dash", "dash": [8, 8]}
        builder = builder.override_by_regexp(dashed, [model.DynamicConfigValue("custom.lineStyle", value)])
    if thick:
        builder = builder.override_by_name(
            thick,
            [
                model.DynamicConfigValue("custom.lineWidth", 3),
                model.DynamicConfigValue("color", {"mode": "fixed", "fixedColor": "text"}),
            ],
        )
    return finished(builder, panel)


def number(title: str, description: str, expr: str, unit: str, **others: Any) -> Built:
    """One figure, with its course behind it unless it is one of the whole time shown."""
    panel = Panel(title, description, (Query(expr, title),), unit, **{"w": 4, "h": 4, **others})
    whole = "$__range]" in expr
    reduce = common.ReduceDataOptions().calcs(["lastNotNull"]).fields("").values(False)
    builder = (
        common_parts(stat.Panel(), panel, "instant" if whole else "range")
        .reduce_options(reduce)
        .graph_mode(kinds.BigValueGraphMode.NONE if whole else kinds.BigValueGraphMode.AREA)
        .color_mode(kinds.BigValueColorMode.VALUE)
        .text_mode(kinds.BigValueTextMode.VALUE)
        .justify_mode(kinds.BigValueJustifyMode.AUTO)
        .orientation(kinds.VizOrientation.AUTO)
        .color_scheme(dashboard.FieldColor().mode(model.FieldColorModeId.THRESHOLDS))
    )
    return finished(builder, panel)


def numbers(title: str, description: str, what: Query, unit: str, **others: Any) -> Built:
    """Several figures side by side, each with its name."""
    panel = Panel(title, description, (what,), unit, **others)
    builder = (
        common_parts(stat.Panel(), panel, "instant")
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]).fields("").values(False))
        .graph_mode(kinds.BigValueGraphMode.NONE)
        .color_mode(kinds.BigValueColorMode.VALUE)
        .text_mode(kinds.BigValueTextMode.VALUE_AND_NAME)
        .justify_mode(kinds.BigValueJustifyMode.CENTER)
        .orientation(kinds.VizOrientation.VERTICAL)
        .color_scheme(dashboard.FieldColor().mode(model.FieldColorModeId.THRESHOLDS))
    )
    return finished(builder, panel)


def bars(title: str, description: str, what: Query, unit: str, **others: Any) -> Built:
    """A bar for each."""
    panel = Panel(title, description, (what,), unit, **others)
    builder = (
        common_parts(bargauge.Panel(), panel, "instant")
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]).fields("").values(False))
        .display_mode(kinds.BarGaugeDisplayMode.BASIC)
        .value_mode(kinds.BarGaugeValueMode.COLOR)
        .name_placement(kinds.BarGaugeNamePlacement.LEFT)
        .orientation(kinds.VizOrientation.HORIZONTAL)
        .show_unfilled(True)
        .min_viz_height(16)
        .color_scheme(dashboard.FieldColor().mode(model.FieldColorModeId.THRESHOLDS))
    )
    return finished(builder, panel)


def matrix(title: str, description: str, expr: str, unit: str, rows: str, columns: str, **others: Any) -> Built:
    """A table with two labels as its sides, coloured like a heat map."""
    panel = Panel(title, description, (Query(expr),), unit, **others)
    shape = {"rowField": rows, "columnField": columns, "valueField": "Value", "emptyValue": "null"}
    corner = f"{rows}\\{columns}"
    builder = (
        common_parts(table.Panel(), panel, "table")
        .transformations(
            [
                model.DataTransformerConfig("groupingToMatrix", options=shape),
                model.DataTransformerConfig("sortBy", options={"fields": {}, "sort": [{"field": corner}]}),
            ]
        )
        .show_header(True)
        .cell_height(kinds.TableCellHeight.SM)
        .cell_options(kinds.TableColoredBackgroundCellOptions(kinds.TableCellBackgroundDisplayMode.BASIC))
        .align(kinds.FieldTextAlignment.CENTER)
        .color_scheme(dashboard.FieldColor().mode(model.FieldColorModeId.CONTINUOUS_BLUES))
        .override_by_name(corner, [model.DynamicConfigValue("custom.cellOptions", {"type": "auto"})])
    )
    builder.build().options.footer = None  # tables have lost it
    return finished(builder, panel)


def variables(nodes: str) -> list[Any]:
    """Where the figures come from, which run, and which nodes: `many`, `one` or none."""
    wanted: list[Any] = [
        dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"),
        dashboard.QueryVariable("run")
        .label("Run")
        .datasource(SOURCE)
        .query("label_values(grapevine_server_up, run)")
        .refresh(model.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(model.VariableSort.NATURAL_ASC),
    ]
    if nodes:
        node = (
            dashboard.QueryVariable("node")
            .label("Node")
            .datasource(SOURCE)
            .query('label_values(grapevine_rounds_left{run="$run"}, node)')
            .refresh(model.VariableRefresh.ON_TIME_RANGE_CHANGED)
            .sort(model.VariableSort.NATURAL_ASC)
        )
        if nodes == "many":
            everything = model.VariableOption(selected=True, text=["All"], value=["$__all"])
            node = node.multi(True).include_all(True).all_value(".*").current(everything)
        wanted.append(node)
    models = [one.build() for one in wanted]
    for one in models:
        one.auto = one.auto_count = one.auto_min = None  # of intervals only
    return [Built(one) for one in models]


def others() -> Built:
    """Links to the other dashboards, in the page's head."""
    link = (
        dashboard.DashboardLink("grapevine")
        .type(model.DashboardLinkType.DASHBOARDS)
        .icon("dashboard")
        .tags(["grapevine"])
        .include_vars(True)
        .keep_time(True)
        .tooltip("The other dashboards, for the same run and time")
        .build()
    )
    link.placement = None
    return Built(link)


def made(name: str, title: str, description: str, nodes: str, rows: list[tuple[str, list[Built]]]) -> model.Dashboard:
    """A dashboard of rows; each row's panels fill the width of the page."""
    builder = (
        dashboard.Dashboard(f"grapevine: {title}")
        .uid(f"grapevine-{name}")
        .description(description)
        .tags(["grapevine"])
        .refresh("10s")
        .time("now-1h", "now")
        .timezone("browser")
        .tooltip(model.DashboardCursorSync.CROSSHAIR)
        .variables(variables(nodes))
        .link(others())
    )
    number = 0
    for row, panels in rows:
        number += 1
        builder = builder.with_row(dashboard.Row(row).id(number).collapsed(False))
        for panel in panels:
            number += 1
            panel.build().id_val = number
            builder = builder.with_panel(panel)
    return builder.build()
