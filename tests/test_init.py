"""The file that `grapevine init` writes: it loads, it learns, and what it leaves commented out is true."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from common.settings import Settings, SettingsError, load
from grapevine.setup.init import text, write
from learners.journal import read
from tests.test_up import environment

COMMENTED = re.compile(r"^( *)# ([a-z_]+: .+)$")


@pytest.fixture(autouse=True)
def no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REDIS_URL", raising=False)


@pytest.mark.parametrize("model", ["starter", "Qwen/Qwen2.5-0.5B-Instruct", "a folder: with # signs", "no"])
def test_it_loads_whatever_the_model_is_called(tmp_path: Path, model: str) -> None:
    file = tmp_path / "My first run.yaml"
    write(file, nodes=3, model=model, tasks="gcd, count_bits", force=False)
    settings = load(file)
    assert (settings.run, len(settings.node_names()), settings.node.model) == ("my-first-run", 3, model)
    assert settings.node.tasks == ["gcd", "count_bits"]
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


def test_commented_lines_hold_the_defaults_or_at_least_valid_settings(tmp_path: Path) -> None:
    lines = text(Path("x.yaml"), 4, "starter", "starter").splitlines()
    commented = [number for number, line in enumerate(lines) if COMMENTED.match(line)]
    assert len(commented) >= 12
    base = load(_file(tmp_path, lines))
    examples = []
    for number in commented:
        changed = load(_file(tmp_path, _uncommented(lines, [number])))
        examples += [] if changed == base else [lines[number].split()[1]]
    assert set(examples) <= {"redis_url:", "policies_url:"}, "these lines show another value than the default"
    together = load(_file(tmp_path, _uncommented(lines, commented)))
    assert together.policies_url is not None


def test_what_is_there_is_kept_and_what_is_wrong_is_not_written(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("seed: 5\n")
    with pytest.raises(SettingsError, match=r"mine\.yaml exists already; .*--force"):
        write(file, 4, "starter", "starter", force=False)
    with pytest.raises(SettingsError, match="task 'gdc' is unknown; did you mean 'gcd'"):
        write(file, 4, "starter", "gdc", force=True)
    assert file.read_text() == "seed: 5\n"
    with pytest.raises(SettingsError, match="nowhere does not exist"):
        write(tmp_path / "nowhere" / "mine.yaml", 4, "starter", "starter", force=False)
    write(file, 4, "starter", "starter", force=True)
    assert load(file).seed == Settings().seed
    assert [path.name for path in tmp_path.iterdir()] == ["mine.yaml"]


def test_init_then_up(tmp_path: Path) -> None:
    """The two commands of a first run, cut short: the printed next command works."""

    def call(*arguments: str) -> str:
        done = subprocess.run(arguments, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout

    grapevine = [sys.executable, "-m", "grapevine"]
    said = call(*grapevine, "init", "first.yaml", "--nodes", "1")
    assert "next: grapevine up first.yaml" in said
    call(*grapevine, *said.split("grapevine ")[-1].split(), "--set", "node.rounds=2", "--set", "node.mix.own=2")
    assert len(read(tmp_path / "runs" / "first" / "nodes" / "node-0" / "rounds.jsonl")) == 2


def _file(folder: Path, lines: list[str]) -> Path:
    path = folder / "settings.yaml"
    path.write_text("\n".join(lines))
    assert isinstance(yaml.safe_load(path.read_text()), dict)
    return path


def _uncommented(lines: list[str], numbers: list[int]) -> list[str]:
    return [COMMENTED.sub(r"\1\2", line) if number in numbers else line for number, line in enumerate(lines)]
