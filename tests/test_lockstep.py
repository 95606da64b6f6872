"""Lockstep: one seed gives one metric file, in any process; the swarm shows earlier rounds only; a stopped run goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from learners.journal import read

NODES = ("node-0", "node-1", "node-2")
ROUNDS = 6


def start(folder: Path, model: Path, hash_seed: str, run: str, rounds: int = ROUNDS, seed: int = 3) -> subprocess.Popen[str]:
    """`grapevine up --lockstep` in a process of its own."""
    config = folder / f"{run}.yaml"
    node = {
        "model": str(model), "rounds": rounds, "group_size": 8, "ahead": 1, "sampling": {"max_new_tokens": 16},
        "mix": {"own": 3, "swarm": 2, "tags": ["failed", "hard", "mixed", "easy"]},
        "update": {"learning_rate": 1e-3}, "evaluate": {"questions": 16, "completions": 4, "every": 2},
    }  # fmt: skip
    tree = {"run": run, "folder": str(folder), "seed": seed, "nodes": len(NODES), "node": node}
    config.write_text(yaml.safe_dump(tree))
    return grapevine("up", str(config), "--lockstep", hash_seed=hash_seed)


def grapevine(*arguments: str, hash_seed: str = "0") -> subprocess.Popen[str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("GRAPEVINE_") and key != "REDIS_URL"}
    return subprocess.Popen(
        [sys.executable, "-m", "grapevine", *arguments],
        env={**clean, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": hash_seed},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen[str], code: int = 0) -> None:
    output, _ = process.communicate(timeout=120)
    assert process.returncode == code, output


def files(folder: Path, run: str) -> dict[str, bytes]:
    names = ("rounds.jsonl", "heldout.jsonl")
    return {f"{node} {name}": (folder / run / "nodes" / node / name).read_bytes() for node in NODES for name in names}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, learnt: Path) -> Path:
    """Three finished runs: `one` and `two` with one seed, `other` with another; each under its own hash seed."""
    folder = tmp_path_factory.mktemp("lockstep")
    for run, hash_seed, seed in (("one", "1", 3), ("two", "2", 3), ("other", "1", 4)):
        finish(start(folder, learnt, hash_seed, run, seed=seed))
    return folder


def test_one_seed_one_metric_file(folder: Path) -> None:
    assert files(folder, "one") == files(folder, "two")


def test_another_seed_another_run(folder: Path) -> None:
    one, other = files(folder, "one"), files(folder, "other")
    assert [name for name in one if one[name] == other[name]] == []


def test_the_run_was_one_that_learns_and_shares(folder: Path) -> None:
    for node in NODES:
        lines = read(folder / "one" / "nodes" / node / "rounds.jsonl")
        assert [line["round"] for line in lines] == list(range(1, ROUNDS + 1))
        assert all(len(line["swarm_ids"]) + line["swarm_missing"] == 2 for line in lines)
        assert all(line["swarm_missing"] == 0 for line in lines[1:])
        assert any(line["grad_norm"] > 0 for line in lines)
        heldout = read(folder / "one" / "nodes" / node / "heldout.jsonl")
        assert sorted(line["round"] for line in heldout) == [0, 2, 4, 6]
        assert len({line["reward"] for line in heldout}) > 1


def test_the_swarm_shows_earlier_rounds_only(folder: Path) -> None:
    # With one batch ahead a group is published in the round its author trains on it.
    lines = {node: read(folder / "one" / "nodes" / node / "rounds.jsonl") for node in NODES}
    published = {f"{node}/{number}": line["round"] for node in NODES for line in lines[node] for number in line["own_ids"]}
    used = [(published[id], line["round"]) for node in NODES for line in lines[node] for id in line["swarm_ids"]]
    assert used
    assert all(earlier < now for earlier, now in used)
    assert any(earlier == now - 1 for earlier, now in used), "the round before is to be seen already"
    for node in NODES:
        drawn = [id for line in lines[node] for id in line["swarm_ids"]]
        assert len(drawn) == len(set(drawn))
        assert not [id for id in drawn if id.startswith(f"{node}/")]


def test_an_interrupted_run_goes_on(tmp_path: Path, tiny_model: Path) -> None:
    process = start(tmp_path, tiny_model, "0", "stopped", rounds=15)
    journal = tmp_path / "stopped" / "nodes" / "node-0" / "rounds.jsonl"
    deadline = time.monotonic() + 60
    while len(read(journal)) < 3:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    finish(process, 130)
    reached = read(journal)
    assert 3 <= len(reached) < 15
    finish(grapevine("up", "--resume", str(tmp_path / "stopped")))
    assert read(journal)[: len(reached)] == reached
    for node in NODES:
        lines = read(tmp_path / "stopped" / "nodes" / node / "rounds.jsonl")
        assert [line["round"] for line in lines] == list(range(1, 16))
        ids = [id for line in lines for id in line["own_ids"]]
        assert sorted(ids) == list(range(len(ids)))
