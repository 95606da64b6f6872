"""`grapevine control`, `jobs`, `export`, `prune`: what a run is asked to do beside training."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from grapevine.commands.options import BindOption, FolderOption, PortOption, SetOption, port_of

if TYPE_CHECKING:
    from grapevine.control.queue import Jobs

jobs = typer.Typer(no_args_is_help=True, help="Control jobs of a run: evaluations, exports, reports, pruning.")

RunArgument = Annotated[str, typer.Argument(help="the run's name")]
IdArgument = Annotated[str, typer.Argument(help="the job's id, as `grapevine jobs list` shows it")]
SiteOption = Annotated[str, typer.Option(help="whose jobs, where several sites share the server")]
UrlOption = Annotated[str | None, typer.Option(envvar="REDIS_URL", show_envvar=True, help="the server, for a run elsewhere")]


def control(
    settings: Annotated[Path | None, typer.Option(help="a YAML or JSON file of settings")] = None,
    set_: SetOption = None,
    name: Annotated[str | None, typer.Option(help="the worker's name; default: control- and this machine's")] = None,
    port: PortOption = "0",
    bind: BindOption = "0.0.0.0",
) -> None:
    """Run a worker for control jobs and for the evaluations that the section `control` schedules.

    Example: REDIS_URL=redis://:password@host:6379/0 grapevine control --settings my.yaml --set control.evaluate_rounds=50
    """
    from grapevine.processes import end_on_sigterm

    end_on_sigterm()  # before the imports that take long
    from common.settings import load
    from grapevine.control.worker import control as work
    from grapevine.control.worker import default_name
    from grapevine.logs import configure_logs
    from grapevine.running.local import with_models

    configure_logs(console=True)
    served = port_of(port)
    loaded = with_models(load(settings, set_))
    work(loaded, default_name() if name is None else name, served, bind)


@jobs.command(name="list")
def list_(
    run: Annotated[str | None, typer.Argument(help="the run's name; may be left out where there is only one")] = None,
    redis_url: UrlOption = None,
    site: SiteOption = "local",
    folder: FolderOption = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json", help="all there is to know of each job, as a JSON list")] = False,
) -> None:
    """List the jobs of a run, the newest first.

    Example: grapevine jobs list demo
    """
    import json

    from rich.console import Console

    from grapevine.control.listing import show_rows

    found = _jobs(run, redis_url, folder, site)
    rows = found.rows()
    if as_json:
        print(json.dumps([row.as_dict() for row in rows], indent=2))
    else:
        show_rows(found.run, rows, Console())


@jobs.command()
def add(
    run: RunArgument,
    kind: Annotated[str, typer.Argument(help="evaluate, export, report or prune")],
    node: Annotated[str | None, typer.Option(help="evaluate, export: whose policy")] = None,
    version: Annotated[str | None, typer.Option(help="evaluate, export: which one, e.g. 1.150; default: the newest")] = None,
    tasks: Annotated[str | None, typer.Option(help="evaluate: a preset, or names with commas")] = None,
    questions: Annotated[int | None, typer.Option(min=1, help="evaluate: distinct held-out questions")] = None,
    completions: Annotated[
        int | None, typer.Option(min=1, max=1024, help="evaluate: sampled completions per question")
    ] = None,
    keep_policies: Annotated[int | None, typer.Option(min=1, help="prune: newest policy files kept per node")] = None,
    older_than: Annotated[str | None, typer.Option(help="prune: age of set-aside runs that go, e.g. 7d")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="prune: only say what would go")] = False,
    retries: Annotated[int, typer.Option(min=0, max=100, help="how often it is tried again when it fails")] = 3,
    wait: Annotated[bool, typer.Option("--wait", help="wait for it and print its result as JSON")] = False,
    redis_url: UrlOption = None,
    site: SiteOption = "local",
    folder: FolderOption = Path("runs"),
) -> None:
    """Put a job into a run's queue and print its id; a `grapevine control` worker does it.

    Example: grapevine jobs add demo evaluate --node node-0 --questions 200

    Example: grapevine jobs add demo export --node node-0 --wait
    """
    from grapevine.control.listing import arguments_of, wait_for

    given = {
        "node": node, "version": version, "tasks": tasks, "questions": questions, "completions": completions,
        "keep_policies": keep_policies, "older_than": older_than, "dry_run": dry_run or None,
    }  # fmt: skip
    arguments = arguments_of(kind, given)
    found = _jobs(run, redis_url, folder, site)
    id = found.add(kind, arguments, retries)
    if wait and id is not None:
        raise typer.Exit(wait_for(found, id))
    print(id)


@jobs.command()
def retry(
    run: RunArgument,
    id: IdArgument,
    redis_url: UrlOption = None,
    site: SiteOption = "local",
    folder: FolderOption = Path("runs"),
) -> None:
    """Put a job that failed or was cancelled into the queue again, with all its tries.

    Example: grapevine jobs retry demo evaluate-node-0-3f9a2c41
    """
    _jobs(run, redis_url, folder, site).retry(id)


@jobs.command()
def cancel(
    run: RunArgument,
    id: IdArgument,
    redis_url: UrlOption = None,
    site: SiteOption = "local",
    folder: FolderOption = Path("runs"),
) -> None:
    """Take a job out of the queue, or end it where it runs.

    Example: grapevine jobs cancel demo evaluate-node-0-3f9a2c41
    """
    _jobs(run, redis_url, folder, site).cancel(id)


def export(
    run: RunArgument,
    node: Annotated[str, typer.Argument(help="whose policy")],
    target: Annotated[Path | None, typer.Argument(help="a new or empty folder; default: RUN-NODE here")] = None,
    version: Annotated[str | None, typer.Option(help="which policy, e.g. 1.150; default: the newest checkpoint")] = None,
    folder: FolderOption = Path("runs"),
) -> None:
    """Write a node's policy as a model folder that transformers, vLLM and others load, with a model card.

    Example: grapevine export demo node-0 models/demo-node-0
    """
    from grapevine.export import export_model, parse_version, run_settings

    wanted = parse_version(version) if version is not None else None
    facts = export_model(run_settings(folder, run), node, target or Path(f"{run}-{node}"), wanted)
    print(f"version {facts['version']} of {node} is in {facts['folder']}")


def prune(
    run: Annotated[str | None, typer.Argument(help="only this run and those set aside for it; default: all")] = None,
    keep_policies: Annotated[int, typer.Option(help="newest policy files kept per node")] = 2,
    older_than: Annotated[str, typer.Option(help="age of set-aside runs that go: s, m, h, d or w")] = "7d",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="only list what would go")] = False,
    folder: FolderOption = Path("runs"),
) -> None:
    """Remove old policy files, caches and set-aside runs; a run that is up is not touched.

    Example: grapevine prune --older-than 2w --dry-run
    """
    from rich.console import Console

    from grapevine.control.listing import show_pruned
    from grapevine.prune import parse_age, plan, prune_runs

    planned = plan(folder, run, keep_policies, parse_age(older_than))
    show_pruned(planned if dry_run else prune_runs(planned), dry_run, Console())


def _jobs(run: str | None, redis_url: str | None, folder: Path, site: str) -> Jobs:
    """The jobs of a run, on the server named or on the one beside the run. Raises SettingsError, ServerRefused."""
    from common.server import ServerRefused
    from common.settings import SettingsError
    from common.worker import TRANSIENT
    from grapevine.control.queue import Jobs, quick_client
    from grapevine.screen.status import NoSuchRun, Place

    try:
        place = Place.find(run, redis_url, folder)
    except NoSuchRun as error:
        raise SettingsError(str(error)) from None
    client = quick_client(place.url)
    try:
        client.ping()
    except TRANSIENT as error:
        raise ServerRefused(f"the server of run {place.keys.run} does not answer: {error}") from None
    return Jobs(place.keys.run, client, site)
