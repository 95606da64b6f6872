"""A generator: orders in, raw groups out, always with the target's newest policy.

Guarantees: an order's entry is finished only together with its raw group; orders no longer open are skipped, not
generated; no order is answered by a policy older than it allows; new orders are admitted while others are being answered,
and a group is sent as soon as it is whole; what is not answered when the generator ends is handed back.
"""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from typing import Any

import structlog

from common import metrics
from common.directory import Directory
from common.identity import Identity
from common.ledger import Ledger
from common.messages import Completion, RawGroup, Refused, Version
from common.settings import Settings
from common.tasks import TaskRefused, build
from generators.engines.base import Engine, Request, RequestUnfit
from generators.following import Following
from generators.intake import GROUP, Intake, Taken
from generators.pool import Pool

log = structlog.get_logger()

IDLE_WAIT_MS = 100
# While the engine is at work, the server is asked for orders and policies no more often than this.
POLL_SECONDS = 0.02
STILL_WANTED_SECONDS = 1.0
# A node whose policy cannot be had is left alone for so long.
NO_POLICY_SECONDS = 1.0
# A move to another target waits until what is in flight is answered, and may open another model: neither more than a
# small part of the time.
ANSWERS_PER_STAY = 4
OPENINGS_PER_STAY = 10


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
        self._settings = settings.generators
        self._seed = settings.seed
        self._site = settings.site
        self._ledger = ledger
        self._directory = directory
        self._identity = identity
        self._engine = engine
        fixed = self._settings.target
        self.pool = Pool(directory, name, settings.site, None if fixed == "auto" else fixed, self._settings.models)
        self._intake = Intake(name, settings.site, ledger, directory, settings.redeliver_seconds)
        self._policy = Following(engine, directory, cache, settings.policies_token)
        self._target: str | None = None
        self._hand: dict[str, Taken] = {}
        self._flight: dict[str, tuple[Taken, float]] = {}
        self._polled = self._checked = float("-inf")
        self._answer_seconds = 0.0
        self._tokens = 0
        self._groups = 0

    def rejoin(self) -> None:
        """Register the key; orders taken before are read again from the streams."""
        self._directory.register(self._identity)
        self._engine.cancel(list(self._flight))
        self._hand, self._flight, self.pool.current = {}, {}, None
        self._intake.forget()
        for target in self._directory.targets(self._site):
            self.pool.come_back(target)

    def step(self) -> bool:
        """Take orders where there is room, sample on, send the groups that are whole."""
        if not self._flight or time.monotonic() - self._polled > POLL_SECONDS:
            self._polled = time.monotonic()
            self._look_around()
        if self._flight and self._target is not None:
            self._sample(self._target)
        return True

    def _look_around(self) -> None:
        """Choose whom to serve, take orders, keep at the policy."""
        for target in self._intake.take_over(self.pool.served_targets):
            self.pool.come_back(target)
        choice = self.pool.choose(
            max(ANSWERS_PER_STAY * self._answer_seconds, OPENINGS_PER_STAY * self._policy.change_seconds)
        )
        if not self._flight:
            self._target = choice
        if self._target is None:
            time.sleep(self._wait_ms / 1000)
        elif choice in (None, self._target):
            self._serve(self._target)
        # Otherwise it is about to move: what is in flight is answered and nothing new taken.

    # --- taking orders ---

    @property
    def _wait_ms(self) -> int:
        return IDLE_WAIT_MS if self._ledger.clock.unit == "ms" else 0

    def _serve(self, target: str) -> None:
        """The newest policy into the engine, orders into the hand, and those that the policy may answer into the engine."""
        self.pool.visited(target)
        if self._policy.serving(target) is None and self._policy.follow(target) is None:
            # Nothing of its is taken, so that a generator that can load its policy may.
            self.pool.ran_dry(target, NO_POLICY_SECONDS)
            time.sleep(self._wait_ms / 1000)
            return
        found = self._take(target)
        if self._flight and self._polled - self._checked > STILL_WANTED_SECONDS:
            self._checked = self._polled
            self._drop(target, self._intake.closed(target, [taken for taken, _ in self._flight.values()]))
        # After taking them, since a policy is announced together with the orders that ask for it.
        serving = self._policy.follow(target)
        if serving is not None:
            self._submit(target, serving)
        if self._flight:
            return
        if self._hand:
            # The policy that they ask for cannot be had here, or not yet.
            self._intake.hand_back(target, self._hand.values())
            self._hand = {}
            self.pool.ran_dry(target, NO_POLICY_SECONDS)
            time.sleep(self._wait_ms / 1000)
        elif not found:
            self.pool.ran_dry(target)

    def _take(self, target: str) -> int:
        """Fill the hand; returns how many entries were read."""
        count = self.pool.share(target, self._room)
        if count or self._flight:
            return self._read(target, count, 0)
        # With empty hands wait for the first order to come; there may be more behind it.
        found = self._read(target, 1, self._wait_ms)
        return found and found + self._read(target, self.pool.share(target, self._room), 0)

    def _read(self, target: str, count: int, wait_ms: int) -> int:
        held = [*self._hand.values(), *(taken for taken, _ in self._flight.values())]
        found, taken = self._intake.take(target, count, wait_ms, held)
        self._hand.update({one.order.id: one for one in taken})
        return found

    @property
    def _room(self) -> int:
        return self._settings.batch_orders - len(self._hand) - len(self._flight)

    def _drop(self, target: str, closed: list[Taken]) -> None:
        """Nobody waits for these any more."""
        self._engine.cancel([taken.order.id for taken in closed])
        for taken in closed:
            del self._flight[taken.order.id]
        self._intake.skip(target, closed)

    # --- answering ---

    def _submit(self, target: str, serving: Version) -> None:
        """From the hand into the engine, as far as the policy served is new enough."""
        for taken in [taken for taken in self._hand.values() if taken.order.lowest <= serving]:
            order = taken.order
            del self._hand[order.id]
            seed = int.from_bytes(hashlib.sha256(f"{self._seed} {order.id}".encode()).digest()[:8])
            try:
                text = build(order.question).text
                self._engine.submit(Request(order.id, text, order.completions, order.sampling, seed))
            except TaskRefused as refusal:
                self._intake.refuse(target, taken.entry, Refused("bad_question", str(refusal)))
            except RequestUnfit as reason:
                self._intake.refuse(target, taken.entry, Refused("too_long", str(reason)))
            else:
                self._flight[order.id] = (taken, time.monotonic())
        metrics.orders_in_flight.set(len(self._flight))

    def _sample(self, target: str) -> None:
        begun = time.monotonic()
        answered = self._engine.step()
        metrics.engine_seconds.inc(time.monotonic() - begun)
        for id, completions in answered:
            taken, since = self._flight.pop(id)
            self._send(target, taken, completions)
            self._answer_seconds = time.monotonic() - since
        if answered:
            metrics.orders_in_flight.set(len(self._flight))
            self._polled = float("-inf")  # there is room: look at once

    def _send(self, target: str, taken: Taken, completions: list[Completion]) -> None:
        group = RawGroup(order=taken.data, completions=completions, model=self._policy.model or "")
        self._ledger.answer(target, taken.entry.id, self._identity.seal(group))
        tokens = sum(completion.tokens for completion in completions)
        self._tokens += tokens
        self._groups += 1
        metrics.tokens_generated.labels(metrics.node_label(target)).inc(tokens)
        metrics.groups_answered.labels(metrics.node_label(target)).inc()

    # --- the end, and what others see ---

    def refusal(self, target: str) -> str | None:
        """Why this generator cannot serve a target at all; None where it can, or has not tried yet."""
        return self._policy.refusal(target)

    def drain(self) -> None:
        """Answer what is in flight, for `drain_seconds` at most; hand back the rest."""
        end = time.monotonic() + self._settings.drain_seconds
        while self._target is not None and self._flight and time.monotonic() < end:
            self._sample(self._target)
        left = [*self._hand.values(), *(taken for taken, _ in self._flight.values())]
        self._engine.cancel(list(self._flight))
        self._hand, self._flight = {}, {}
        if self._target is not None and left:
            log.info("orders handed back", target=self._target, orders=len(left))
            self._intake.hand_back(self._target, left)

    def facts(self) -> dict[str, Any]:
        """Target, policy, totals since the start."""
        serving = str(self._policy.version) if self._policy.version else ""
        return {"target": self.pool.current, "policy": serving, "tokens": self._tokens, "groups": self._groups}

    def in_hand(self) -> tuple[str, list[tuple[str, str]]]:
        """The orders being answered."""
        taken = [*list(self._hand.values()), *(taken for taken, _ in list(self._flight.values()))]
        return GROUP, [(one.entry.stream, one.entry.id) for one in taken]
