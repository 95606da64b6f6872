"""What a run looks like at one instant, as values: nodes, generators, streams, counts. `grapevine.screen.watch` reads them.

Guarantees: frozen; nothing here talks to a server.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from common.ledger import Books

TEXT_LENGTH = 120


class HeldOut(msgspec.Struct, frozen=True):
    """The last evaluation: mean accuracy of sampled completions with its 95 % interval, and of greedy ones."""

    round: int = 0
    reward: float = 0.0
    low: float | None = None
    high: float | None = None
    greedy: float | None = None


class Mix(msgspec.Struct, frozen=True):
    """Groups of the last round by reward tag; `missing` are swarm groups that it wanted and did not get."""

    own: dict[str, int] = {}
    swarm: dict[str, int] = {}
    missing: int = 0


class LearnerFacts(msgspec.Struct, frozen=True):
    """What a learner's heartbeat says. Rewards per completion, staleness in policy steps, tokens trained per second."""

    round: int = 0
    rounds: int = 0
    waiting: int = 0
    wanted: int = 0
    own_reward: float | None = None
    curve: list[float] = []
    heldout: HeldOut | None = None
    mix: Mix = Mix()
    staleness: float = 0.0
    tokens_per_second: float = 0.0
    version: str = ""
    model: str = ""
    site: str = ""
    state: str = ""


class GeneratorFacts(msgspec.Struct, frozen=True):
    """What a generator's heartbeat says: whom it serves, totals since its start."""

    target: str | None = None
    policy: str = ""
    tokens: int = 0
    groups: int = 0


class VerifierFacts(msgspec.Struct, frozen=True):
    """What a verifier's heartbeat says."""

    scored: int = 0


@dataclass(frozen=True)
class Target:
    """Orders of a node or of an evaluation. `unanswered` counts all, `taken` those in a generator's hands."""

    name: str
    site: str
    unanswered: int
    taken: int
    own: int


@dataclass(frozen=True)
class Node:
    """One node. `age` is seconds since its learner's last heartbeat, None when there is none on the server."""

    name: str
    target: Target
    books: Books
    facts: LearnerFacts
    age: float | None
    silent: bool
    state: str

    @property
    def lost(self) -> int:
        """Ordered groups that are nowhere."""
        return self.books.lost


@dataclass(frozen=True)
class Generator:
    """One generator. Tokens per second between two looks; None at the first one."""

    name: str
    facts: GeneratorFacts
    at: float
    age: float
    silent: bool
    tokens_per_second: float | None


@dataclass(frozen=True)
class Helper:
    """A verifier, a control worker, or another role without figures of its own."""

    role: str
    name: str
    age: float
    silent: bool
    scored: int


@dataclass(frozen=True)
class Raw:
    """One stream of raw groups. `taken` are in a verifier's hands, `waiting` counts all."""

    shard: int
    site: str
    waiting: int
    taken: int


@dataclass(frozen=True)
class View:
    """A run at one instant. `at` in seconds since 1970; what this machine cannot know is None."""

    run: str
    at: float
    nodes: tuple[Node, ...]
    evaluations: tuple[Target, ...]
    generators: tuple[Generator, ...]
    helpers: tuple[Helper, ...]
    raw: tuple[Raw, ...]
    counts: Mapping[str, int]
    newer: int
    waits: tuple[str, ...] = ()
    elapsed: float | None = None
    restarts: int | None = None
    events: tuple[Mapping[str, Any], ...] = ()

    @property
    def refused(self) -> dict[str, int]:
        """Refused messages by `stream:reason`."""
        return {name.removeprefix("refused:"): n for name, n in self.counts.items() if name.startswith("refused:")}

    @property
    def round(self) -> int:
        """The round that every node has done."""
        return min((node.facts.round for node in self.nodes), default=0)


def tree(view: View) -> dict[str, Any]:
    """The view as plain values, for JSON."""
    facts: dict[str, Any] = msgspec.to_builtins(view)
    for node, row in zip(view.nodes, facts["nodes"], strict=True):
        row["lost"] = node.lost
    return {**facts, "refused": view.refused, "round": view.round}


def plain(value: bytes | str, length: int = TEXT_LENGTH) -> str:
    """Text of strangers as one may print it: control and other unprintable characters as escapes, cut to `length`."""
    text = value.decode(errors="backslashreplace") if isinstance(value, bytes) else value
    text = text if len(text) <= length else text[: length - 1] + "…"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
