"""`grapevine up`, `grapevine worker`: run a swarm on this machine, or one worker of it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from grapevine.commands.options import BindOption, ConfigArgument, PortOption, SetOption, port_of


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
    role: Annotated[str, typer.Argument(help="learner, generator, verifier or exporter")],
    name: Annotated[str, typer.Argument(help="the worker's name; a learner's is its node's")],
    settings: Annotated[Path | None, typer.Option(help="a YAML or JSON file of settings")] = None,
    set_: SetOption = None,
    port: PortOption = "0",
    bind: BindOption = "0.0.0.0",
    stay: Annotated[
        bool, typer.Option("--stay", help="a learner that is complete goes on handing out its policy until told to end")
    ] = False,
) -> None:
    """Run one worker against the server that REDIS_URL or the settings name.

    An exporter has no part in the training: it shows what lies on the server to Prometheus.

    Example: REDIS_URL=redis://:password@host:6379/0 grapevine worker generator gen-1 --settings my.yaml --port 9100
    """
    from grapevine.processes import end_on_sigterm

    end_on_sigterm()  # before the imports that take long
    from common.settings import SettingsError, load
    from common.worker import serve_health
    from grapevine.disk import writing_to
    from grapevine.logs import configure_logs
    from grapevine.roles import make_loop

    if role not in ("learner", "generator", "verifier", "exporter"):
        raise SettingsError(f"role {role} is unknown; choose learner, generator, verifier or exporter")
    served = port_of(port)
    configure_logs(console=True)
    loaded = load(settings, set_)
    if role == "learner" and name not in loaded.node_names():
        raise SettingsError(f"node {name} is not in the settings; nodes are {', '.join(loaded.node_names())}")
    if role == "learner":
        from grapevine.running.local import keep_settings, with_models

        loaded = with_models(loaded)
    with writing_to(loaded.run_folder):
        if role == "learner" and settings != loaded.run_folder / "settings.json":
            keep_settings(loaded)
        loop = make_loop(role, name, loaded, stay)
        if served is not None:
            serve_health(loop, loaded.run, served, bind)
        loop.run()
