"""Draws a View: header, nodes, streams, workers, what happens.

Guarantees: never wider than asked, and where a height is given never higher; with less room columns go, then nodes are
summed up, then panels go; beside every colour stands a word that says the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from grapevine.screen.table import node_table
from grapevine.screen.view import Generator, Helper, View
from grapevine.screen.waits import count
from grapevine.screen.wording import clock, duration, event_words, mix_words, round_words, tag_sums

SIDE_BY_SIDE = 76
WIDE = 100
HEADER_LINES = 4
FRAME = 2
TABLE_FRAME = 3


@dataclass(frozen=True)
class _Room:
    """How many lines of their own the parts get; 0: the part is left out."""

    nodes: int
    panels: int
    events: int


def picture(view: View, width: int, height: int | None = None, away: float = 0.0) -> RenderableType:
    """The whole screen in at most `width` columns and `height` lines. `away`: seconds without an answer of the server."""
    streams, workers, events = _streams(view), _workers(view, width), _events(view, away)
    wanted = _Room(len(view.nodes) + (len(view.nodes) > 1), max(len(streams), len(workers)), len(events))
    room = wanted if height is None else _room(wanted, height)
    parts: list[RenderableType] = [_header(view, width, away), node_table(view, width, room.nodes)]
    if room.panels:
        left, right = _panel("streams", streams[: room.panels], room.panels), _panel("workers", workers, room.panels)
        parts.append(_side_by_side(left, right, width))
    if room.events:
        parts.append(_panel("what happens", events, room.events))
    return Group(*parts)


def _room(wanted: _Room, height: int) -> _Room:
    """Divide `height` lines: a little for each part first, then what the nodes want, then the panels, then the events."""
    left = height - HEADER_LINES - TABLE_FRAME - 1
    panels, events = (
        (min(wanted.panels, 4), min(wanted.events, 3)) if height < 30 else (min(wanted.panels, 8), min(wanted.events, 4))
    )
    if left < events + FRAME + 1:
        events = 0
    left -= events + FRAME * bool(events)
    if left < panels + FRAME + 1:
        panels = 0
    left -= panels + FRAME * bool(panels)
    nodes = 1 + max(0, min(wanted.nodes - 1, left))
    left -= nodes - 1
    more = max(0, min(wanted.panels - panels, left)) if panels else 0
    return _Room(nodes, panels + more, events + max(0, min(wanted.events - events, left - more)) if events else 0)


def _header(view: View, width: int, away: float) -> Panel:
    done, whole = sum(node.facts.round for node in view.nodes), sum(node.facts.rounds for node in view.nodes)
    share = min(1.0, max(0.0, done / whole)) if whole else 0.0
    figures = Text()
    lost = sum(node.lost for node in view.nodes)
    if view.restarts is not None:
        figures.append(f"   {count(view.restarts, 'restart')}", "yellow" if view.restarts else "dim")
    refused = sum(view.refused.values())
    figures.append(f"   {refused} refused", "yellow" if refused else "dim")
    figures.append(f"   {lost} lost", "bold red" if lost else "dim")
    words = round_words(view)
    length = max(0, width - 4 - len(words) - 7 - figures.cell_len)
    filled = min(length, int(share * length))
    first = Text.assemble(
        (words, "bold"), "  ", ("━" * filled, "green"), ("━" * (length - filled), "bright_black"), f" {share:4.0%}", figures
    )
    title = Text.assemble(("grapevine ", "bold magenta"), (view.run, "bold"))
    time = clock(view.at) + (f", up {duration(view.elapsed)}" if view.elapsed is not None else "")
    below = Text(f"server away for {away:.0f} s" if away else time, "bold red" if away else "dim")
    lines = [first, _flow(view, width)]
    for line in lines:
        line.no_wrap, line.overflow = True, "ellipsis"
    return Panel(
        Group(*lines), title=title, title_align="left", subtitle=below, subtitle_align="right",
        box=box.ROUNDED, border_style="magenta", width=width,
    )  # fmt: skip


def _flow(view: View, width: int) -> Text:
    """The way round: what waits on each stream, and how many workers stand between two of them."""
    verifiers = sum(one.role == "verifier" and not one.silent for one in view.helpers)
    generators = sum(not one.silent for one in view.generators)
    learners = sum(node.age is not None and not node.silent for node in view.nodes)
    orders = sum(target.unanswered for target in (*(node.target for node in view.nodes), *view.evaluations))
    raw, own = sum(one.waiting for one in view.raw), sum(node.target.own for node in view.nodes)
    wide = width >= WIDE
    stations = [
        (True, orders, "orders"), (False, generators, "generator"),
        (True, raw, "raw groups" if wide else "raw"), (False, verifiers, "verifier"),
        (True, own, "scored groups" if wide else "scored"), (False, learners, "learner"),
    ]  # fmt: skip
    flow = Text()
    for is_stream, number, word in stations:
        flow.append(f" {'──' if wide else '─'}▶ " if flow else "", "bright_black")
        flow.append(f"{number} ", "bold cyan" if is_stream else "bold green" if number else "bold red")
        flow.append(word if is_stream or number == 1 else f"{word}s")
    return flow


def _side_by_side(left: Panel, right: Panel, width: int) -> RenderableType:
    if width < SIDE_BY_SIDE:
        return left
    grid = Table.grid(padding=0)
    half = (width + 1) // 2
    grid.add_column(width=half)
    grid.add_column(width=width - half)
    grid.add_row(left, right)
    return grid


def _panel(title: str, lines: Sequence[Text], height: int) -> Panel:
    """Lines in a frame, cut to its width; too many end in a word about the rest."""
    shown = list(lines[:height])
    if len(lines) > height:
        shown[-1] = Text(f"and {len(lines) - height + 1} more", "dim")
    for line in shown:
        line.no_wrap, line.overflow = True, "ellipsis"
    frame = box.ROUNDED
    return Panel(
        Group(*shown), title=title, title_align="left", box=frame, border_style="bright_black", height=height + FRAME
    )


def _streams(view: View) -> list[Text]:
    """The most telling first: what does not fit is left out."""

    def fact(name: str, *words: str | Text | tuple[str, str]) -> Text:
        return Text.assemble((f"{name:<8}", "cyan"), *words)

    targets = [*(node.target for node in view.nodes), *view.evaluations]
    unanswered, taken = sum(one.unanswered for one in targets), sum(one.taken for one in targets)
    raw, scoring = sum(one.waiting for one in view.raw), sum(one.taken for one in view.raw)
    books = [node.books for node in view.nodes]
    lost = sum(book.lost for book in books)
    trained, filtered, expired = (sum(getattr(b, name) for b in books) for name in ("trained", "filtered", "expired"))
    own, swarm, missing = tag_sums(view.nodes)
    lines = [
        fact("orders", f"{unanswered - taken} wait, {taken} at work"),
        fact("raw", f"{raw - scoring} wait, {scoring} at work"),
        fact("scored", f"{sum(book.waiting for book in books)} wait for their round"),
        fact("books", f"{sum(book.ordered for book in books)} ordered, ", (f"{lost} lost", "bold red" if lost else "green")),
        fact("", f"{trained} trained, {filtered} filtered"),
        fact("", f"{expired} orders expired"),
        fact("mixed", "own ", mix_words(own)),
        fact("", "swarm ", mix_words(swarm, missing)),
        fact("", ("by the tag's initial", "dim")),
    ]
    lines += [
        fact("refused", (f"{number} {reason.replace(':', ': ')}", "yellow"))
        for reason, number in sorted(view.refused.items(), key=lambda one: -one[1])
    ]
    lines += [fact("", f"{one.name}: {one.unanswered} orders, {one.own} scored") for one in view.evaluations]
    redelivered, duplicates = view.counts.get("redelivered", 0), view.counts.get("duplicates", 0)
    return [*lines, fact("again", f"{redelivered} redelivered, {duplicates} double")]


def _workers(view: View, width: int) -> list[Text]:
    """Sums where there are several of a kind, then who is silent, then one by one."""
    generators = [one for one in view.generators if not one.silent]
    verifiers = [one for one in view.helpers if one.role == "verifier" and not one.silent]
    lines = []
    if len(generators) != 1:
        busy = sum(bool(one.facts.target) for one in generators)
        speed = sum(one.tokens_per_second or 0.0 for one in generators)
        lines.append(Text(f"{count(len(generators), 'generator')}, {busy} busy" + (f", {speed:.0f} tok/s" if speed else "")))
    if len(verifiers) != 1:
        lines.append(Text(f"{count(len(verifiers), 'verifier')}, {sum(one.scored for one in verifiers)} scored"))
    workers: list[Generator | Helper] = [*view.generators, *view.helpers]
    for gone in (one for one in workers if one.silent):
        lines.append(Text.assemble((gone.name, "bold"), (f" silent {duration(gone.age)}", "bold red")))
    longest = max((len(one.name) for one in workers), default=0)
    place = max((len(one.facts.target or "") for one in generators), default=0)
    for one in generators:
        line = Text.assemble((f"{one.name:<{longest}}", "green"))
        if one.facts.target:
            line.append(" ▶ ", "bright_black").append(f"{one.facts.target:<{place}}")
        else:
            line.append(f"   {'idle':<{place}}", "dim")
        line.append(f" {one.tokens_per_second:5.0f} tok/s" if one.tokens_per_second is not None else "", "bold")
        if width >= WIDE and one.facts.policy:
            line.append(f"  policy {one.facts.policy}", "dim")
        lines.append(line)
    for helper in (helper for helper in view.helpers if not helper.silent):
        words = f"   {helper.scored} scored" if helper.role == "verifier" else f"   {helper.role}"
        lines.append(Text.assemble((f"{helper.name:<{longest}}", "green"), words))
    return lines


def _events(view: View, away: float) -> list[Text]:
    """What is amiss, who waits for whom, and what happened, the latest first."""
    lines = [Text(f"server away for {away:.0f} s; this is how the run looked before", "bold red")] if away else []
    lines += [Text(words, "yellow" if "silent" in words or "miss" in words else "") for words in view.waits]
    for event in reversed(view.events):
        lines.append(Text.assemble((f"{clock(event['at'])}  ", "dim"), event_words(event)))
    return lines or [Text("nobody waits", "dim")]
