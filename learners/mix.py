"""Which groups a round trains on, and what each completion is worth to the update.

Guarantees: own reward is the mean over all own groups of the round, before any filter; a swarm group enters only when
its signature holds and its question is not held out; a malformed one is refused before
anything of the round's state changes.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from common import metrics
from common.identity import KeyLookup, unseal
from common.ledger import Entry, Ledger
from common.messages import NewerSchema, Refused, ScoredGroup, SwarmGroup
from common.settings import NodeSettings
from common.shared_streams import SwarmReader
from common.tasks import is_held_out
from learners.advantages import group_advantages, rewards

# A round is never held up by a swarm full of rubbish; what is left is refused in the rounds that follow.
REFUSED_PER_ROUND = 200


@dataclass(frozen=True)
class Sample:
    """One completion for the update. Own ones carry tokens as sampled, swarm ones text to be encoded again.

    `token_ids` is little-endian int32 and `logprobs` little-endian float32 (nats), None for swarm samples.
    """

    question: str
    text: str
    finished: bool
    advantage: float
    token_ids: bytes | None
    logprobs: bytes | None


def draw_swarm(
    reader: SwarmReader, ledger: Ledger, lookup: KeyLookup, me: str, count: int, random: Random
) -> list[SwarmGroup]:
    """Up to `count` groups; fewer when the swarm holds no more that we have not seen."""
    groups: list[SwarmGroup] = []
    refused = 0
    while len(groups) < count and refused < REFUSED_PER_ROUND:
        entry = reader.draw(random)
        if entry is None:
            break
        try:
            group = _open(entry, lookup)
            if not reader.is_new(group.order_id, entry):
                raise Refused("replayed", f"group {group.order_id} was drawn before from another entry")
            groups.append(group)
        except NewerSchema:
            continue
        except Refused as refusal:
            refused += 1
            metrics.messages_refused.labels("swarm", refusal.reason).inc()
            ledger.note_refusal(_shard_of(entry, ledger), entry, "swarm", refusal.reason, refusal.detail, me)
    return groups


def _open(entry: Entry, lookup: KeyLookup) -> SwarmGroup:
    group, _ = unseal(SwarmGroup, entry.data, lookup)
    if not entry.stream.endswith(f":swarm-{group.tag}:{group.author}"):
        raise Refused("misplaced", f"a {group.tag} group of {group.author} lay in {entry.stream}")
    if len(group.completions) < 2:
        raise Refused("malformed", "a group of one completion teaches nothing")
    if is_held_out(group.question_text):
        raise Refused("held_out", "the question is held out")
    return group


def _shard_of(entry: Entry, ledger: Ledger) -> int:
    return ledger.keys.shard_of(entry.stream.rpartition(":")[2])


def own_samples(group: ScoredGroup, question: str, settings: NodeSettings) -> list[Sample]:
    """Samples of an own group; a group without signal gives samples of advantage zero."""
    advantages = group_advantages(rewards(group.components, settings.reward))
    return [
        Sample(question, c.text, c.finish_reason == "stop", advantage, c.token_ids, c.logprobs)
        for c, advantage in zip(group.completions, advantages, strict=True)
    ]


def swarm_samples(group: SwarmGroup, settings: NodeSettings) -> list[Sample]:
    """Samples of a foreign group. `successes` leaves out what did worse than its group's mean.

    Pushing down text that one's own policy would hardly write teaches nothing; pulling up a right answer does.
    """
    advantages = group_advantages(rewards(group.components, settings.reward))
    only_successes = settings.update.correction == "successes"
    return [
        Sample(group.question_text, c.text, c.finish_reason == "stop", advantage, None, None)
        for c, advantage in zip(group.completions, advantages, strict=True)
        if advantage > 0 or (advantage < 0 and not only_successes)
    ]
