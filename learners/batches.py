"""Samples as tokens, and which of them to compute together."""

from __future__ import annotations

import math
from dataclasses import dataclass

DISTINCT_WIDTHS = 256


# Compared by identity, so that a round can file what it measured under the sample.
@dataclass(frozen=True, eq=False)
class Encoded:
    """A sample as tokens.

    `sampled` holds the generator's log-probabilities (nats), None where there are none; `sender` is what a foreign
    completion's sampler gave the whole of it (nats), None for own ones and where it is not comparable.
    """

    prompt: list[int]
    completion: list[int]
    sampled: list[float] | None
    advantage: float
    foreign: bool = False
    sender: float | None = None

    def __len__(self) -> int:
        return len(self.prompt) + len(self.completion)


def cuts(widths: list[int], overhead: int) -> list[int]:
    """Where to cut samples, sorted by width, into batches so that padding and `overhead` per batch cost the least.

    The ends of the batches, the last being the number of samples. A batch costs its rows times its widest, plus
    `overhead`; the optimum over all cuts between distinct widths, by dynamic programming.
    """
    if not widths:
        return []
    # Many lengths that hardly differ are not worth telling apart, and the search would take their number squared.
    step = max(1, widths[-1] // DISTINCT_WIDTHS)
    widths = [-(-width // step) * step for width in widths]
    ends = [i for i in range(1, len(widths)) if widths[i] != widths[i - 1]] + [len(widths)]
    cost, before = [0.0], [0]
    for j, end in enumerate(ends, 1):
        width = widths[end - 1]
        starts = [0, *ends[: j - 1]]
        best, at = math.inf, 0
        for i, start in enumerate(starts):
            total = cost[i] + overhead + (end - start) * width
            if total < best:
                best, at = total, i
        cost.append(best)
        before.append(at)
    found, j = [], len(ends)
    while j:
        found.append(ends[j - 1])
        j = before[j]
    return found[::-1]
