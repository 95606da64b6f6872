"""Orders on their way in: read from the streams, checked, and skipped where nobody waits for them any more.

Guarantees: an order that is taken stays pending until it is answered, refused, or handed back; what a generator that fell
silent had taken is taken over by others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

import structlog

from common import metrics
from common.directory import Directory
from common.identity import unseal
from common.ledger import Entry, Ledger
from common.messages import NewerSchema, Order, Refused

GROUP = "generators"
MOST_TAKEN_OVER = 64

log = structlog.get_logger()


@dataclass(frozen=True)
class Taken:
    """An order in hand: the entry it came in, what it says, and its sealed bytes."""

    entry: Entry
    order: Order
    data: bytes


class Intake:
    """Reads the orders of any target of one site, for one generator."""

    def __init__(self, name: str, site: str, ledger: Ledger, directory: Directory, quiet_seconds: float) -> None:
        """`quiet_seconds`: a generator silent for so long has lost its orders."""
        self._name = name
        self._site = site
        self._ledger = ledger
        self._directory = directory
        self._quiet = quiet_seconds
        self._backlog_read: set[str] = set()
        self._looked = float("-inf")

    def forget(self) -> None:
        """After a start or a lost connection: what this generator took before is read again."""
        self._backlog_read.clear()

    def take(self, target: str, count: int, wait_ms: int, in_hand: Collection[Taken]) -> tuple[int, list[Taken]]:
        """Up to `count` new orders, and on the first visit those taken earlier and not `in_hand`.

        Returns how many entries were read, and the orders among them that still want an answer.
        """
        held = {taken.entry.id for taken in in_hand}
        entries: list[Entry] = []
        if target not in self._backlog_read:
            self._backlog_read.add(target)
            backlog = self._ledger.take_orders(target, self._name, 1000, 0, backlog=True)
            entries += [entry for entry in backlog if entry.id not in held]
            # Those in hand were read again only by the way, which is no new attempt at them.
            again = [(taken.entry.stream, taken.entry.id) for taken in in_hand]
            self._ledger.keep(again, GROUP, self._name, deliveries=1)
        if count > 0:
            entries += self._ledger.take_orders(target, self._name, count, 0 if entries else wait_ms)
        readable = [taken for taken in (self._read(target, entry) for entry in entries) if taken is not None]
        return len(entries), self._wanted(target, readable, {taken.order.id for taken in in_hand})

    def _read(self, target: str, entry: Entry) -> Taken | None:
        try:
            order, node = unseal(Order, entry.data, self._directory.lookup)
            if node.name != order.node or order.target != target:
                raise Refused("wrong_node", f"an order of {order.node} for {order.target}, signed by {node.name}")
            if node.site != self._site:
                raise Refused("foreign_site", f"node {node.name} belongs to site {node.site}")
        except NewerSchema:
            self._ledger.leave(self._ledger.keys.shard_of(target), GROUP, entry, "orders", self._name)
            return None
        except Refused as refusal:
            self.refuse(target, entry, refusal)
            return None
        return Taken(entry, order, entry.data)

    def _wanted(self, target: str, found: list[Taken], in_hand: set[str]) -> list[Taken]:
        """Those still open and in time. One asked again while its first entry is in hand is answered by that."""
        now = self._ledger.clock.now()
        still_open = self._ledger.still_open(target, [taken.order.id for taken in found])
        wanted: dict[str, Taken] = {}
        for taken, is_open in zip(found, still_open, strict=True):
            id = taken.order.id
            if is_open and taken.order.deadline > now and id not in in_hand and id not in wanted:
                wanted[id] = taken
            else:
                self.skip(target, [taken])
        return list(wanted.values())

    def closed(self, target: str, taken: Iterable[Taken]) -> list[Taken]:
        """Those of the orders in hand that nobody waits for any more: answered by another generator, or expired."""
        found = list(taken)
        still_open = self._ledger.still_open(target, [one.order.id for one in found])
        return [one for one, is_open in zip(found, still_open, strict=True) if not is_open]

    def skip(self, target: str, taken: Iterable[Taken]) -> None:
        """Finish orders without an answer, since none is wanted."""
        for one in taken:
            metrics.orders_skipped.inc()
            self._ledger.finish(self._ledger.keys.shard_of(target), GROUP, one.entry, "skipped")

    def refuse(self, target: str, entry: Entry, refusal: Refused) -> None:
        """Quarantine an order."""
        metrics.messages_refused.labels("orders", refusal.reason).inc()
        log.debug("order refused", entry=entry.id, reason=refusal.reason, detail=refusal.detail)
        shard = self._ledger.keys.shard_of(target)
        self._ledger.refuse(shard, GROUP, entry, "orders", refusal.reason, refusal.detail, self._name)

    def hand_back(self, target: str, taken: Iterable[Taken]) -> None:
        """Return orders to the stream, so that another generator takes them at once."""
        self._ledger.hand_back(target, self._name, [one.entry.id for one in taken])

    def take_over(self, targets: Callable[[], Collection[str]]) -> list[str]:
        """Every third of the quiet time, take what silent generators hold; the targets where something was found.

        `targets` is asked for the targets to look at, when it is time.
        """
        if time.monotonic() - self._looked < self._quiet / 3:
            return []
        self._looked = time.monotonic()
        keys, found = self._ledger.keys, []
        for target in targets():
            shard, stream, quiet_ms = keys.shard_of(target), keys.orders(target), int(1000 * self._quiet)
            if self._ledger.redeliver(shard, stream, GROUP, "orders", self._name, quiet_ms, MOST_TAKEN_OVER):
                self._backlog_read.discard(target)
                found.append(target)
        return found
