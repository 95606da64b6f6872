"""Every command explains itself: what it does, and an example that parses."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

import pytest
import typer.main

from grapevine.cli import app


def commands() -> Iterator[tuple[str, object]]:
    """All commands with their full names, those of groups too."""
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        if hasattr(command, "commands"):
            yield from ((f"{name} {inner}", one) for inner, one in command.commands.items())
        else:
            yield name, command


COMMANDS = dict(commands())


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_has_an_example_that_parses(name: str) -> None:
    command = COMMANDS[name]
    examples = [line.strip() for line in (command.help or "").split("Example: ")[1:]]  # type: ignore[attr-defined]
    assert examples, f"grapevine {name} --help gives no example"
    for example in examples:
        words = shlex.split(" ".join(example.split()))
        while "=" in words[0]:
            words.pop(0)  # a variable of the environment
        assert words[: 1 + len(name.split())] == ["grapevine", *name.split()], example
        # Parsing only: unknown options, missing or superfluous arguments raise here.
        command.make_context(name, words[1 + len(name.split()) :])  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_says_what_its_arguments_are(name: str) -> None:
    command = COMMANDS[name]
    silent = [parameter.name for parameter in command.params if not getattr(parameter, "help", None)]  # type: ignore[attr-defined]
    assert silent == [], f"no help for these of grapevine {name}"
