"""Who waits for whom, in words.

Guarantees: each sentence names who waits, for what, and the figures that say so; equal causes share a sentence, so a large
swarm needs no more sentences than a small one. What is bad comes first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from grapevine.screen.view import Generator, Helper, Node, View


def waits(view: View) -> Iterator[str]:
    """The sentences of one view."""
    yield from _silent(view)
    generators = [one for one in view.generators if not one.silent]
    verifiers = [one for one in view.helpers if one.role == "verifier" and not one.silent]
    for node in view.nodes:
        if node.lost:
            yield f"{node.name}: the books miss {node.lost} groups"
    nodes = view.nodes
    raw = sum(one.waiting for one in view.raw)
    hungry = [node for node in nodes if waits_for(node, raw) == "generators"]
    scoring = [node for node in nodes if waits_for(node, raw) == "verifiers"]
    nowhere = [node for node in nodes if waits_for(node, raw) == "overdue"]
    if hungry:
        orders = sum(node.target.unanswered for node in hungry)
        names = {node.name for node in hungry}
        on_it = sum(one.facts.target in names for one in generators)
        them = "it" if len(hungry) == 1 else "them"
        who = f"{on_it} on {them}" if generators else "and no generator is up"
        yield f"{_names(hungry)} for generators ({count(orders, 'order')} unanswered, {who})"
    if scoring:
        yield f"{_names(scoring)} for verifiers (raw {raw}{'' if verifiers else ', and no verifier is up'})"
    if nowhere:
        orders = sum(node.books.open for node in nowhere)
        yield f"{_names(nowhere)} for {count(orders, 'refused or lost order')}; asked again when overdue"
    if not any(target.unanswered for target in (*(node.target for node in view.nodes), *view.evaluations)):
        idle = [one.name for one in generators if not one.facts.target]
        if idle:
            yield f"{listed(idle)} idle: no node asks"
    if view.newer:
        yield f"{count(view.newer, 'message')} of a newer release wait for a worker that can read them"


def waits_for(node: Node, raw: int) -> Literal["generators", "verifiers", "overdue"] | None:
    """Whom a node's learner waits for, with `raw` groups unscored; None: for nobody, or nobody can tell.

    `overdue`: its orders are neither with a generator nor with a verifier, and are asked again at their deadline.
    """
    if node.state != "waits for own groups":
        return None
    if node.target.unanswered:
        return "generators"
    return None if not node.books.open else "verifiers" if raw else "overdue"


def _silent(view: View) -> Iterator[str]:
    nodes = [(node.name, node.age) for node in view.nodes if node.silent]
    workers: list[Generator | Helper] = [*view.generators, *view.helpers]
    others = [(one.name, one.age) for one in workers if one.silent]
    for name, age in sorted([*nodes, *others], key=lambda one: one[1] or 0.0):
        known = age is not None and age < 10**8
        yield f"{name}: " + (f"heartbeat silent for {age:.0f} s" if known else "heartbeat cannot be read")


def _names(nodes: Sequence[Node]) -> str:
    return listed([node.name for node in nodes]) + (" waits" if len(nodes) == 1 else " wait")


def listed(names: Sequence[str]) -> str:
    """One name, two, or the first and how many more there are."""
    return " and ".join(names) if len(names) < 3 else f"{names[0]} and {len(names) - 1} more"


def count(number: int, noun: str) -> str:
    """`1 order`, `2 orders`."""
    return f"{number} {noun}" + ("" if number == 1 else "s")
