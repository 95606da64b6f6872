"""A generator: orders in, raw groups out, always with the target's newest policy.

Guarantees: an order's entry is finished only together with its raw group; orders no longer open are skipped, not
generated; a policy is loaded only after its checksum agreed, and a bad one leaves the old one serving and is counted; no
order is answered by a policy older than it allows.
"""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from typing import Any

import structlog

from common import metrics
from common.directory import Directory, Policy
from common.identity import Identity, unseal
from common.ledger import Entry, Ledger
from common.messages import NewerSchema, Order, RawGroup, Refused, Version
from common.policies import BadPolicy, fetch
from common.settings import Settings
from common.tasks import TaskRefused, build
from generators.engines.base import Engine, PolicyUnusable, Request
from generators.pool import Pool

log = structlog.get_logger()

IDLE_WAIT_MS = 100
RETRY_SECONDS = 10.0


class Generator:
    """One engine that serves one target at a time."""

    role = "generator"

    def __init__(
        self,
        name: str,
        settings: Settings,
        ledger: Ledger,
        directory: Directory,
        identity: Identity,
        engine: Engine,
        cache: Path,
    ) -> None:
        self.name = name
        self._settings = settings
        self._ledger = ledger
        self._directory = directory
        self._identity = identity
        self._engine = engine
        self._cache = cache
        fixed = settings.generators.target
        self.pool = Pool(directory, name, settings.site, None if fixed == "auto" else fixed)
        self._loaded: tuple[str, Version] | None = None
        self._hand: list[tuple[Entry, Order, bytes]] = []
        self._model: str | None = None
        self._read: set[str] = set()
        self._failed: dict[str, tuple[Policy, float]] = {}
        self._looked_for_quiet: dict[str, float] = {}
        self._tokens = 0
        self._groups = 0

    def rejoin(self) -> None:
        """Register the key; orders taken before are read again from the streams."""
        self._directory.register(self._identity)
        self._hand, self._read, self.pool.current = [], set(), None

    def step(self) -> bool:
        """Take a batch of orders, answer it."""
        target = self.pool.choose()
        if target is None:
            time.sleep(self._wait_ms / 1000)
            return True
        self._take_over(target)
        found = self._take(target)
        if not self._hand:
            if not found:
                self.pool.ran_dry(target)
            return True
        if self._ready(target):
            self._answer(target)
        else:
            # They stay pending with this consumer and are read again on the next visit; others are served meanwhile.
            # Reading them again is no attempt, so it does not count as a delivery.
            self._ledger.keep(self.in_hand()[1], "generators", self.name, deliveries=1)
            self._hand = []
            self._read.discard(target)
            self.pool.ran_dry(target)
            time.sleep(self._wait_ms / 1000)
        return True

    # --- taking orders ---

    def _take(self, target: str) -> int:
        """Fill the hand with orders that still want an answer; returns how many entries were read."""
        room = self._settings.generators.batch_orders - len(self._hand)
        entries: list[Entry] = []
        held = {entry.id for entry, _, _ in self._hand}
        if target not in self._read:
            # The first visit after a start or a lost connection: what this consumer took and never answered.
            self._read.add(target)
            backlog = self._ledger.take_orders(target, self.name, 1000, 0, backlog=True)
            entries += [entry for entry in backlog if entry.id not in held]
        if room > 0:
            entries += self._ledger.take_orders(target, self.name, room, 0 if self._hand or entries else self._wait_ms)
        shard = self._ledger.keys.shard_of(target)
        readable: list[tuple[Entry, Order, bytes]] = []
        for entry in entries:
            try:
                order, node = unseal(Order, entry.data, self._directory.lookup)
                if node.name != order.node or order.target != target:
                    raise Refused("wrong_node", f"an order of {order.node} for {order.target}, signed by {node.name}")
                if node.site != self._identity.record.site:
                    raise Refused("foreign_site", f"node {node.name} belongs to site {node.site}")
                readable.append((entry, order, entry.data))
            except NewerSchema:
                self._ledger.leave(shard, "generators", entry, "orders", self.name)
            except Refused as refusal:
                self._refuse(shard, entry, refusal)
        wanted = self._ledger.still_open(target, [order.id for _, order, _ in readable])
        now = self._ledger.clock.now()
        for (entry, order, data), is_open in zip(readable, wanted, strict=True):
            if is_open and order.deadline > now:
                self._hand.append((entry, order, data))
            else:
                metrics.orders_skipped.inc()
                self._ledger.finish(shard, "generators", entry, "skipped")
        return len(entries)

    @property
    def _wait_ms(self) -> int:
        return IDLE_WAIT_MS if self._ledger.clock.unit == "ms" else 0

    def _take_over(self, target: str) -> None:
        """Every third of the quiet time, look for orders of this target whose generator fell silent."""
        quiet = self._settings.redeliver_seconds
        if time.monotonic() - self._looked_for_quiet.get(target, 0.0) < quiet / 3:
            return
        self._looked_for_quiet[target] = time.monotonic()
        keys = self._ledger.keys
        shard, stream = keys.shard_of(target), keys.orders(target)
        if self._ledger.redeliver(shard, stream, "generators", "orders", self.name, int(1000 * quiet), 64):
            self._read.discard(target)

    def _refuse(self, shard: int, entry: Entry, refusal: Refused) -> None:
        metrics.messages_refused.labels("orders", refusal.reason).inc()
        log.debug("order refused", entry=entry.id, reason=refusal.reason, detail=refusal.detail)
        self._ledger.refuse(shard, "generators", entry, "orders", refusal.reason, refusal.detail, self.name)

    # --- answering ---

    def _ready(self, target: str) -> bool:
        """Have the target's newest policy in the engine; False when what is there may not answer the orders in hand."""
        policy = self._directory.policy(target)
        if policy is None:
            return False
        if self._loaded != (target, policy.version) and not self._failed_lately(target, policy):
            try:
                if policy.model != self._model:
                    self._loaded = None
                    self._engine.open_model(policy.model)
                    self._model = policy.model
                local = fetch(policy, self._cache)
                try:
                    self._engine.load_policy(local, policy.version)
                finally:
                    local.unlink()
                self._loaded = (target, policy.version)
                metrics.policies_loaded.labels(target).inc()
            except (BadPolicy, PolicyUnusable) as error:
                metrics.policies_refused.labels(getattr(error, "reason", "shape")).inc()
                log.warning("policy not loaded", target=target, version=str(policy.version), detail=str(error))
                if isinstance(error, PolicyUnusable):
                    self._failed[target] = (policy, time.monotonic())
        if self._loaded is None or self._loaded[0] != target:
            return False
        serving = self._loaded[1]
        return all(order.lowest <= serving for _, order, _ in self._hand)

    def _failed_lately(self, target: str, policy: Policy) -> bool:
        """Whether a model or policy that cannot be used was tried within RETRY_SECONDS: others are served meanwhile."""
        failed, at = self._failed.get(target, (None, 0.0))
        return failed == policy and time.monotonic() - at < RETRY_SECONDS

    def _answer(self, target: str) -> None:
        shard = self._ledger.keys.shard_of(target)
        batch: list[tuple[Entry, Order, bytes]] = []
        requests: list[Request] = []
        for entry, order, data in self._hand:
            try:
                item = build(order.question)
            except TaskRefused as refusal:
                self._refuse(shard, entry, Refused("bad_question", str(refusal)))
                continue
            batch.append((entry, order, data))
            seed = int.from_bytes(hashlib.sha256(f"{self._settings.seed} {order.id}".encode()).digest()[:8])
            requests.append(Request(item.text, order.completions, order.sampling, seed))
        self._hand = batch
        for (entry, _, data), completions in zip(batch, self._engine.generate(requests), strict=True):
            group = RawGroup(order=data, completions=completions, model=self._model or "")
            self._ledger.answer(target, entry.id, self._identity.seal(group))
            self._tokens += sum(c.tokens for c in completions)
            self._groups += 1
            metrics.tokens_generated.labels(target).inc(sum(c.tokens for c in completions))
            metrics.groups_answered.labels(target).inc()
        self._hand = []

    def drain(self) -> None:
        """A batch is answered within its step; orders in hand without a policy stay pending and are redelivered."""
        self._hand = []

    def facts(self) -> dict[str, Any]:
        """Target, policy, totals since the start."""
        serving = str(self._loaded[1]) if self._loaded else ""
        return {"target": self.pool.current, "policy": serving, "tokens": self._tokens, "groups": self._groups}

    def in_hand(self) -> tuple[str, list[tuple[str, str]]]:
        """The orders being answered."""
        return "generators", [(entry.stream, entry.id) for entry, _, _ in list(self._hand)]
