"""Arguments and options that several subcommands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ConfigArgument = Annotated[Path | None, typer.Argument(help="a YAML file of settings; without it, the defaults")]
SetOption = Annotated[list[str] | None, typer.Option("--set", help="one setting, e.g. node.mix.swarm=0; repeatable")]
PortOption = Annotated[
    str, typer.Option(help="serve /healthz, /readyz and /metrics here; `any`: where there is room; 0: nowhere")
]
BindOption = Annotated[str, typer.Option(help="the address of this machine to serve them at; 127.0.0.1: to itself only")]
FolderOption = Annotated[Path, typer.Option("--folder", help="where runs are kept")]


def port_of(text: str) -> int | None:
    """What `--port` says as a port, 0 for any; None for nowhere. Raises SettingsError."""
    from common.settings import SettingsError

    if text == "any":
        return 0
    if not text.isdecimal() or int(text) > 65535:
        raise SettingsError(f"--port {text}: a number up to 65535, `any`, or 0 for none")
    return int(text) or None
