"""The command line. Settings errors are one sentence and exit code 2; a bug is a traceback and exit code 70."""

from __future__ import annotations

import sys
import traceback
from contextlib import suppress
from typing import NoReturn

import typer

from common.guard import check_imports

check_imports()  # before anything else is imported from a folder that may not be ours

# ruff: noqa: E402
from grapevine.commands import control, evaluate, join, results, run, setup, status

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Decentralised RL post-training of language models by sharing rollouts.",
)
app.command()(run.up)
app.command()(run.worker)
app.command()(join.invite)
app.command()(join.join)
app.command(name="eval")(evaluate.evaluate)
app.command()(results.report)
app.command()(results.leaderboard)
app.command()(status.status)
app.command()(setup.init)
app.command()(setup.doctor)
app.command()(setup.settings)
app.command()(setup.starter)
app.command()(control.control)
app.add_typer(control.jobs, name="jobs")
app.command()(control.export)
app.command()(control.prune)


def main() -> NoReturn:
    """Entry point of the `grapevine` command."""
    import redis

    from common.directory import NameTaken
    from common.ledger import Fenced
    from common.server import ServerRefused, denied
    from common.settings import SettingsError
    from common.tasks import TaskRefused
    from common.worker import BUG_EXIT_CODE
    from grapevine.disk import disk_trouble
    from grapevine.running.supervisor import GaveUp

    try:
        app()
    except (SettingsError, TaskRefused, ServerRefused, NameTaken, Fenced) as error:
        _say(error)
        sys.exit(2)
    except GaveUp as error:
        _say(error)
        sys.exit(1)
    except (redis.ConnectionError, redis.TimeoutError) as error:
        _say(f"the server does not answer: {' '.join(str(error).split())}; start it, or correct redis_url or REDIS_URL")
        sys.exit(1)
    except Exception as error:
        sentence = denied(error) or disk_trouble(error)
        if sentence is not None:
            _say(sentence)
            sys.exit(2)
        traceback.print_exc()
        sys.exit(BUG_EXIT_CODE)
    sys.exit(0)


def _say(what: object) -> None:
    """One sentence on standard error."""
    with suppress(OSError):  # a log on a full disk: the exit code must get through all the same
        print(f"grapevine: {what}", file=sys.stderr, flush=True)
