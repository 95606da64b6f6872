"""What a round leaves on paper: the line of figures, and some groups in full for people to read.

Guarantees: pure functions of the round's groups, so that one seed gives one record.
"""

from __future__ import annotations

from statistics import fmean
from typing import Any

from common.messages import SwarmGroup
from common.sections import RewardSettings
from learners.advantages import is_informative, rewards
from learners.journal import question_mark
from learners.mix import OwnBatch
from learners.orders import Arrived

ROLLOUTS_EVERY = 10
CHARACTERS = 2000


def round_record(
    round: int,
    batch: OwnBatch,
    stale: list[Arrived],
    texts: list[str],
    staleness: float,
    drawn: list[SwarmGroup],
    missing: int,
    weights: RewardSettings,
) -> dict[str, Any]:
    """A line of `rounds.jsonl`. `own_reward` is the mean over all own groups of the round, before any filter.

    Groups that the own filter leaves out of the update count in all figures, tokens included. `texts` are the questions of
    the own groups; rewards are the node's own, of swarm groups too.
    """
    own = batch.groups
    own_rewards = [fmean(rewards(one.group.components, weights)) for one in own]
    return {
        "round": round,
        "own_reward": fmean(own_rewards),
        "own_group_rewards": own_rewards,
        "own_ids": [one.number for one in own],
        "stale_ids": [one.number for one in stale],
        "filtered_ids": batch.filtered,
        "informative_share": fmean(is_informative(rewards(one.group.components, weights)) for one in own),
        "own_tags": [one.group.tag for one in own],
        "own_tasks": [one.group.question.task for one in own],
        "questions": [question_mark(text) for text in texts],
        "staleness": staleness,
        "swarm_ids": [group.order_id for group in drawn],
        "swarm_tags": [group.tag for group in drawn],
        "swarm_rewards": [fmean(rewards(group.components, weights)) for group in drawn],
        "swarm_missing": missing,
        "own_tokens": sum(c.tokens for one in own for c in one.group.completions),
    }


def rollouts_due(round: int, rounds: int) -> bool:
    """Whether this round's samples are kept: the first, the last, and every tenth."""
    return round in (1, rounds) or round % ROLLOUTS_EVERY == 0


def rollout_records(
    round: int, own: list[Arrived], texts: list[str], drawn: list[SwarmGroup], weights: RewardSettings
) -> list[dict[str, Any]]:
    """Lines of `rollouts.jsonl`: one own group and one from the swarm, those with the most to compare."""
    records = []
    if own:
        one, text = max(zip(own, texts, strict=True), key=lambda pair: _spread(rewards(pair[0].group.components, weights)))
        group = one.group
        records.append(
            _rollout(round, "own", group.order_id, group.question.task, group.tag, text, group, weights),
        )
    if drawn:
        group_drawn = max(drawn, key=lambda group: _spread(rewards(group.components, weights)))
        task, text = group_drawn.question.task, group_drawn.question_text
        records.append(_rollout(round, "swarm", group_drawn.order_id, task, group_drawn.tag, text, group_drawn, weights))
    return records


def _spread(values: list[float]) -> float:
    return max(values) - min(values)


def _rollout(
    round: int, source: str, order_id: str, task: str, tag: str, text: str, group: Any, weights: RewardSettings
) -> dict[str, Any]:
    return {
        "round": round,
        "source": source,
        "order_id": order_id,
        "task": task,
        "tag": tag,
        "question": text[:CHARACTERS],
        "completions": [
            {"text": c.text[:CHARACTERS], "reward": reward, "tokens": c.tokens, "finished": c.finish_reason == "stop"}
            for c, reward in zip(group.completions, rewards(group.components, weights), strict=True)
        ],
    }
