"""The table of nodes, one line each, in as many columns as fit.

Guarantees: never wider than asked and never longer; columns go whole, the least telling first; nodes that do not fit are
summed up in a line, those in trouble never; the last line sums up all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich import box
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from grapevine.screen.view import Node, View
from grapevine.screen.wording import duration, mean, mean_curve, mix_words, sparkline

STATE_STYLES = {
    "waits for own groups": "yellow",
    "updates": "green",
    "evaluates": "cyan",
    "complete": "bold green",
    "silent": "bold red",
    "no learner": "red",
}
GAP = 2
CURVE_LENGTHS = (24, 12)


@dataclass(frozen=True)
class Row:
    """A line: one node, or several summed up."""

    name: str
    nodes: Sequence[Node]

    def mean(self, of: Callable[[Node], float | None]) -> float | None:
        """The mean over the nodes that have this figure."""
        values = [value for value in map(of, self.nodes) if value is not None]
        return mean(values) if values else None

    @property
    def node(self) -> Node | None:
        """The node of a line that stands for one."""
        return self.nodes[0] if self.name == self.nodes[0].name else None


@dataclass(frozen=True)
class Column:
    """A column: its title, what stands in a line's cell, its rank (the highest goes first), and to which side it leans."""

    title: str
    cell: Callable[[Row], Text]
    rank: int
    right: bool = False


def node_table(view: View, width: int, lines: int) -> Panel:
    """The table in a frame, `lines` + 3 lines high."""
    rows = rows_of(view.nodes, lines)
    # Frame and its padding take four columns.
    columns = columns_of(view, rows, width - 4)
    table = Table(box=None, padding=(0, GAP, 0, 0), pad_edge=False, header_style="dim", collapse_padding=True)
    for column in columns:
        side = "right" if column.right else "left"
        table.add_column(Text(column.title), justify=side, no_wrap=True, overflow="ellipsis")  # type: ignore[arg-type]
    for row in rows:
        table.add_row(*(column.cell(row) for column in columns), style="" if row.node else "bold")
    return Panel(table, title="nodes", title_align="left", box=box.ROUNDED, border_style="bright_black", width=width)


def rows_of(nodes: Sequence[Node], lines: int) -> list[Row]:
    """The nodes in at most `lines` lines (1 at least)."""
    everybody = [Row(f"all {len(nodes)}", nodes)] if len(nodes) > 1 else []
    if len(nodes) + len(everybody) <= lines:
        return [*(Row(node.name, [node]) for node in nodes), *everybody]
    troubled = [node for node in nodes if node.silent or node.lost]
    chosen = [*troubled, *(node for node in nodes if node not in troubled)][: max(0, lines - 2)]
    shown = [Row(node.name, [node]) for node in nodes if node in chosen]
    hidden = [node for node in nodes if node not in chosen]
    more = [Row(f"{len(hidden)} more", hidden)] if lines > 1 else []
    return [*shown, *more, *everybody]


def columns_of(view: View, rows: Sequence[Row], width: int) -> list[Column]:
    """The columns that fit, in the order in which they stand."""
    offered = _offered(view)

    def needs(column: Column) -> int:
        return GAP + max([len(column.title), *(column.cell(row).cell_len for row in rows)])

    # By rank; a better version of a column takes the place of the plain one when there is room left for it.
    kept: list[Column] = []
    for rank in sorted({column.rank for column in offered}):
        for column in (one for one in offered if one.rank == rank):
            others = [one for one in kept if one.title.split(" (")[0] != column.title.split(" (")[0]]
            if sum(map(needs, others)) + needs(column) - GAP <= width:
                kept = [*others, column]
    return [column for column in offered if column in kept]


def _offered(view: View) -> list[Column]:
    points = [value for node in view.nodes for value in node.facts.curve]
    # One scale for all, so that curves can be compared.
    scale = (min(points), max(points)) if points else (0.0, 1.0)

    def curve(length: int) -> Callable[[Row], Text]:
        def cell(row: Row) -> Text:
            curves = [node.facts.curve for node in row.nodes if node.facts.curve]
            return Text(sparkline(mean_curve(curves), length, scale), "cyan")

        return cell

    def total(of: Callable[[Node], float]) -> Callable[[Row], Text]:
        return lambda row: Text(f"{sum(of(node) for node in row.nodes):.0f}")

    def word(of: Callable[[Node], str]) -> Callable[[Row], Text]:
        return lambda row: Text(of(row.node) if row.node else "")

    columns = [
        Column("node", lambda row: Text(row.name, "bold"), 0),
        Column("round", _round, 1, True),
        Column("reward", _reward, 1, True),
        Column("curve", curve(CURVE_LENGTHS[0]), 9),
        Column("curve", curve(CURVE_LENGTHS[1]), 3),
        Column("held-out (95 %)", _heldout_interval, 8),
        Column("held-out", _heldout, 4),
        Column("own mix", lambda row: mix_words(row.node.facts.mix.own) if row.node else Text(), 6),
        Column("swarm mix", _swarm_mix, 6),
        Column("stale", lambda row: Text(f"{row.mean(lambda node: node.facts.staleness):.1f}"), 5, True),
        Column("tok/s", total(lambda node: node.facts.tokens_per_second), 5, True),
        Column("asked", total(lambda node: node.target.unanswered), 10, True),
        Column("arrived", total(lambda node: node.target.own), 10, True),
        Column("policy", word(lambda node: node.facts.version), 11),
        Column("state", _state, 2),
    ]
    if len({node.target.site for node in view.nodes}) > 1:
        columns.insert(-1, Column("site", word(lambda node: node.target.site), 7))
    if len({node.facts.model for node in view.nodes}) > 1:
        columns.insert(-1, Column("model", word(lambda node: node.facts.model.rstrip("/").rpartition("/")[2][:24]), 7))
    return columns


def _round(row: Row) -> Text:
    rounds, whole = [node.facts.round for node in row.nodes], max(node.facts.rounds for node in row.nodes)
    return Text(f"{min(rounds)}/{whole or '?'}")


def _reward(row: Row) -> Text:
    reward = row.mean(lambda node: node.facts.own_reward)
    return Text("-", "dim") if reward is None else Text(f"{reward:.3f}", "bold")


def _heldout(row: Row) -> Text:
    """The rate with half its interval; of several nodes the mean rate alone."""
    reward = row.mean(lambda node: node.facts.heldout.reward if node.facts.heldout else None)
    facts = row.node.facts.heldout if row.node else None
    if reward is None:
        return Text("-", "dim")
    if facts is None or facts.low is None or facts.high is None:
        return Text(f"{reward:.2f}")
    return Text(f"{reward:.2f}±{(facts.high - facts.low) / 2:.2f}")


def _heldout_interval(row: Row) -> Text:
    """The rate with its interval; of several nodes the mean rate alone."""
    facts = row.node.facts.heldout if row.node else None
    if facts is None or facts.low is None or facts.high is None:
        return _heldout(row)
    return Text.assemble(f"{facts.reward:.2f}", (f"  {facts.low:.2f}-{facts.high:.2f}", "dim"))


def _swarm_mix(row: Row) -> Text:
    return mix_words(row.node.facts.mix.swarm, row.node.facts.mix.missing) if row.node else Text()


def _state(row: Row) -> Text:
    node = row.node
    if node is None:
        silent = sum(node.silent for node in row.nodes)
        waiting = sum(node.state == "waits for own groups" for node in row.nodes)
        complete = all(node.state == "complete" for node in row.nodes)
        return Text(f"{silent} silent" if silent else "complete" if complete else f"{waiting} wait")
    word = node.state
    if node.silent and node.age is not None:
        word = f"silent {duration(node.age)}"
    elif node.state == "waits for own groups":
        # More may have arrived than the round needs: what it waits for then are fresher ones.
        word = f"waits {node.target.own}/{node.facts.wanted}" if node.facts.wanted else "waits"
    return Text(word, STATE_STYLES.get(node.state, ""))
