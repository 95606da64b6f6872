"""How strong other nodes are beside this one: HACPO's capability ratio (arXiv 2603.02604), from the tags of their groups.

Guarantees: what a draw picks does not count, since it picks by tag: an author's accuracy is estimated from how often it
shares groups under each tag, and ours from the tags of all our own groups, so equal nodes come out equal. An author who
shares chosen tags only looks as good as those; how its groups score is the word of its site's verifier, so the ratio is
clamped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from common.messages import Tag
from common.shared_streams import SwarmReader

# The accuracy that a tag stands for: the middle of its range (see `common.messages.tag_of`).
MIDDLES: dict[Tag, float] = {"failed": 0.0, "hard": 1 / 6, "mixed": 1 / 2, "easy": 5 / 6, "solved": 1.0}
# Fewer groups than this say nothing yet.
FEWEST = 8
LOWEST, HIGHEST = 0.5, 2.0


def capabilities(reader: SwarmReader, authors: Iterable[str], records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """By author: its accuracy over ours, clamped to [0.5, 2]; those of whom too little is known are missing.

    `records` are recent lines of `rounds.jsonl`: where ours comes from. Costs two reads per author and tag.
    """
    own = accuracy({tag: sum(record["own_tags"].count(tag) for record in records) for tag in MIDDLES})
    if sum(len(record["own_tags"]) for record in records) < FEWEST or not own:
        return {}
    found = {}
    for author in sorted(set(authors)):
        shared = reader.shared(author)
        theirs = accuracy({tag: rate for tag, (_, rate) in shared.items()})
        if theirs is not None and sum(count for count, _ in shared.values()) >= FEWEST:
            found[author] = min(HIGHEST, max(LOWEST, theirs / own))
    return found


def accuracy(weights: Mapping[Tag, float]) -> float | None:
    """The mean accuracy of groups that come under each tag so often; None of none."""
    total = sum(weights.values())
    return sum(weight * MIDDLES[tag] for tag, weight in weights.items()) / total if total else None
