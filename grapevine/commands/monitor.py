"""`grapevine monitor`: a run in Prometheus, on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from grapevine.commands.options import FolderOption


def monitor(
    run: Annotated[str | None, typer.Argument(help="the run's name; may be left out where there is only one")] = None,
    folder: FolderOption = Path("runs"),
    listen: Annotated[str, typer.Option(help="where Prometheus is to be found, address:port")] = "127.0.0.1:9090",
) -> None:
    """Watch a run that is up on this machine with Prometheus: the figures and alerts of a cluster, until Ctrl-C.

    Example: grapevine monitor demo
    """
    from rich.console import Console

    from grapevine.logs import configure_logs
    from grapevine.monitoring.prometheus import watch

    configure_logs(console=False)
    watch(run, folder, listen, Console())
