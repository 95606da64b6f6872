"""A run's folder as a run would have left it, without running one."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

from common.settings import Settings
from learners.scores import Answered, summarize

TASKS = ("binary_matrix", "count_bits", "fraction_simplification", "gcd")
ALL_TAGS = (("failed", 0.0), ("hard", 0.34), ("mixed", 0.67), ("easy", 0.999))


def write_run(
    folder: Path,
    rounds: int = 60,
    nodes: int | dict[str, Any] = 4,
    swarm: int = 4,
    every: int = 20,
    lift: float = 0.4,
    complete: bool = True,
    **tree: Any,
) -> Path:
    """A run whose own reward rises by `lift`; `tree` are further settings. Returns its folder."""
    node = {"rounds": rounds if complete else 2 * rounds, "mix": {"own": 8, "swarm": swarm}, **tree.pop("node", {})}
    settings = Settings(run=folder.name, folder=folder.parent, nodes=nodes, node=node, **tree)
    folder.mkdir(parents=True)
    (folder / "settings.json").write_text(json.dumps(settings.model_dump(mode="json", exclude={"redis_url"})))
    names = settings.node_names()
    books = {}
    for name in names:
        chance = Random(f"{folder.name} {name}")
        place = folder / "nodes" / name
        place.mkdir(parents=True)
        others = [other for other in names if other != name]
        lines = [round_line(chance, number, rounds, others, swarm, lift) for number in range(1, rounds + 1)]
        write_lines(place / "rounds.jsonl", lines)
        write_lines(place / "timing.jsonl", [timing_line(chance, number) for number in range(1, rounds + 1)])
        if every:
            at = sorted({*range(0, rounds + 1, every), rounds})
            write_lines(place / "heldout.jsonl", [heldout_line(chance, number, rounds, lift) for number in at])
        kept = [number for number in range(1, rounds + 1) if number in (1, rounds) or number % 10 == 0]
        sources = ["own", "swarm"] if others and swarm else ["own"]
        write_lines(
            place / "rollouts.jsonl",
            [rollout_line(chance, number, source, name, others) for number in kept for source in sources],
        )
        books[name] = {
            "ordered": 8 * rounds, "trained": 8 * rounds, "filtered": 0, "expired": 0, "open": 0, "waiting": 0, "lost": 0,
        }  # fmt: skip
    counts = {"scored:train": 8 * rounds * len(names), "shared": 8 * rounds * len(names), "scored:eval": 128}
    (folder / "ledger.json").write_text(json.dumps({"books": books, "counts": counts}))
    (folder / "run.json").write_text(json.dumps({"elapsed_seconds": 0.8 * rounds, "restarts": 0}))
    return folder


def round_line(chance: Random, number: int, rounds: int, others: list[str], swarm: int, lift: float) -> dict[str, Any]:
    """One line of rounds.jsonl."""
    level = 0.2 + lift * number / rounds
    rewards = [min(8, max(0, round(8 * chance.gauss(level, 0.2)))) / 8 for _ in range(8)]
    drawn = min(swarm, number - 1) if others else 0
    return {
        "round": number, "own_reward": fmean(rewards), "own_group_rewards": rewards,
        "own_ids": list(range(8 * (number - 1), 8 * number)), "stale_ids": [], "own_tags": [tag(one) for one in rewards],
        "own_tasks": [chance.choice(TASKS) for _ in range(8)],
        "questions": [f"{chance.getrandbits(40):010x}" for _ in range(8)],
        "staleness": chance.choice([0.0, 1.0, 1.0, 1.5]),
        "swarm_ids": [f"{chance.choice(others)}/{chance.randrange(8 * rounds)}" for _ in range(drawn)],
        "swarm_tags": [chance.choice(["hard", "mixed", "easy"]) for _ in range(drawn)],
        "swarm_rewards": [chance.random() for _ in range(drawn)], "swarm_missing": swarm - drawn, "own_tokens": 700,
        "tokens_own": 700.0, "tokens_swarm": 90.0 * drawn, "loss": 0.01, "grad_norm": 0.6, "informative_share": 0.7,
        "sampler_gap": 1e-7, "skipped": 0.0,
    }  # fmt: skip


def tag(reward: float) -> str:
    """The reward tag of a group's mean."""
    return next((name for name, below in ALL_TAGS if reward <= below), "solved")


def timing_line(chance: Random, number: int) -> dict[str, Any]:
    """One line of timing.jsonl; the first round waits for models to load."""
    return {
        "round": number, "at": 1_760_000_000.0 + 0.8 * number, "waited": 12.0 if number == 1 else chance.uniform(0.1, 0.3),
        "drew": 0.01, "updated": chance.uniform(0.25, 0.4), "finished": chance.uniform(0.03, 0.08),
    }  # fmt: skip


def heldout_line(chance: Random, number: int, rounds: int, lift: float) -> dict[str, Any]:
    """One line of heldout.jsonl, by the functions that make real ones."""
    level = 0.15 + lift * number / rounds
    answered = [
        Answered(TASKS[i % 4], float(chance.random() < level + 0.1), tuple(float(chance.random() < level) for _ in range(4)))
        for i in range(64)
    ]
    return {"round": number, "version": f"1.{number}", **summarize(answered)}


def rollout_line(chance: Random, number: int, source: str, node: str, others: list[str]) -> dict[str, Any]:
    """One line of rollouts.jsonl."""
    author = node if source == "own" else chance.choice(others)
    x, y = chance.randrange(10, 99), chance.randrange(10, 99)
    completions = [
        {"text": f"<answer>{x + y + chance.choice([0, 0, 1, 10])}</answer>", "reward": 0.0, "tokens": 14, "finished": True}
        for _ in range(8)
    ]
    for one in completions:
        one["reward"] = float(f">{x + y}<" in str(one["text"]))
    return {
        "round": number, "source": source, "order_id": f"{author}/{chance.randrange(900)}", "task": "sums",
        "tag": tag(fmean(float(str(one["reward"])) for one in completions)), "question": f"What is {x} + {y}?",
        "completions": completions,
    }  # fmt: skip


def write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    """A journal file."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
