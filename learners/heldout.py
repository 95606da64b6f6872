"""A node's evaluations while it trains: begun when due, carried over crashes, written to the journal when done.

Guarantees: a round is evaluated once; what is under way is in the checkpoint (`pending`), with its policy pinned; one whose
plan changed with the settings is begun anew; one of which nothing comes back ends in the log and not in a learner that
waits for ever.
"""

from __future__ import annotations

import structlog

from common.directory import Directory, Policy
from common.identity import Identity
from common.ledger import Ledger
from common.policies import PolicyStore
from common.sections import NodeSettings
from common.tasks import TaskSpec
from learners.checkpoint import PendingEvaluation
from learners.evaluation import Evaluation, Plan, Unanswered
from learners.journal import Journal

log = structlog.get_logger()


class HeldOut:
    """Held-out questions, asked of a node's own policies."""

    def __init__(
        self,
        settings: NodeSettings,
        specs: tuple[TaskSpec, ...],
        run_seed: int,
        ledger: Ledger,
        directory: Directory,
        identity: Identity,
        incarnation: int,
        journal: Journal,
        store: PolicyStore,
        pending: tuple[PendingEvaluation, ...],
    ) -> None:
        """`pending` is what the checkpoint says was under way."""
        self._settings = settings
        self._specs = specs
        self._run_seed = run_seed
        self._ledger = ledger
        self._directory = directory
        self._identity = identity
        self._incarnation = incarnation
        self._journal = journal
        self._store = store
        self._outdated: list[Evaluation] = []
        self._running: dict[PendingEvaluation, Evaluation] = {}
        for one in pending:
            evaluation = self._evaluation(one.round, one.policy)
            if one.plan != evaluation.plan.digest or one.round in journal.evaluated:
                self._outdated.append(evaluation)
            if one.round in journal.evaluated:
                store.pinned.discard(one.policy.version)
            else:
                self._add(one.round, one.policy, evaluation)

    @property
    def pending(self) -> tuple[PendingEvaluation, ...]:
        """What is under way, for the checkpoint."""
        return tuple(self._running)

    def rejoin(self) -> None:
        """Place the orders, or find them where they are."""
        for evaluation in self._outdated:
            evaluation.forget()
        self._outdated = []
        for evaluation in self._running.values():
            evaluation.rejoin()

    def is_due(self, round: int) -> bool:
        """Whether the policy after this round is to be evaluated: the first, the last, and every so many."""
        wanted, node = self._settings.evaluate, self._settings
        regular = bool(wanted.every) and round % wanted.every == 0
        return bool(wanted.questions) and node.learner == "train" and (regular or round in (0, node.rounds))

    def begin_if_due(self, round: int, policy: Policy) -> None:
        """Begin the evaluation of a round, unless it was begun before."""
        begun = round in self._journal.evaluated or any(one.round == round for one in self._running)
        if not begun and self.is_due(round):
            evaluation = self._evaluation(round, policy)
            self._add(round, policy, evaluation)
            evaluation.rejoin()

    def advance(self) -> None:
        """Collect what arrived, write down what is complete."""
        for pending, evaluation in list(self._running.items()):
            if not evaluation.step():
                continue
            try:
                figures = {"round": pending.round, "version": str(pending.policy.version), **evaluation.result()}
                self._journal.heldout(figures)
            except Unanswered as error:
                log.error("evaluation given up", node=self._identity.record.name, round=pending.round, detail=str(error))
            # Only now: what is written down twice can be told, what was forgotten unwritten is lost.
            evaluation.forget()
            del self._running[pending]
            self._store.pinned.discard(pending.policy.version)

    def _add(self, round: int, policy: Policy, evaluation: Evaluation) -> None:
        self._store.pinned.add(policy.version)
        self._running[PendingEvaluation(round, policy, evaluation.plan.digest)] = evaluation

    def _evaluation(self, round: int, policy: Policy) -> Evaluation:
        plan = Plan.of(self._settings, self._specs, self._run_seed)
        return Evaluation(str(round), plan, policy, self._ledger, self._directory, self._identity, self._incarnation)
