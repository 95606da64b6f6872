"""`grapevine up` with real processes: what is killed comes back, what is interrupted goes on, nothing is left behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
import yaml

from learners.journal import read

GRAPEVINE = [sys.executable, "-m", "grapevine"]
PATIENCE = 90.0
ROUNDS = 40
NODES = ("node-0", "node-1")


class Run:
    """One run's folder, and the `grapevine up` processes that a test starts on it."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder / "runs" / "up"
        self.config = folder / "up.yaml"
        node = {
            "model": str(model), "rounds": ROUNDS, "group_size": 8, "sampling": {"max_new_tokens": 32},
            "mix": {"own": 4, "swarm": 2, "tags": ["failed", "hard", "mixed", "easy"]},
            # The length of an answer is rewarded too: a random model's answers are all wrong, and nothing would be learnt.
            "reward": {"accuracy": 1.0, "length": 1.0}, "update": {"learning_rate": 1e-3},
            "evaluate": {"questions": 8, "completions": 2, "every": 20},
        }  # fmt: skip
        tree = {"run": "up", "folder": str(folder / "runs"), "nodes": 2, "redeliver_seconds": 3.0, "node": node}
        self.config.write_text(yaml.safe_dump(tree))
        self.process: subprocess.Popen[str] | None = None
        self.seen: dict[int, psutil.Process] = {}

    def up(self, *flags: str, **variables: str) -> None:
        """Start it in the background."""
        self.process = subprocess.Popen(
            [*GRAPEVINE, "up", str(self.config), *flags],
            env=environment(**variables),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def call(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """A command to its end."""
        return subprocess.run([*GRAPEVINE, *arguments], env=environment(), capture_output=True, text=True, timeout=PATIENCE)

    def rounds(self, node: str) -> list[int]:
        return [line["round"] for line in read(self.folder / "nodes" / node / "rounds.jsonl")]

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for it while `up` runs, taking note of every process there is."""
        deadline = time.monotonic() + PATIENCE
        assert self.process is not None
        while not condition():
            assert self.process.poll() is None, f"ended with {self.process.returncode} before {what}: {self.words()}"
            assert time.monotonic() < deadline, f"no {what} within {PATIENCE:.0f} s"
            self.look()
            time.sleep(0.02)

    def look(self) -> None:
        """Note all descendants of `up`."""
        assert self.process is not None
        with suppress(psutil.NoSuchProcess):
            self.seen |= {child.pid: child for child in psutil.Process(self.process.pid).children(recursive=True)}

    def kill(self, *words: str) -> None:
        """SIGKILL the child of `up` whose command line ends in, or contains, these words."""
        assert self.process is not None
        found = [
            c for c in psutil.Process(self.process.pid).children() if all(word in " ".join(c.cmdline()) for word in words)
        ]
        assert len(found) == 1, (words, found)
        found[0].kill()

    @contextmanager
    def held_after_round(self, round: int) -> Iterator[list[int]]:
        """Wait for a round of node-0, then let no generator move meanwhile, so that the run cannot come to its end."""
        self.until(lambda: len(self.rounds("node-0")) >= round, f"round {round}")
        assert self.process is not None
        held = [c for c in psutil.Process(self.process.pid).children() if "worker generator" in " ".join(c.cmdline())]
        for child in held:
            child.suspend()
        yield self.rounds("node-0")
        for child in held:
            with suppress(psutil.NoSuchProcess):
                child.resume()

    def wait(self) -> int:
        """The exit code."""
        assert self.process is not None
        deadline = time.monotonic() + PATIENCE
        while self.process.poll() is None and time.monotonic() < deadline:
            self.look()
            time.sleep(0.05)
        return self.process.wait(1)

    def words(self) -> str:
        """What it printed, once it has ended."""
        assert self.process is not None
        out, err = self.process.communicate(timeout=PATIENCE)
        return out + err

    def alive(self) -> list[str]:
        """Descendants that are still there, zombies apart, and strangers that name this run's folder."""
        left = [process for process in self.seen.values() if is_alive(process)]
        for process in psutil.process_iter():
            try:
                if str(self.folder) in " ".join(process.cmdline()) and process.pid not in self.seen and is_alive(process):
                    left.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return [str(process) for process in left]

    def report(self) -> dict[str, float]:
        """`grapevine report --json`."""
        done = self.call("report", self.folder.name, "--folder", str(self.folder.parent), "--json")
        assert done.returncode == 0, done.stderr
        facts: dict[str, float] = json.loads(done.stdout)
        return facts

    def assert_whole(self) -> None:
        """Every round once on every node, nothing lost, nothing twice, all evaluations there."""
        for node in NODES:
            assert self.rounds(node) == list(range(1, ROUNDS + 1))
            heldout = {line["round"] for line in read(self.folder / "nodes" / node / "heldout.jsonl")}
            assert heldout == {0, 20, ROUNDS}
        facts = self.report()
        assert (facts["groups_lost"], facts["groups_trained_twice"], facts["rounds"]) == (0, 0, ROUNDS)
        assert facts["swarm_groups_used"] > 0


def environment(**variables: str) -> dict[str, str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("GRAPEVINE_") and key != "REDIS_URL"}
    return {**clean, "OMP_NUM_THREADS": "1", **variables}


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def run(tmp_path: Path, tiny_model: Path) -> Iterator[Run]:
    run = Run(tmp_path, tiny_model)
    yield run
    if run.process is not None and run.process.poll() is None:
        run.process.kill()
        run.process.wait()


def test_whatever_is_killed_comes_back(run: Run) -> None:
    # A flag overrules a variable, in the workers too.
    run.up("--set", f"node.rounds={ROUNDS}", GRAPEVINE_NODE__ROUNDS="3")
    for words in (
        ("worker generator generator-0",),
        ("worker verifier",),
        ("worker learner node-0",),
        ("valkey", "127.0.0.1:"),
    ):
        # Nodes need not start together, so it is node-0 that everything is done to.
        with run.held_after_round(len(run.rounds("node-0")) + 2) as reached:
            assert len(reached) < ROUNDS - 2, "nothing was left to disturb"
            run.kill(*words)
    assert run.wait() == 0, run.words()
    run.assert_whole()
    assert run.report()["restarts"] >= 4
    events = [(line["event"], line["name"]) for line in read(run.folder / "events.jsonl")]
    assert set(events) >= {
        ("restart", "generator-0"), ("restart", "verifier-0"), ("restart", "node-0"), ("server restart", "server"),
    }  # fmt: skip
    assert run.alive() == []


def test_interrupted_killed_and_finished(run: Run) -> None:
    run.up()
    with run.held_after_round(2) as reached:
        # Exclusion, looked at while nothing moves.
        for flags in ((), ("--fresh",), ("--lockstep",)):
            second = run.call("up", str(run.config), *flags)
            assert second.returncode == 2
            assert second.stderr.startswith("grapevine: run up is already up in another process")
            assert second.stderr.count("\n") == 1
            assert second.stdout == ""
        assert run.process is not None
        run.process.send_signal(signal.SIGINT)
    assert run.wait() == 130, run.words()
    assert run.alive() == []
    assert run.report()["groups_lost"] == 0
    assert run.rounds("node-0")[: len(reached)] == reached
    reached = run.rounds("node-0")
    assert len(reached) < ROUNDS

    run.up()
    with run.held_after_round(len(reached) + 2):
        run.process.kill()
        run.process.wait()
        # The kernel kills the children of a killed parent, and theirs, those that stand still among them.
        gone_by = time.monotonic() + 10
        while run.alive() and time.monotonic() < gone_by:
            time.sleep(0.05)
        assert run.alive() == []
    assert run.rounds("node-0")[: len(reached)] == reached

    run.up()
    assert run.wait() == 0, run.words()
    assert run.rounds("node-0")[: len(reached)] == reached
    run.assert_whole()
    assert run.alive() == []


@pytest.mark.parametrize("fault", ["not there", "cut short"])
def test_a_model_that_is_none_ends_the_run_in_one_sentence(run: Run, tiny_model: Path, tmp_path: Path, fault: str) -> None:
    model = tmp_path / "model"
    if fault == "cut short":
        shutil.copytree(tiny_model, model)
        os.truncate(model / "model.safetensors", 1000)
    run.up("--set", f"node.model={model}")
    assert run.wait() == 2
    assert run.process is not None
    _, errors = run.process.communicate(timeout=PATIENCE)
    (sentence,) = errors.splitlines()
    assert sentence.startswith("grapevine: node-")
    assert f"the model {model} of node-" in sentence
    assert not (run.folder / "events.jsonl").exists(), "starting again would not help"
    assert run.alive() == []


def test_a_server_that_does_not_answer_is_said_at_once(run: Run) -> None:
    run.up("--set", "redis_url=redis://127.0.0.1:1/0")
    assert run.wait() == 2
    assert run.process is not None
    _, errors = run.process.communicate(timeout=PATIENCE)
    (sentence,) = errors.splitlines()
    assert sentence.startswith("grapevine: the server that redis_url names does not answer")
