"""The ledger: orders out, groups in, nothing lost and nothing counted twice.

Guarantees, whatever dies and whenever:
- a group is published at most once per open order (the script that removes the order from `open` publishes it);
- an entry leaves a work stream only in the script that hands its content on, or counts why it was refused;
- books: ordered = trained + filtered + expired + open + waiting, where `open` and `waiting` are counted from the streams
  themselves and the rest is what the learner's checkpoint says;
- work streams are never trimmed: open orders bound them, and an entry is deleted with its acknowledgement.

The learner's side of these promises is `learners.orders`. Every script runs within one shard.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

import msgspec
import redis
import structlog

from common.clock import Clock
from common.keys import Keys
from common.messages import Order

log = structlog.get_logger()

QUARANTINE_KEPT = 200
QUARANTINE_HEAD = 2048
DELIVERIES_ALLOWED = 5
CONSUMER_RETIRED_MS = 3_600_000
# A rolling upgrade is over by then; what no worker can read any more must not stay for ever.
NEWER_KEPT_MS = 24 * 3_600_000


class Fenced(Exception):
    """Another learner has taken this target since: this one must stop without writing anything more."""


@dataclass(frozen=True)
class Entry:
    """A stream entry as delivered: where it came from, its id, its bytes."""

    stream: str
    id: str
    data: bytes


@dataclass(frozen=True)
class Books:
    """A target's books at one instant. `waiting` are scored groups that no durable checkpoint names yet."""

    open: int
    waiting: int
    ordered: int
    trained: int
    filtered: int
    expired: int
    incarnation: int
    round: int

    @property
    def lost(self) -> int:
        """Ordered groups that are nowhere. Zero, always."""
        return self.ordered - self.trained - self.filtered - self.expired - self.open - self.waiting


class Ledger:
    """The streams and scripts of one run, for all roles. Holds no state but the connection, and what it warned of.

    `site` says whose raw groups `answer`, `take_raw` and `publish` deal with.
    """

    def __init__(self, client: redis.Redis, keys: Keys, clock: Clock, site: str = "local") -> None:
        self.redis: Any = client
        self.keys = keys
        self.clock = clock
        self.site = site
        self._newer: set[str] = set()
        folder = resources.files("common") / "lua"
        self._scripts = {
            name: client.register_script((folder / f"{name}.lua").read_text())
            for name in ("settle", "replace", "answer", "hand_back", "publish", "finish", "redeliver", "books")
        }

    # --- learner ---

    def settle(
        self,
        target: str,
        incarnation: int,
        round: int,
        totals: tuple[int, int, int, int],
        policy: bytes,
        acks: Sequence[str] = (),
        drops: Sequence[str] = (),
        orders: Iterable[tuple[str, int, bytes]] = (),
        force: bool = False,
    ) -> bool:
        """Make the learner's state the server's (see settle.lua). Totals: ordered, trained, filtered, expired.

        Orders are (id, deadline, sealed order). Returns False when the round was settled before.
        Raises Fenced when a later incarnation has joined.
        """
        keys = self.keys
        shard = keys.shard_of(target)
        args: list[Any] = [incarnation, round, int(force), *totals, policy, len(acks), *acks, len(drops), *drops]
        for order in orders:
            args += order
        names = [keys.open(shard), keys.orders(target), keys.own(target), keys.books(target), keys.policy(target)]
        return bool(self._fenced("settle", names, args))

    def replace(self, target: str, incarnation: int, id: str, deadline: int, order: tuple[str, int, bytes]) -> bool:
        """Ask an overdue order again, or (under another id) give it up for a new one.

        Returns False, having done nothing, when the order is no longer open with that deadline. Raises Fenced.
        """
        names = [self.keys.open(self.keys.shard_of(target)), self.keys.orders(target), self.keys.books(target)]
        return bool(self._fenced("replace", names, [incarnation, id, deadline, *order]))

    def _fenced(self, script: str, names: list[str], args: list[Any]) -> Any:
        try:
            return self._scripts[script](names, args)
        except redis.ResponseError as error:
            if "FENCED" in str(error):
                raise Fenced(
                    f"this node was taken over by a later learner ({error}); run one learner per node, "
                    f"and where its folder was lost begin anew with `grapevine up --fresh`"
                ) from None
            raise

    def deadlines(self, target: str, ids: Sequence[str]) -> list[int | None]:
        """The deadline of each order, None where it is no longer open."""
        if not ids:
            return []
        found = self.redis.hmget(self.keys.open(self.keys.shard_of(target)), ids)
        return [int(value) if value is not None else None for value in found]

    def open_ids(self, target: str) -> list[str]:
        """All open orders of a target."""
        prefix = f"{target}/".encode()
        found = self.redis.hkeys(self.keys.open(self.keys.shard_of(target)))
        # What others wrote there under this target's name, and is no order of it, is nobody's.
        return [id.decode() for id in found if id.startswith(prefix) and id[len(prefix) :].isdigit()]

    def own_entries(self, target: str) -> list[Entry]:
        """Everything in the own stream, read without moving the consumer group."""
        stream = self.keys.own(target)
        return [Entry(stream, id.decode(), fields.get(b"m", b"")) for id, fields in self.redis.xrange(stream)]

    def take_own(self, target: str, wait_ms: int, backlog: bool = False) -> list[Entry]:
        """New scored groups, or with `backlog` those delivered earlier and not acknowledged."""
        return self._read("learner", target, self.keys.own(target), 1000, wait_ms, backlog)

    def books(self, target: str) -> Books:
        """The books at this instant."""
        names = [self.keys.open(self.keys.shard_of(target)), self.keys.own(target), self.keys.books(target)]
        return Books(*(int(value) for value in self._scripts["books"](names, [f"{target}/"])))

    def forget_target(self, target: str) -> None:
        """Delete all that a temporary target (an evaluation) left behind."""
        keys, shard = self.keys, self.keys.shard_of(target)
        leftover = self.open_ids(target)
        if leftover:
            self.redis.hdel(keys.open(shard), *leftover)
        self.redis.hdel(keys.targets(), target)
        self.redis.delete(keys.orders(target), keys.own(target), keys.books(target), keys.policy(target))

    # --- generator ---

    def take_orders(self, target: str, me: str, count: int, wait_ms: int, backlog: bool = False) -> list[Entry]:
        """Orders for a target: new ones, or with `backlog` those this consumer took earlier."""
        # An evaluation's stream may be gone by now; reading it must not bring it back.
        return self._read("generators", me, self.keys.orders(target), count, wait_ms, backlog, make=False)

    def still_open(self, target: str, ids: Sequence[str]) -> list[bool]:
        """Which orders still want an answer."""
        return [deadline is not None for deadline in self.deadlines(target, ids)]

    def answer(self, target: str, entry_id: str, message: bytes) -> None:
        """Hand in a raw group and finish its order's entry, atomically."""
        names = [self.keys.orders(target), self.raw(self.keys.shard_of(target))]
        self._scripts["answer"](names, [entry_id, self.clock.stream_id(), message])

    def hand_back(self, target: str, me: str, entry_ids: Sequence[str]) -> int:
        """Return orders that this consumer took and did not answer, as new entries; returns how many."""
        if not entry_ids:
            return 0
        try:
            return int(self._scripts["hand_back"]([self.keys.orders(target)], [me, *entry_ids]))
        except redis.ResponseError as error:
            if _no_group(error):
                return 0
            raise

    # --- verifier ---

    def take_raw(self, shard: int, me: str, count: int, wait_ms: int, backlog: bool = False) -> list[Entry]:
        """The site's raw groups of one shard."""
        return self._read("verifiers", me, self.raw(shard), count, wait_ms, backlog)

    def publish(
        self,
        order: Order,
        entry_id: str,
        own: bytes,
        tag: str,
        swarm: bytes,
        quota: int,
        max_age: int,
    ) -> bool:
        """Publish a scored group to its target's own stream and, unless `swarm` is empty, to the author's swarm stream.

        `max_age` in the clock's unit. Returns False for a duplicate: the order was answered before or is settled.
        """
        keys, clock, target, author = self.keys, self.clock, order.target, order.node
        shard = keys.shard_of(target)
        now = clock.now()
        names = [
            keys.open(shard), self.raw(shard), keys.own(target), keys.counts(shard),
            keys.authors(shard, tag), keys.swarm(author, tag) if swarm else keys.own(target),
        ]  # fmt: skip
        expiry = max_age if clock.unit == "ms" else 0
        args: list[Any] = [
            order.id, entry_id, clock.stream_id(), own,
            swarm, clock.stream_id(), author, quota, expiry, now, max(0, now - max_age), order.purpose,
        ]  # fmt: skip
        return bool(self._scripts["publish"](names, args))

    # --- every role ---

    def raw(self, shard: int) -> str:
        """The stream of this site's raw groups of one shard."""
        return self.keys.raw(shard, self.site)

    def refuse(self, shard: int, group: str, entry: Entry, stream: str, reason: str, detail: str, by: str) -> bool:
        """Quarantine an entry: counted once as refused:<stream>:<reason>, a sample kept."""
        sample = quarantine_sample(stream, reason, detail, by, entry.data)
        return self.finish(shard, group, entry, f"refused:{stream}:{reason}", sample)

    def leave(self, shard: int, group: str, entry: Entry, stream: str, by: str) -> None:
        """Leave a newer release's message to a newer worker; after a day nobody came for it, and it is refused."""
        written = int(entry.id.partition("-")[0])
        if self.clock.unit == "ms" and self.clock.now() - written > NEWER_KEPT_MS:
            self.refuse(shard, group, entry, stream, "newer_schema", "no worker that could read it came within a day", by)
        else:
            self.keep([(entry.stream, entry.id)], group, by, deliveries=0)
            if stream not in self._newer:
                self._newer.add(stream)
                log.warning("left for newer workers: messages that this release cannot read; update it", stream=stream)

    def finish(self, shard: int, group: str, entry: Entry, count: str, sample: bytes = b"") -> bool:
        """Acknowledge and delete an entry, counting it. False when somebody else finished it."""
        names = [entry.stream, self.keys.counts(shard), self.keys.quarantine(shard)]
        return bool(self._scripts["finish"](names, [group, entry.id, count, sample, QUARANTINE_KEPT]))

    def note_refusal(self, shard: int, entry: Entry, stream: str, reason: str, detail: str, by: str) -> None:
        """Count and sample a refused entry of a stream that nobody acknowledges (the swarm's)."""
        pipeline = self.redis.pipeline(transaction=False)
        pipeline.hincrby(self.keys.counts(shard), f"refused:{stream}:{reason}", 1)
        pipeline.lpush(self.keys.quarantine(shard), quarantine_sample(stream, reason, detail, by, entry.data))
        pipeline.ltrim(self.keys.quarantine(shard), 0, QUARANTINE_KEPT - 1)
        pipeline.execute()

    def count_start(self, role: str) -> None:
        """Count the start of a worker: what dies and comes back shows here."""
        self.redis.hincrby(self.keys.counts(0), f"started:{role}", 1)

    def counts(self) -> dict[str, int]:
        """Totals over all shards: scored:<purpose>, shared, duplicates, skipped, redelivered, refused:<stream>:<reason>,
        started:<role>.
        """
        totals: dict[str, int] = {}
        for shard in range(self.keys.shards):
            for field, value in self.redis.hgetall(self.keys.counts(shard)).items():
                totals[field.decode()] = totals.get(field.decode(), 0) + int(value)
        return totals

    def redeliver(
        self,
        shard: int,
        stream: str,
        group: str,
        label: str,
        me: str,
        quiet_ms: int,
        count: int,
        allowed: int = DELIVERIES_ALLOWED,
    ) -> int:
        """Take over what consumers gone quiet for `quiet_ms` hold; read it with `backlog=True`. Returns how many.

        Quarantines what was delivered `allowed` times, and what was left for a newer release for too long.
        """
        names = [stream, self.keys.counts(shard), self.keys.quarantine(shard)]
        oldest = max(0, self.clock.now() - NEWER_KEPT_MS) if self.clock.unit == "ms" else 0
        args: list[Any] = [
            group, me, quiet_ms, count, allowed, label, QUARANTINE_KEPT, QUARANTINE_HEAD, CONSUMER_RETIRED_MS, oldest,
        ]  # fmt: skip
        try:
            return len(self._scripts["redeliver"](names, args))
        except redis.ResponseError as error:
            if _no_group(error):
                return 0
            raise

    def keep(self, entries: Sequence[tuple[str, str]], group: str, me: str, deliveries: int | None = None) -> None:
        """Say that (stream, id) entries are still being worked on, so that nobody takes them over.

        `deliveries` sets their count: 0 for what waits for a newer release, 1 for what was read and never tried.
        """
        for stream in {stream for stream, _ in entries}:
            ids = [id for name, id in entries if name == stream]
            try:
                self.redis.xclaim(stream, group, me, 0, ids, justid=True, retrycount=deliveries)
            except redis.ResponseError as error:
                if not _no_group(error):
                    raise

    def _read(
        self, group: str, me: str, stream: str, count: int, wait_ms: int, backlog: bool, make: bool = True
    ) -> list[Entry]:
        after, block = (b"0", None) if backlog else (b">", wait_ms if wait_ms > 0 else None)
        entries: list[Entry] = []
        while True:
            try:
                found = self.redis.xreadgroup(group, me, {stream: after}, count=count, block=block)
            except redis.ResponseError as error:
                if not _no_group(error):
                    raise
                if not self._make_group(stream, group, make):
                    return []
                continue
            rows = found[0][1] if found else []
            for id, fields in rows:
                # An entry whose fields are gone was deleted while pending; acknowledging it is all that is left to do.
                if fields is None:
                    self.redis.xack(stream, group, id)
                else:
                    entries.append(Entry(stream, id.decode(), fields.get(b"m", b"")))
            # A backlog is read to its end: what waits there for a newer release must not hide what lies behind it.
            if not backlog or len(rows) < count:
                return entries
            after = rows[-1][0]

    def _make_group(self, stream: str, group: str, make_stream: bool) -> bool:
        """Make the group of readers where it is missing; False when there is no stream and none is to be made."""
        try:
            self.redis.xgroup_create(stream, group, id="0", mkstream=make_stream)
        except redis.ResponseError as error:
            if "requires the key to exist" in str(error):
                return False
            if "BUSYGROUP" not in str(error):
                raise
        return True


def quarantine_sample(stream: str, reason: str, detail: str, by: str, data: bytes) -> bytes:
    """What the quarantine keeps of a refused message."""
    return msgspec.msgpack.encode(
        {"stream": stream, "reason": reason, "detail": detail[:300], "by": by, "head": data[:QUARANTINE_HEAD]}
    )


def _no_group(error: redis.ResponseError) -> bool:
    return "NOGROUP" in str(error) or "no such key" in str(error)
