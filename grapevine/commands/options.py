"""Arguments and options that several subcommands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ConfigArgument = Annotated[Path | None, typer.Argument(help="a YAML file of settings; without it, the defaults")]
SetOption = Annotated[list[str] | None, typer.Option("--set", help="one setting, e.g. node.mix.swarm=0; repeatable")]
FolderOption = Annotated[Path, typer.Option("--folder", help="where runs are kept")]
