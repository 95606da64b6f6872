"""`grapevine up`, `grapevine worker`: run a swarm on this machine, or one worker of it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from grapevine.commands.options import ConfigArgument, SetOption


def up(
    config: ConfigArgument = None,
    set_: SetOption = None,
    fresh: Annotated[bool, typer.Option(help="set an earlier run of this name aside and begin anew")] = False,
    lockstep: Annotated[bool, typer.Option(help="one process, reproducible to the last digit")] = False,
    resume: Annotated[str | None, typer.Option(help="continue this run with the settings it was last up with")] = None,
    listen: Annotated[str | None, typer.Option(help="let other machines join at this address; 0.0.0.0: at any")] = None,
) -> None:
    """Run a swarm on this machine; continues a run that was interrupted.

    Example: grapevine up configs/demo.yaml --fresh --set node.mix.swarm=0

    Example: grapevine up --resume demo --set node.rounds=300

    Example: grapevine up configs/demo.yaml --listen 0.0.0.0
    """
    import json

    from rich.console import Console

    from common.settings import SettingsError, load
    from grapevine.disk import writing_to
    from grapevine.logs import configure_logs
    from grapevine.running.continuing import resumed
    from grapevine.running.local import up as run_up

    configure_logs(console=False)
    place: list[str] = []
    if resume is not None:
        if config is not None or fresh:
            raise SettingsError(
                "--resume takes the run's own settings: leave out the file and --fresh, or leave out --resume"
            )
        config, place, lockstep = resumed(resume)
    flags = [*place, *(set_ or []), *([f"listen={json.dumps(listen)}"] if listen is not None else [])]
    settings = load(config, flags)
    if resume is not None and settings.run_folder != config.parent:  # type: ignore[union-attr]
        raise SettingsError("--resume goes on with a run where it is: leave out --set run=... and --set folder=...")
    with writing_to(settings.run_folder):
        code = run_up(settings, fresh, lockstep, Console())
    raise typer.Exit(code)


def worker(
    role: Annotated[str, typer.Argument(help="learner, generator or verifier")],
    name: Annotated[str, typer.Argument(help="the worker's name; a learner's is its node's")],
    settings: Annotated[Path | None, typer.Option(help="a YAML or JSON file of settings")] = None,
    set_: SetOption = None,
    port: Annotated[int, typer.Option(help="serve /healthz, /readyz and /metrics here; 0: nowhere")] = 0,
) -> None:
    """Run one worker against the server that REDIS_URL or the settings name.

    Example: REDIS_URL=redis://:password@host:6379/0 grapevine worker generator gen-1 --settings my.yaml --port 9100
    """
    from common.settings import SettingsError, load
    from common.worker import serve_health
    from grapevine.disk import writing_to
    from grapevine.logs import configure_logs
    from grapevine.roles import make_loop

    if role not in ("learner", "generator", "verifier"):
        raise SettingsError(f"role {role} is unknown; choose learner, generator or verifier")
    configure_logs(console=True)
    loaded = load(settings, set_)
    if role == "learner" and name not in loaded.node_names():
        raise SettingsError(f"node {name} is not in the settings; nodes are {', '.join(loaded.node_names())}")
    if role == "learner":
        from grapevine.running.local import with_models

        loaded = with_models(loaded)
    with writing_to(loaded.run_folder):
        loop = make_loop(role, name, loaded)
        if port:
            serve_health(loop, port)
        loop.run()
