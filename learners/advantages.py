"""From reward components to advantages. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, pstdev

from common.sections import RewardSettings
from common.tasks import Components

# Keeps near-equal rewards from being blown up; far below the spread of any group that carries signal.
SPREAD_FLOOR = 1e-4


def rewards(components: Sequence[Components], weights: RewardSettings) -> list[float]:
    """The node's local reward model (SAPO, arXiv 2509.08721, section 4): a weighted sum of a completion's components."""
    return [weights.accuracy * c.accuracy + weights.format * c.format + weights.length * c.length for c in components]


def group_advantages(group: Sequence[float], scaled: bool = True) -> list[float]:
    """(reward - mean) / (standard deviation + 1e-4) within one group (GRPO, arXiv 2402.03300, section 4.1.2).

    The standard deviation is the population's. A group with all rewards alike gives zeros. Not `scaled`: reward - mean, as
    Dr. GRPO has it (arXiv 2503.20783, section 3.2), so that nearly solved and nearly failed questions count no more.
    """
    mean, spread = fmean(group), pstdev(group)
    if not spread:
        return [0.0 for _ in group]
    return [(reward - mean) / (spread + SPREAD_FLOOR if scaled else 1.0) for reward in group]


def is_informative(group: Sequence[float]) -> bool:
    """Whether some completions of a group did better than others: only then does it teach anything."""
    return pstdev(group) > 0.0
