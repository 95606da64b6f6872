"""An evaluation: distinct held-out questions, answered by the pool under one pinned policy, greedily and sampled.

Guarantees: its orders, books and policy are those of a target of its own (`eval-<node>-<name>`), so it moves nothing of
any training's; the questions depend on tasks and seed alone, so they are the same for every node and round; whoever
starts it anew takes up what is there.
"""

from __future__ import annotations

import functools
import hashlib
import sys
import time
from dataclasses import dataclass
from typing import Any

import msgspec

from common import tasks
from common.directory import Directory, Policy
from common.identity import Identity
from common.ledger import Ledger
from common.messages import Order, Sampling, ScoredGroup
from common.sections import NodeSettings
from learners.orders import Account, AccountState
from learners.scores import Answered, summarize

TEND_SECONDS = 1.0
ATTEMPTS = 4


class Unanswered(Exception):
    """An evaluation of which nothing came back."""


@dataclass(frozen=True)
class Plan:
    """What an evaluation asks. Each question is answered once greedily and `completions` times by sampling."""

    questions: tuple[tasks.Question, ...]
    completions: int
    sampling: Sampling
    order_seconds: float

    @classmethod
    def of(cls, node: NodeSettings, specs: tuple[tasks.TaskSpec, ...], run_seed: int) -> Plan:
        """The plan that a node's settings ask for."""
        wanted = node.evaluate
        sampling = Sampling(**{**node.sampling.model_dump(), "temperature": wanted.temperature})
        questions = distinct_questions(specs, run_seed, wanted.questions)
        # All orders are placed at once, so that the last of them waits for the others.
        patience = node.order_seconds * (1 + len(questions) // 16)
        return cls(questions, wanted.completions, sampling, patience)

    @property
    def orders(self) -> int:
        """Number of orders: the first half greedy, the second sampled."""
        return 2 * len(self.questions)

    @property
    def digest(self) -> str:
        """Tells plans apart that ask something else."""
        asked = msgspec.json.encode([self.questions, self.completions, self.sampling])
        return hashlib.sha256(asked).hexdigest()[:16]


class Evaluation:
    """One evaluation under way. Signed by `identity`, whose name is the node of its orders."""

    def __init__(
        self,
        name: str,
        plan: Plan,
        policy: Policy,
        ledger: Ledger,
        directory: Directory,
        identity: Identity,
        incarnation: int,
    ) -> None:
        """`name` without hyphens: a round, or the id of a job."""
        self.policy = policy
        self.target = f"eval-{identity.record.name}-{name}"
        self.plan = plan
        self._node = identity.record.name
        self._site = identity.record.site
        self._ledger = ledger
        self._directory = directory
        self._announcement = Directory.announcement(policy)
        self._account = Account(
            ledger,
            directory.lookup,
            identity,
            self.target,
            incarnation,
            self._order,
            lambda: plan.orders,
            AccountState(),
            attempts=sys.maxsize,  # none is given up for another question
        )
        self._tended = time.monotonic()

    @property
    def answered(self) -> int:
        """Orders that came back."""
        return len(self._account.waiting)

    def rejoin(self) -> None:
        """Place the orders, or find them where they are."""
        self._account.reconcile(0, self._announcement)
        self._directory.add_target(self.target, self._site)

    def step(self, wait_ms: int = 0) -> bool:
        """Collect. True once every order is answered, or was asked ATTEMPTS times in vain."""
        self._account.poll(wait_ms)
        if time.monotonic() - self._tended > TEND_SECONDS or self._ledger.clock.unit == "round":
            self._tended = time.monotonic()
            self._account.tend(0, self._announcement)
        missing = set(range(self.plan.orders)) - self._account.waiting.keys()
        return all(self._account.times_asked(number) > ATTEMPTS for number in missing)

    def answers(self) -> list[tuple[ScoredGroup, ScoredGroup]]:
        """The greedy and the sampled group of every question that has both."""
        groups, half = self._account.waiting, len(self.plan.questions)
        return [
            (groups[number].group, groups[number + half].group)
            for number in range(half)
            if number in groups and number + half in groups
        ]

    def result(self) -> dict[str, Any]:
        """The figures (see `learners.scores`), with the number of questions left `unanswered`.

        Raises Unanswered when there is nothing to judge by.
        """
        answers = self.answers()
        if not answers:
            raise Unanswered(
                f"none of the {len(self.plan.questions)} questions of {self.target} was answered; "
                f"`grapevine status --quarantine` says what was refused, and the generators' logs what failed"
            )
        figures = summarize(
            [
                Answered(one.question.task, one.components[0].accuracy, tuple(c.accuracy for c in other.components))
                for one, other in answers
            ]
        )
        return {**figures, "unanswered": len(self.plan.questions) - len(answers)}

    def forget(self) -> None:
        """Delete what the server knows of it."""
        self._ledger.forget_target(self.target)

    def _order(self, number: int) -> Order:
        plan = self.plan
        greedy = number < len(plan.questions)
        return Order(
            id=f"{self.target}/{number}",
            target=self.target,
            node=self._node,
            purpose="eval",
            question=plan.questions[number % len(plan.questions)],
            completions=1 if greedy else plan.completions,
            sampling=msgspec.structs.replace(plan.sampling, temperature=0.0) if greedy else plan.sampling,
            lowest=self.policy.version,
            deadline=self._ledger.clock.now() + int(plan.order_seconds * (1000 if self._ledger.clock.unit == "ms" else 1)),
            share=[],
        )


def distinct_questions(specs: tuple[tasks.TaskSpec, ...], run_seed: int, wanted: int) -> tuple[tasks.Question, ...]:
    """`wanted` held-out questions with different texts; fewer where the tasks have no more of them.

    Tasks are drawn uniformly; one that has run out leaves its place to the others.
    """
    return _distinct(msgspec.json.encode(specs), run_seed, wanted)


@functools.lru_cache(maxsize=16)
def _distinct(specs: bytes, run_seed: int, wanted: int) -> tuple[tasks.Question, ...]:
    drawn_from = msgspec.json.decode(specs, type=tuple[tasks.TaskSpec, ...])
    base = tasks.seed_base_of(run_seed, "", held_out=True)
    found: dict[str, tasks.Question] = {}
    # Small tasks repeat themselves: past four times as many draws hardly anything new would come.
    for number in range(4 * wanted):
        if len(found) == wanted:
            break
        question = tasks.draw(drawn_from, base, number, held_out=True)
        found.setdefault(tasks.build(question).text, question)
    return tuple(found.values())
