"""Names beside the lines of a chart: short enough, and never on top of one another."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean


def short(name: str, most: int = 14) -> str:
    """A name cut to what fits beside a chart."""
    return name if len(name) <= most else f"{name[: most - 6]}…{name[-5:]}"


def spread(wanted: Sequence[float], gap: float) -> list[float]:
    """Places between 0 and 1 near the wanted ones and at least `gap` apart, as far as there is room; order is kept."""
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    gap = min(gap, 1.0 / max(1, len(wanted) - 1))
    # Runs of touching places are centred on the mean of what their members want.
    runs: list[list[int]] = []
    for i in order:
        runs.append([i])
        while len(runs) > 1 and _middle(runs[-2], wanted, gap) + _half(runs[-2], gap) + gap > (
            _middle(runs[-1], wanted, gap) - _half(runs[-1], gap)
        ):
            runs[-2:] = [runs[-2] + runs[-1]]
    places = [0.0] * len(wanted)
    for run in runs:
        start = _middle(run, wanted, gap) - _half(run, gap)
        for step, i in enumerate(run):
            places[i] = start + step * gap
    return places


def _half(run: list[int], gap: float) -> float:
    return gap * (len(run) - 1) / 2


def _middle(run: list[int], wanted: Sequence[float], gap: float) -> float:
    return min(max(fmean(wanted[i] for i in run), _half(run, gap)), 1.0 - _half(run, gap))
