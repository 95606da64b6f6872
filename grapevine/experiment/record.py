"""What a cell's run came to, in one small JSON object.

Guarantees: a pure function of what the run's journals say; sums and means are taken before anything is rounded.
"""

from __future__ import annotations

from statistics import fmean
from typing import Any

from grapevine.report.folder import RunFolder
from grapevine.report.series import learned_from

LAST = 20
# Finer than any difference that could matter, and a third of the size.
DIGITS = 5


def record(run: RunFolder) -> dict[str, Any]:
    """Figures by round (means or sums over the nodes that reached it), by node, and of each evaluation."""
    learning = [node for node in run.nodes if run.of_node(node, "learner") != "none"] or run.nodes
    columns = _columns([run.rounds[node] for node in learning])
    rewards = [fmean(line["own_reward"] for line in column) for column in columns]
    every = _columns(list(run.rounds.values()))
    authors, _, counts = learned_from(run)
    return {
        "rounds": {
            "own_reward": [round(reward, DIGITS) for reward in rewards],
            "own_tokens": [sum(line["own_tokens"] for line in column) for column in every],
            "swarm_groups": [sum(len(line["swarm_ids"]) for line in column) for column in every],
            "skipped": [int(sum(line.get("skipped", 0) for line in column)) for column in every],
        },
        "cumulative_own_reward": sum(rewards),
        "learning": learning,
        "nodes": {node: _node(run, node) for node in run.nodes},
        "heldout": _heldout(run),
        "learned_from": {
            node: {author: count for author, count in zip(authors, row, strict=True) if count}
            for node, row in zip(run.nodes, counts, strict=True)
        },
        "wall_seconds": round(run.elapsed_seconds, 1),
    }


def _columns(lines: list[list[dict[str, Any]]]) -> list[list[dict[str, Any]]]:
    """The nodes' lines of each round."""
    last = max((len(one) for one in lines), default=0)
    return [[one[i] for one in lines if i < len(one)] for i in range(last)]


def _node(run: RunFolder, node: str) -> dict[str, Any]:
    lines, evaluations = run.rounds[node], run.heldout[node]
    rewards = [line["own_reward"] for line in lines]
    return {
        "rounds": len(lines),
        "cumulative_own_reward": sum(rewards),
        "last_own_reward": fmean(rewards[-LAST:]) if rewards else None,
        "own_tokens": sum(line["own_tokens"] for line in lines),
        "swarm_groups": sum(len(line["swarm_ids"]) for line in lines),
        "skipped": int(sum(line.get("skipped", 0) for line in lines)),
        "heldout": evaluations[-1]["reward"] if evaluations else None,
        "heldout_greedy": evaluations[-1]["greedy"]["rate"] if evaluations else None,
    }


def _heldout(run: RunFolder) -> list[dict[str, Any]]:
    """Evaluations that every evaluated node has: the round, means over nodes, and each node's figures."""
    nodes = {node: {line["round"]: line for line in lines} for node, lines in run.heldout.items() if lines}
    shared = sorted(set.intersection(*(set(lines) for lines in nodes.values()))) if nodes else []
    found = []
    for at in shared:
        sampled = {node: lines[at]["reward"] for node, lines in nodes.items()}
        greedy = {node: lines[at]["greedy"]["rate"] for node, lines in nodes.items()}
        found.append(
            {
                "round": at,
                "sampled": round(fmean(sampled.values()), DIGITS),
                "greedy": round(fmean(greedy.values()), DIGITS),
                "nodes": {
                    node: {"sampled": round(sampled[node], DIGITS), "greedy": round(greedy[node], DIGITS)} for node in nodes
                },
            }
        )
    return found
