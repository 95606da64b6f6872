"""`grapevine init`, `doctor`, `settings`, `starter`: what one needs before a first run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from grapevine.commands.options import ConfigArgument, SetOption


def init(
    file: Annotated[Path, typer.Argument(help="the file to write")] = Path("grapevine.yaml"),
    nodes: Annotated[int, typer.Option(min=1, max=10_000, help="how many nodes")] = 4,
    model: Annotated[str, typer.Option(help="a hub id, a folder, or `starter`")] = "starter",
    tasks: Annotated[str, typer.Option(help="a preset, or dataset names with commas between them")] = "starter",
    force: Annotated[bool, typer.Option("--force", help="overwrite the file if it is there")] = False,
) -> None:
    """Write a settings file to start from: it runs as it is and explains what can be changed.

    Example: grapevine init my.yaml --nodes 2
    """
    from grapevine.setup.init import write

    write(file, nodes, model, tasks, force)
    print(f"{file} is written; next: grapevine up {file}")


def doctor(
    config: ConfigArgument = None,
    set_: SetOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="the findings as a JSON list")] = False,
) -> None:
    """Check whether a run of these settings can work on this machine, and say what to do where it cannot.

    Example: grapevine doctor my.yaml
    """
    from rich.console import Console

    from common.settings import load
    from grapevine.setup.doctor import examine, show

    findings = examine(load(config, set_))
    raise typer.Exit(show(findings, Console(), as_json))


def settings(
    write: Annotated[Path | None, typer.Option("--write", help="write the page to this file instead")] = None,
) -> None:
    """Print the reference of all settings, as Markdown.

    Example: grapevine settings --write docs/configuration.md
    """
    from grapevine.setup import reference

    if write is None:
        print(reference.reference(), end="")
    else:
        print(f"{write} is {'written' if reference.write(write) else 'up to date'}")


def starter(
    folder: Annotated[Path | None, typer.Argument(help="where to put it; default: the cache")] = None,
    wide: Annotated[bool, typer.Option("--wide", help="`starter-wide`: larger, with another tokenizer")] = False,
) -> None:
    """Make a starter model: a tiny one, for trying things out without a model hub.

    Example: grapevine starter models/mine --wide
    """
    from grapevine.starter.model import STARTERS, starter_folder

    name = "starter-wide" if wide else "starter"
    print(STARTERS[name](folder) if folder else starter_folder(name))
