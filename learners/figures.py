"""A node's journal as figures for Prometheus.

Guarantees: counts go on over restarts, since they begin with what the journal holds; authors beyond the first so many share
a label, so that a large swarm does not flood whoever stores the series.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from common import metrics


class Figures:
    """One node's figures."""

    def __init__(self, node: str, rounds: Iterable[Mapping[str, Any]], evaluations: Iterable[Mapping[str, Any]]) -> None:
        """`rounds` and `evaluations` are the journal's lines so far."""
        self._node = node
        self._authors: set[str] = set()
        # There from the start, so that a rate over them is 0 and not nothing.
        for origin in ("own", "swarm"):
            metrics.tokens_trained.labels(node, origin)
        for counter in (metrics.swarm_missing, metrics.updates_skipped, metrics.rollbacks, metrics.policies_served):
            counter.labels(node)
        metrics.rounds.labels(node).set(0)
        for record in rounds:
            self.round(record)
        for record in evaluations:
            self.heldout(record)

    def round(self, record: Mapping[str, Any]) -> None:
        """A line of rounds.jsonl."""
        node = self._node
        metrics.rounds.labels(node).set(record["round"])
        metrics.own_reward.labels(node).set(record["own_reward"])
        metrics.staleness.labels(node).set(record.get("staleness", 0))
        metrics.swarm_missing.labels(node).inc(record.get("swarm_missing", 0))
        metrics.tokens_trained.labels(node, "own").inc(record.get("tokens_own", 0))
        metrics.tokens_trained.labels(node, "swarm").inc(record.get("tokens_swarm", 0))
        metrics.updates_skipped.labels(node).inc(record.get("skipped", 0))
        metrics.rollbacks.labels(node).inc(record.get("rolled_back", 0))
        for gauge, name in (
            (metrics.informative_share, "informative_share"), (metrics.loss, "loss"), (metrics.grad_norm, "grad_norm"),
        ):  # fmt: skip
            if record.get(name) is not None:
                gauge.labels(node).set(record[name])
        by_task: dict[str, list[float]] = {}
        for task, reward in zip(record.get("own_tasks", ()), record.get("own_group_rewards", ()), strict=False):
            by_task.setdefault(task, []).append(reward)
        for task, rewards in by_task.items():
            metrics.task_reward.labels(node, task).set(sum(rewards) / len(rewards))
        for tag in record.get("own_tags", ()):
            metrics.groups_used.labels(node, node, tag).inc()
        for id, tag in zip(record.get("swarm_ids", ()), record.get("swarm_tags", ()), strict=False):
            metrics.groups_used.labels(node, self._author(id.rpartition("/")[0]), tag).inc()

    def _author(self, name: str) -> str:
        if len(self._authors) < metrics.AUTHORS_NAMED:
            self._authors.add(name)
        return name if name in self._authors else metrics.OTHERS

    def heldout(self, record: Mapping[str, Any]) -> None:
        """A line of heldout.jsonl."""
        metrics.heldout_reward.labels(self._node).set(record["reward"])
        if "greedy" in record:
            metrics.heldout_greedy.labels(self._node).set(record["greedy"]["rate"])
