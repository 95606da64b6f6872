"""A task of one's own: the largest of some digits. Used by function-task.yaml."""

from random import Random
from typing import Any


def larger(rng: Random, largest: int = 9) -> dict[str, Any]:
    """One question with its answer; the same random numbers must always give the same question."""
    numbers = [rng.randint(0, largest) for _ in range(3)]
    return {
        "question": "Which is largest, {}, {} or {}?".format(*numbers),
        "answer": str(max(numbers)),
        "metadata": {"numbers": numbers},
    }


def near(answer: str, entry: dict[str, Any]) -> float:
    """1 for the right number, a tenth for another one of those in the question; runs in the verifier's sandbox."""
    if answer == entry["answer"]:
        return 1.0
    return 0.1 if answer in [str(number) for number in entry["metadata"]["numbers"]] else 0.0
