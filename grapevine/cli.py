"""The command line. Settings errors are one sentence and exit code 2; a bug is a traceback and exit code 70."""

from __future__ import annotations

import sys
import traceback
from typing import NoReturn

import typer

from common.guard import check_imports

check_imports()  # before anything else is imported from a folder that may not be ours

# ruff: noqa: E402
from grapevine.commands import results, run, setup

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Decentralised RL post-training of language models by sharing rollouts.",
)
app.command()(run.up)
app.command()(run.worker)
app.command()(results.report)
app.command()(setup.starter)


def main() -> NoReturn:
    """Entry point of the `grapevine` command."""
    from common.directory import NameTaken
    from common.ledger import Fenced
    from common.server import ServerRefused
    from common.settings import SettingsError
    from common.tasks import TaskRefused
    from common.worker import BUG_EXIT_CODE
    from grapevine.supervisor import GaveUp

    try:
        app()
    except (SettingsError, TaskRefused, ServerRefused, NameTaken, Fenced) as error:
        print(f"grapevine: {error}", file=sys.stderr)
        sys.exit(2)
    except GaveUp as error:
        print(f"grapevine: {error}", file=sys.stderr)
        sys.exit(1)
    except Exception:
        traceback.print_exc()
        sys.exit(BUG_EXIT_CODE)
    sys.exit(0)
