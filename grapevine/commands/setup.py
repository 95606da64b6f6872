"""`grapevine starter`: what one needs before a first run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def starter(folder: Annotated[Path | None, typer.Argument(help="where to put it; default: the cache")] = None) -> None:
    """Make the starter model: a tiny one, for trying things out without a model hub.

    Example: grapevine starter models/mine
    """
    from grapevine.starter.model import make_starter, starter_folder

    print(make_starter(folder) if folder else starter_folder())
