"""Settings: three sources with one order among them, per-node overrides, and every mistake in one sentence."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import structlog
import yaml

from common.sections import NodeSettings
from common.settings import Settings, SettingsError, load
from grapevine.cli import main
from grapevine.running.supervisor import Supervisor
from grapevine.server import EmbeddedServer

Command = Callable[..., tuple[int | str | None, str]]


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.upper().startswith("GRAPEVINE_")]:
        monkeypatch.delenv(name)
    monkeypatch.delenv("REDIS_URL", raising=False)


def written(folder: Path, tree: object) -> Path:
    path = folder / "settings.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


# --- where a value comes from ---


def test_without_anything_the_defaults_hold() -> None:
    assert load(None) == Settings()
    assert load(None).node_names() == ["node-0", "node-1", "node-2", "node-3"]


def test_file_then_environment_then_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, {"seed": 1, "node": {"rounds": 9, "mix": {"own": 2, "swarm": 7}}})
    assert (load(path).node.mix.own, load(path).node.mix.swarm) == (2, 7)
    monkeypatch.setenv("GRAPEVINE_NODE__MIX__OWN", "8")
    # One variable changes one leaf: neither its neighbours nor the rest of the section.
    assert (load(path).node.mix.own, load(path).node.mix.swarm, load(path).node.rounds, load(path).seed) == (8, 7, 9, 1)
    flagged = load(path, ["node.mix.own=5", "node.mix.tags=[hard, easy]", "run=another"])
    assert (flagged.node.mix.own, flagged.node.mix.swarm, flagged.node.rounds) == (5, 7, 9)
    assert flagged.node.mix.tags == ("hard", "easy")
    assert flagged.run == "another"
    assert load(path, ["node.mix.own=5", "node.mix.own=6"]).node.mix.own == 6, "the last flag wins"


def test_the_servers_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, {"redis_url": "redis://file"})
    assert load(None).redis_url is None
    assert load(path).redis_url == "redis://file"
    monkeypatch.setenv("REDIS_URL", "redis://environment")
    assert load(None).redis_url == "redis://environment"
    assert load(path).redis_url == "redis://environment"
    monkeypatch.setenv("GRAPEVINE_REDIS_URL", "redis://ours")
    assert load(path).redis_url == "redis://ours"
    assert load(path, ["redis_url=redis://flag"]).redis_url == "redis://flag"


@pytest.mark.parametrize(
    ("value", "names"), [("3", ["node-0", "node-1", "node-2"]), ('{"a": null, "b": {"rounds": 3}}', ["a", "b"])]
)
def test_nodes_from_the_environment(monkeypatch: pytest.MonkeyPatch, value: str, names: list[str]) -> None:
    monkeypatch.setenv("GRAPEVINE_NODES", value)
    assert load(None).node_names() == names


def test_a_nodes_own_settings_lie_on_top(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        {
            "node": {"rounds": 9, "mix": {"own": 2, "swarm": 7}},
            "nodes": {"a": None, "b": {"mix": {"swarm": 0}}, "c": {"rounds": 3, "learner": "none"}},
        },
    )
    settings = load(path, ["nodes.b.update.learning_rate=1e-4"])
    assert settings.node_names() == ["a", "b", "c"]
    assert settings.for_node("a") == settings.node
    b = settings.for_node("b")
    assert (b.mix.own, b.mix.swarm, b.rounds, b.update.learning_rate) == (2, 0, 9, 1e-4)
    assert (settings.for_node("c").rounds, settings.for_node("c").learner) == (3, "none")
    # What a run writes down for its workers gives them the same settings again.
    kept = tmp_path / "settings.json"
    kept.write_text(json.dumps(settings.model_dump(mode="json")))
    assert load(kept) == settings


def test_workers_take_the_settings_of_their_run_not_the_environments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRAPEVINE_NODE__ROUNDS", "3")
    monkeypatch.setenv("GRAPEVINE_LOG", "json")
    settings = load(None, ["node.rounds=5", f"folder={tmp_path}", "redis_url=redis://here"])
    environment = Supervisor(settings, tmp_path / "settings.json")._environment
    assert environment["REDIS_URL"] == "redis://here"
    assert "GRAPEVINE_NODE__ROUNDS" not in environment
    assert environment["GRAPEVINE_LOG"] == "json"


def test_an_empty_section_means_its_defaults(tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text("node:\n  rounds: 9\n  mix:\nswarm:\nnodes:\n  a:\n    mix:\n  b:\nown_tasks:\n")
    assert load(path).for_node("a") == load(None, ["node.rounds=9"]).node
    path.write_text("node:\nnodes:\n")
    assert load(path) == Settings()


def test_a_flag_for_one_of_a_number_of_nodes_keeps_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, {"nodes": 2})
    settings = load(path, ["nodes.node-1.mix.own=3"])
    assert [settings.for_node(name).mix.own for name in settings.node_names()] == [8, 3]
    with pytest.raises(SettingsError, match=r"nodes\.node-7: nodes is 2, that is node-0, node-1"):
        load(path, ["nodes.node-7.mix.own=3"])
    assert load(None, ["nodes={a: null}", "nodes.b.rounds=3"]).node_names() == ["a", "b"], "these are listed by name"
    monkeypatch.setenv("GRAPEVINE_NODES__NODE-0__ROUNDS", "7")
    assert [load(path).for_node(name).rounds for name in load(path).node_names()] == [7, 200]


# --- mistakes ---


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("seed: 1\nnode:\n  rounds: 5\n  rounds: 6\n", "line 4: rounds is there twice"),
        ("seed: 2024-13-45", "month must be in 1..12"),
        (f"seed: {'9' * 5000}", "a value in it cannot be read"),
        ("seed: !!timestamp x", "a value in it cannot be read"),
        ("run: " + "[" * 5000, "it is nested too deeply"),
        ("nodes: 100000000", "setting nodes: a run has at most 10000 nodes"),
    ],
)
def test_yaml_that_cannot_be_meant(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text(text)
    with pytest.raises(SettingsError, match=words) as raised:
        load(path)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 500


@pytest.mark.parametrize(
    ("tree", "sentence"),
    [
        ({"generatorz": {}}, "unknown setting generatorz; did you mean generators?"),
        ({"node": {"mix": {"swram": 1}}}, "unknown setting node.mix.swram; did you mean node.mix.swarm?"),
        ({"node": {"zzzzzz": 1}}, "unknown setting node.zzzzzz"),
        ({"nodes": {"a": {"rond": 1}}}, "unknown setting nodes.a.rond; did you mean nodes.a.rounds?"),
        ({"nodes": {"a": {"mix": {"ownn": 1}}}}, "unknown setting nodes.a.mix.ownn; did you mean nodes.a.mix.own?"),
        ({1: 2}, "unknown setting 1"),
        ({"node": {"mix": {"own": 0}}}, "setting node.mix.own: input should be greater than or equal to 1 (got 0)"),
        ({"node": {"rounds": "many"}}, "setting node.rounds: input should be a valid integer"),
        ({"nodes": {"a": {"rounds": "many"}}}, "setting nodes.a.rounds: input should be a valid integer"),
        (
            {"node": {"update": {"objective": "ppo"}}},
            "setting node.update.objective: input should be 'grpo', 'dr_grpo', 'gspo' or 'cispo' (got 'ppo')",
        ),
        ({"node": 5}, "setting node: input should be a valid dictionary"),
        ({"nodes": "x"}, "setting nodes: a number of nodes, or a name with settings per node (got 'x')"),
        ({"nodes": 0}, "setting nodes: a run needs at least one node (got 0)"),
        ({"nodes": {}}, "setting nodes: a run needs at least one node (got {})"),
        ({"nodes": {"Not_So": None}}, "setting nodes: 'Not_So' cannot name a node"),
        ({"own_tasks": {"A_b": {}}}, "setting own_tasks: 'A_b' cannot be a name; up to 40 of a-z, 0-9, '.' and '-'"),
        ({"nodes": {"a": 5}}, "setting nodes.a: settings of this node"),
        ({"run": "A b"}, "setting run: string should match pattern"),
        ({"node": {"mix": {"tags": ["harder"]}}}, "setting node.mix.tags.0: input should be 'failed', 'hard'"),
        (["a", "list"], "must hold settings as `key: value`, not a list"),
    ],
)
def test_a_mistake_is_one_sentence_that_names_the_key(tmp_path: Path, tree: object, sentence: str) -> None:
    with pytest.raises(SettingsError) as raised:
        load(written(tmp_path, tree))
    assert sentence in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("flag", "sentence"),
    [
        ("node.mix.own", "--set node.mix.own: write it as key=value"),
        ("node.mix.own=", "setting node.mix.own: input should be a valid integer (got None)"),
        ("node.mix=[", "--set node.mix=[: "),
        ("=3", "unknown setting"),
        ("node.mix.own.deeper=3", "setting node.mix.own: input should be a valid integer"),
    ],
)
def test_mistakes_in_flags(flag: str, sentence: str) -> None:
    with pytest.raises(SettingsError) as raised:
        load(None, [flag])
    assert sentence in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("GRAPEVINE_NODE__MIX__OWN", "x", "setting node.mix.own: input should be a valid integer"),
        ("GRAPEVINE_NODE__MIX__OWNN", "1", "unknown setting node.mix.ownn; did you mean node.mix.own?"),
        ("GRAPEVINE_NODES", '{"a":', "setting nodes: a number of nodes"),
        ("GRAPEVINE_NODE", "x", "GRAPEVINE_ variables"),
    ],
)
def test_mistakes_in_the_environment(monkeypatch: pytest.MonkeyPatch, name: str, value: str, sentence: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError) as raised:
        load(None)
    assert sentence in str(raised.value)
    assert "\n" not in str(raised.value)


def test_every_default_is_a_value_one_may_write_down(tmp_path: Path) -> None:
    tree = Settings().model_dump(mode="json")
    assert load(written(tmp_path, tree)) == Settings()
    assert NodeSettings.model_validate(tree["node"]) == NodeSettings()


# --- through the command line ---


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Command]:
    """`grapevine` in this process: exit code and what went to standard error."""

    def call(*arguments: str) -> tuple[int | str | None, str]:
        monkeypatch.setattr(sys, "argv", ["grapevine", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code, capfd.readouterr().err

    monkeypatch.chdir(tmp_path)
    yield call
    structlog.reset_defaults()  # the command line points the log at a stream that ends with this test


@pytest.mark.parametrize(
    ("arguments", "text", "sentence"),
    [
        (["up", "broken.yaml"], "node: [a\n\tb", "broken.yaml cannot be read as YAML"),
        (["up", "broken.yaml"], "node: {rounds: many}", "setting node.rounds: input should be a valid integer"),
        (["up", "absent.yaml"], "", "absent.yaml does not exist; `grapevine init absent.yaml` writes one"),
        (["up", "--set", "node.mix.swram=1"], "", "unknown setting node.mix.swram; did you mean node.mix.swarm?"),
        (["worker", "learner", "nosuch"], "", "node nosuch is not in the settings; nodes are node-0, node-1"),
        (["worker", "cook", "x"], "", "role cook is unknown; choose learner, generator, verifier or exporter"),
        (["worker", "verifier", "x"], "", "no server: set redis_url, or REDIS_URL"),
        (["worker", "verifier", "x", "--set", "redis_url=nonsense"], "", "redis_url cannot be used"),
        (["worker", "verifier", "x", "--set", "redis_url=redis://u:se/cret@h:1/0"], "", "the password other than letters"),
        (["report", "nosuch"], "", "runs/nosuch holds no run"),
    ],
)
def test_the_command_line_says_it_and_exits_with_2(
    tmp_path: Path, command: Command, arguments: list[str], text: str, sentence: str
) -> None:
    (tmp_path / "broken.yaml").write_text(text)
    code, errors = command(*arguments)
    assert code == 2
    assert errors.startswith("grapevine: ")
    assert sentence in errors
    assert "cret" not in errors
    assert errors.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken.yaml"], "nothing was begun"


def test_a_wrong_password_is_said_and_not_tried_again(server: EmbeddedServer, command: Command) -> None:
    wrong = server.url.replace("redis://:", "redis://:not")
    code, errors = command("worker", "verifier", "x", "--set", f"redis_url={wrong}")
    assert code == 2
    assert errors.startswith("grapevine: the server wants another password than redis_url has")
    assert errors.count("\n") == 1
    assert wrong not in errors


def test_an_unknown_option_is_no_bug(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "grapevine", "up", "--nosuch"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "--nosuch" in done.stderr
    assert "Traceback" not in done.stderr
