"""An evaluation while training: held-out questions, answered by the pool under one pinned policy.

Guarantees: its orders, books and policy are those of a target of its own (`eval-<node>-<round>`), so it moves nothing of
the training's; the questions are the same for every node and round; a restarted learner takes up what is there.
"""

from __future__ import annotations

import time
from statistics import fmean, stdev
from typing import Any

from common import tasks
from common.directory import Directory
from common.identity import Identity
from common.ledger import Ledger
from common.messages import Order, Sampling
from common.settings import Settings
from learners.checkpoint import PendingEvaluation
from learners.orders import Account, AccountState

TEND_SECONDS = 1.0


class Evaluation:
    """One evaluation under way."""

    def __init__(
        self,
        node: str,
        settings: Settings,
        ledger: Ledger,
        directory: Directory,
        identity: Identity,
        incarnation: int,
        task_specs: tuple[tasks.TaskSpec, ...],
        pending: PendingEvaluation,
    ) -> None:
        self.pending = pending
        self.target = f"eval-{node}-{pending.round}"
        self._node = node
        self._site = settings.site
        self._settings = settings.for_node(node)
        self._ledger = ledger
        self._directory = directory
        self._tasks = task_specs
        self._seed_base = tasks.seed_base_of(settings.seed, node, held_out=True)
        self._questions = self._settings.evaluate.questions
        self._announcement = Directory.announcement(pending.policy)
        self._account = Account(
            ledger,
            directory.lookup,
            identity,
            self.target,
            incarnation,
            self._order,
            lambda: self._questions,
            AccountState(),
        )
        self._tended = time.monotonic()

    def rejoin(self) -> None:
        """Place the orders, or find them where they are."""
        self._account.reconcile(0, self._announcement)
        self._directory.add_target(self.target, self._site)

    def step(self) -> dict[str, Any] | None:
        """Collect; the result once every question is answered. Mean reward is accuracy over all completions."""
        self._account.poll()
        if time.monotonic() - self._tended > TEND_SECONDS:
            self._tended = time.monotonic()
            self._account.tend(0, self._announcement)
        if len(self._account.waiting) < self._questions:
            return None
        groups = [one.group for _, one in sorted(self._account.waiting.items())]
        means = [fmean(c.accuracy for c in group.components) for group in groups]
        by_task: dict[str, list[float]] = {}
        for group, mean in zip(groups, means, strict=True):
            by_task.setdefault(group.question.task, []).append(mean)
        self._ledger.forget_target(self.target)
        return {
            "round": self.pending.round,
            "version": str(self.pending.policy.version),
            "reward": fmean(means),
            "standard_error": stdev(means) / len(means) ** 0.5 if len(means) > 1 else 0.0,
            "questions": len(means),
            "completions": self._settings.evaluate.completions,
            "by_task": {task: fmean(values) for task, values in sorted(by_task.items())},
        }

    def _order(self, number: int) -> Order:
        node = self._settings
        sampling = {**node.sampling.model_dump(), "temperature": node.evaluate.temperature}
        seconds = int(node.order_seconds * (1000 if self._ledger.clock.unit == "ms" else 1))
        return Order(
            id=f"{self.target}/{number}",
            target=self.target,
            node=self._node,
            purpose="eval",
            question=tasks.draw(self._tasks, self._seed_base, number, held_out=True),
            completions=node.evaluate.completions,
            sampling=Sampling(**sampling),
            lowest=self.pending.policy.version,
            deadline=self._ledger.clock.now() + seconds,
            share=[],
        )
