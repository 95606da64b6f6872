"""`mix.swarm: auto`: how many swarm groups the next round draws, by what past rounds showed. Pure functions.

Guarantees: the number lies between 1 (so that sharing is never given up for good) and `mix.most`; it follows from the
journal's lines and the swarm's streams, so a resumed lockstep run decides as it would have; what it was decided by stands in
the round's line.

Three signals. A node whose own groups are mostly all right or all wrong learns little from them and draws more. Peers that
answer better than the node does are worth more than peers that answer worse. And when the node does clearly worse than it
once did, on its own fresh questions or on the held-out ones, the swarm is the first suspect and the number is halved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import sqrt
from statistics import fmean, stdev
from typing import Any

from common.sections import MixSettings

WINDOW = 16  # rounds whose mean is one point of the trend
CLEARLY = 3.0  # standard errors that a fall must reach to count as one


@dataclass(frozen=True)
class Decision:
    """How many swarm groups to draw, and why.

    Attributes:
        swarm: groups, 1 to `mix.most`.
        informative: share of own groups whose rewards were not all alike, over the recent rounds.
        strength: mean capability of the authors drawn from, 1 where nothing is known; see `learners.capability`.
        falling: whether own or held-out reward fell clearly below what it was.
    """

    swarm: int
    informative: float
    strength: float
    falling: bool

    def record(self) -> dict[str, Any]:
        """For the round's line."""
        return asdict(self)


def decide(
    records: Sequence[Mapping[str, Any]],
    heldout: Sequence[Mapping[str, Any]],
    peers: Mapping[str, float],
    mix: MixSettings,
) -> Decision:
    """The next round's number of swarm groups.

    Own groups times (2 - informative share), times the peers' strength, halved while falling. With nothing known yet that
    is as many as own groups.

    Args:
        records: recent lines of `rounds.jsonl`, the newest last.
        heldout: lines of `heldout.jsonl`, the newest last.
        peers: capabilities of the authors drawn lately.
    """
    strength = fmean(peers.values()) if peers else 1.0
    if not records:
        return Decision(min(mix.own, mix.most), 1.0, strength, False)
    informative = fmean(record["informative_share"] for record in records)
    falling = _own_falls(records) or _heldout_falls(heldout)
    wanted = mix.own * (2.0 - informative) * strength * (0.5 if falling else 1.0)
    return Decision(max(1, min(mix.most, round(wanted))), informative, strength, falling)


def _own_falls(records: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the newest window's mean lies clearly below the best earlier one's."""
    rewards = [record["own_reward"] for record in records]
    windows = [rewards[end - WINDOW : end] for end in range(len(rewards), WINDOW - 1, -WINDOW)]
    if len(windows) < 2:
        return False
    best = max(windows[1:], key=fmean)
    error = sqrt((stdev(windows[0]) ** 2 + stdev(best) ** 2) / WINDOW)
    return fmean(best) - fmean(windows[0]) > CLEARLY * error


def _heldout_falls(heldout: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the newest evaluation's interval lies wholly below an earlier one's."""
    return len(heldout) > 1 and any(heldout[-1]["high"] < earlier["low"] for earlier in heldout[:-1])
