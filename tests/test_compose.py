"""compose.yaml, read as Docker would: real commands, real files, one server for all, the image of its role for each."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from common.settings import load
from grapevine.cli import app
from tests.test_image import ARGUMENTS, STAGES, TARGETS

ROOT = Path(__file__).parents[1]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
WORKERS = sorted(set(SERVICES) - {"redis"})


def filled_in(text: str) -> str:
    """Variables as in a shell where none of them is set."""
    return re.sub(r"\$\{\w+(?::?[-?]([^}]*))?\}", lambda match: match.group(1) or "", text)


def command_of(service: dict[str, Any]) -> list[str]:
    """The words after `grapevine`."""
    command = [str(word) for word in service["command"]]
    if service.get("entrypoint") is None:
        return command
    assert service["entrypoint"] == ["sh", "-c"]
    (line,) = command
    words = shlex.split(line.replace("$$HOSTNAME", "0123456789ab"))
    assert words[:2] == ["exec", "grapevine"], "whoever is told to stop must be grapevine, not the shell"
    return words[2:]


@pytest.mark.parametrize("name", WORKERS)
def test_every_command_is_one(name: str) -> None:
    words = command_of(SERVICES[name])
    group = typer.main.get_command(app)
    subcommand = group.commands[words[0]]  # type: ignore[attr-defined]
    context = subcommand.make_context(words[0], words[1:])
    if words[0] in ("worker", "control"):
        assert str(context.params["settings"]) == "/config/run.yaml"
        assert str(context.params["port"]) == "9100"
        assert "127.0.0.1:9100/readyz" in SERVICES[name]["healthcheck"]["test"][-1]


def test_the_nodes_are_those_of_the_settings() -> None:
    (mount,) = {
        volume for name in WORKERS for volume in SERVICES[name]["volumes"] if volume.endswith(":/config/run.yaml:ro")
    }
    config = ROOT / filled_in(mount.removesuffix(":/config/run.yaml:ro"))
    settings = load(config)
    learners = [words for name in WORKERS if (words := command_of(SERVICES[name]))[:2] == ["worker", "learner"]]
    assert [words[2] for words in learners] == settings.node_names()
    assert settings.redis_url is None, "the environment names it"
    assert not settings.folder.is_absolute(), "below the working folder, where the volume is"


def test_everyone_reaches_the_same_server_and_nobody_else_can() -> None:
    (url,) = {SERVICES[name]["environment"]["REDIS_URL"] for name in WORKERS}
    assert url.endswith("@redis:6379/0")
    assert "REDIS_PASSWORD:?" in url, "no password, no start"
    assert not [name for name, service in SERVICES.items() if "ports" in service]
    script = SERVICES["redis"]["command"][-1]
    assert "requirepass" in script.splitlines()[1]
    assert "--appendonly yes" in script
    assert "--maxmemory-policy noeviction" in script
    for service in SERVICES.values():
        assert "REDIS_PASSWORD" not in str(service["command"]) or service is SERVICES["redis"]


def test_volumes_and_dependencies_exist() -> None:
    for name, service in SERVICES.items():
        for volume in service["volumes"]:
            source = filled_in(volume).partition(":")[0]
            assert source in COMPOSE["volumes"] or (ROOT / source).exists(), (name, volume)
        assert set(service.get("depends_on", {})) <= set(SERVICES)
    for name in WORKERS:
        assert SERVICES[name]["depends_on"]["redis"] == {"condition": "service_healthy"}


@pytest.mark.parametrize("name", WORKERS)
def test_every_worker_has_the_image_of_its_role(name: str) -> None:
    service, words = SERVICES[name], command_of(SERVICES[name])
    role = words[1] if words[0] == "worker" else words[0]
    target = service["build"]["target"]
    # Learners generate as well; GENERATOR names another image for those that only generate.
    assert target == ("${GENERATOR:-learner}" if role == "generator" else role)
    assert filled_in(target) in TARGETS
    assert service["image"] == f"grapevine/{target}:local"
    assert service["build"]["context"] == "."
    arguments = service["build"].get("args", {})
    assert arguments == ({"TORCH": "${TORCH:-cpu}"} if role in ("learner", "generator") else {})
    assert set(arguments) <= set(ARGUMENTS)
    # What the image brings along is found where the image says.
    assert "GRAPEVINE_CACHE" not in service["environment"]


def test_folders_of_volumes_are_the_users_own() -> None:
    """A volume takes its owner from the folder that it is mounted on."""
    (prepared,) = STAGES["runtime"].all("RUN")
    (owned,) = re.findall(r"chown 10001:10001 (.+)$", prepared)
    places = {volume.split(":")[1] for name in WORKERS for volume in SERVICES[name]["volumes"] if not volume.endswith(":ro")}
    assert places == set(owned.split())
