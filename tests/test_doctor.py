"""`grapevine doctor`: what is in order passes, what is not is named with what to do, and nothing of the run is touched."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from rich.console import Console

from common.settings import Settings
from grapevine.cli import main
from grapevine.server import EmbeddedServer
from grapevine.setup import doctor, packages
from grapevine.setup.doctor_server import examine_server
from grapevine.setup.findings import Finding

Doctor = Callable[..., tuple[int | str | None, list[Finding]]]


@pytest.fixture
def examined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Doctor]:
    """`grapevine doctor --json` with some settings, in an empty folder: exit code and findings."""

    def call(*settings: str) -> tuple[int | str | None, list[Finding]]:
        flags = [part for setting in settings for part in ("--set", setting)]
        monkeypatch.setattr(sys, "argv", ["grapevine", "doctor", *flags, "--json"])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code, [Finding(**finding) for finding in json.loads(capfd.readouterr().out)]

    for name in [name for name in os.environ if name.upper().startswith("GRAPEVINE_") or name == "REDIS_URL"]:
        monkeypatch.delenv(name)
    # A GPU, or none, is looked for in a process that imports torch: seconds, and another answer on every machine.
    monkeypatch.setattr(doctor, "GPU_PROBE", "print([])")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    yield call


def test_all_is_well(examined: Doctor, tiny_model: Path) -> None:
    code, findings = examined(f"node.model={tiny_model}", "node.tasks=[gcd, count_bits]")
    assert code == 0
    assert [finding for finding in findings if finding.state == "failure"] == []
    found = {finding.name: finding.found for finding in findings}
    assert found["roles"] == "can run here: learner, generator, verifier, server, control, report"
    assert found["engine"].startswith("generators run ")
    assert "embedded Valkey" in found["server"]
    assert "(4 nodes): Qwen2ForCausalLM" in found["model"]
    tasks = [finding.found for finding in findings if finding.name == "task"]
    assert [task.partition(":")[0] for task in tasks] == ["gcd", "count_bits"]
    assert all(task.endswith("scores 1") for task in tasks)
    assert list(Path().iterdir()) == [], "nothing is left behind"


def test_every_fault_is_named_with_its_fix_and_hides_no_other(examined: Doctor, tmp_path: Path, tiny_model: Path) -> None:
    (tmp_path / "file").write_text("")
    code, findings = examined(
        "redis_url=redis://127.0.0.1:1/0",
        f"folder={tmp_path / 'file'}",
        f"nodes={{a: {{model: {tmp_path / 'none'}}}, b: null, c: null}}",
        f"node.model={tiny_model}",
        "node.tasks=[gcd]",
    )
    assert code == 1
    failed = [finding for finding in findings if finding.state == "failure"]
    assert [finding.name for finding in failed] == ["run folder", "server", "model"]
    assert all(finding.fix for finding in findings if finding.state != "ok")
    assert "127.0.0.1:1" in failed[1].found
    assert str(tmp_path / "none") in failed[2].found
    assert [finding.name for finding in findings if finding.state == "ok"][-3:] == ["model", "memory", "task"]


def test_a_server_as_it_should_not_be(server: EmbeddedServer) -> None:
    client = redis.Redis.from_url(server.url)
    settings = Settings(redis_url=server.url)
    kept: dict[str, Any] = client.config_get("maxmemory*")
    assert {finding.name: finding.state for finding in examine_server(settings)} == {
        "server": "ok", "eviction": "ok", "persistence": "ok", "protection": "ok", "clock": "ok",
    }  # fmt: skip
    try:
        client.config_set("maxmemory", "1gb")
        client.config_set("maxmemory-policy", "allkeys-lru")
        client.config_set("appendonly", "no")
        found = {finding.name: finding for finding in examine_server(settings)}
    finally:
        for name in ("maxmemory", "maxmemory-policy"):
            client.config_set(name, kept[name])
        client.config_set("appendonly", "yes")
        client.close()
    assert (found["eviction"].state, found["persistence"].state) == ("failure", "warning")
    assert "noeviction" in found["eviction"].fix
    assert "appendonly yes" in found["persistence"].fix


@pytest.mark.parametrize(("offset", "state"), [(0.1, "ok"), (-90.0, "warning")])
def test_clocks_that_differ(server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch, offset: float, state: str) -> None:
    monkeypatch.setattr("grapevine.setup.doctor_server._clock_offset", lambda client: offset)
    (clock,) = [finding for finding in examine_server(Settings(redis_url=server.url)) if finding.name == "clock"]
    assert clock.state == state


def test_a_role_without_its_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "_installed", lambda package: package != "torch")
    found = {finding.name: finding for finding in doctor._python()}
    assert found["roles"].found == "can run here: verifier, server, control, report"
    assert (found["learner"].state, found["learner"].found) == ("warning", "cannot run here, missing: torch")
    assert "grapevine-rl[generator]" in found["generator"].fix


@pytest.mark.parametrize("terminal", [True, False])
def test_the_page_for_people(terminal: bool) -> None:
    findings = [
        Finding("ok", "server", "[here]"),
        Finding("warning", "clock", "slow", "wind it up"),
        Finding("failure", "model", "none", "get one"),
    ]
    page = io.StringIO()
    console = Console(file=page, force_terminal=terminal, color_system="standard" if terminal else None, width=40)
    assert doctor.show(findings, console, as_json=False) == 1
    assert doctor.show(findings[:2], Console(file=io.StringIO()), as_json=False) == 0
    text = page.getvalue()
    assert ("\x1b[" in text) == terminal
    assert text.startswith("Can a run work here?")
    if not terminal:
        assert text.splitlines()[2:] == [
            "✓ server       [here]",
            "! clock        slow",
            "               → wind it up",
            "✗ model        none",
            "               → get one",
            "",
            "No: 1 to mend first (the lines with ✗). 1 to look at (!).",
        ]


def test_an_engine_that_is_not_there(examined: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grapevine.engines.find_spec", lambda name: None)
    code, findings = examined("generators.engine=vllm")
    (engine,) = [finding for finding in findings if finding.name == "engine"]
    assert code == 1
    assert engine.state == "failure" and "make setup-vllm" in engine.found
    _, findings = examined()
    (engine,) = [finding for finding in findings if finding.name == "engine"]
    assert engine == Finding("ok", "engine", "generators run transformers (auto: vLLM is not installed)", "")
    _, findings = examined("generators.engine_options={max_model_len: 4096}")
    (engine,) = [finding for finding in findings if finding.name == "engine"]
    assert "the transformers engine has no options (max_model_len)" in engine.found
    _, findings = examined("generators.engine=paced")
    (engine,) = [finding for finding in findings if finding.name == "engine"]
    assert engine.state == "warning"
