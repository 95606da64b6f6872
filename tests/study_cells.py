"""Studies and finished cells as an experiment would have left them, without running one."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import yaml

from grapevine.experiment.cells import Cell
from grapevine.experiment.study import Study, load_study


def write_study(folder: Path, seeds: tuple[int, ...] = (1, 2, 3), **changes: Any) -> Study:
    """Three arms, one regime; `changes` replace keys of the file."""
    tree: dict[str, Any] = {
        "experiment": "made-up",
        "question": "What do the arms differ in?",
        "settings": {"nodes": 4, "node": {"tasks": "starter", "rounds": 300, "model": "small"}},
        "models": {"small": {"steps": 1, "width": 32}},
        "arms": {
            "silo": {"node": {"mix": {"own": 8, "swarm": 0}}},
            "naive": {"node": {"mix": {"own": 8, "swarm": 8}}},
            "successes": {"node": {"mix": {"own": 8, "swarm": 8}, "update": {"correction": "successes"}}},
        },
        "regimes": {"alike": {"purpose": "confirmatory", "about": "All nodes begin alike.", "seeds": list(seeds)}},
    }
    path = folder / "study.yaml"
    path.write_text(yaml.safe_dump({**tree, **changes}, sort_keys=False))
    return load_study(path)


def write_cell(cell: Cell, out: Path, lift: float, rounds: int = 300) -> dict[str, Any]:
    """A finished cell whose own reward rises by `lift`."""
    chance = Random(cell.name)
    lucky = Random(cell.seed).gauss(0.0, 0.03)
    rewards = [
        round(min(1.0, max(0.0, 0.2 + lucky + lift * at / rounds + chance.gauss(0, 0.05))), 5) for at in range(1, rounds + 1)
    ]
    swarm = cell.settings.node.mix.swarm
    nodes = cell.settings.node_names()
    figures: dict[str, Any] = {
        "regime": cell.regime, "arm": cell.arm, "seed": cell.seed, "version": "0.1.0", "commit": None,
        **cell.resolved(),
        "rounds": {
            "own_reward": rewards,
            "own_tokens": [2000 + chance.randrange(500) + round(300 * lift) for _ in rewards],
            "swarm_groups": [4 * swarm if swarm else 0 for _ in rewards],
            "skipped": [0 for _ in rewards],
        },
        "cumulative_own_reward": sum(rewards),
        "learning": nodes,
        "nodes": {node: {"cumulative_own_reward": sum(rewards), "last_own_reward": fmean(rewards[-20:])} for node in nodes},
        "heldout": [
            {"round": at, "sampled": 0.2 + lucky + lift * at / rounds, "greedy": 0.4 + lift * at / rounds / 2, "nodes": {}}
            for at in range(0, rounds + 1, rounds // 4)
        ],
        "learned_from": {},
        "wall_seconds": 120.0,
    }  # fmt: skip
    path = cell.file(out)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(figures))
    return figures
