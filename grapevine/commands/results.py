"""`grapevine report`, `grapevine leaderboard`: what runs came to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from grapevine.commands.options import FolderOption


def report(
    runs: Annotated[list[str], typer.Argument(help="the run's name; several to compare them")],
    folder: FolderOption = Path("runs"),
    out: Annotated[Path | None, typer.Option(help="where to write the page; default: in the run's folder")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="figures as JSON, and no page")] = False,
) -> None:
    """Show what a run came to, and write a page about it; or about several runs, side by side.

    Example: grapevine report demo

    Example: grapevine report demo silo --out comparison.html
    """
    from rich.console import Console

    from grapevine.report.folder import read_run
    from grapevine.report.summary import figures, show_summary

    read = [read_run(folder / run) for run in runs]
    facts = [figures(run) for run in read]
    if as_json:
        print(json.dumps(facts[0] if len(facts) == 1 else facts, indent=2))
        return
    console = Console()
    for fact in facts:
        show_summary(fact, console)
    try:
        from grapevine.report.compare import comparison_page
        from grapevine.report.page import run_page, write_page
    except ImportError as error:
        from common.settings import SettingsError

        raise SettingsError(
            f"the page needs the package {error.name}, which is not installed: pip install 'grapevine-rl[report]'"
        ) from None
    if len(read) == 1:
        out = out or read[0].path / "report.html"
        write_page(run_page(read[0]), out)
    else:
        out = out or folder / f"{'-vs-'.join(run.name for run in read)}.html"
        write_page(comparison_page(read), out)
    console.print(f"\npage: {out}", highlight=False, soft_wrap=True)


def leaderboard(
    run: Annotated[str, typer.Argument(help="the run's name")],
    folder: FolderOption = Path("runs"),
    top: Annotated[int, typer.Option(min=0, help="rows to show; 0: all")] = 20,
) -> None:
    """Order a run's nodes and rounds by how well they answer held-out questions.

    Example: grapevine leaderboard demo --top 0
    """
    from rich.console import Console

    from grapevine.report.folder import read_run
    from grapevine.report.leaderboard import show_standings

    show_standings(read_run(folder / run), top, Console())
