"""`grapevine status`: how a run stands, here or elsewhere."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from grapevine.commands.options import FolderOption


def status(
    run: Annotated[str | None, typer.Argument(help="the run's name; may be left out where there is only one")] = None,
    redis_url: Annotated[
        str | None, typer.Option(envvar="REDIS_URL", show_envvar=True, help="the server, for a run elsewhere")
    ] = None,
    folder: FolderOption = Path("runs"),
    watch: Annotated[bool, typer.Option("--watch", help="keep looking until Ctrl-C")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="the figures as one JSON object")] = False,
    svg: Annotated[Path | None, typer.Option(help="write the picture to this SVG file")] = None,
    quarantine: Annotated[bool, typer.Option("--quarantine", help="show the last refused messages")] = False,
) -> None:
    """Show how a run stands now; exit code 1 when there is no such run, 2 when its server does not answer.

    Example: REDIS_URL=redis://:password@host:6379/0 grapevine status demo --watch
    """
    from grapevine.screen.status import NoSuchRun, Place, show_quarantine, show_status, write_svg

    try:
        place = Place.find(run, redis_url, folder)
        if quarantine:
            show_quarantine(place, as_json)
        elif svg is not None:
            write_svg(place, svg)
        else:
            show_status(place, watch, as_json)
    except NoSuchRun as error:
        print(f"grapevine: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
