"""Experiments for real: cells in processes of their own, stopped and gone on with, and one that fails."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.study_cells import write_study

SETTINGS = {
    "nodes": 2,
    "node": {
        "model": "small", "tasks": "starter", "rounds": 4, "group_size": 4, "ahead": 1, "sampling": {"max_new_tokens": 8},
        "update": {"learning_rate": 1e-3}, "evaluate": {"every": 0, "questions": 6, "completions": 2},
    },
}  # fmt: skip
MODELS = {"small": {"steps": 40, "width": 32, "layers": 1, "sloppy": 0.2}}
SILO = {"node": {"mix": {"own": 3, "swarm": 0}}}
NAIVE: dict[str, dict[str, Any]] = {"node": {"mix": {"own": 3, "swarm": 3, "tags": ["failed", "hard", "mixed", "easy"]}}}
LONG = 60


def start(folder: Path, *options: str) -> subprocess.Popen[str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("GRAPEVINE_") and key != "REDIS_URL"}
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "grapevine",
            "experiment",
            str(folder / "study.yaml"),
            "--out",
            str(folder / "out"),
            *options,
        ],
        env={**clean, "OMP_NUM_THREADS": "1", "GRAPEVINE_CACHE": str(folder / "cache"), "GRAPEVINE_NODE__ROUNDS": "2"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def cell(folder: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "out" / "cells" / "alike" / f"{name}.json").read_text())
    return found


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three cells, of which one fails, interrupted in the middle of the third and gone on with by a second start."""
    folder = tmp_path_factory.mktemp("stopped")
    (folder / "no-model").mkdir()
    broken = {"node": {"model": str(folder / "no-model"), "mix": {"own": 3}}}
    # Long enough that its end does not come before the signal.
    long = {"node": {**NAIVE["node"], "rounds": LONG}}
    arms = {"silo": SILO, "broken": broken, "naive": long}
    write_study(folder, seeds=(1,), settings=SETTINGS, models=MODELS, arms=arms)
    process = start(folder)
    journal = folder / "out" / "runs" / "alike" / "naive-1" / "nodes" / "node-0" / "timing.jsonl"
    deadline = time.monotonic() + 200
    while not journal.exists() or not journal.read_bytes():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "stopped with 1 of 3 cells finished; the same command goes on with the others" in output
    assert children and not psutil.wait_procs(children, timeout=20)[1]
    out = folder / "out"
    assert not (out / "cells" / "alike" / "naive-1.json").exists()
    assert "2 of 3 runs are not finished" in (out / "index.html").read_text()
    before = (out / "cells" / "alike" / "silo-1.json").stat().st_mtime_ns

    process = start(folder, "--parallel", "2")
    (folder / "output").write_text(process.communicate(timeout=200)[0])
    assert process.returncode == 1, (folder / "output").read_text()
    assert (out / "cells" / "alike" / "silo-1.json").stat().st_mtime_ns == before
    return folder


def test_a_stopped_experiment_goes_on_and_leaves_only_its_results(stopped: Path) -> None:
    output, out = (stopped / "output").read_text(), stopped / "out"
    assert "1 of 3 cells are there, 2 to run" in output
    assert "alike naive seed 1: own reward" in output
    assert "\x1b" not in output
    assert not (out / "runs" / "alike" / "naive-1").exists()
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["cells"], summary["finished"]) == (3, 2)
    page = (out / "index.html").read_text()
    assert all(f"<tr><td>{arm}" in page for arm in ("silo", "naive", "broken"))


def test_a_cell_that_fails_is_told_and_holds_up_no_other(stopped: Path) -> None:
    output = (stopped / "output").read_text()
    assert "alike/broken-1 ended with exit code 2; the end of" in output
    assert f"{stopped / 'no-model'} is no model folder" in output
    assert str(stopped / "out" / "logs" / "alike" / "broken-1.log") in output
    assert "1 of 3 cells failed: alike/broken-1" in output


def test_a_cell_says_what_came_of_it(stopped: Path) -> None:
    silo, naive = cell(stopped, "silo-1"), cell(stopped, "naive-1")
    assert len(silo["rounds"]["own_reward"]) == 4  # the environment has no say
    assert len(naive["rounds"]["own_reward"]) == LONG
    assert sum(silo["rounds"]["swarm_groups"]) == 0 < sum(naive["rounds"]["swarm_groups"])
    assert naive["learned_from"]["node-0"].keys() == {"node-1"}
    assert [one["round"] for one in naive["heldout"]] == [0, LONG]
    assert all(tokens > 0 for tokens in naive["rounds"]["own_tokens"])
    assert silo["settings"]["node"]["model"] == "small" and silo["models"]["small"]["steps"] == 40
    assert silo["seed"] == silo["settings"]["seed"] == 1 and silo["wall_seconds"] > 0
    # One seed, one model, and before the first update nothing was shared yet.
    assert silo["heldout"][0] == naive["heldout"][0]
    assert silo["rounds"]["own_reward"][0] == naive["rounds"]["own_reward"][0]
