"""Study files: what is wrong is one sentence; what a cell is to run with; cells that were run with other settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from common.settings import SettingsError
from grapevine.cli import app
from grapevine.experiment.cells import Cell, kept, plan
from grapevine.experiment.study import load_study
from tests.study_cells import write_cell, write_study

ROOT = Path(__file__).resolve().parents[1]
STUDIES = sorted((ROOT / "configs" / "experiments").glob("*.yaml"))


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_the_studies_that_come_along_resolve(path: Path, tmp_path: Path) -> None:
    study = load_study(path)
    for cell in plan(study, tmp_path):
        assert cell.settings.run_folder == tmp_path / "runs" / cell.regime / f"{cell.arm}-{cell.seed}"
    assert study.question


def test_the_papers_setting_is_the_papers(tmp_path: Path) -> None:
    cells = {cell.name: cell.settings for cell in plan(load_study(ROOT / "configs/experiments/paper-qwen.yaml"), tmp_path)}
    assert len(cells) == 18
    mixes = {name.split("/")[1][:-2]: (cell.node.mix.own, cell.node.mix.swarm) for name, cell in cells.items()}
    assert mixes == {
        "silo": (8, 0), "silo-filtered": (8, 0), "six-two": (6, 2), "four-four": (4, 4), "two-six": (2, 6),
        "successes": (8, 8),
    }  # fmt: skip
    for settings in cells.values():
        node = settings.node
        assert (settings.nodes, node.model, node.rounds, node.group_size) == (8, "Qwen/Qwen2.5-0.5B-Instruct", 2000, 8)
        assert (node.update.clip_low, node.update.clip_high, node.update.learning_rate) == (0.2, 0.28, 1e-6)
        assert (node.sampling.max_new_tokens, node.sampling.temperature, node.sampling.top_p) == (256, 1.0, 1.0)


def test_a_dry_run_shows_the_plan_and_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setenv("GRAPEVINE_NODE__MIX__OWN", "3")  # of no concern to a study
    done = CliRunner().invoke(app, ["experiment", str(ROOT / "configs/experiments/paper-qwen.yaml"), "--dry-run"])
    assert done.exit_code == 0, done.output
    rows = {line.split()[1]: line for line in done.output.splitlines() if line.startswith("paper ")}
    assert "8/0" in rows["silo"] and "384,000" in rows["silo"] and "96,000" in rows["two-six"]
    assert "0 of 18 cells are there; to run: 18 cells, 36,000 rounds" in done.output
    assert list(tmp_path.iterdir()) == []


def test_precedence_is_study_then_regime_then_arm(tmp_path: Path) -> None:
    study = write_study(
        tmp_path,
        settings={"nodes": 2, "node": {"rounds": 5, "group_size": 4, "model": "starter"}, "swarm": {"quota": 7}},
        arms={"a": None, "b": {"node": {"rounds": 9}, "nodes": {"node-1": {"mix": {"own": 3}}}}},
        regimes={"one": {"seeds": [4, 5], "settings": {"node": {"rounds": 7, "group_size": 6}}}},
    )
    cells = {cell.name: cell.settings for cell in plan(study, tmp_path)}
    assert list(cells) == ["one/a-4", "one/b-4", "one/a-5", "one/b-5"]
    assert [(s.node.rounds, s.node.group_size, s.swarm.quota, s.seed) for s in cells.values()] == [
        (7, 6, 7, 4), (9, 6, 7, 4), (7, 6, 7, 5), (9, 6, 7, 5),
    ]  # fmt: skip
    assert cells["one/b-4"].node_names() == ["node-0", "node-1"]
    assert [cells["one/b-4"].for_node(name).mix.own for name in ("node-0", "node-1")] == [8, 3]


def test_descriptive_arms_have_fewer_seeds_and_come_last(tmp_path: Path) -> None:
    study = write_study(
        tmp_path,
        arms={"a": None, "b": None, "c": None},
        regimes={"one": {"seeds": [4, 5, 6], "descriptive_arms": ["b"], "descriptive_seeds": 1}},
    )
    names = [cell.name for cell in plan(study, tmp_path)]
    assert names == ["one/a-4", "one/c-4", "one/a-5", "one/c-5", "one/a-6", "one/c-6", "one/b-4"]
    assert study.arms_of("one") == ["a", "c", "b"]


def test_an_arm_that_names_a_node_leaves_the_others(tmp_path: Path) -> None:
    study = write_study(tmp_path, settings={}, arms={"a": {"nodes": {"node-2": {"mix": {"own": 3}}}}})
    assert plan(study, tmp_path)[0].settings.node_names() == ["node-0", "node-1", "node-2", "node-3"]


def regime(tree: dict[str, Any]) -> dict[str, Any]:
    return {"regimes": {"alike": tree}}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"regime": {}}, "unknown key regime; did you mean regimes?"),
        (regime({"sedes": [1]}), "unknown key regimes.alike.sedes; did you mean regimes.alike.seeds?"),
        (regime({"purpose": "descriptive"}), "regimes.alike.seeds is missing; add it"),
        (regime({"seeds": [1], "referense": []}), "regimes.alike.referense; did you mean regimes.alike.reference?"),
        (regime({"seeds": [1], "arms": ["silos"]}), "regimes.alike.arms: there is no arm silos; did you mean silo?"),
        (regime({"seeds": [1], "arms": ["silo"], "reference": ["naive"]}), "there is no arm naive; there are silo"),
        (regime({"seeds": [1, 1]}), "regimes.alike.seeds: 1 is there twice"),
        (regime({"seeds": ["x"]}), "regimes.alike.seeds.0: input should be a valid integer"),
        ({"models": {"small": {"widht": 32}}}, "unknown key models.small.widht; did you mean models.small.width?"),
        ({"models": {"small": {"width": 33}}}, "models.small.width: input should be a multiple of 32"),
        ({"models": {"small": {"shares": {"gcd": 1.0}}}}, "models.small.shares: give each of its tasks a share"),
        ({"models": {"starter": {}}}, "models.starter: this model is there already"),
        ({"models": {"small": {"tasks": "startre"}}}, "models.small.tasks: tasks: preset 'startre' is unknown"),
        ({"settings": {"seed": 1}}, "settings.seed: seeds stand in `seeds` of a regime; take it out"),
        ({"arms": {"Silo!": {}}}, "arms: 'Silo!' cannot be a name"),
        ({"path": "/etc"}, "must be a study"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_one_sentence(tmp_path: Path, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SettingsError) as refused:
        write_study(tmp_path, **changes)
    assert sentence in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"node": {"mixx": {}}}, "regime alike, arm silo: unknown setting node.mixx; did you mean node.mix?"),
        ({"node": {"model": "smal"}}, "there is no model smal; did you mean small?"),
        ({"node": {"tasks": ["gdc"]}}, "did you mean 'gcd'?"),
    ],
)
def test_settings_of_a_cell_that_cannot_be_used(tmp_path: Path, settings: dict[str, Any], sentence: str) -> None:
    study = write_study(tmp_path, settings=settings)
    with pytest.raises(SettingsError) as refused:
        plan(study, tmp_path)
    assert sentence in str(refused.value)


def test_a_missing_file_and_broken_yaml(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="does not exist"):
        load_study(tmp_path / "no.yaml")
    (tmp_path / "broken.yaml").write_text("a: [")
    with pytest.raises(SettingsError, match="cannot be read as YAML"):
        load_study(tmp_path / "broken.yaml")


def first_cell(tmp_path: Path, **changes: Any) -> Cell:
    return plan(write_study(tmp_path, **changes), tmp_path)[0]


def test_a_cell_of_other_settings_is_refused(tmp_path: Path) -> None:
    cell = first_cell(tmp_path)
    figures = write_cell(cell, tmp_path, 0.2)
    assert kept(cell, tmp_path) == figures
    other = first_cell(tmp_path, settings={"nodes": 4, "node": {"tasks": "starter", "rounds": 301, "model": "small"}})
    with pytest.raises(SettingsError, match=r"cell alike/silo-1 was run with node.rounds = 300.* 301; .*--out elsewhere"):
        kept(other, tmp_path)
    other = first_cell(tmp_path, models={"small": {"steps": 2, "width": 32}})
    with pytest.raises(SettingsError, match=r"models.small.steps = 1.* 2"):
        kept(other, tmp_path)
    done = CliRunner().invoke(app, ["experiment", str(tmp_path / "study.yaml"), "--out", str(tmp_path), "--page-only"])
    assert isinstance(done.exception, SettingsError)


def test_a_setting_that_was_not_known_then_had_its_default(tmp_path: Path) -> None:
    cell = first_cell(tmp_path)
    figures = write_cell(cell, tmp_path, 0.2)
    del figures["settings"]["node"]["mix"]["fill"]
    cell.file(tmp_path).write_text(json.dumps(figures))
    assert kept(cell, tmp_path)
    arms = {"silo": {"node": {"mix": {"own": 8, "swarm": 0, "fill": True}}}}
    with pytest.raises(SettingsError, match=r"node.mix.fill = no"):
        kept(first_cell(tmp_path, arms=arms), tmp_path)


def test_a_damaged_cell_is_named(tmp_path: Path) -> None:
    cell = first_cell(tmp_path)
    write_cell(cell, tmp_path, 0.2)
    cell.file(tmp_path).write_text("{")
    with pytest.raises(SettingsError, match=r"silo-1.json is damaged; delete it"):
        kept(cell, tmp_path)


def test_names_are_short_enough_for_every_seed(tmp_path: Path) -> None:
    long = "a" * 25
    regimes = {"b" * 25: {"seeds": [2**31 - 1]}}
    cell = first_cell(tmp_path, arms={long: yaml.safe_load("node: {mix: {own: 1}}")}, regimes=regimes)
    assert cell.settings.run == f"{long}-{2**31 - 1}"
