"""Updates that are skipped again and again: counted, then undone by the last checkpoint that later updates came from."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from common.messages import Version
from common.settings import Settings
from learners.checkpoint import Checkpoints, LearnerState
from learners.journal import read
from learners.rollback import Rollback, Streak

ROUNDS = 9
BROKEN_AT, LIMIT = 3, 3
MARK = 7.25

processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["grapevine.running.local", "grapevine.running.lockstep", "learners.update"])


class Empty:
    """A trainer whose only tensor is a number on disk."""

    def __init__(self) -> None:
        self.value = 0

    def save(self, folder: Path) -> None:
        (folder / "model.safetensors").write_text(str(self.value))

    def load(self, folder: Path) -> None:
        self.value = int((folder / "model.safetensors").read_text())

    roll_back = load


def line(taken: int, skipped: int = 0, rolled_back: int = 0) -> dict[str, float]:
    return {"steps": taken, "skipped": skipped, "rolled_back": rolled_back}


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([], (0, 0)),
        ([line(1), line(1)], (2, 0)),
        ([line(1), line(0, 1), line(0, 1)], (1, 2)),
        ([line(1), line(0, 1), line(0)], (1, 1)),  # nothing to learn: neither counts nor ends the row
        ([line(1), line(0, 1), line(1, 2)], (3, 0)),  # some steps of the round were taken
        ([line(1), line(0, 1), line(0, 1, rolled_back=1)], (1, 0)),
        ([line(1), line(0, 1), line(0, 1, rolled_back=1), line(0, 1)], (1, 1)),
        ([{"skipped": 0.0}, {"skipped": 1.0}, {}], (3, 0)),  # an earlier release's, and a stand-in's
    ],
)
def test_the_row_is_read_from_the_journal(lines: list[dict[str, float]], expected: tuple[int, int]) -> None:
    assert Streak.of([{"round": number, **figures} for number, figures in enumerate(lines, 1)]) == expected


def play(folder: Path, rounds: list[dict[str, float]], limit: int, kept: int = 2) -> tuple[list[float], list[int]]:
    """Rounds through a real `Checkpoints`, restarted before each; what was rolled back, and the trainer's numbers."""
    lines: list[dict[str, float]] = []
    back, values = [], []
    Checkpoints(folder, kept).save(LearnerState(version=Version(1, 0)), Empty())
    for number, figures in enumerate(rounds, 1):
        checkpoints, trainer = Checkpoints(folder, kept), Empty()
        found = checkpoints.newest()
        assert found is not None
        trainer.load(found[1])
        rollback = Rollback("node-0", limit, checkpoints, trainer, lines)
        trainer.value += 100 * int(figures["steps"])
        after = rollback.after(number, figures)
        checkpoints.save(LearnerState(round=number, version=Version(1, number)), trainer)
        lines.append({"round": number, **after})
        back.append(after["rolled_back"])
        values.append(trainer.value)
    return back, values


def test_the_checkpoint_that_comes_back_is_one_that_was_trained_from(tmp_path: Path) -> None:
    good, bad = line(1), line(0, 1)
    back, values = play(tmp_path / "a", [good, good, good, bad, bad, bad, bad, good], limit=4)
    # Round 3 gave the weights that every update failed with; those of round 2 gave round 3.
    assert back == [0, 0, 0, 0, 0, 0, 1, 0]
    assert values == [100, 200, 300, 300, 300, 300, 200, 300]
    back, values = play(tmp_path / "b", [good, bad, bad, bad, bad], limit=2)
    assert back == [0, 0, 1, 0, 1], "it counts anew after each return"
    assert values == [100, 100, 0, 0, 0]
    back, values = play(tmp_path / "c", [bad, bad, bad, bad], limit=2)
    assert back == [0, 0, 0, 0], "nothing was ever good"
    back, values = play(tmp_path / "d", [good, bad, bad, bad, bad], limit=0)
    assert back == [0, 0, 0, 0, 0]


def test_a_damaged_checkpoint_does_not_come_back(tmp_path: Path) -> None:
    checkpoints, trainer = Checkpoints(tmp_path, kept=5), Empty()
    for number in range(4):
        trainer.value = number
        folder = checkpoints.save(LearnerState(round=number, version=Version(1, number)), trainer)
        if number == 2:
            (folder / "model.safetensors").write_text("half")
    rollback = Rollback("node-1", 1, checkpoints, trainer, [{"round": 3, **line(1)}])
    assert rollback.after(4, line(0, 1))["rolled_back"] == 1
    assert trainer.value == 1


def test_the_good_checkpoint_is_spared(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, kept=2)
    for number in range(8):
        checkpoints.spared_before = min(number, 3)
        checkpoints.save(LearnerState(round=number, version=Version(1, number)), Empty())
    assert sorted(path.name[-1] for path in tmp_path.iterdir()) == ["2", "6", "7"]


# --- a real run ---


def settings(folder: Path, run: str, model: Path, **update: Any) -> Settings:
    node = {
        "model": str(model), "rounds": ROUNDS, "group_size": 4, "ahead": 1, "sampling": {"max_new_tokens": 12},
        "mix": {"own": 2, "swarm": 1, "tags": ["failed", "hard", "mixed", "easy"]},
        # Of random weights no answer is right, but some are shorter than others.
        "reward": {"length": 1.0}, "evaluate": {"questions": 0}, "policies_kept": 32,
        "update": {"learning_rate": 1e-4, "rollback_after": LIMIT, **update},
    }  # fmt: skip
    return Settings.model_validate({"run": run, "folder": folder, "seed": 3, "nodes": 2, "node": node})


def child(tree: str, said: str, killed_at: int) -> None:
    """A lockstep run whose weights are broken after update 3: each update from them fails until others take their place."""
    from grapevine.running.local import up
    from learners.update import PolicyTrainer

    real_update = PolicyTrainer.update
    flag = Path(f"{said}.killed")

    def update(self: Any, own: Any, swarm: Any) -> dict[str, float]:
        real_loss = self._loss

        def loss(*args: Any) -> Any:
            broken = next(iter(self._parameters.values())).data.view(-1)[0] == MARK
            return real_loss(*args) * (float("nan") if broken else 1.0)

        self._loss = loss
        figures = real_update(self, own, swarm)
        self._loss = real_loss
        if self._updates == BROKEN_AT:
            next(iter(self._parameters.values())).data.view(-1)[0] = MARK
        if self._updates == killed_at and not flag.exists():
            flag.touch()
            os._exit(9)
        return figures

    PolicyTrainer.update = update  # type: ignore[method-assign]
    with Path(said).open("a") as file:
        console = Console(file=file, width=200)
        raise SystemExit(up(Settings.model_validate_json(tree), fresh=False, lockstep=True, console=console))


def run(of: Settings, killed_at: int = 0) -> Path:
    of.folder.mkdir(parents=True, exist_ok=True)
    said = of.folder / f"{of.run}.txt"
    for expected in [9, 0] if killed_at else [0]:
        process = processes.Process(target=child, args=(of.model_dump_json(), str(said), killed_at))
        process.start()
        process.join(200)
        assert process.exitcode == expected, said.read_text()[-3000:]
    return of.run_folder


@pytest.fixture(scope="module", params=["weights", "adapters"])
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> tuple[Path, Any]:
    lora = {"lora": {"rank": 4}} if request.param == "adapters" else {}
    folder = tmp_path_factory.mktemp("rollback")
    return run(settings(folder, "whole", tiny_model, **lora)), lora


def test_a_run_recovers_from_broken_weights(whole: tuple[Path, Any]) -> None:
    folder, _ = whole
    for node in ("node-0", "node-1"):
        lines = read(folder / "nodes" / node / "rounds.jsonl")
        assert [row["round"] for row in lines] == list(range(1, ROUNDS + 1))
        assert [row["skipped"] for row in lines] == [0, 0, 0, 1, 1, 1, 0, 0, 0]
        assert [row["rolled_back"] for row in lines] == [0, 0, 0, 0, 0, 1, 0, 0, 0]
        assert all(row["grad_norm"] > 0 for row in lines[6:])
        policies = {path.stem[-1]: path.read_bytes() for path in (folder / "policies" / node).glob("*.safetensors")}
        assert len(policies) == ROUNDS + 1, "every round has a number of its own"
        assert policies["3"] == policies["4"] == policies["5"] != policies["2"]
        assert policies["6"] == policies["2"] != policies["7"]


@pytest.mark.parametrize("killed_at", [5, 6])
def test_a_kill_among_skipped_rounds_changes_nothing(
    whole: tuple[Path, Any], tmp_path: Path, tiny_model: Path, killed_at: int
) -> None:
    folder, lora = whole
    again = run(settings(tmp_path, "killed", tiny_model, **lora), killed_at)
    for node in ("node-0", "node-1"):
        name = Path("nodes") / node / "rounds.jsonl"
        assert (folder / name).read_bytes() == (again / name).read_bytes()
