"""One target's account: which orders exist, which are settled, which wait. The learner's side of the ledger.

Guarantees:
- the checkpoint is the truth: `state` is saved with the weights, and whatever the server says is brought in line with it
  (`reconcile`) after every start, lost connection and server restart;
- every order number below `state.next` is settled, open on the server, or waiting in the own stream; those that are
  nowhere are asked again under the same number;
- a settled number is never returned by `poll` again.

No torch here: this file and the ledger are what the chaos test tortures.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import msgspec

from common import metrics
from common.identity import Identity, KeyLookup, unseal
from common.ledger import Entry, Ledger
from common.messages import NewerSchema, Order, Refused, ScoredGroup
from common.tasks import Question


class AccountState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a checkpoint says of an account. All numbers below `watermark` and those in `above` are settled."""

    next: int = 0
    watermark: int = 0
    above: tuple[int, ...] = ()
    trained: int = 0
    filtered: int = 0
    expired: int = 0

    def is_settled(self, number: int) -> bool:
        """Whether this order is done with."""
        return number < self.watermark or number in self.above

    def settled(
        self, trained: Sequence[int] = (), filtered: Sequence[int] = (), expired: Sequence[int] = ()
    ) -> AccountState:
        """The state after these numbers are done with. Raises ValueError when one of them already was, or never was."""
        numbers = [*trained, *filtered, *expired]
        above = set(self.above)
        for number in numbers:
            if number >= self.next or number < self.watermark or number in above:
                raise ValueError(f"order {number} cannot be settled (again)")
            above.add(number)
        watermark = self.watermark
        while watermark in above:
            above.remove(watermark)
            watermark += 1
        return AccountState(
            next=self.next,
            watermark=watermark,
            above=tuple(sorted(above)),
            trained=self.trained + len(trained),
            filtered=self.filtered + len(filtered),
            expired=self.expired + len(expired),
        )

    def extended(self, to: int) -> AccountState:
        """The state after ordering up to `to` (exclusive)."""
        return msgspec.structs.replace(self, next=max(self.next, to))

    def outstanding(self) -> list[int]:
        """Ordered and not settled, ascending."""
        return [number for number in range(self.watermark, self.next) if number not in self.above]


class Arrived(msgspec.Struct, frozen=True):
    """A scored group that waits for its round: its order number, its entry in the own stream."""

    number: int
    entry_id: str
    group: ScoredGroup


class Account:
    """Places orders for one target and collects their groups.

    `make_order(number)` must give the same question for the same number, in every incarnation; `limit()` says how many
    orders may be outstanding.
    """

    def __init__(
        self,
        ledger: Ledger,
        lookup: KeyLookup,
        identity: Identity,
        target: str,
        incarnation: int,
        make_order: Callable[[int], Order],
        limit: Callable[[], int],
        state: AccountState,
        attempts: int = 4,
    ) -> None:
        self._ledger = ledger
        self._lookup = lookup
        self._identity = identity
        self._target = target
        self._shard = ledger.keys.shard_of(target)
        self._incarnation = incarnation
        self._make_order = make_order
        self._limit = limit
        self._attempts = attempts
        self._asked: dict[int, int] = {}
        self._questions: dict[int, bytes] = {}
        self._missed: set[int] = set()
        self._backlog_unread = True
        self._unacknowledged: list[str] = []
        self.state = state
        self.durable = state
        self.waiting: dict[int, Arrived] = {}

    # --- ordering ---

    def room(self, limit: int, leaving: int = 0) -> int:
        """How many more orders fit under `limit` once `leaving` of them are settled."""
        return max(0, limit - (len(self.state.outstanding()) - leaving))

    def settle(self, round: int, state: AccountState, policy: bytes, durable: bool = True) -> None:
        """Make `state` the account's: acknowledge what a checkpoint holds, order anew, announce the policy.

        With `durable` a checkpoint on disk holds `state`. Without, the groups settled since stay pending on the server
        until the next durable settle, so that a crash finds them again. Raises Fenced when another learner took over.
        """
        done = [number for number in self.waiting if state.is_settled(number)]
        self._unacknowledged += [self.waiting.pop(number).entry_id for number in done]
        orders = [self._sealed(number) for number in range(self.state.next, state.next)]
        # The state moves first: should the reply be lost, `reconcile` repairs the server from it.
        self.state = state
        acks = []
        if durable:
            self.durable, acks, self._unacknowledged = state, self._unacknowledged, []
        self._ledger.settle(self._target, self._incarnation, round, self._totals(), policy, acks=acks, orders=orders)
        self._asked = {number: asked for number, asked in self._asked.items() if not state.is_settled(number)}
        self._questions = {number: asked for number, asked in self._questions.items() if not state.is_settled(number)}

    def top_up(self, round: int, policy: bytes, limit: int) -> None:
        """Order up to `limit` outstanding between two rounds. Raises Fenced when another learner took over."""
        fresh = range(self.state.next, self.state.next + self.room(limit))
        if fresh:
            orders = [self._sealed(number) for number in fresh]
            self.state = self.state.extended(fresh.stop)
            self._ledger.settle(self._target, self._incarnation, round, self._totals(), policy, orders=orders, force=True)

    def reconcile(self, round: int, policy: bytes) -> None:
        """Bring the server in line with the state, whatever it remembers, and order up to the limit.

        Forgets what was read and reads it again.

        Raises Fenced when another learner took over.
        """
        # `open` is read first: an order only ever moves from `open` to the own stream, so none is missed in between.
        found_open = {number for id in self._ledger.open_ids(self._target) if (number := self._number(id)) is not None}
        entries = self._ledger.own_entries(self._target)
        # Orders placed since the checkpoint are taken over, as far as the books know of them: a forged number is not.
        self.state = self.state.extended(self._ledger.books(self._target).ordered)
        self.waiting, self._unacknowledged, self._backlog_unread, self._missed = {}, [], True, set()
        done: list[str] = []
        seen: set[int] = set()
        for entry in entries:
            number = self._number_of(entry)
            if number is None or number >= self.state.next:
                continue
            if self.durable.is_settled(number) or number in seen:
                done.append(entry.id)
            elif self.state.is_settled(number):
                self._unacknowledged.append(entry.id)
            seen.add(number)
        known = seen | found_open
        missing = [number for number in self.state.outstanding() if number not in known]
        drops = [
            f"{self._target}/{number}" for number in found_open if number >= self.state.next or self.state.is_settled(number)
        ]
        fresh = range(self.state.next, self.state.next + self.room(self._limit()))
        self.state = self.state.extended(fresh.stop)
        orders = [self._sealed(number) for number in [*missing, *fresh]]
        self._ledger.settle(
            self._target,
            self._incarnation,
            round,
            self._totals(),
            policy,
            acks=done,
            drops=drops,
            orders=orders,
            force=True,
        )

    def tend(self, round: int, policy: bytes) -> tuple[int, int]:
        """Ask overdue orders again; after `attempts` give them up for new ones. Returns (asked again, given up).

        An order that is neither open nor waiting twice in a row, with a `poll` in between, is nowhere: `reconcile`.
        """
        numbers = [number for number in self.state.outstanding() if number not in self.waiting]
        deadlines = self._ledger.deadlines(self._target, [f"{self._target}/{number}" for number in numbers])
        nowhere = {number for number, deadline in zip(numbers, deadlines, strict=True) if deadline is None}
        if nowhere & self._missed:
            self.reconcile(round, policy)
            return len(nowhere), 0
        self._missed = nowhere
        # Nobody takes over from the one reader of this stream; only what was left for a newer release too long goes.
        stream = self._ledger.keys.own(self._target)
        self._ledger.redeliver(self._shard, stream, "learner", "own", self._target, 0, 0, allowed=sys.maxsize)
        now, asked_again, given_up = self._ledger.clock.now(), 0, 0
        for number, deadline in zip(numbers, deadlines, strict=True):
            if deadline is None or deadline >= now:
                continue
            give_up = self._asked.get(number, 1) >= self._attempts
            new = self.state.next if give_up else number
            id = f"{self._target}/{number}"
            if not self._ledger.replace(self._target, self._incarnation, id, deadline, self._sealed(new)):
                continue
            if give_up:
                self.state = self.state.extended(new + 1).settled(expired=[number])
                self._asked.pop(number, None)
                given_up += 1
            else:
                self._asked[number] = self._asked.get(number, 1) + 1
                asked_again += 1
        return asked_again, given_up

    def times_asked(self, number: int) -> int:
        """How often an order that is not settled was placed by this process, the first time included."""
        return self._asked.get(number, 1)

    def _totals(self) -> tuple[int, int, int, int]:
        # What no checkpoint holds yet still waits in the own stream, and counts as waiting, unless the server forgot it:
        # then it is with us alone.
        state, durable = self.state, self.durable
        undurable = state.trained + state.filtered - durable.trained - durable.filtered
        forgotten = undurable - len(self._unacknowledged)
        return (state.next, durable.trained + forgotten, durable.filtered, state.expired)

    def _sealed(self, number: int) -> tuple[str, int, bytes]:
        order = self._make_order(number)
        self._questions[number] = msgspec.msgpack.encode(order.question)
        return order.id, order.deadline, self._identity.seal(order)

    # --- collecting ---

    def poll(self, wait_ms: int = 0) -> list[Arrived]:
        """Read what has arrived; new groups are returned and stay in `waiting` until settled."""
        entries = []
        if self._backlog_unread:
            entries = self._ledger.take_own(self._target, 0, backlog=True)
            self._backlog_unread = False
        entries += self._ledger.take_own(self._target, 0 if entries else wait_ms)
        arrived = []
        for entry in entries:
            try:
                group = self._open(entry)
                number = self._number(group.order_id)
                if number is None or number >= self.state.next:
                    raise Refused("unknown_order", f"{group.order_id} was never ordered here")
                if not self.state.is_settled(number) and not self._is_asked(number, group.question):
                    raise Refused("wrong_question", f"{group.order_id} asked another question")
            except NewerSchema:
                self._ledger.leave(self._shard, "learner", entry, "own", self._target)
                continue
            except Refused as refusal:
                metrics.messages_refused.labels("own", refusal.reason).inc()
                self._ledger.refuse(self._shard, "learner", entry, "own", refusal.reason, refusal.detail, self._target)
                continue
            if self.state.is_settled(number) or number in self.waiting:
                held = self.waiting.get(number)
                # Trained since the last checkpoint and read again after a lost connection: it stays until the next one.
                if entry.id not in self._unacknowledged and (held is None or held.entry_id != entry.id):
                    self._ledger.finish(self._shard, "learner", entry, "duplicates")
                continue
            self.waiting[number] = Arrived(number, entry.id, group)
            arrived.append(self.waiting[number])
        return arrived

    def _is_asked(self, number: int, question: Question) -> bool:
        """Whether a question is the one ordered. As bytes: on the way a tuple in its settings has become a list."""
        if number not in self._questions:
            self._questions[number] = msgspec.msgpack.encode(self._make_order(number).question)
        return self._questions[number] == msgspec.msgpack.encode(question)

    def _open(self, entry: Entry) -> ScoredGroup:
        group, verifier = unseal(ScoredGroup, entry.data, self._lookup)
        if verifier.site != self._identity.record.site:
            raise Refused("foreign_site", f"scored by a verifier of site {verifier.site}")
        return group

    def _number_of(self, entry: Entry) -> int | None:
        """The order number of an own entry, None when it is not a message of this target (`poll` refuses it)."""
        try:
            return self._number(self._open(entry).order_id)
        except (NewerSchema, Refused):
            return None

    def _number(self, id: str) -> int | None:
        target, _, number = id.rpartition("/")
        return int(number) if target == self._target else None
