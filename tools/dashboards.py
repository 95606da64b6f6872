"""The Grafana dashboards and the PrometheusRule of k8s/components/monitoring, as code.

Run as `python -m tools.dashboards`; the files are checked in, and a test tells when they are out of date. Needs the package
grafana-foundation-sdk of the extra `dev`.

Guarantees: the same code gives the same bytes; every panel has a title, a description, a unit and thresholds; every
expression asks for one run, and puts the series of a worker that was started again together.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

with warnings.catch_warnings():
    # The newer kind of dashboard, which it recommends, can only be read by the newest Grafana.
    warnings.simplefilter("ignore", DeprecationWarning)
    from grafana_foundation_sdk.builders import bargauge, common, dashboard, prometheus, stat, table, timeseries
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.models import common as kinds
    from grafana_foundation_sdk.models import dashboard as model

from grapevine.monitoring.prometheus import alert_rules

MONITORING = Path(__file__).parents[1] / "k8s" / "components" / "monitoring"
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


# --- is it learning, and who helps whom ---


def swarm() -> model.Dashboard:
    """Rewards, progress, and what nodes take from one another."""
    used = f"max by (node, author, tag) (grapevine_groups_used_total{{{NODES}}})"
    rate_used = f"sum by (node, author) (rate(grapevine_groups_used_total{{{NODES}}}{RATE}))"
    itself = f'label_replace(group by (node) ({used}), "author", "$1", "node", "(.*)")'
    of_others = f'sum by (node) (rate(grapevine_tokens_trained_total{{{NODES},origin="swarm"}}{RATE}))'
    of_all = f"sum by (node) (rate(grapevine_tokens_trained_total{{{NODES}}}{RATE}))"
    learning = [
        number(
            "Own reward", "Mean over the nodes of their own reward in the last round, before anything is filtered.",
            f"avg(max by (node) (grapevine_own_reward{{{NODES}}}))", REWARD, decimals=3, steps=NEUTRAL,
        ),
        number(
            "Held-out accuracy", "Mean over the nodes: share of right answers to questions that no node trains on, sampled.",
            f"avg(max by (node) (grapevine_heldout_reward{{{NODES}}}))", SHARE, decimals=1, steps=NEUTRAL,
        ),
        number(
            "Rounds done", "Rounds done of those planned, over all nodes whose learner is up.",
            f"sum(max by (node) (grapevine_round{{{NODES}}})) / sum(max by (node) (grapevine_rounds_planned{{{NODES}}}))",
            SHARE, decimals=0, least=0, most=1, steps=NEUTRAL,
        ),
        number(
            "Nodes with rounds left", "Nodes that are not complete, whether their learner is up or not.",
            f"count(max by (node) (grapevine_rounds_left{{{NODES}}}) > 0) or vector(0)", COUNT, decimals=0, steps=NEUTRAL,
        ),
        number(
            "Training from others", "Share of the tokens trained that other nodes sampled.",
            f"sum({of_others}) / sum({of_all})", SHARE, decimals=0, steps=NEUTRAL,
        ),
        number(
            "Tokens trained", "Completion tokens in updates per second, own and swarm, all nodes together.",
            f"sum({of_all})", TOKENS, steps=NEUTRAL,
        ),
        lines(
            "Own reward by node",
            "The curve to watch: mean reward of a round's own groups, before anything is filtered. The thick line is "
            "the mean of all.",
            (
                Query(f"max by (node) (grapevine_own_reward{{{NODES}}})", "{{node}}"),
                Query(f"avg(max by (node) (grapevine_own_reward{{{NODES}}}))", "mean"),
            ),
            REWARD, w=12, h=9, decimals=2, thick="mean", links=True,
        ),
        lines(
            "Held-out accuracy by node",
            "Right answers to questions that no node ever trains on, as of each node's last evaluation: sampled, and greedy "
            "(dashed). Rewards that rise while these fall are learnt by heart.",
            (
                Query(f"max by (node) (grapevine_heldout_reward{{{NODES}}})", "{{node}}"),
                Query(f"max by (node) (grapevine_heldout_greedy{{{NODES}}})", "{{node}} greedy"),
            ),
            SHARE, w=12, h=9, least=0, most=1, dashed="/ greedy$/", links=True,
        ),
    ]  # fmt: skip
    progress = [
        bars(
            "Rounds done by node", "Rounds done of those planned. Nodes need not keep step: none waits for another.",
            Query(
                f"max by (node) (grapevine_round{{{NODES}}}) / max by (node) (grapevine_rounds_planned{{{NODES}}})",
                "{{node}}",
            ),
            SHARE, least=0, most=1, decimals=0, steps=NEUTRAL, links=True,
        ),
        lines(
            "Rounds per minute by node", "How fast each node goes through its rounds.",
            Query(f'60 * sum by (node) (rate(grapevine_round_seconds_count{{{NODES},phase="update"}}{RATE}))', "{{node}}"),
            PER_MINUTE, links=True,
        ),
        lines(
            "Tokens trained, own and from others", "Completion tokens in updates per second, by who sampled them.",
            Query(f"sum by (origin) (rate(grapevine_tokens_trained_total{{{NODES}}}{RATE}))", "{{origin}}"),
            TOKENS, stack="normal", colours=ORIGIN_COLOURS,
        ),
    ]  # fmt: skip
    helping = [
        matrix(
            "Whose groups each node trained on",
            "Rows are nodes, columns the authors of the groups they used since they began; the diagonal is their own. A "
            "column of small figures is an author that shares little, or little with a tag that is asked for.",
            "sum by (node, author) (max by (node, author, tag) "
            f"(max_over_time(grapevine_groups_used_total{{{NODES}}}[$__range])))",
            COUNT, "node", "author", w=12, h=10, decimals=0, least=0,
        ),
        lines(
            "Training from others, by node", "Share of each node's trained tokens that others sampled.",
            Query(f"{of_others} / {of_all}", "{{node}}"), SHARE, w=12, h=10, least=0, most=1, links=True,
        ),
        lines(
            "Authors that others learn from", "Groups per minute that other nodes used, by author.",
            Query(f"60 * sum by (author) ({rate_used} unless on (node, author) {itself})", "{{author}}"),
            PER_MINUTE, w=6, stack="normal",
        ),
        lines(
            "Groups to draw from", "Groups that lie in the swarm streams, by tag.",
            Query(f"max by (tag) (grapevine_swarm_groups{{{RUN}}})", "{{tag}}"), COUNT, w=6, stack="normal",
            colours=TAG_COLOURS,
        ),
        lines(
            "Authors to draw from", "Nodes that shared a group with this tag within the swarm's maximum age.",
            Query(f"max by (tag) (grapevine_swarm_authors{{{RUN}}})", "{{tag}}"), COUNT, w=6, colours=TAG_COLOURS,
        ),
        lines(
            "Wanted and not found",
            "Swarm groups per minute that rounds wanted and that were not there: others share too little with the tags that "
            "are asked for, or are slower.",
            Query(f"60 * sum by (node) (rate(grapevine_swarm_missing_total{{{NODES}}}{RATE}))", "{{node}}"),
            PER_MINUTE, w=6, links=True,
        ),
    ]  # fmt: skip
    material = [
        lines(
            "Groups used, by tag",
            "How hard the groups were that rounds trained on, own and swarm. In those that failed or are solved, all "
            "answers are equally right.",
            Query(f"sum by (tag) (rate(grapevine_groups_used_total{{{NODES}}}{RATE}))", "{{tag}}"),
            PER_SECOND, stack="percent", colours=TAG_COLOURS,
        ),
        lines(
            "Informative groups", "Share of a round's own groups whose rewards are not all alike: the others teach nothing.",
            Query(f"max by (node) (grapevine_informative_share{{{NODES}}})", "{{node}}"), SHARE, least=0, most=1, links=True,
        ),
        lines(
            "Staleness",
            "Mean policy steps between sampling and training of a round's own groups. Bounded by `max_staleness`.",
            Query(f"max by (node) (grapevine_staleness_steps{{{NODES}}})", "{{node}}"), STEPS, decimals=1, links=True,
        ),
    ]  # fmt: skip
    return made(
        "swarm", "swarm", "Is it learning, and who helps whom?", "many",
        [
            ("Is it learning?", learning), ("How far is it?", progress), ("Who helps whom?", helping),
            ("What does it learn from?", material),
        ],
    )  # fmt: skip


# --- where the bottleneck is ---


def pipeline() -> model.Dashboard:
    """Who waits for whom, streams, and each role's own speed."""
    waits = f"sum by (node, on) (rate(grapevine_waiting_seconds_total{{{NODES}}}{RATE}))"
    at_work = f"rate(grapevine_engine_seconds_total{{{RUN}}}{RATE})"
    swap = f"sum by (le) (rate(grapevine_policy_swap_seconds_bucket{{{RUN}}}{RATE}))"
    rounds = f'sum(rate(grapevine_round_seconds_count{{{NODES},phase="update"}}{RATE}))'
    phases = f"sum by (phase) (rate(grapevine_round_seconds_sum{{{NODES}}}{RATE}))"
    generated = f"rate(grapevine_tokens_generated_total{{{RUN}}}{RATE})"
    backlog = "max by (stream, node) (grapevine_backlog"
    crowd: tuple[Step, ...] = (("green", None), ("yellow", 50), ("red", 100))
    bottleneck = [
        number(
            "Generators at work", "Share of the time in which the engines sample. Near 100 %: more generators help.",
            f"avg({at_work})", SHARE, decimals=0, least=0, most=1,
            steps=(("red", None), ("yellow", 0.05), ("green", 0.3)),
        ),
        number(
            "Learners that wait", "Share of the time in which a learner waits for its own groups, mean over nodes.",
            f"avg(sum by (node) ({waits}))", SHARE, decimals=0, least=0, most=1,
            steps=(("green", None), ("yellow", 0.5), ("red", 0.9)),
        ),
        number(
            "Open orders", "Orders that are not answered and scored yet; the autoscaler reads the same figure.",
            f"max(grapevine_open_orders{{{RUN}}})", COUNT, decimals=0, steps=NEUTRAL,
        ),
        number(
            "Raw groups that wait", "Answers that no verifier took yet.",
            f'sum({backlog}{{{RUN},stream="raw"}}))', COUNT, decimals=0, steps=crowd,
        ),
        number(
            "Tokens generated", "Completion tokens sampled per second, all generators together, evaluations included.",
            f"sum({generated})", TOKENS, steps=NEUTRAL,
        ),
        number(
            "Workers up", "Workers of all roles with a fresh heartbeat.",
            f"sum(max by (worker_role) (grapevine_workers{{{RUN}}}))", COUNT, decimals=0,
            steps=(("red", None), ("green", 1)),
        ),
        lines(
            "Whom learners wait for",
            "Share of the time in which a learner waits for its own groups, mean over nodes, by whom it waits for. Nothing: "
            "the learners are the bottleneck. Overdue: the orders are lost with who had them, and are asked again at their "
            "deadline.",
            Query(f"avg by (on) ({waits})", "{{on}}"), SHARE, w=12, h=9, least=0, most=1, stack="normal",
            colours=WAIT_COLOURS,
        ),
        lines(
            "Where a round's time goes",
            "Seconds of a round by phase, mean over nodes: wait for own groups, draw from the swarm, update, finish "
            "(checkpoint and policy).",
            Query(f"{phases} / on () group_left () {rounds}", "{{phase}}"),
            SECONDS, w=12, h=9, stack="normal",
        ),
    ]  # fmt: skip
    streams = [
        lines(
            "Waiting, by stream", "Entries that nobody took yet. In `own` they stay until the learner's next checkpoint.",
            Query(f"sum by (stream) ({backlog}{{{RUN}}}))", "{{stream}}"), COUNT,
        ),
        lines(
            "In hand, by stream", "Entries that a generator or a verifier has taken and not finished.",
            Query(f"sum by (stream) (max by (stream, node) (grapevine_pending{{{RUN}}}))", "{{stream}}"), COUNT,
        ),
        lines(
            "Groups published",
            "Scored groups per second, for training and for evaluations, and those of them that were shared.",
            (
                Query(f"max by (purpose) (rate(grapevine_groups_published_total{{{RUN}}}{RATE}))", "{{purpose}}"),
                Query(f"max(rate(grapevine_groups_shared_total{{{RUN}}}{RATE}))", "shared with the swarm"),
            ),
            PER_SECOND,
        ),
        lines(
            "Open orders", "Orders that are not answered and scored yet, of nodes and evaluations.",
            Query(f"max(grapevine_open_orders{{{RUN}}})", "open"), COUNT,
        ),
        lines(
            "Orders waiting, by node",
            "Orders that no generator took yet. Learners keep at most `ahead` batches of them open.",
            Query(f'max by (node) (grapevine_backlog{{{NODES},stream="orders"}})', "{{node}}"), COUNT, stack="normal",
        ),
        lines(
            "Generators, by node", "Generators that serve a node now; each goes to whichever node has most waiting.",
            Query(f"max by (node) (grapevine_generators_assigned{{{NODES}}})", "{{node}}"), COUNT, stack="normal",
            links=True,
        ),
    ]  # fmt: skip
    generators = [
        lines(
            "Generators at work",
            "Share of the time in which an engine samples: mean, the busiest and the least busy generator.",
            (
                Query(f"avg({at_work})", "mean"),
                Query(f"max({at_work})", "busiest"),
                Query(f"min({at_work})", "least busy"),
            ),
            SHARE, least=0, most=1, steps=(("red", None), ("green", 0.05)), limit=True, thick="mean",
        ),
        lines(
            "Tokens generated, by node", "Completion tokens sampled per second, by whom they were sampled for.",
            Query(f"sum by (node) (rate(grapevine_tokens_generated_total{{{NODES}}}{RATE}))", "{{node}}"),
            TOKENS, stack="normal",
        ),
        lines(
            "Groups answered, by node", "Orders answered per second.",
            Query(f"sum by (node) (rate(grapevine_groups_answered_total{{{NODES}}}{RATE}))", "{{node}}"),
            PER_SECOND, stack="normal",
        ),
        lines(
            "Orders in flight",
            "Orders in the engines, and orders per minute that were skipped since nobody waited for them.",
            (
                Query(f"sum(grapevine_orders_in_flight{{{RUN}}})", "in flight"),
                Query(f"60 * sum(rate(grapevine_orders_skipped_total{{{RUN}}}{RATE}))", "skipped per minute"),
            ),
            COUNT,
        ),
        lines(
            "Pause for a new policy", "Seconds for which sampling pauses while an engine takes on a policy.",
            (
                Query(f"histogram_quantile(0.5, {swap})", "half are shorter"),
                Query(f"histogram_quantile(0.95, {swap})", "19 of 20 are shorter"),
            ),
            SECONDS, steps=(("green", None), ("red", 1)), limit=True,
        ),
        lines(
            "Policies taken on, by node", "Policy versions per minute that were loaded into an engine.",
            Query(f"60 * sum by (node) (rate(grapevine_policies_loaded_total{{{NODES}}}{RATE}))", "{{node}}"), PER_MINUTE,
        ),
    ]  # fmt: skip
    scoring = f"sum by (le, task) (rate(grapevine_scoring_seconds_bucket{{{RUN}}}{RATE}))"
    verifiers = [
        lines(
            "Groups scored, by tag", "Groups per second that verifiers scored, by how hard they proved.",
            Query(f"sum by (tag) (rate(grapevine_groups_scored_total{{{RUN}}}{RATE}))", "{{tag}}"),
            PER_SECOND, stack="normal", colours=TAG_COLOURS,
        ),
        lines(
            "Time to score a group, by task", "19 of 20 groups of a task are scored faster than this.",
            Query(f"histogram_quantile(0.95, {scoring})", "{{task}}"), SECONDS,
            steps=(("green", None), ("red", 3)), limit=True,
        ),
        lines(
            "Raw groups that wait, by site", "Answers that no verifier of the site took yet.",
            Query(f'max by (node) (grapevine_backlog{{{RUN},stream="raw"}})', "{{node}}"), COUNT, steps=crowd, limit=True,
        ),
    ]  # fmt: skip
    workers = [
        lines(
            "Tokens trained, by node", "Completion tokens in updates per second, own and swarm.",
            Query(f"sum by (node) (rate(grapevine_tokens_trained_total{{{NODES}}}{RATE}))", "{{node}}"), TOKENS,
            stack="normal", links=True,
        ),
        lines(
            "Seconds of an update, by node", "Mean time of the update alone, without waiting, drawing and checkpoint.",
            Query(
                f'sum by (node) (rate(grapevine_round_seconds_sum{{{NODES},phase="update"}}{RATE})) / '
                f'sum by (node) (rate(grapevine_round_seconds_count{{{NODES},phase="update"}}{RATE}))',
                "{{node}}",
            ),
            SECONDS, links=True,
        ),
        lines(
            "Workers up, by role", "Workers with a fresh heartbeat.",
            Query(f"max by (worker_role) (grapevine_workers{{{RUN}}})", "{{worker_role}}"), COUNT, decimals=0,
        ),
    ]  # fmt: skip
    return made(
        "pipeline", "pipeline", "Where is the bottleneck: generators, verifiers or learners?", "many",
        [
            ("Where is the bottleneck?", bottleneck), ("Streams", streams), ("Generators", generators),
            ("Verifiers", verifiers), ("Learners and workers", workers),
        ],
    )  # fmt: skip


# --- all about one node ---


def node() -> model.Dashboard:
    """One node, from its reward to its books."""
    gauge = "max(grapevine_{0}{{" + NODE + "}})"
    pace = f'sum(rate(grapevine_round_seconds_count{{{NODE},phase="update"}}[10m]))'
    stands = [
        number("Rounds done", "Rounds that the node completed.", gauge.format("round"), COUNT, decimals=0, steps=NEUTRAL),
        number(
            "Rounds left", "Rounds until the node is complete, whether its learner is up or not.",
            gauge.format("rounds_left"), COUNT, decimals=0, steps=NEUTRAL,
        ),
        number(
            "Time left", "Rounds left at the pace of the last ten minutes.",
            f"max(grapevine_rounds_left{{{NODE}}}) / {pace}", SECONDS, decimals=0, steps=NEUTRAL,
        ),
        number(
            "Own reward", "Mean reward of the last round's own groups, before anything is filtered.",
            gauge.format("own_reward"), REWARD, decimals=3, steps=NEUTRAL,
        ),
        number(
            "Held-out accuracy", "Right answers to questions that no node trains on, sampled, last evaluation.",
            gauge.format("heldout_reward"), SHARE, decimals=1, steps=NEUTRAL,
        ),
        number(
            "Groups lost", "Ordered groups that are nowhere in the books. Always 0.",
            f'max(abs(grapevine_books{{{NODE},column="lost"}}))', COUNT, decimals=0, steps=ANY_IS_BAD,
        ),
    ]  # fmt: skip
    learning = [
        lines(
            "Reward", "Mean reward of a round's own groups, and accuracy on held-out questions: sampled and greedy.",
            (
                Query(gauge.format("own_reward"), "own reward"),
                Query(gauge.format("heldout_reward"), "held-out"),
                Query(gauge.format("heldout_greedy"), "held-out, greedy"),
            ),
            REWARD, w=12, h=9, decimals=2, dashed="/greedy$/",
        ),
        lines(
            "Reward by task", "Mean reward of the own groups of each task, in the last round that had the task.",
            Query(f"max by (task) (grapevine_task_reward{{{NODE}}})", "{{task}}"), REWARD, w=12, h=9, decimals=2,
        ),
        lines("Loss", "Loss of each update.", Query(gauge.format("loss"), "loss"), REWARD, w=6),
        lines(
            "Gradient", "Norm of each update's gradient, before it was shortened. Spikes come before skipped updates.",
            Query(gauge.format("grad_norm"), "norm"), REWARD, w=6,
        ),
        lines(
            "Informative groups", "Share of a round's own groups whose rewards are not all alike: the others teach nothing.",
            Query(gauge.format("informative_share"), "informative"), SHARE, w=6, least=0, most=1,
        ),
        lines(
            "Staleness", "Mean policy steps between sampling and training of a round's own groups.",
            Query(gauge.format("staleness_steps"), "steps"), STEPS, w=6, decimals=1,
        ),
    ]  # fmt: skip
    material = [
        lines(
            "Groups used, by author",
            "Groups per minute that its rounds used, by who sampled them; the node itself among them.",
            Query(f"60 * sum by (author) (rate(grapevine_groups_used_total{{{NODE}}}{RATE}))", "{{author}}"), PER_MINUTE,
            stack="normal",
        ),
        lines(
            "Groups used, by tag", "How hard the groups were that its rounds trained on, own and swarm.",
            Query(f"60 * sum by (tag) (rate(grapevine_groups_used_total{{{NODE}}}{RATE}))", "{{tag}}"), PER_MINUTE,
            stack="normal", colours=TAG_COLOURS,
        ),
        lines(
            "Tokens", "Completion tokens per second: sampled for this node, and trained, its own and those of others.",
            (
                Query(f"sum(rate(grapevine_tokens_generated_total{{{NODE}}}{RATE}))", "generated"),
                Query(f"sum by (origin) (rate(grapevine_tokens_trained_total{{{NODE}}}{RATE}))", "trained, {{origin}}"),
            ),
            TOKENS,
        ),
    ]  # fmt: skip
    mine = f'sum(rate(grapevine_round_seconds_count{{{NODE},phase="update"}}{RATE}))'
    phases = f"sum by (phase) (rate(grapevine_round_seconds_sum{{{NODE}}}{RATE}))"
    work = [
        lines(
            "Where a round's time goes", "Seconds of a round by phase: wait for own groups, draw, update, finish.",
            Query(f"{phases} / on () group_left () {mine}", "{{phase}}"),
            SECONDS, stack="normal",
        ),
        lines(
            "Whom it waits for", "Share of the time in which its learner waits for own groups, by whom it waits for.",
            Query(f"sum by (on) (rate(grapevine_waiting_seconds_total{{{NODE}}}{RATE}))", "{{on}}"), SHARE, least=0, most=1,
            stack="normal", colours=WAIT_COLOURS,
        ),
        lines(
            "Orders and generators",
            "Its orders that wait, those in a generator's hands, its groups that wait to be trained, and the generators "
            "that serve it.",
            (
                Query(f'max(grapevine_backlog{{{NODE},stream="orders"}})', "orders waiting"),
                Query(f'max(grapevine_pending{{{NODE},stream="orders"}})', "orders in hand"),
                Query(f'max(grapevine_backlog{{{NODE},stream="own"}})', "own groups waiting"),
                Query(gauge.format("generators_assigned"), "generators"),
            ),
            COUNT,
        ),
        lines(
            "Wanted and not found", "Swarm groups per minute that its rounds wanted and that were not there.",
            Query(f"60 * sum(rate(grapevine_swarm_missing_total{{{NODE}}}{RATE}))", "missing"), PER_MINUTE, w=6,
        ),
        lines(
            "Policies", "Policy versions per minute that generators took on, and files that this node sent them over HTTP.",
            (
                Query(f"60 * sum(rate(grapevine_policies_loaded_total{{{NODE}}}{RATE}))", "taken on"),
                Query(f"60 * sum(rate(grapevine_policies_served_total{{{NODE}}}{RATE}))", "sent over HTTP"),
            ),
            PER_MINUTE, w=6,
        ),
        lines(
            "Updates that failed", "Optimizer steps skipped, and returns to the last good checkpoint, since the node began.",
            (
                Query(gauge.format("updates_skipped_total"), "updates skipped"),
                Query(gauge.format("rollbacks_total"), "rollbacks"),
            ),
            COUNT, w=6, decimals=0, steps=ANY_IS_BAD,
        ),
        lines(
            "Books, over time", "Orders that are open, and groups that wait to be trained.",
            Query(f'max by (column) (grapevine_books{{{NODE},column=~"open|waiting"}})', "{{column}}"), COUNT, w=6,
        ),
        numbers(
            "Books", "Ordered = trained + filtered + expired + open + waiting; lost is what is missing.",
            Query(f"max by (column) (grapevine_books{{{NODE}}})", "{{column}}"), COUNT, w=24, h=4, decimals=0, steps=NEUTRAL,
        ),
    ]  # fmt: skip
    return made(
        "node", "node", "One node: what it learns, from whom, how fast, and its books.", "one",
        [
            ("Where it stands", stands), ("What it learns", learning), ("What it learns from", material),
            ("How it works", work),
        ],
    )  # fmt: skip


# --- is all well ---


def safety() -> model.Dashboard:
    """What was refused, what was done twice, who died, and what fills up."""
    refused = f"max by (stream, reason) (rate(grapevine_quarantined_total{{{RUN}}}{RATE}))"
    totals = f"max by (stream, reason) (increase(grapevine_quarantined_total{{{RUN}}}[$__range]))"
    faults = f"60 * sum by (task, fault) (rate(grapevine_scoring_faults_total{{{RUN}}}{RATE}))"
    by_reader = f"60 * sum by (role, stream) (rate(grapevine_messages_refused_total{{{RUN}}}{RATE}))"
    failures = f"60 * sum by (kind) (rate(grapevine_job_failures_total{{{RUN}}}{RATE}))"
    bytes_used = f"max(grapevine_server_memory_bytes{{{RUN}}})"
    stands = [
        number(
            "Alerts", "Alerts of grapevine that fire for this run.",
            f'count(ALERTS{{{RUN},alertname=~"Grapevine.*",alertstate="firing"}}) or vector(0)', COUNT, decimals=0,
            steps=ANY_IS_BAD,
        ),
        number(
            "Server", "1 when the run's server answers.",
            f"max(grapevine_server_up{{{RUN}}})", COUNT, decimals=0, steps=(("red", None), ("green", 1)),
        ),
        number(
            "Groups lost", "Ordered groups that are nowhere in the books of any node. Always 0.",
            f'sum(max by (node) (abs(grapevine_books{{{NODES},column="lost"}})))', COUNT, decimals=0, steps=ANY_IS_BAD,
        ),
        number(
            "Refused", "Messages that went into quarantine within the time shown.",
            f"sum({totals})", COUNT, decimals=0,
            steps=(("green", None), ("yellow", 1), ("red", 100)),
        ),
        number(
            "Starts of workers", "Workers started within the time shown, for the first time or again.",
            f"sum(round(max by (worker_role) (increase(grapevine_workers_started_total{{{RUN}}}[$__range]))))", COUNT,
            decimals=0, steps=NEUTRAL,
        ),
        number(
            "Rollbacks", "Returns to the last good checkpoint since the nodes began.",
            f"sum(max by (node) (grapevine_rollbacks_total{{{NODES}}}))", COUNT, decimals=0, steps=ANY_IS_BAD,
        ),
    ]  # fmt: skip
    messages = [
        lines(
            "Refused, by stream", "Messages per minute that went into quarantine. Nothing refused is ever used.",
            Query(f"60 * sum by (stream) ({refused})", "{{stream}}"), PER_MINUTE, stack="normal",
        ),
        lines(
            "Refused, by reason", "Messages per minute that went into quarantine, by why.",
            Query(or_none(f"60 * sum by (reason) ({refused}) > 0", "reason"), "{{reason}}"), PER_MINUTE, stack="normal",
        ),
        bars(
            "Most refused", "The ten combinations of stream and reason that were refused most within the time shown.",
            Query(or_none(f"sort_desc(topk(10, {totals} > 0))", "stream", "reason"), "{{stream}}: {{reason}}"),
            COUNT, decimals=0, steps=(("green", None), ("yellow", 1), ("red", 100)), least=0,
        ),
        lines(
            "Refused, by the role that read it", "Messages per minute that workers who are up refused, by their role.",
            Query(or_none(by_reader, "role", "stream"), "{{role}}: {{stream}}"),
            PER_MINUTE,
        ),
        lines(
            "Scoring that failed",
            "Completions per minute whose scoring hung, crashed or raised; they score 0 and cost no other answer anything.",
            Query(or_none(faults, "task", "fault"), "{{task}}: {{fault}}"),
            PER_MINUTE,
        ),
        lines(
            "Policies refused",
            "Policies per minute that generators did not load: missing, with a wrong checksum, of another shape.",
            Query(f"60 * sum by (reason) (rate(grapevine_policies_refused_total{{{RUN}}}{RATE}))", "{{reason}}"), PER_MINUTE,
        ),
    ]  # fmt: skip
    workers = [
        lines(
            "Done again, done twice",
            "Entries per minute taken over from workers that fell silent, and answers to orders that another had answered.",
            (
                Query(f"60 * max(rate(grapevine_redelivered_total{{{RUN}}}{RATE}))", "taken over"),
                Query(f"60 * max(rate(grapevine_duplicates_total{{{RUN}}}{RATE}))", "duplicates"),
            ),
            PER_MINUTE,
        ),
        lines(
            "Starts of workers, by role", "Workers started within the last ten minutes, for the first time or again.",
            Query(
                f"round(max by (worker_role) (increase(grapevine_workers_started_total{{{RUN}}}[10m])))", "{{worker_role}}"
            ),
            COUNT, decimals=0,
        ),
        lines(
            "Connections lost", "Times per minute that workers lost the server and joined again, by role.",
            Query(f"60 * sum by (role) (rate(grapevine_reconnects_total{{{RUN}}}{RATE}))", "{{role}}"), PER_MINUTE,
        ),
        lines(
            "Groups lost, by node", "Ordered groups that are nowhere in the books. Always 0.",
            Query(f'max by (node) (grapevine_books{{{NODES},column="lost"}})', "{{node}}"), COUNT, decimals=0,
            steps=ANY_IS_BAD, links=True,
        ),
        lines(
            "Updates skipped, by node", "Optimizer steps skipped since the node began: exploding or not finite.",
            Query(f"max by (node) (grapevine_updates_skipped_total{{{NODES}}})", "{{node}}"), COUNT, decimals=0, links=True,
        ),
        lines(
            "Rollbacks, by node", "Returns to the last good checkpoint since the node began.",
            Query(f"max by (node) (grapevine_rollbacks_total{{{NODES}}})", "{{node}}"), COUNT, decimals=0, links=True,
        ),
    ]  # fmt: skip
    memory = [
        number(
            "Memory of the server", "Share of its limit that the server uses; of 4 GiB where it has none.",
            f"{bytes_used} / (max(grapevine_server_memory_limit_bytes{{{RUN}}}) > 0 or vector(4294967296))", SHARE,
            w=6, h=8, decimals=0, least=0, most=1, steps=(("green", None), ("yellow", 0.6), ("red", 0.8)),
        ),
        lines(
            "Memory of the server, over time",
            "What the server uses for its data, of all its runs, and what it may use (0: no limit).",
            (
                Query(bytes_used, "used"),
                Query(f"max(grapevine_server_memory_limit_bytes{{{RUN}}})", "limit"),
            ),
            BYTES, w=9, dashed="/^limit$/",
        ),
        lines(
            "Memory of the streams", "What this run's streams take on the server.",
            Query(f"max by (stream) (grapevine_stream_bytes{{{RUN}}})", "{{stream}}"), BYTES, w=9, stack="normal",
        ),
    ]  # fmt: skip
    jobs = [
        lines(
            "Jobs, by status", "Jobs of the control workers.",
            Query(f"max by (status) (grapevine_jobs{{{RUN}}})", "{{status}}"), COUNT, w=12, decimals=0,
            colours={"failed": "red", "started": "blue", "finished": "green"},
        ),
        lines(
            "Tries of jobs that failed", "Failed tries per minute, by kind of job.",
            Query(or_none(failures, "kind"), "{{kind}}"), PER_MINUTE, w=12,
        ),
    ]  # fmt: skip
    return made(
        "safety", "safety", "Is all well: what was refused, lost, done again, and what fills up?", "many",
        [
            ("Is all well?", stands), ("Messages, answers and policies that were refused", messages),
            ("Workers and updates", workers), ("Memory", memory), ("Jobs", jobs),
        ],
    )  # fmt: skip


DASHBOARDS = {"swarm": swarm, "pipeline": pipeline, "node": node, "safety": safety}


def rules() -> str:
    """The alerts as Kubernetes wants them, for the Prometheus operator."""
    resource = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "grapevine", "labels": {"app.kubernetes.io/part-of": "grapevine"}},
        "spec": alert_rules(),
    }
    head = "# Made from grapevine/monitoring/alerts.yaml by `python -m tools.dashboards`.\n"
    return head + yaml.dump(resource, Dumper=Blocks, sort_keys=False, width=120)


class Blocks(yaml.SafeDumper):
    """Texts of several lines as they are."""


Blocks.add_representer(
    str, lambda to, text: to.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)
)


def files() -> dict[Path, str]:
    """Every file that is made here, and its content."""
    made = {
        MONITORING / "dashboards" / f"{name}.json": json.dumps(make(), cls=JSONEncoder, indent=2, sort_keys=True) + "\n"
        for name, make in DASHBOARDS.items()
    }
    return {**made, MONITORING / "rules.yaml": rules()}


def main() -> None:
    """Write what is out of date."""
    for path, text in files().items():
        if not path.exists() or path.read_text() != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            print(f"written: {path.relative_to(MONITORING.parents[2])}", file=sys.stderr)


if __name__ == "__main__":
    main()
