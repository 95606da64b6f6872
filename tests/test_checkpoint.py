"""Checkpoints, journals and policy files: whole or not at all, damage is said and survived, versions only rise."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from structlog.testing import capture_logs

from common.directory import Policy
from common.messages import Version
from common.policies import BadPolicy, PolicyStore, fetch
from common.settings import SettingsError
from learners.checkpoint import Checkpoints, LearnerState, PendingEvaluation
from learners.journal import Journal, read
from learners.orders import AccountState


class Text:
    """Stands for the tensors: a line in each of two files. `fails` breaks off between the two."""

    def __init__(self, text: str = "", fails: bool = False) -> None:
        self.text = text
        self.fails = fails

    def save(self, folder: Path) -> None:
        (folder / "model.safetensors").write_text(self.text)
        if self.fails:
            raise OSError("no space left on device")
        (folder / "optimizer.safetensors").write_text(self.text[::-1])

    def load(self, folder: Path) -> None:
        self.text = (folder / "model.safetensors").read_text()


def state(round: int, incarnation: int = 1) -> LearnerState:
    policy = Policy(Version(incarnation, round), "file:///somewhere", "0" * 64, "model")
    return LearnerState(
        round=round, version=Version(incarnation, round), account=AccountState(next=round + 4, watermark=round),
        seen={"stream 1-0": 7}, evaluations=(PendingEvaluation(round, policy),),
    )  # fmt: skip


def newest(checkpoints: Checkpoints) -> tuple[LearnerState, str]:
    found = checkpoints.newest()
    assert found is not None
    read_back = Text()
    read_back.load(found[1])
    return msgspec.structs.replace(found[0], checksums={}), read_back.text


# --- checkpoints ---


def test_what_was_saved_comes_back(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.newest() is None
    checkpoints.save(state(1), Text("one"))
    assert newest(checkpoints) == (state(1), "one")
    assert newest(Checkpoints(tmp_path)) == (state(1), "one")


def test_the_last_two_are_kept_and_a_later_incarnation_is_later(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    for round, incarnation in ((8, 1), (9, 1), (10, 1), (3, 2)):
        checkpoints.save(state(round, incarnation), Text(f"{round}"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["000001-000000010", "000002-000000003"]
    assert newest(checkpoints) == (state(3, 2), "3")


def test_a_save_that_breaks_off_leaves_no_checkpoint(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(state(1), Text("one"))
    with pytest.raises(OSError, match="no space"):
        checkpoints.save(state(2), Text("two", fails=True))
    assert newest(checkpoints) == (state(1), "one")
    # The next start clears away what was begun, and saves that round.
    again = Checkpoints(tmp_path)
    again.sweep()
    assert [path.name for path in tmp_path.iterdir()] == ["000001-000000001"]
    again.save(state(2), Text("two"))
    assert newest(again) == (state(2), "two")


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors", "state.json"])
@pytest.mark.parametrize("damage", ["cut", "flipped", "gone", "empty"])
def test_a_damaged_one_is_said_and_the_one_before_is_used(tmp_path: Path, file: str, damage: str) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(state(1), Text("the first one"))
    place = checkpoints.save(state(2), Text("the second one")) / file
    data = place.read_bytes()
    if damage == "gone":
        place.unlink()
    else:
        # Flipped in the state file: the digit of the round, which no grammar could miss.
        at = data.index(b'"round": 2') + 9 if file == "state.json" else len(data) // 2
        flipped = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        place.write_bytes({"cut": data[: len(data) // 2], "flipped": flipped, "empty": b""}[damage])
    with capture_logs() as logs:
        assert newest(Checkpoints(tmp_path)) == (state(1), "the first one")
    assert [(line["log_level"], Path(line["folder"]).name) for line in logs] == [("error", "000001-000000002")]
    assert all(line["detail"] for line in logs)


def test_with_all_damaged_there_is_none_and_nothing_begins_anew(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    for round in (1, 2):
        (checkpoints.save(state(round), Text("x")) / "model.safetensors").write_text("y")
    with capture_logs() as logs, pytest.raises(SettingsError, match="none of the 2 checkpoints in"):
        checkpoints.newest()
    assert len(logs) == 2


def test_a_round_saved_again_renews_its_state(tmp_path: Path) -> None:
    """As a learner does that resumes from a drained round and is told to stop before the next."""
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(state(3), Text("three"))
    renewed = msgspec.structs.replace(state(3), evaluations=())
    checkpoints.save(renewed, Text("three"))
    assert newest(checkpoints) == (renewed, "three")
    checkpoints.amend(state(3))
    assert newest(Checkpoints(tmp_path)) == (state(3), "three")


def test_the_incarnation_only_rises(tmp_path: Path) -> None:
    numbers = [Checkpoints(tmp_path).raise_incarnation() for _ in range(3)]
    assert numbers == [1, 2, 3]
    # Without its file the checkpoints still say what there was: a lower number would sort below them.
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(state(5, incarnation=3), Text("x"))
    (tmp_path / "incarnation").unlink()
    assert checkpoints.raise_incarnation() == 4


# --- the journal ---


def test_a_resumed_journal_drops_what_the_checkpoint_does_not_know(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "node-0", keep_until=0)
    for round in range(1, 6):
        journal.round({"round": round, "own_reward": 0.5})
        journal.timing({"round": round, "at": 0.0})
        journal.heldout({"round": round, "reward": 0.1})
    with (tmp_path / "rounds.jsonl").open("ab") as file:
        file.write(b'{"round":6,"own_rew')
    assert [line["round"] for line in read(tmp_path / "rounds.jsonl")] == [1, 2, 3, 4, 5]
    resumed = Journal(tmp_path, "node-0", keep_until=3)
    resumed.round({"round": 4, "own_reward": 0.7})
    for name, rounds in (("rounds", [1, 2, 3, 4]), ("timing", [1, 2, 3]), ("heldout", [1, 2, 3])):
        text = (tmp_path / f"{name}.jsonl").read_text()
        assert [json.loads(line)["round"] for line in text.splitlines()] == rounds
    assert read(tmp_path / "rounds.jsonl")[-1]["own_reward"] == 0.7
    assert read(tmp_path / "nothing.jsonl") == []


def test_a_line_cut_short_at_the_checkpoints_round_is_not_glued_to_the_next(tmp_path: Path) -> None:
    Journal(tmp_path, "node-0", keep_until=0).round({"round": 1, "own_reward": 0.5})
    with (tmp_path / "rounds.jsonl").open("ab") as file:
        file.write(b'{"round":2')
    Journal(tmp_path, "node-0", keep_until=1).round({"round": 2, "own_reward": 0.5})
    assert read(tmp_path / "rounds.jsonl") == [{"round": 1, "own_reward": 0.5}, {"round": 2, "own_reward": 0.5}]


# --- policies ---


def weights_file(folder: Path, text: str = "weights") -> Path:
    path = folder / "weights"
    path.write_text(text)
    return path


def test_a_policy_travels(tmp_path: Path) -> None:
    store = PolicyStore(str(tmp_path / "store"), "node-0", kept=2)
    policy = store.publish(weights_file(tmp_path), Version(1, 5), "model")
    assert (policy.version, policy.model) == (Version(1, 5), "model")
    local = fetch(policy, tmp_path / "cache")
    assert local.read_text() == "weights"
    assert local.is_relative_to(tmp_path / "cache")


@pytest.mark.parametrize("reason", ["missing", "checksum"])
def test_what_is_not_as_announced_is_not_fetched(tmp_path: Path, reason: str) -> None:
    store = PolicyStore(str(tmp_path / "store"), "node-0", kept=2)
    policy = store.publish(weights_file(tmp_path), Version(1, 5), "model")
    (place,) = (tmp_path / "store").rglob("*.safetensors")
    place.unlink() if reason == "missing" else place.write_text("other weights")
    with pytest.raises(BadPolicy) as raised:
        fetch(policy, tmp_path / "cache")
    assert raised.value.reason == reason
    assert "1.5" in str(raised.value)
    assert list((tmp_path / "cache").iterdir()) == [], "nothing is left that could be taken for a policy"


@pytest.mark.parametrize("url", ["file:///nowhere/x.safetensors", "nosuchscheme://host/x", "memory://none/x"])
def test_an_address_that_leads_nowhere_is_missing(tmp_path: Path, url: str) -> None:
    with pytest.raises(BadPolicy) as raised:
        fetch(Policy(Version(1, 1), url, "0" * 64, "model"), tmp_path / "cache")
    assert raised.value.reason == "missing"


def test_the_last_and_the_pinned_are_kept(tmp_path: Path) -> None:
    store = PolicyStore(str(tmp_path / "store"), "node-0", kept=3)
    store.pinned = {Version(1, 2)}
    policies = {}
    for step in range(1, 8):
        version = Version(1, step) if step < 6 else Version(2, step)
        policies[version] = store.publish(weights_file(tmp_path, f"weights {step}"), version, "model")

    def left() -> set[Version]:
        return {version for version, policy in policies.items() if Path(policy.url.removeprefix("file://")).exists()}

    assert left() == {Version(1, 2), Version(1, 5), Version(2, 6), Version(2, 7)}
    assert fetch(policies[Version(1, 2)], tmp_path / "cache").read_text() == "weights 2"
    store.pinned = set()
    policies[Version(2, 8)] = store.publish(weights_file(tmp_path), Version(2, 8), "model")
    assert left() == {Version(2, 6), Version(2, 7), Version(2, 8)}
    assert [path.name for path in (tmp_path / "store").rglob("*.part")] == []


def test_nodes_do_not_prune_one_another(tmp_path: Path) -> None:
    first, second = (PolicyStore(str(tmp_path / "store"), node, kept=2) for node in ("node-0", "node-1"))
    kept = first.publish(weights_file(tmp_path), Version(1, 1), "model")
    for step in range(5):
        second.publish(weights_file(tmp_path), Version(1, step), "model")
    assert fetch(kept, tmp_path / "cache").exists()
