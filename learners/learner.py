"""The learner: one node's loop of ordering, collecting, updating, checkpointing and announcing. Top to bottom in one file.

Guarantees:
- a round is one update on I own groups and up to J from the swarm; it waits for own groups and never for the swarm;
- the checkpoint comes first, then one script tells the server; a crash between the two repeats the script, not the round;
- nothing of the round's state changes before everything it uses was read and checked.

No torch here: the trainer is handed in, so that the same loop runs in tests without a model.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any, Protocol

import msgspec
import structlog

from common import metrics, tasks
from common.directory import Directory, Policy
from common.identity import Identity
from common.ledger import Ledger
from common.messages import Order, Sampling, SwarmGroup, Version
from common.policies import PolicyStore
from common.sections import NodeSettings
from common.settings import Settings, SettingsError
from common.shared_streams import SwarmReader
from learners.auto_mix import Decision, decide
from learners.capability import capabilities
from learners.checkpoint import WEIGHTS_FILE, Checkpoints, LearnerState, Tensors
from learners.heldout import HeldOut
from learners.journal import Journal, read
from learners.mix import OwnBatch, Sample, draw_swarm, filled, own_batch, own_samples, swarm_samples, to_refill
from learners.orders import Account, Arrived
from learners.record import rollout_records, rollouts_due, round_record
from learners.rollback import Restorable, Rollback
from learners.sinks import open_sinks

log = structlog.get_logger()

WAIT_MS = 500
TEND_SECONDS = 1.0


class Trainer(Tensors, Restorable, Protocol):
    """The part of a learner that holds a model."""

    def update(self, own: list[Sample], swarm: list[Sample]) -> dict[str, float]:
        """One policy update; returns its figures (loss, grad_norm, tokens_own, tokens_swarm, ...)."""


class Learner:
    """One node."""

    role = "learner"

    def __init__(
        self,
        node: str,
        settings: Settings,
        ledger: Ledger,
        directory: Directory,
        identity: Identity,
        trainer: Trainer,
        model: str,
        stay: bool = False,
    ) -> None:
        """`model` is the folder or hub id that generators open; the trainer holds the same.

        With `stay` it does not end when it is complete, and goes on announcing its last policy.
        """
        self.name = node
        self._stay = stay
        self._settings = settings
        self._node: NodeSettings = settings.for_node(node)
        self._ledger = ledger
        self._directory = directory
        self._identity = identity
        self._trainer = trainer
        self._model = model
        self._tasks = tasks.resolve_tasks(self._node.tasks)
        self._seed_base = tasks.seed_base_of(settings.seed, node, held_out=False)
        self._tended = 0.0
        self._waiting_since = time.monotonic()
        self._doing = "waits for own groups"

        folder = settings.run_folder / "nodes" / node
        # A barrier may stand a round behind a learner, and the one before it must be good to fall back on.
        self._checkpoints = Checkpoints(folder / "checkpoints", kept=3 if ledger.clock.unit == "round" else 2)
        self._checkpoints.sweep()
        self._store = PolicyStore.of(settings, node, self._node.policies_kept)
        found = self._checkpoints.newest()
        self._state = LearnerState()
        if found is not None:
            self._state, folder_of_checkpoint = found
            trainer.load(folder_of_checkpoint)
            log.info("resumed", node=node, round=self._state.round)
        elif read(folder / "rounds.jsonl"):
            # The first checkpoint is older than the first round: beginning anew unasked would throw the work away.
            raise SettingsError(
                f"{node} has trained but has no checkpoint in {folder / 'checkpoints'}; put one back, "
                f"or begin the run anew with `grapevine up --fresh`"
            )
        # In lockstep a repeated round gives the very weights that bore its number before.
        again = found is not None and ledger.clock.unit == "round"
        self._incarnation = self._state.version.incarnation if again else self._checkpoints.raise_incarnation()
        sinks = open_sinks(settings, node, settings.run_folder, self._state.round)
        self._journal = Journal(folder, node, self._state.round, sinks)
        rounds = read(folder / "rounds.jsonl")
        metrics.rounds_planned.labels(node).set(self._node.rounds)
        self._rollback = Rollback(node, self._node.update.rollback_after, self._checkpoints, trainer, rounds)
        self._version = Version(self._incarnation, self._state.version.step)
        self._state = msgspec.structs.replace(self._state, version=self._version)
        self._store.pinned = {pending.policy.version for pending in self._state.evaluations}
        self._policy = self._publish(durable=True)
        self._account = Account(
            ledger, directory.lookup, identity, node, self._incarnation, self._order, self._limit, self._state.account
        )
        max_age = self._in_clock_units(settings.swarm.max_age)
        self._swarm = SwarmReader(
            ledger.redis,
            ledger.keys,
            ledger.clock,
            node,
            self._node.mix.tags,
            max_age,
            self._state.seen,
            settings.swarm.quota,
            self._node.mix.weights,
        )
        self._heldout = HeldOut(
            self._node, self._tasks, settings.seed, ledger, directory, identity, self._incarnation,
            self._journal, self._store, self._state.evaluations,
        )  # fmt: skip

    # --- the worker's side ---

    def rejoin(self) -> None:
        """Register, announce, and bring the server in line with the checkpoint."""
        self._directory.register(self._identity)
        self._account.reconcile(self._state.round, self._announcement())
        # The pool learns of a target only once its policy is announced.
        self._directory.add_target(self.name, self._settings.site)
        self._heldout.rejoin()
        # Round 0 begins here; so does an evaluation that a crash or a lost connection kept from beginning.
        self._heldout.begin_if_due(self._state.round, self._policy)

    def step(self) -> bool:
        """Collect what arrived; run a round when it is complete. False when all rounds and evaluations are done."""
        self._heldout.advance()
        if self._state.round >= self._node.rounds:
            self._doing = "evaluates" if self._heldout.pending else "complete"
            if not self._heldout.pending:
                if self._stay:
                    self._show_books()  # which notices a server that came back without its memory
                    time.sleep(TEND_SECONDS)
                return self._stay
            time.sleep(0.05 if self._ledger.clock.unit == "ms" else 0)
            return True
        ready = own_batch(self._fresh(), self._node) is not None
        lockstep = self._ledger.clock.unit == "round"
        self._account.poll(0 if ready or lockstep else WAIT_MS if not self._heldout.pending else 50)
        self._tend()
        # These will not train: without this, a batch gone stale would take the place of the one the round waits for.
        in_the_way = len(self._stale()) + to_refill(self._fresh(), self._node)
        if in_the_way:
            self._account.top_up(self._state.round, self._announcement(), self._limit() + in_the_way)
        own = own_batch(self._fresh(), self._node)
        if own is not None:
            self._doing = "updates"
            self._round(own)
            self._doing = "waits for own groups"
        return True

    def drain(self) -> None:
        """Make what was trained since the last checkpoint durable."""
        self.checkpoint()
        self.close()

    def close(self) -> None:
        """Let go of what would otherwise lose its last figures."""
        self._journal.close()

    def checkpoint(self) -> tuple[Path, LearnerState]:
        """A checkpoint of this moment, evaluations under way included: its folder and its state."""
        self._state = msgspec.structs.replace(self._state, evaluations=self._heldout.pending)
        return self._checkpoints.save(self._state, self._trainer), self._state

    def facts(self) -> dict[str, Any]:
        """Where the node stands. Called from the heartbeat's thread too: read only."""
        return {
            "round": self._state.round,
            "rounds": self._node.rounds,
            "waiting": len(self._account.waiting),
            "wanted": self._node.mix.own,
            "version": str(self._version),
            "model": self._model,
            "site": self._settings.site,
            "state": self._doing,
            **self._journal.facts(),
        }

    def in_hand(self) -> tuple[str, list[tuple[str, str]]]:
        """Own entries have one reader; nobody takes them over."""
        return "learner", []

    # --- orders ---

    def _order(self, number: int) -> Order:
        """The order of a number: the same question in every incarnation."""
        node = self._node
        shares = Random(f"{self._settings.seed} {self.name} share {number}").random() < node.share.fraction
        return Order(
            id=f"{self.name}/{number}",
            target=self.name,
            node=self.name,
            purpose="train",
            question=tasks.draw(self._tasks, self._seed_base, number, held_out=False),
            completions=node.group_size,
            sampling=Sampling(**node.sampling.model_dump()),
            lowest=Version(self._incarnation, max(0, self._version.step - node.max_staleness)),
            deadline=self._ledger.clock.now() + self._in_clock_units(node.order_seconds),
            share=list(node.share.tags) if shares else [],
        )

    def _in_clock_units(self, seconds: float) -> int:
        return int(seconds * 1000) if self._ledger.clock.unit == "ms" else int(seconds)

    def _limit(self) -> int:
        """How many orders may be outstanding: `ahead` batches, and at the end no more than the rounds left need."""
        left = self._node.rounds - self._state.round
        return min(self._node.ahead, left) * self._node.mix.own

    def _tend(self) -> None:
        if time.monotonic() - self._tended > TEND_SECONDS or self._ledger.clock.unit == "round":
            self._tended = time.monotonic()
            again, given_up = self._account.tend(self._state.round, self._announcement())
            if again or given_up:
                log.warning("orders overdue", node=self.name, asked_again=again, given_up=given_up)
            self._show_books()

    def _show_books(self) -> None:
        books = self._ledger.books(self.name)
        for column in ("ordered", "trained", "filtered", "expired", "open", "waiting", "lost"):
            metrics.books.labels(self.name, column).set(getattr(books, column))

    # --- one round ---

    def _fresh(self) -> list[Arrived]:
        """What has arrived and is new enough to train, in order number."""
        arrived = sorted(self._account.waiting.values(), key=lambda one: one.number)
        return [one for one in arrived if self._staleness(one) <= self._node.max_staleness]

    def _stale(self) -> list[Arrived]:
        """What has arrived and is too old to train; the next round filters it."""
        return [one for one in self._account.waiting.values() if self._staleness(one) > self._node.max_staleness]

    def _staleness(self, arrived: Arrived) -> int:
        """Policy steps between the oldest token of a group and the policy it would train."""
        oldest = min(completion.spans[0].version.step for completion in arrived.group.completions)
        return max(0, self._version.step - oldest)

    def _round(self, own: OwnBatch) -> None:
        node, started = self._node, time.monotonic()
        round = self._state.round + 1
        stale = self._stale()
        decision = self._decide() if node.mix.swarm == "auto" else None
        wanted = decision.swarm if decision else int(node.mix.swarm)
        drawn = self._draw(round, wanted)
        missing = wanted - len(drawn)
        if node.mix.fill and missing:
            own = filled(own, self._fresh(), missing, node)
        drawn_at = time.monotonic()

        texts = [tasks.build(one.group.question).text for one in own.groups]
        trained = {one.number for one in own.trained}
        trained_samples = [
            sample
            for one, text in zip(own.groups, texts, strict=True)
            if one.number in trained
            for sample in own_samples(one.group, text, node)
        ]
        strength = self._capabilities(group.author for group in drawn) if node.update.correction == "hacpo" else {}
        foreign_samples = [s for group in drawn for s in swarm_samples(group, node, strength.get(group.author, 1.0))]
        trains = node.learner == "train"
        figures = self._rollback.after(round, self._trainer.update(trained_samples, foreign_samples)) if trains else {}
        updated_at = time.monotonic()

        staleness = fmean(self._staleness(one) for one in own.groups)
        record = figures | round_record(round, own, stale, texts, staleness, drawn, missing, node.reward)
        if decision is not None:
            record["auto"] = decision.record()
        # The journal comes before the checkpoint: a resumed learner drops lines its checkpoint does not know.
        self._journal.round(record)
        if rollouts_due(round, node.rounds):
            self._journal.rollouts(rollout_records(round, own.groups, texts, drawn, node.reward))
        self._version = Version(self._incarnation, self._version.step + int(trains))
        settled = [one.number for one in [*own.groups, *stale]]
        self._finish(round, settled, trained=trained if trains else set())
        seconds = {
            "waited": started - self._waiting_since,
            "drew": drawn_at - started,
            "updated": updated_at - drawn_at,
            "finished": time.monotonic() - updated_at,
        }
        self._journal.timing({"round": round, "at": time.time(), **seconds})
        for phase, spent in zip(("wait", "draw", "update", "finish"), seconds.values(), strict=True):
            metrics.phase_seconds.labels(self.name, phase).observe(spent)
        self._waiting_since = time.monotonic()
        log.info(
            "round", node=self.name, round=round, own_reward=round_(record["own_reward"]),
            swarm=len(record["swarm_ids"]), staleness=round_(record["staleness"]),
        )  # fmt: skip

    def _decide(self) -> Decision:
        """How many swarm groups this round draws, by itself."""
        recent = self._journal.recent
        authors = [id.rpartition("/")[0] for record in list(recent)[-1:] for id in record["swarm_ids"]]
        return decide(recent, self._journal.evaluations, self._capabilities(authors), self._node.mix)

    def _capabilities(self, authors: Iterable[str]) -> dict[str, float]:
        return capabilities(self._swarm, authors, self._journal.recent)

    def _draw(self, round: int, wanted: int) -> list[SwarmGroup]:
        """Up to `wanted` groups of others. Should the connection be lost half-way, none of them counts as seen."""
        random, seen = Random(f"{self._settings.seed} {self.name} draw {round}"), dict(self._swarm.seen)
        try:
            return draw_swarm(self._swarm, self._ledger, self._directory.lookup, self.name, wanted, random)
        except BaseException:
            self._swarm.seen = seen
            raise

    def _finish(self, round: int, numbers: list[int], trained: set[int]) -> None:
        """Checkpoint, then one script: acknowledge `numbers`, order anew, announce."""
        filtered = [number for number in numbers if number not in trained]
        settled = self._account.state.settled(trained=sorted(trained), filtered=filtered)
        self._state = msgspec.structs.replace(
            self._state, round=round, version=self._version, seen=dict(self._swarm.seen), evaluations=self._heldout.pending
        )
        room = self._account.room(self._limit(), leaving=len(numbers))
        self._state = msgspec.structs.replace(self._state, account=settled.extended(settled.next + room))
        durable = self._durable(round)
        if self._heldout.is_due(round):
            self._store.pinned.add(self._version)
        self._policy = self._publish(durable)
        self._account.settle(round, self._state.account, self._announcement(), durable)
        self._heldout.begin_if_due(round, self._policy)

    def _durable(self, round: int) -> bool:
        return round % self._node.durable_every == 0 or round == self._node.rounds

    def _publish(self, durable: bool) -> Policy:
        """Write the weights once: as a checkpoint when it is to be durable, and as the policy's file."""
        if durable:
            folder = self._checkpoints.save(self._state, self._trainer)
            return self._store.publish(folder / WEIGHTS_FILE, self._version, self._model)
        with tempfile.TemporaryDirectory() as scratch:
            self._trainer.save(Path(scratch))
            return self._store.publish(Path(scratch) / WEIGHTS_FILE, self._version, self._model)

    def _announcement(self) -> bytes:
        return Directory.announcement(self._policy)


def round_(value: float) -> float:
    """Three decimals, for the log."""
    return float(f"{value:.3f}")
