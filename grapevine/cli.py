"""The command line. Settings errors are one sentence and exit code 2; a bug is a traceback and exit code 70."""

from __future__ import annotations

import io
import sys
import traceback
from contextlib import suppress
from importlib import metadata
from typing import Annotated, NoReturn

import typer

from common.guard import check_imports

check_imports()  # before anything else is imported from a folder that may not be ours

# ruff: noqa: E402
from grapevine.commands import cluster, control, evaluate, experiment, join, monitor, results, run, setup, status

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    invoke_without_command=True,
)
start, look, take, machines, upkeep = "Start", "Look at it", "Take it along", "More machines", "Upkeep"
app.command(rich_help_panel=start)(setup.init)
app.command(rich_help_panel=start)(setup.doctor)
app.command(rich_help_panel=start)(run.up)
app.command(rich_help_panel=start)(experiment.experiment)
app.command(rich_help_panel=look)(status.status)
app.command(rich_help_panel=look)(monitor.monitor)
app.command(rich_help_panel=look)(results.report)
app.command(rich_help_panel=look)(results.leaderboard)
app.command(name="eval", rich_help_panel=look)(evaluate.evaluate)
app.command(rich_help_panel=take)(control.export)
app.command(rich_help_panel=take)(setup.starter)
app.command(rich_help_panel=machines)(join.invite)
app.command(rich_help_panel=machines)(join.join)
app.command(rich_help_panel=machines)(run.worker)
app.add_typer(cluster.cluster, name="cluster", rich_help_panel=machines)
app.command(rich_help_panel=upkeep)(control.control)
app.add_typer(control.jobs, name="jobs", rich_help_panel=upkeep)
app.command(rich_help_panel=upkeep)(control.prune)
app.command(rich_help_panel=upkeep)(setup.settings)


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", help="print the release and end", is_eager=True)] = False,
) -> None:
    """Decentralised RL post-training of language models by sharing rollouts."""
    if version:
        print(f"grapevine {metadata.version('grapevine-rl')}")
        raise typer.Exit


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

    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that knows no curves is no reason to end a run
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(130)
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
