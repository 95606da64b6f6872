"""What a run looks like now, read from the server and nowhere else.

Guarantees: reads only; all streams and books of one look are read at one instant (one MULTI), so the books add up; two
round trips whatever the size of the swarm; a heartbeat with strange contents costs its own figures and nothing else; no
text of the view holds a control character.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec
import redis

from common.directory import UNREADABLE, WORKER_GONE_SECONDS, Heartbeat
from common.keys import Keys
from common.ledger import Books
from grapevine.screen.view import (
    Generator,
    GeneratorFacts,
    Helper,
    LearnerFacts,
    Node,
    Raw,
    Target,
    VerifierFacts,
    View,
    plain,
)
from grapevine.screen.waits import waits

# Entries that a newer release wrote are the oldest of their stream; more than these are not counted.
NEWER_LOOKED_AT = 50
# No figure of a run is greater.
MOST = 10**15
COLUMNS = ("ordered", "trained", "filtered", "expired", "incarnation", "round")


def look(client: redis.Redis, keys: Keys, before: View | None = None) -> View:
    """The run as it is now. `before` is an earlier view of it, for what changes and for figures of who has left since.

    Raises redis.ConnectionError or redis.TimeoutError when the server is away.
    """
    first = client.pipeline(transaction=False)
    first.time()
    first.hgetall(keys.targets())
    first.hgetall(keys.workers())
    (seconds, micros), places, found = first.execute()
    now = seconds + micros / 1e6
    sites = {plain(name): plain(site) for name, site in places.items()}
    beats = [_heartbeat(field, data) for field, data in sorted(found.items())]
    learners = {beat.name: beat for beat in beats if beat.role == "learner"}
    nodes = sorted({*(name for name in sites if not name.startswith("eval-")), *learners}, key=_by_number)
    targets = [*nodes, *sorted(name for name in sites if name.startswith("eval-"))]
    streams = _Streams(client, keys, targets, sorted(set(sites.values())))
    known = {target: streams.target(target, sites.get(target, "")) for target in targets}
    earlier = {node.name: node for node in before.nodes} if before else {}
    rates = {one.name: one for one in before.generators} if before else {}
    view = View(
        run=keys.run,
        at=now,
        nodes=tuple(
            _node(name, known[name], streams.books(name), learners.get(name), earlier.get(name), now) for name in nodes
        ),
        evaluations=tuple(known[name] for name in targets[len(nodes) :]),
        generators=tuple(_generator(beat, rates.get(beat.name), now) for beat in beats if beat.role == "generator"),
        helpers=tuple(
            Helper(beat.role, beat.name, *_age(beat, now), _facts(beat, VerifierFacts()).scored)
            for beat in beats
            if beat.role not in ("learner", "generator")
        ),
        raw=tuple(streams.raw()),
        counts=streams.counts(),
        newer=streams.newer(),
    )
    return replace(view, waits=tuple(waits(view)))


class _Streams:
    """All streams, books and counts of a run, read in one transaction."""

    def __init__(self, client: redis.Redis, keys: Keys, targets: list[str], sites: list[str]) -> None:
        self._keys = keys
        # XPENDING's answer is an error where nobody has read yet.
        pipeline: Any = client.pipeline(transaction=True)
        wanted: list[Any] = []
        for shard in range(keys.shards):
            wanted += [("open", shard), ("counts", shard)]
            pipeline.hkeys(keys.open(shard))
            pipeline.hgetall(keys.counts(shard))
            for site in sites:
                wanted += [("raw", shard, site), ("raw taken", shard, site), ("newer", "raw", shard, site)]
                self._stream(pipeline, keys.raw(shard, site), "verifiers")
        for target in targets:
            wanted += [("orders", target), ("orders taken", target), ("newer", "orders", target)]
            self._stream(pipeline, keys.orders(target), "generators")
            wanted += [("own", target), ("own taken", target), ("newer", "own", target), ("books", target)]
            self._stream(pipeline, keys.own(target), "learner")
            pipeline.hmget(keys.books(target), COLUMNS)
        self._found: dict[Any, Any] = dict(zip(wanted, pipeline.execute(raise_on_error=False), strict=True))
        for answer in self._found.values():
            if isinstance(answer, redis.RedisError) and "NOGROUP" not in str(answer):
                raise answer
        self._open: dict[str, int] = {}
        for key, ids in self._found.items():
            for id in ids if key[0] == "open" else ():
                name = id.rpartition(b"/")[0].decode(errors="replace")
                self._open[name] = self._open.get(name, 0) + 1

    @staticmethod
    def _stream(pipeline: Any, stream: str, group: str) -> None:
        pipeline.xlen(stream)
        pipeline.xpending(stream, group)
        pipeline.xpending_range(stream, group, "-", "+", NEWER_LOOKED_AT)

    def _taken(self, *key: Any) -> int:
        answer = self._found[key]
        return 0 if isinstance(answer, redis.RedisError) else int(answer["pending"])

    def target(self, name: str, site: str) -> Target:
        found = self._found
        return Target(name, site, found["orders", name], self._taken("orders taken", name), found["own", name])

    def books(self, name: str) -> Books:
        figures = dict(zip(COLUMNS, map(_count, self._found["books", name]), strict=True))
        return Books(open=self._open.get(name, 0), waiting=self._found["own", name], **figures)

    def raw(self) -> Iterator[Raw]:
        for key in self._found:
            if key[0] == "raw":
                yield Raw(key[1], key[2], self._found[key], self._taken("raw taken", *key[1:]))

    def counts(self) -> dict[str, int]:
        totals: dict[str, int] = {}
        for shard in range(self._keys.shards):
            for field, value in self._found["counts", shard].items():
                totals[plain(field)] = totals.get(plain(field), 0) + _count(value)
        return dict(sorted(totals.items()))

    def newer(self) -> int:
        """Entries left for a newer release: their count of deliveries was set to 0."""
        pages = [rows for key, rows in self._found.items() if key[0] == "newer" and not isinstance(rows, redis.RedisError)]
        return sum(row["times_delivered"] == 0 for rows in pages for row in rows)


def _count(value: bytes | None) -> int:
    """A figure of the ledger; 0 for what is none."""
    try:
        return int(value or 0)
    except ValueError:
        return 0


def _heartbeat(field: bytes, data: bytes) -> Heartbeat:
    """A heartbeat; what cannot be read is one that was never heard of, under the name it is kept by."""
    role, _, name = plain(field).partition(":")
    try:
        beat = msgspec.json.decode(data, type=Heartbeat)
    except UNREADABLE:
        return Heartbeat(role, name, 0.0)
    return Heartbeat(role, name, beat.at, beat.facts)


def _facts(beat: Heartbeat, default: Any) -> Any:
    """A heartbeat's facts in the shape of `default`, which stands for those that have another."""
    try:
        return msgspec.convert(_plain_tree(beat.facts), type(default), strict=False)
    except UNREADABLE:
        return default


def _plain_tree(value: Any) -> Any:
    """Facts that can be drawn: no control characters, no numbers that are none of a run's."""
    if isinstance(value, str):
        return plain(value)
    if isinstance(value, dict):
        return {plain(str(key)): _plain_tree(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_plain_tree(one) for one in value[:256]]
    return max(-MOST, min(MOST, value)) if isinstance(value, int | float) and not isinstance(value, bool) else value


def _age(beat: Heartbeat, now: float) -> tuple[float, bool]:
    age = max(0.0, now - beat.at)
    return age, age > WORKER_GONE_SECONDS


def _node(name: str, target: Target, books: Books, beat: Heartbeat | None, before: Node | None, now: float) -> Node:
    if beat is None:
        # Its learner has left in good order, or was never here: what it said last still tells how far it came.
        facts = before.facts if before else LearnerFacts()
        facts = msgspec.structs.replace(facts, round=max(facts.round, books.round), tokens_per_second=0.0)
        return Node(name, target, books, facts, None, False, "complete" if 0 < facts.rounds <= facts.round else "no learner")
    age, silent = _age(beat, now)
    facts = _facts(beat, LearnerFacts())
    return Node(name, target, books, facts, age, silent, "silent" if silent else facts.state or "unknown")


def _generator(beat: Heartbeat, before: Generator | None, now: float) -> Generator:
    facts = _facts(beat, GeneratorFacts())
    rate = before.tokens_per_second if before else None
    if before and beat.at > before.at and facts.tokens >= before.facts.tokens:
        rate = (facts.tokens - before.facts.tokens) / (beat.at - before.at)
    return Generator(beat.name, facts, beat.at, *_age(beat, now), rate)


def _by_number(name: str) -> tuple[str, int, str]:
    """node-2 before node-10."""
    stem = name.rstrip("0123456789")
    return stem, int(name[len(stem) :] or 0), name
