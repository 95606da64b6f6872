"""Rollouts to read: a few groups from a run's beginning, middle and end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from grapevine.report.folder import RunFolder
from grapevine.report.series import thin

GROUPS = 24
COMPLETIONS = 16
CHARACTERS = 1200


@dataclass(frozen=True)
class Answer:
    """A completion; `mark` is `right`, `wrong` or `partly`."""

    text: str
    reward: float
    mark: str
    tokens: int
    finished: bool
    cut: bool


@dataclass(frozen=True)
class Sample:
    """A group, as the node `reader` trained on it."""

    reader: str
    round: int
    source: str
    author: str
    task: str
    tag: str
    question: str
    answers: list[Answer]
    left_out: int

    @property
    def right(self) -> int:
        """Answers with full marks."""
        return sum(answer.mark == "right" for answer in self.answers)


def samples(run: RunFolder) -> list[Sample]:
    """At most `GROUPS` groups in order of their rounds: of rounds spread over the run, the nodes taking turns."""
    rounds = sorted({one["round"] for lines in run.rollouts.values() for one in lines})
    chosen = []
    for turn, round in enumerate(thin(rounds, GROUPS // 2)):
        here = [(node, one) for node, lines in run.rollouts.items() for one in lines if one["round"] == round]
        for source in ("own", "swarm"):
            those = [(node, one) for node, one in here if one["source"] == source]
            if those:
                chosen.append(_sample(run, *those[turn % len(those)]))
    return chosen


def _sample(run: RunFolder, node: str, line: dict[str, Any]) -> Sample:
    full = _full_marks(run, node)
    completions = line["completions"]
    return Sample(
        reader=node,
        round=line["round"],
        source=line["source"],
        author=line["order_id"].rpartition("/")[0],
        task=line["task"],
        tag=line["tag"],
        question=line["question"][:CHARACTERS],
        answers=[
            Answer(
                text=one["text"][:CHARACTERS],
                reward=one["reward"],
                mark="right" if one["reward"] >= full - 1e-6 else "partly" if one["reward"] > 0 else "wrong",
                tokens=one["tokens"],
                finished=one["finished"],
                cut=len(one["text"]) > CHARACTERS,
            )
            for one in completions[:COMPLETIONS]
        ],
        left_out=max(0, len(completions) - COMPLETIONS),
    )


def _full_marks(run: RunFolder, node: str) -> float:
    """The reward of an answer that is right in all that the node rewards; 1 when its weights are not known."""
    weights = [run.of_node(node, "reward", part) for part in ("accuracy", "format", "length")]
    return sum(weight for weight in weights if weight is not None and weight > 0) or 1.0
