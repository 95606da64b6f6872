"""What an evaluation comes to: pass rates with intervals, over all questions and per task.

Guarantees: pure functions; the unit of chance is the question and not the completion, since completions of one question
are alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import comb, sqrt
from statistics import fmean, pvariance, stdev
from typing import Any, NamedTuple

Z95 = 1.959964


class Answered(NamedTuple):
    """One question with its accuracies: of the greedy completion and of the sampled ones."""

    task: str
    greedy: float
    sampled: tuple[float, ...]


def rate(values: Sequence[float], drawn: float = 1.0) -> dict[str, float]:
    """Mean of values from 0 to 1, one per question, with its 95 % Wilson score interval (Wilson 1927).

    Means over completions vary less than rights and wrongs: they count as so many questions as would vary like them
    (the effective sample size of survey statistics, Korn and Graubard 1998), at most `drawn` times their number.
    """
    p, spread = fmean(values), pvariance(values)
    n = float(len(values))
    if spread > 0:
        n = n * min(max(drawn, 1.0), max(1.0, p * (1 - p) / spread))
    middle = (p + Z95**2 / (2 * n)) / (1 + Z95**2 / n)
    half = Z95 / (1 + Z95**2 / n) * sqrt(max(0.0, p * (1 - p)) / n + Z95**2 / (4 * n**2))
    return {"rate": p, "low": max(0.0, min(p, middle - half)), "high": min(1.0, max(p, middle + half))}


def pass_at(k: int, accuracies: Sequence[float]) -> float:
    """Chance that at least one of k completions is right, estimated without bias from n >= k (Chen et al. 2021, eq. 1).

    A completion is right when its accuracy is 1.
    """
    n, right = len(accuracies), sum(accuracy >= 1.0 for accuracy in accuracies)
    return 1.0 - comb(n - right, k) / comb(n, k)


def summarize(answered: Sequence[Answered]) -> dict[str, Any]:
    """The figures of an evaluation. `reward` is the mean accuracy of the sampled completions."""
    tasks = sorted({one.task for one in answered})
    means = [fmean(one.sampled) for one in answered]
    return {
        **_figures(answered),
        "standard_error": stdev(means) / sqrt(len(means)) if len(means) > 1 else 0.0,
        "completions": len(answered[0].sampled),
        "by_task": {task: _figures([one for one in answered if one.task == task]) for task in tasks},
    }


def _figures(answered: Sequence[Answered]) -> dict[str, Any]:
    completions = len(answered[0].sampled)
    sampled = rate([fmean(one.sampled) for one in answered], completions)
    # 1, 2, 4, ... and all of them.
    sizes = sorted({1 << power for power in range(completions.bit_length())} | {completions})
    return {
        "questions": len(answered),
        "reward": sampled["rate"],
        "low": sampled["low"],
        "high": sampled["high"],
        "greedy": rate([one.greedy for one in answered]),
        "pass_at": {str(k): rate([pass_at(k, one.sampled) for one in answered], completions / k) for k in sizes},
    }
