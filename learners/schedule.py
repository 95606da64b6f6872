"""The learning rate of every round: a pure function, so that a resumed run goes on exactly."""

from __future__ import annotations

import math

from common.sections import UpdateSettings

# Where `linear` and `cosine` end, beside the height.
FLOOR = 0.1


def learning_rate(settings: UpdateSettings, round: int, rounds: int) -> float:
    """Of the update that makes round `round`, the first being 1, of `rounds`.

    It rises in `warmup_rounds` equal steps to its height, which the last of them has; from there `linear` and `cosine`
    fall to a tenth at the last round.
    """
    height, warmup = settings.learning_rate, settings.warmup_rounds
    if round < warmup:
        return height * round / warmup
    if settings.schedule == "constant":
        return height
    first = max(warmup, 1)
    progress = min(1.0, (round - first) / max(1, rounds - first))
    share = 1 - progress if settings.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return height * (FLOOR + (1 - FLOOR) * share)
