"""`grapevine experiment`: arms against one another, over regimes and seeds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def experiment(
    file: Annotated[Path, typer.Argument(help="a study: arms, regimes, seeds (see configs/experiments)")],
    out: Annotated[Path | None, typer.Option(help="where cells and page are kept; default: runs/experiments/NAME")] = None,
    parallel: Annotated[int, typer.Option(min=1, max=256, help="cells at a time")] = 1,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="show what would be run, and run nothing")] = False,
    page_only: Annotated[bool, typer.Option("--page-only", help="write the page of what is there, and run nothing")] = False,
) -> None:
    """Run every arm of a study with every seed, in lockstep, and write one page that compares them.

    Finished cells are kept: the same command goes on where it was stopped.

    Example: grapevine experiment configs/experiments/tiny.yaml --dry-run

    Example: grapevine experiment configs/experiments/tiny.yaml --parallel 2
    """
    from rich.console import Console

    from common.settings import SettingsError
    from grapevine.disk import writing_to
    from grapevine.experiment.cells import plan
    from grapevine.experiment.preview import show_plan
    from grapevine.experiment.study import load_study

    if dry_run and page_only:
        raise SettingsError("--dry-run writes nothing and --page-only a page; leave out one of the two")
    study, console = load_study(file), Console()
    place = out or study.default_out
    try:
        from grapevine.experiment.page import write_pages
        from grapevine.experiment.run import finished, run_study
    except ImportError as error:
        raise SettingsError(
            f"experiments need the package {error.name}, which is not installed: pip install 'grapevine-rl[all]'"
        ) from None
    with writing_to(place):
        if not dry_run and not page_only:
            raise typer.Exit(run_study(study, place, parallel, console))
        cells = plan(study, place)
        if dry_run:
            show_plan(study, cells, {cell.name for cell in cells if cell.file(place).exists()}, place, console)
        found = finished(cells, place)
        if page_only:
            write_pages(study, cells, found, place)
            console.print(f"page: {place / 'index.html'}", highlight=False, soft_wrap=True)
