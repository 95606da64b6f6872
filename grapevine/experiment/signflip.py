"""The exact paired two-sided sign-flip test.

If two arms were alike, each seed's difference could as well have had the other sign. Guarantees: p is the share of all 2^n
ways to choose the signs whose mean is at least as far from zero as the one that was found (ties count), without sampling.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

# Sums of the same numbers in another order differ by rounding; a tie must stay one.
SLACK = 1e-9


def sign_flip_p(differences: Sequence[float]) -> float:
    """The p value of the mean of these differences. Takes time and memory like 2^(n/2)."""
    if not differences:
        raise ValueError("no difference, no p value")
    most = sum(map(abs, differences))
    least = abs(sum(differences)) - SLACK * most
    if least <= 0:
        return 1.0
    # Every choice of signs is one of the first half and one of the second.
    half = len(differences) // 2
    first, second = _sums(differences[:half]), sorted(_sums(differences[half:]))
    as_far = 0
    for one in first:
        as_far += len(second) - bisect_left(second, least - one)
        as_far += bisect_right(second, -least - one)
    return float(as_far / 2 ** len(differences))


def _sums(values: Sequence[float]) -> list[float]:
    """The sum for every choice of signs."""
    sums = [0.0]
    for value in values:
        sums = [total + signed for total in sums for signed in (value, -value)]
    return sums
