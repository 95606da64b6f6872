"""Sinks: what the journal gets is found again in TensorBoard's event files and at Weights & Biases."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from common.settings import Settings, SettingsError
from learners.sinks import open_sinks, scalars

ROUND: dict[str, Any] = {
    "round": 1, "own_reward": 0.5, "own_group_rewards": [0.25, 0.75, 0.5], "own_ids": [0, 1, 2], "stale_ids": [],
    "own_tags": ["hard", "easy", "hard"], "own_tasks": ["gcd", "lcm", "gcd"], "questions": ["aa", "bb", "cc"],
    "staleness": 1.5, "swarm_ids": ["node-1/4"], "swarm_tags": ["mixed"], "swarm_rewards": [0.625], "swarm_missing": 1,
    "own_tokens": 300, "tokens_own": 300.0, "tokens_swarm": 90.0, "loss": -0.25, "grad_norm": 2.0,
}  # fmt: skip
RATE = {"rate": 0.75, "low": 0.5, "high": 0.9}
HELDOUT: dict[str, Any] = {
    "round": 0, "version": "1.0", "reward": 0.4, "low": 0.3, "high": 0.5, "standard_error": 0.05, "questions": 8,
    "completions": 4, "greedy": RATE, "pass_at": {"1": {**RATE, "rate": 0.4}, "4": {**RATE, "rate": 0.8}},
    "by_task": {"gcd": {"questions": 8, "reward": 0.4, "low": 0.3, "high": 0.5, "greedy": RATE, "pass_at": {}}},
}  # fmt: skip


def settings(folder: Path, **sinks: Any) -> Settings:
    return Settings(run="sunk", folder=folder, nodes=2, sinks=sinks)


def events(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """All scalars of an event folder, as TensorBoard itself would show them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    accumulator.Reload()
    return {tag: [(e.step, e.value) for e in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]}


def test_no_sink_is_opened_unless_asked_for(tmp_path: Path) -> None:
    assert open_sinks(settings(tmp_path), "node-0", tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_a_record_becomes_single_numbers() -> None:
    figures = scalars("round", ROUND)
    assert figures["reward/own"] == 0.5
    assert (figures["reward/task/gcd"], figures["reward/task/lcm"]) == (0.375, 0.75)
    assert (figures["tags/own_hard"], figures["tags/own_easy"], figures["tags/swarm_mixed"]) == (2, 1, 1)
    assert (figures["mix/own_groups"], figures["mix/swarm_groups"], figures["mix/swarm_missing"]) == (3, 1, 1)
    held = scalars("heldout", HELDOUT)
    assert (held["heldout/sampled"], held["heldout/greedy"], held["heldout/pass@4"]) == (0.4, 0.75, 0.8)
    assert held["heldout/task/gcd"] == 0.4


def test_a_node_that_never_trains_has_fewer_figures() -> None:
    bare = {key: value for key, value in ROUND.items() if key not in ("tokens_own", "tokens_swarm", "loss", "grad_norm")}
    assert not any(name.startswith("update/") for name in scalars("round", {**bare, "swarm_ids": [], "swarm_rewards": []}))


def test_tensorboard_holds_what_was_written(tmp_path: Path) -> None:
    asked = settings(tmp_path, tensorboard=True)
    for node, reward in (("node-0", 0.5), ("node-1", 0.25)):
        (sink,) = open_sinks(asked, node, asked.run_folder)
        sink.write("heldout", HELDOUT, 0)
        sink.write("round", {**ROUND, "own_reward": reward}, 1)
        sink.close()
    found = events(tmp_path / "sunk" / "tensorboard" / "node-1")
    assert found["reward/own"] == [(1, 0.25)]
    assert found["heldout/sampled"] == [(0, pytest.approx(0.4))]
    assert events(tmp_path / "sunk" / "tensorboard" / "node-0")["reward/own"] == [(1, 0.5)]


def test_rounds_repeated_after_a_crash_show_once(tmp_path: Path) -> None:
    asked = settings(tmp_path, tensorboard=True)
    (sink,) = open_sinks(asked, "node-0", tmp_path)
    sink.write("heldout", HELDOUT, 0)
    for step in range(1, 6):
        sink.write("round", {**ROUND, "own_reward": 0.1}, step)
    sink.close()
    # The checkpoint was of round 3: rounds 4 and 5 come again, and come out otherwise.
    (sink,) = open_sinks(asked, "node-0", tmp_path, resumed_at=3)
    for step in range(4, 7):
        sink.write("round", {**ROUND, "own_reward": 0.9}, step)
    sink.close()
    found = events(tmp_path / "tensorboard" / "node-0")
    assert [(step, round(value, 1)) for step, value in found["reward/own"]] == [
        (1, 0.1), (2, 0.1), (3, 0.1), (4, 0.9), (5, 0.9), (6, 0.9),
    ]  # fmt: skip
    assert len(found["heldout/sampled"]) == 1


@pytest.mark.parametrize(("sink", "package"), [({"tensorboard": True}, "tensorboard"), ({"wandb": "mine"}, "wandb")])
def test_a_missing_package_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sink: dict[str, Any], package: str
) -> None:
    for name in [name for name in sys.modules if name.startswith(("torch.utils.tensorboard", "tensorboard", "wandb"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SettingsError, match=rf"needs the package {package}.*pip install 'grapevine-rl\[sinks\]'"):
        open_sinks(settings(tmp_path, **sink), "node-0", tmp_path)


def test_wandb_keeps_its_run_over_a_crash(tmp_path: Path) -> None:
    """Offline, in a process of its own: wandb starts a service and handlers that would outlive the test."""
    pytest.importorskip("wandb")
    script = f"""
from pathlib import Path
from common.settings import Settings
from learners.sinks import open_sinks
from tests.test_sinks import HELDOUT, ROUND
settings = Settings(run="sunk", folder=Path({str(tmp_path)!r}), nodes=2, sinks={{"wandb": "grapevine"}})
for resumed_at in (0, 1):
    both = [open_sinks(settings, node, settings.run_folder, resumed_at)[0] for node in ("node-0", "node-1")]
    print(*[sink._run.id for sink in both], *[sink._run.group for sink in both])
    for sink in both:
        sink.write("heldout", HELDOUT, resumed_at)
        for step in range(resumed_at + 1, 4):
            sink.write("round", {{**ROUND, "own_reward": step / 10}}, step)
    for sink in both:
        print(sink._run.summary["round"], sink._run.summary["reward/own"])
        sink.close()
"""
    environment = {**os.environ, "WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_CONFIG_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    first, *figures = done.stdout.splitlines()
    ids = first.split()[:2]
    assert len(set(ids)) == 2
    assert first.split()[2:] == ["sunk", "sunk"]
    assert figures == ["3 0.3", "3 0.3", first, "3 0.3", "3 0.3"]
    assert list((tmp_path / "sunk" / "wandb").rglob("*.wandb")), "nothing was written under the run's folder"
