"""A lockstep run that is killed, at any moment and again and again, ends with the files of one that never was."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
from rich.console import Console

from common.run import open_run
from common.settings import Settings, SettingsError, load
from grapevine.running.barrier import Barriers
from grapevine.running.continuing import check_mode, is_complete, resumed
from grapevine.server import EmbeddedServer
from learners.checkpoint import Checkpoints
from learners.journal import read

KILLS = 20
ROUNDS = 9
NODES = 3
METRICS = ("rounds.jsonl", "heldout.jsonl", "rollouts.jsonl")

# Its children have torch loaded already: twenty starts from nothing would take minutes.
processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(
    ["grapevine.running.local", "grapevine.running.lockstep", "generators.engines.transformers", "learners.update"]
)


def settings(folder: Path, run: str, model: Path) -> Settings:
    node = {
        "model": str(model), "rounds": ROUNDS, "group_size": 8, "ahead": 2, "sampling": {"max_new_tokens": 16},
        "mix": {"own": 3, "swarm": 2, "tags": ["failed", "hard", "mixed", "easy"]},
        "update": {"learning_rate": 1e-3}, "evaluate": {"questions": 12, "completions": 2, "every": 2},
    }  # fmt: skip
    return Settings.model_validate({"run": run, "folder": folder, "seed": 3, "nodes": NODES, "node": node})


def child(tree: str, said: str) -> None:
    """A whole `grapevine up --lockstep` in a process of its own."""
    from grapevine.running.local import up

    with Path(said).open("a") as file:
        raise SystemExit(
            up(Settings.model_validate_json(tree), fresh=False, lockstep=True, console=Console(file=file, width=200))
        )


def start(of: Settings) -> multiprocessing.process.BaseProcess:
    of.folder.mkdir(parents=True, exist_ok=True)
    process = processes.Process(target=child, args=(of.model_dump_json(), str(said(of))))
    process.start()
    return process


def said(of: Settings) -> Path:
    return of.folder / f"{of.run}.txt"


def run_to_the_end(of: Settings) -> None:
    process = start(of)
    process.join(120)
    assert process.exitcode == 0, said(of).read_text()


def files(of: Settings) -> dict[str, bytes]:
    return {
        f"{node} {name}": (of.run_folder / "nodes" / node / name).read_bytes()
        for node in of.node_names()
        for name in METRICS
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, learnt: Path) -> tuple[Settings, float]:
    """An uninterrupted run and the seconds it took."""
    of = settings(tmp_path_factory.mktemp("whole"), "whole", learnt)
    began = time.monotonic()
    run_to_the_end(of)
    assert [line["round"] for line in read(of.run_folder / "nodes" / "node-0" / "heldout.jsonl")] == [0, 2, 4, 6, 8, 9]
    return of, time.monotonic() - began


@pytest.mark.timeout(600)
def test_killed_at_twenty_random_moments(whole: tuple[Settings, float], tmp_path: Path, learnt: Path) -> None:
    reference, seconds = whole
    moments = random.Random(0)
    kills = runs = 0
    in_rounds: set[int] = set()
    while kills < KILLS:
        of = settings(tmp_path, f"killed-{runs}", learnt)
        while True:
            process = start(of)
            process.join(moments.uniform(0.05, 0.9) * seconds)
            if process.exitcode is not None:
                assert process.exitcode == 0, said(of).read_text()
                break
            os.kill(process.pid or 0, signal.SIGKILL)
            process.join()
            kills += 1
            in_rounds.add(len(read(of.run_folder / "nodes" / "node-0" / "rounds.jsonl")))
            if kills >= KILLS:
                run_to_the_end(of)
                break
        assert files(of) == files(reference)
        runs += 1
    assert len(in_rounds) > 2, "the kills must have met the run in many places"


@pytest.fixture
def ended(whole: tuple[Settings, float], tmp_path: Path) -> Settings:
    """A copy of the whole run, cut back to its last barrier but one when it is resumed."""
    of = whole[0]
    shutil.copytree(of.run_folder, tmp_path / of.run)
    return of.model_copy(update={"folder": tmp_path})


def barriers(of: Settings) -> list[Path]:
    return sorted((of.run_folder / "barriers").iterdir())


def test_a_damaged_barrier_is_named_and_the_one_before_used(whole: tuple[Settings, float], ended: Settings) -> None:
    newest = barriers(ended)[-1]
    newest.write_bytes(newest.read_bytes()[:-20])
    run_to_the_end(ended)
    assert "cannot be used (its checksum is wrong); going back to the one before" in said(ended).read_text()
    assert f"resuming after round {int(newest.name) - 1}" in said(ended).read_text()
    assert files(ended) == files(whole[0])


def test_a_damaged_checkpoint_is_named_and_the_barrier_before_used(whole: tuple[Settings, float], ended: Settings) -> None:
    checkpoint = sorted((ended.run_folder / "nodes" / "node-1" / "checkpoints").glob("*-*"))[-1]
    weights = checkpoint / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + b"\0\0\0\1")
    run_to_the_end(ended)
    text = said(ended).read_text()
    assert f"checkpoint {checkpoint.name} of node-1: model.safetensors is not what was written" in text
    assert files(ended) == files(whole[0])


def test_without_a_good_barrier_nothing_is_begun(ended: Settings) -> None:
    for path in barriers(ended):
        path.write_bytes(b"")
    before = files(ended)
    process = start(ended)
    process.join(60)
    assert process.exitcode == 1
    assert files(ended) == before


def test_a_run_in_lockstep_keeps_its_nodes(ended: Settings, server: EmbeddedServer) -> None:
    ledger, _ = open_run(ended.model_copy(update={"redis_url": server.url}))
    with pytest.raises(SettingsError, match="in lockstep they stay the same"):
        Barriers(ended.run_folder).restore(ledger, ["node-0", "other"], print)


def test_with_and_without_evaluation_the_rounds_are_the_same(
    whole: tuple[Settings, float], tmp_path: Path, learnt: Path
) -> None:
    reference = whole[0]
    tree = json.loads(settings(tmp_path, "bare", learnt).model_dump_json())
    tree["node"]["evaluate"]["questions"] = 0
    bare = Settings.model_validate(tree)
    run_to_the_end(bare)
    for node in reference.node_names():
        place = Path("nodes") / node
        assert not (bare.run_folder / place / "heldout.jsonl").exists()
        for name in ("rounds.jsonl", "rollouts.jsonl"):
            assert (bare.run_folder / place / name).read_bytes() == (reference.run_folder / place / name).read_bytes()


def test_a_run_stays_in_its_mode(ended: Settings, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="was begun in lockstep; continue it with --lockstep"):
        check_mode(ended.run_folder, lockstep=False)
    (tmp_path / "other" / "nodes" / "node-0" / "checkpoints" / "000001-000000001").mkdir(parents=True)
    with pytest.raises(SettingsError, match="was begun without --lockstep"):
        check_mode(tmp_path / "other", lockstep=True)


def test_a_complete_run_is_known_until_it_is_given_more_rounds(ended: Settings) -> None:
    assert is_complete(ended)
    more = ended.model_copy(update={"node": ended.node.model_copy(update={"rounds": ROUNDS + 1})})
    assert not is_complete(more)


def test_a_run_that_lost_its_barriers_is_not_begun_anew(ended: Settings, server: EmbeddedServer) -> None:
    for path in barriers(ended):
        path.unlink()
    before = files(ended)
    ledger, _ = open_run(ended.model_copy(update={"redis_url": server.url}))
    with pytest.raises(SettingsError, match="lost its barriers"):
        Barriers(ended.run_folder).restore(ledger, ended.node_names(), print)
    assert files(ended) == before


def test_another_run_of_that_name_on_the_server_is_left_alone(tmp_path: Path, server: EmbeddedServer) -> None:
    of = Settings(run="elsewhere", folder=tmp_path, redis_url=server.url)
    ledger, _ = open_run(of)
    ledger.redis.set(ledger.keys.targets(), "theirs")
    with pytest.raises(SettingsError, match="holds a run elsewhere that was not begun here"):
        Barriers(of.run_folder).restore(ledger, of.node_names(), print)
    assert ledger.redis.get(ledger.keys.targets()) == b"theirs"
    ledger.redis.delete(ledger.keys.targets())


def test_a_beginning_that_was_killed_leaves_no_incarnation(tmp_path: Path, server: EmbeddedServer) -> None:
    of = Settings(run="beginning", folder=tmp_path, redis_url=server.url)
    ledger, _ = open_run(of)
    assert Barriers(of.run_folder).restore(ledger, of.node_names(), print) == 0
    folder = of.run_folder / "nodes" / "node-0" / "checkpoints"
    assert Checkpoints(folder).raise_incarnation() == 1
    assert Barriers(of.run_folder).restore(ledger, of.node_names(), print) == 0
    assert Checkpoints(folder).raise_incarnation() == 1


def test_resume_finds_a_run_by_its_folder(ended: Settings) -> None:
    path, flags, lockstep = resumed(str(ended.run_folder))
    assert lockstep
    again = load(path, [*flags, "node.rounds=12"])
    assert again.run_folder == ended.run_folder
    assert again.for_node("node-0").rounds == 12
    assert again.for_node("node-0").update == ended.for_node("node-0").update
    with pytest.raises(SettingsError, match=r"there is no run to resume in .*/hole; did you mean whole\?"):
        resumed(str(ended.folder / "hole"))
