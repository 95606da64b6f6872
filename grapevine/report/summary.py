"""What a run came to, from the files it left behind.

Guarantees: reads only the run's folder, so it works while the run goes on, after it ended, and on a copy.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from common.settings import SettingsError
from learners.journal import read

EDGE = 10


def summary(folder: Path) -> dict[str, Any]:
    """The figures of `grapevine report RUN --json`. Raises SettingsError when there is no such run."""
    nodes = sorted(path for path in (folder / "nodes").glob("*") if path.is_dir())
    if not nodes:
        raise SettingsError(f"{folder} holds no run; `grapevine up` makes one")
    rounds = {node.name: read(node / "rounds.jsonl") for node in nodes}
    heldout = {node.name: _last_per_round(read(node / "heldout.jsonl")) for node in nodes}
    ledger = _json(folder / "ledger.json", {"books": {}, "counts": {}})
    clock = _json(folder / "run.json", {"elapsed_seconds": 0.0})
    books, counts = ledger["books"].values(), ledger["counts"]

    first = _edge(rounds, slice(0, EDGE))
    last = _edge(rounds, slice(-EDGE, None))
    ids = [Counter(id for line in lines for id in [*line["own_ids"], *line["stale_ids"]]) for lines in rounds.values()]
    questions = [mark for lines in rounds.values() for line in lines for mark in line["questions"]]
    tokens = sum(line["own_tokens"] for lines in rounds.values() for line in lines)
    evaluated = [lines for lines in heldout.values() if lines]
    elapsed = clock["elapsed_seconds"]
    return {
        "run": folder.name,
        "nodes": len(nodes),
        "rounds": min(len(lines) for lines in rounds.values()),
        "own_reward_first10": _mean(first),
        "own_reward_first10_se": _standard_error(first),
        "own_reward_last10": _mean(last),
        "own_reward_last10_se": _standard_error(last),
        "heldout_first": _mean([lines[0]["reward"] for lines in evaluated]),
        "heldout_first_se": _pooled([lines[0]["standard_error"] for lines in evaluated]),
        "heldout_last": _mean([lines[-1]["reward"] for lines in evaluated]),
        "heldout_last_se": _pooled([lines[-1]["standard_error"] for lines in evaluated]),
        "groups_ordered": sum(book["ordered"] for book in books),
        "groups_scored": counts.get("scored:train", 0),
        "groups_evaluated": counts.get("scored:eval", 0),
        "groups_lost": sum(book["lost"] for book in books),
        "groups_trained_twice": sum(count - 1 for node in ids for count in node.values()),
        "swarm_groups_used": sum(len(line["swarm_ids"]) for lines in rounds.values() for line in lines),
        "duplicates": counts.get("duplicates", 0),
        "quarantined": sum(count for name, count in counts.items() if name.startswith("refused:")),
        "restarts": clock.get("restarts", 0),
        "distinct_question_share": len(set(questions)) / len(questions) if questions else 0.0,
        "tokens_per_second": tokens / elapsed if elapsed else 0.0,
        "elapsed_seconds": elapsed,
    }


def _edge(rounds: dict[str, list[dict[str, Any]]], part: slice) -> list[float]:
    """Mean rewards of the own groups in these rounds, all nodes."""
    return [reward for lines in rounds.values() for line in lines[part] for reward in line["own_group_rewards"]]


def _last_per_round(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Evaluations by round; one repeated after a restart counts once."""
    return [line for _, line in sorted({line["round"]: line for line in lines}.items())]


def _mean(values: list[float]) -> float | None:
    return fmean(values) if values else None


def _standard_error(values: list[float]) -> float | None:
    return stdev(values) / len(values) ** 0.5 if len(values) > 1 else None


def _pooled(errors: list[float]) -> float | None:
    """Standard error of the mean of independent means."""
    return sum(error**2 for error in errors) ** 0.5 / len(errors) if errors else None


def _json(path: Path, default: dict[str, Any]) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else default
