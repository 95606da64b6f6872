"""Pruning frees what it says, and never what a run needs."""

from __future__ import annotations

import fcntl
import json
import os
import time
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from common.directory import Policy
from common.messages import Version
from common.settings import SettingsError
from grapevine.cli import app
from grapevine.prune import is_up, parse_age, plan, prune_runs
from learners.checkpoint import LearnerState, PendingEvaluation

DAY = 86400.0


def policy_file(version: Version) -> str:
    return f"{version.incarnation:06d}-{version.step:09d}.safetensors"


def make_run(folder: Path, name: str, calls_itself: str | None = None) -> Path:
    """A run with one node, five policies of which the second is being evaluated, a cache, and a job's copy."""
    run = folder / name
    checkpoint = run / "nodes" / "node-0" / "checkpoints" / "000001-000000005"
    checkpoint.mkdir(parents=True)
    held = Policy(Version(1, 2), "", "", "")
    state = LearnerState(round=5, version=Version(1, 5), evaluations=(PendingEvaluation(2, held),))
    (checkpoint / "state.json").write_bytes(msgspec.json.encode(state))
    (run / "settings.json").write_text(json.dumps({"run": calls_itself or name}))
    for kind, node in (("policies", "node-0"), ("policies", "eval-job-abc"), ("cache", "generator-0")):
        (run / kind / node).mkdir(parents=True)
    for step in range(1, 6):
        (run / "policies" / "node-0" / policy_file(Version(1, step))).write_bytes(bytes(100))
    (run / "policies" / "eval-job-abc" / policy_file(Version(1, 3))).write_bytes(bytes(50))
    (run / "cache" / "generator-0" / "policy-1.safetensors").write_bytes(bytes(30))
    (run / "nodes" / "node-0" / "key").write_bytes(bytes(32))
    for path in run.rglob("*"):
        os.utime(path, (time.time() - DAY, time.time() - DAY))
    return run


def kept(run: Path) -> list[str]:
    return sorted(path.name.removeprefix("000001-").lstrip("0")[:1] for path in (run / "policies" / "node-0").iterdir())


def test_old_policies_go_and_those_in_use_stay(tmp_path: Path) -> None:
    run = make_run(tmp_path, "demo")
    planned = plan(tmp_path, "demo", keep=2, older_than=0.0)
    assert planned.size == 100 + 100 + 50 + 30
    assert kept(run) == ["1", "2", "3", "4", "5"], "planning removes nothing"
    assert prune_runs(planned).size == planned.size
    assert kept(run) == ["2", "4", "5"], "the two newest, and the one that an evaluation waits for"
    assert not (run / "policies" / "eval-job-abc").exists()
    assert list((run / "cache").iterdir()) == []
    assert (run / "nodes" / "node-0" / "key").exists()
    assert plan(tmp_path, "demo", keep=2, older_than=0.0).items == ()
    with pytest.raises(SettingsError, match="at least 1"):
        plan(tmp_path, "demo", keep=0, older_than=0.0)


def test_what_is_young_may_be_a_workers_that_holds_no_lock(tmp_path: Path) -> None:
    run = make_run(tmp_path, "demo")
    store = run / "policies" / "node-0"
    (store / "000001-000000009.part").write_bytes(bytes(10))
    for path in (store / policy_file(Version(1, 1)), run / "cache" / "generator-0" / "policy-1.safetensors"):
        os.utime(path)
    before = sorted(run.rglob("*"))
    planned = plan(tmp_path, "demo", keep=2, older_than=0.0)
    assert {item.path.name for item in planned.items} == {policy_file(Version(1, 3)), "eval-job-abc"}
    assert sorted(run.rglob("*")) == before, "planning writes nothing, not even a lock"


def test_a_run_that_is_up_is_not_touched(tmp_path: Path) -> None:
    run = make_run(tmp_path, "demo")
    other = make_run(tmp_path, "other")
    planned = plan(tmp_path, None, keep=1, older_than=0.0)
    with (run / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert is_up(run)
        now = plan(tmp_path, None, keep=1, older_than=0.0)
        assert now.passed_over == {"demo": "is up"}
        assert {item.run.name for item in now.items} == {"other"}
        removed = prune_runs(planned)  # it was started after the plan was made
        assert removed.passed_over == {"demo": "is up"}
    assert kept(run) == ["1", "2", "3", "4", "5"]
    assert kept(other) == ["2", "5"]


def test_only_runs_that_were_set_aside_long_ago_go(tmp_path: Path) -> None:
    def aside(days: float) -> str:
        return f"demo-{time.strftime('%Y%m%d-%H%M%S', time.localtime(time.time() - days * DAY))}"

    old, young, named_so = aside(8), aside(6), aside(9)
    make_run(tmp_path, old, calls_itself="demo")
    make_run(tmp_path, young, calls_itself="demo")
    make_run(tmp_path, named_so)  # a run of its own that somebody gave such a name
    make_run(tmp_path, "demo")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "precious").write_text("x")
    (tmp_path / "demo-20200101-000000").symlink_to(tmp_path / "elsewhere")
    arguments = ["prune", "--folder", str(tmp_path), "--keep-policies", "5"]
    listed = CliRunner().invoke(app, [*arguments, "--dry-run"])
    assert listed.exit_code == 0, listed
    assert "would be freed" in listed.output
    assert (tmp_path / old).exists()
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result
    assert "set aside by demo" in result.output
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == sorted([young, named_so, "demo", "elsewhere", "demo-20200101-000000"])
    assert (tmp_path / "elsewhere" / "precious").exists()


@given(st.integers(0, 10**6), st.sampled_from("smhdw"))
def test_ages(number: int, unit: str) -> None:
    assert parse_age(f"{number}{unit}") == number * {"s": 1, "m": 60, "h": 3600, "d": DAY, "w": 7 * DAY}[unit]


@given(st.text().filter(lambda text: not any(unit in text for unit in "smhdw")))
def test_what_is_no_age_says_so(text: str) -> None:
    with pytest.raises(SettingsError, match="is no age"):
        parse_age(text)
