"""How strong other nodes are beside this one, from what the journal says of past rounds. Pure functions.

Guarantees: like is compared with like. What we draw of others was chosen by reward tag, so our own groups are held against
it only where they bear one of those tags; nothing that a sender says of itself is believed. Everything follows from lines
of `rounds.jsonl`, so a resumed learner finds the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

# Groups of an author that count, the newest. HACPO slides a window over the last batches (arXiv 2603.02604, section 4.1).
WINDOW = 64
# Fewer groups than this say nothing yet.
FEWEST = 4
LOWEST, HIGHEST = 0.5, 2.0


def capabilities(records: Sequence[Mapping[str, Any]], tags: Sequence[str]) -> dict[str, float]:
    """By author: its mean reward over ours, clamped to [0.5, 2]; authors with too few groups are missing.

    `records` are lines of `rounds.jsonl`, the newest last; `tags` those that the mix draws.
    """
    own: list[float] = []
    theirs: dict[str, list[float]] = {}
    for record in reversed(records):
        for tag, reward in zip(record["own_tags"], record["own_group_rewards"], strict=True):
            if tag in tags and len(own) < WINDOW:
                own.append(reward)
        for id, reward in zip(record["swarm_ids"], record["swarm_rewards"], strict=True):
            rewards = theirs.setdefault(id.rpartition("/")[0], [])
            if len(rewards) < WINDOW:
                rewards.append(reward)
    if len(own) < FEWEST or fmean(own) <= 0.0:
        return {}
    ours = fmean(own)
    return {
        author: min(HIGHEST, max(LOWEST, fmean(rewards) / ours))
        for author, rewards in theirs.items()
        if len(rewards) >= FEWEST
    }
