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
from common.sections import NodeSettings
from common.shared_streams import SwarmReader
from common.tasks import Components, is_held_out
from learners.advantages import group_advantages, is_informative, rewards
from learners.orders import Arrived

# A round is never held up by a swarm full of rubbish; what is left is refused in the rounds that follow.
REFUSED_PER_ROUND = 200


@dataclass(frozen=True)
class Sample:
    """One completion for the update. Own ones carry tokens as sampled, swarm ones text to be encoded again.

    `token_ids` is little-endian int32 and `logprobs` little-endian float32 (nats), None for swarm samples; `logprobs` is
    None, too, where the sampler recorded none. `sender_logprob` is the whole completion's, in nats, as its sampler saw it:
    None for own samples and where the sender gave none.
    """

    question: str
    text: str
    finished: bool
    advantage: float
    token_ids: bytes | None
    logprobs: bytes | None
    foreign: bool = False
    sender_logprob: float | None = None


@dataclass(frozen=True)
class OwnBatch:
    """A round's own groups by order number. All of them count in its figures, `trained` alone enter the update."""

    groups: list[Arrived]
    trained: list[Arrived]

    @property
    def filtered(self) -> list[int]:
        """The order numbers that the own filter leaves out."""
        trained = {one.number for one in self.trained}
        return [one.number for one in self.groups if one.number not in trained]


def own_batch(arrived: list[Arrived], settings: NodeSettings) -> OwnBatch | None:
    """The own groups that a round takes of those that arrived, oldest first; None while there are too few.

    With `own_filter: refill` a round takes groups until I of them are informative, or `refill_most` times I in all.
    """
    mix = settings.mix
    groups, trained = [], []
    for one in arrived:
        groups.append(one)
        if _passes(one, settings):
            trained.append(one)
        if mix.own_filter == "refill":
            complete = len(trained) == mix.own or len(groups) == mix.own * mix.refill_most
        else:
            complete = len(groups) == mix.own
        if complete:
            return OwnBatch(groups, trained)
    return None


def filled(batch: OwnBatch, arrived: list[Arrived], missing: int, settings: NodeSettings) -> OwnBatch:
    """The batch with up to `missing` further own groups of those that arrived; the own filter holds for them, too."""
    taken = {one.number for one in batch.groups}
    spare = [one for one in arrived if one.number not in taken][:missing]
    trained = [one for one in spare if _passes(one, settings)]
    return OwnBatch(batch.groups + spare, batch.trained + trained)


def _passes(one: Arrived, settings: NodeSettings) -> bool:
    return settings.mix.own_filter == "none" or is_informative(rewards(one.group.components, settings.reward))


def to_refill(arrived: list[Arrived], settings: NodeSettings) -> int:
    """How many groups to order in place of arrived ones that teach nothing."""
    if settings.mix.own_filter != "refill":
        return 0
    useless = sum(not is_informative(rewards(one.group.components, settings.reward)) for one in arrived)
    return min(useless, settings.mix.own * (settings.mix.refill_most - 1))


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
    return [
        Sample(question, c.text, c.finish_reason == "stop", advantage, c.token_ids, c.logprobs or None)
        for c, advantage in zip(group.completions, _advantages(group.components, settings), strict=True)
    ]


def swarm_samples(group: SwarmGroup, settings: NodeSettings, capability: float = 1.0) -> list[Sample]:
    """Samples of a foreign group; those whose advantage is zero are left out.

    `capability` is the author's beside our own (see `learners.capability`); HACPO multiplies foreign advantages by it
    (arXiv 2603.02604), so that more is learned from the stronger. `successes` leaves out what did worse than its group's
    mean: pushing down text that one's own policy would hardly write teaches nothing; pulling up a right answer does.
    """
    correction = settings.update.correction
    factor = capability if correction == "hacpo" else 1.0
    pairs = list(zip(group.completions, _advantages(group.components, settings), strict=True))
    if len(pairs) > settings.group_size:
        # A group counts as one of ours, however many completions its author packs into it.
        pairs = Random(group.order_id).sample(pairs, settings.group_size)
    return [
        Sample(
            group.question_text, c.text, c.finish_reason == "stop", factor * advantage, None, None,
            foreign=True, sender_logprob=c.logprob,
        )
        for c, advantage in pairs
        if advantage > 0 or (advantage < 0 and correction != "successes")
    ]  # fmt: skip


def _advantages(components: list[Components], settings: NodeSettings) -> list[float]:
    return group_advantages(rewards(components, settings.reward), scaled=settings.update.objective != "dr_grpo")
