"""An exported policy is an ordinary model folder: same logits, same tokens, nothing overwritten, nothing half written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from common.messages import Version
from common.policies import PolicyStore
from common.sections import NodeSettings
from common.settings import Settings, SettingsError
from grapevine.cli import main
from grapevine.export import export_model, find_policy, run_settings
from learners.checkpoint import WEIGHTS_FILE, Checkpoints, LearnerState
from learners.update import PolicyTrainer
from tests.conftest import make_tiny_model

IDS = torch.tensor([[3, 5, 7, 11]])


class Trained:
    """A run of one node with two checkpoints and three policy files, each with weights of its own."""

    def __init__(self, folder: Path, model: Path) -> None:
        node: dict[str, Any] = {"model": str(model), "rounds": 10, "tasks": "starter"}
        self.settings = Settings(run="trained", folder=folder / "runs", nodes=1, node=node)  # type: ignore[arg-type]
        self.settings.run_folder.mkdir(parents=True)
        path = self.settings.run_folder / "settings.json"
        path.write_text(self.settings.model_dump_json(exclude={"redis_url"}))
        trainer = PolicyTrainer(str(model), NodeSettings(**node))
        self.checkpoints = Checkpoints(self.settings.run_folder / "nodes" / "node-0" / "checkpoints")
        store = PolicyStore(str(self.settings.run_folder / "policies"), "node-0", kept=8)
        self.logits: dict[str, torch.Tensor] = {}
        for round in (1, 2, 3):
            with torch.no_grad():
                for parameter in trainer.model.parameters():
                    parameter.add_(
                        0.1 * round * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(round))
                    )
                self.logits[f"1.{round}"] = trainer.model(IDS).logits
            saved = self.checkpoints.save(LearnerState(round=round, version=Version(1, round)), trainer)
            store.publish(saved / WEIGHTS_FILE, Version(1, round), str(model))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Trained:
    return Trained(tmp_path_factory.mktemp("trained"), tiny_model)


def logits_of(folder: Path) -> torch.Tensor:
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(IDS).logits


@pytest.mark.parametrize("version", [None, "1.2", "1.1"])  # the newest checkpoint, the one before it, a policy file alone
def test_the_folder_gives_the_policys_logits(trained: Trained, tmp_path: Path, version: str | None) -> None:
    wanted = Version(*(int(part) for part in version.split("."))) if version else None
    facts = export_model(trained.settings, "node-0", tmp_path / "models" / "mine", wanted)
    assert facts["version"] == (version or "1.3")
    folder = Path(facts["folder"])
    torch.testing.assert_close(logits_of(folder), trained.logits[facts["version"]], rtol=0, atol=0)
    base = trained.settings.for_node("node-0").model
    text = "What is 2 + 2?"
    assert AutoTokenizer.from_pretrained(folder).encode(text) == AutoTokenizer.from_pretrained(base).encode(text)
    assert (folder / "generation_config.json").exists()
    assert not list(folder.glob("*.bin")) and not list(folder.parent.glob(".*"))


def test_untied_embeddings_stay_two(tmp_path: Path) -> None:
    trained = Trained(tmp_path, make_tiny_model(tmp_path / "model", tied=False))
    export_model(trained.settings, "node-0", tmp_path / "out")
    torch.testing.assert_close(logits_of(tmp_path / "out"), trained.logits["1.3"], rtol=0, atol=0)


def test_the_card_says_what_is_known_and_what_is_not(trained: Trained, tmp_path: Path) -> None:
    folder = trained.settings.run_folder
    part = {
        "questions": 40, "reward": 0.5, "low": 0.4, "high": 0.6, "greedy": {"rate": 0.55, "low": 0.4, "high": 0.7},
    }  # fmt: skip
    line = {"round": 3, "version": "1.3", "completions": 4, **part, "by_task": {"gcd": part}}
    (folder / "nodes" / "node-0" / "heldout.jsonl").write_text(json.dumps(line) + "\n")
    export_model(trained.settings, "node-0", tmp_path / "new")
    export_model(trained.settings, "node-0", tmp_path / "old", Version(1, 2))
    card = (tmp_path / "new" / "README.md").read_text()
    front = yaml.safe_load(card.split("---")[1])
    assert front["library_name"] == "transformers"
    assert front["license"] == "other", "the base model's licence was not looked up"
    assert "| gcd | 40 | 0.550 (0.400-0.700) | 0.500 (0.400-0.600) |" in card
    assert "Policy 1.3 of node `node-0`" in card
    assert (
        "This version was not evaluated. The node's last evaluation was of round 3."
        in (tmp_path / "old" / "README.md").read_text()
    )


def test_nothing_is_overwritten_and_a_wrong_name_gets_the_right_one(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("mine")
    with pytest.raises(SettingsError, match="full is not empty"):
        export_model(trained.settings, "node-0", tmp_path / "full")
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["thesis.tex"]
    with pytest.raises(SettingsError, match="has no node nod-0; did you mean node-0"):
        export_model(trained.settings, "nod-0", tmp_path / "out")
    with pytest.raises(SettingsError, match=r"version 1\.9 of node-0 is not kept any more; kept are 1\.1, 1\.2, 1\.3"):
        export_model(trained.settings, "node-0", tmp_path / "out", Version(1, 9))
    with pytest.raises(SettingsError, match="did you mean trained"):
        run_settings(trained.settings.folder, "traned")
    arguments = [
        "export",
        "trained",
        "node-0",
        str(tmp_path / "out"),
        "--version",
        "3",
        "--folder",
        str(trained.settings.folder),
    ]
    monkeypatch.setattr("sys.argv", ["grapevine", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "3 is no policy version; write it as incarnation.step, for example 1.150" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_damaged_checkpoint_is_not_exported(tmp_path: Path, tiny_model: Path) -> None:
    trained = Trained(tmp_path, tiny_model)
    policy = find_policy(trained.settings, "node-0", None)
    path = Path(policy.url)
    path.write_bytes(path.read_bytes()[:-8] + bytes(8))
    with pytest.raises(SettingsError, match="is not the one that was announced; name another version"):
        export_model(trained.settings, "node-0", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_command_says_where_the_model_is(trained: Trained, tmp_path: Path) -> None:
    from grapevine.cli import app

    target = tmp_path / "out"
    result = CliRunner().invoke(app, ["export", "trained", "node-0", str(target), "--folder", str(trained.settings.folder)])
    assert result.exit_code == 0, result
    assert result.output.strip() == f"version 1.3 of node-0 is in {target}"
