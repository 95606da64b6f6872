"""The command line. Settings errors are one sentence and exit code 2; a bug is a traceback and exit code 70."""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from common.guard import check_imports

check_imports()  # before anything else is imported from a folder that may not be ours

# ruff: noqa: E402
from common.directory import NameTaken
from common.ledger import Fenced
from common.server import ServerRefused
from common.settings import SettingsError, load
from common.tasks import TaskRefused
from common.worker import BUG_EXIT_CODE, serve_health
from grapevine.logs import configure_logs

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help=("Decentralised RL post-training of language models by sharing rollouts."),
)

ConfigArgument = Annotated[Path | None, typer.Argument(help="a YAML file of settings; without it, the defaults")]
SetOption = Annotated[list[str] | None, typer.Option("--set", help="one setting, e.g. node.mix.swarm=0; repeatable")]


@app.command()
def up(
    config: ConfigArgument = None,
    set_: SetOption = None,
    fresh: Annotated[bool, typer.Option(help="set an earlier run of this name aside and begin anew")] = False,
    lockstep: Annotated[bool, typer.Option(help="one process, reproducible to the last digit")] = False,
) -> None:
    """Run a swarm on this machine; continues a run that was interrupted."""
    from grapevine.local import up as run_up

    configure_logs(console=False)
    raise typer.Exit(run_up(load(config, set_), fresh, lockstep, Console()))


@app.command()
def worker(
    role: Annotated[str, typer.Argument(help="learner, generator or verifier")],
    name: Annotated[str, typer.Argument(help="the worker's name; a learner's is its node's")],
    settings: Annotated[Path | None, typer.Option(help="a YAML or JSON file of settings")] = None,
    set_: SetOption = None,
    port: Annotated[int, typer.Option(help="serve /healthz, /readyz and /metrics here; 0: nowhere")] = 0,
) -> None:
    """Run one worker against the server that REDIS_URL or the settings name."""
    from grapevine.roles import make_loop

    if role not in ("learner", "generator", "verifier"):
        raise SettingsError(f"role {role} is unknown; choose learner, generator or verifier")
    configure_logs(console=True)
    loaded = load(settings, set_)
    if role == "learner" and name not in loaded.node_names():
        raise SettingsError(f"node {name} is not in the settings; nodes are {', '.join(loaded.node_names())}")
    if role == "learner":
        from grapevine.local import with_models

        loaded = with_models(loaded)
    loop = make_loop(role, name, loaded)
    if port:
        serve_health(loop, port)
    loop.run()


@app.command()
def starter(folder: Annotated[Path | None, typer.Argument(help="where to put it; default: the cache")] = None) -> None:
    """Make the starter model: a tiny one, for trying things out without a model hub."""
    from grapevine.starter import make_starter, starter_folder

    print(make_starter(folder) if folder else starter_folder())


@app.command()
def report(
    run: Annotated[str, typer.Argument(help="the run's name")],
    folder: Annotated[Path, typer.Option(help="where runs are kept")] = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json", help="figures as one JSON object")] = False,
) -> None:
    """Show what a run came to."""
    from grapevine.local import show_summary
    from grapevine.report import summary

    facts = summary(folder / run)
    if as_json:
        print(json.dumps(facts, indent=2))
    else:
        show_summary(facts, Console())


def main() -> NoReturn:
    """Entry point of the `grapevine` command."""
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
