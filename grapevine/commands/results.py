"""`grapevine report`: what a run came to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from grapevine.commands.options import FolderOption


def report(
    run: Annotated[str, typer.Argument(help="the run's name")],
    folder: FolderOption = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json", help="figures as one JSON object")] = False,
) -> None:
    """Show what a run came to.

    Example: grapevine report demo --json
    """
    from rich.console import Console

    from grapevine.local import show_summary
    from grapevine.report.summary import summary

    facts = summary(folder / run)
    if as_json:
        print(json.dumps(facts, indent=2))
    else:
        show_summary(facts, Console())
