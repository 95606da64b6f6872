"""`grapevine invite`, `grapevine join`: a run on more than one machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from grapevine.commands.options import FolderOption, SetOption


def invite(
    run: Annotated[str | None, typer.Argument(help="the run's name; without it, the one that is up")] = None,
    folder: FolderOption = Path("runs"),
    address: Annotated[
        str | None, typer.Option(help="host or host:port under which the other machine reaches the server")
    ] = None,
    settings: Annotated[
        Path | None, typer.Option(help="settings of a run whose workers were started one by one; REDIS_URL names its server")
    ] = None,
    revoke: Annotated[bool, typer.Option("--revoke", help="take the invitation back and cut who uses it")] = False,
) -> None:
    """Print the command with which another machine joins a run that is up here.

    Example: grapevine invite demo

    Example: grapevine invite demo --address gpu-1.example.org:6400

    Example: grapevine invite demo --revoke
    """
    import sys

    from grapevine.joining.guests import invite as invite_guests
    from grapevine.joining.guests import revoke as revoke_guests

    if revoke:
        name, gone = revoke_guests(run, folder, settings)
        print(f"the invitation to run {name} is revoked" if gone else f"run {name} had no invitation")
        return
    invitation = invite_guests(run, folder, settings, address)
    for number, url in enumerate(invitation.urls):
        print(f"grapevine join '{url}' --node NAME" if not number else f"# or at: '{url}'")
    notes = ["whoever has this URL has its password, and can write into this run", *invitation.notes]
    for note in notes:
        print(f"note: {note}", file=sys.stderr)


def join(
    url: Annotated[str, typer.Argument(help="what `grapevine invite` printed, in quotes; `-` reads it from standard input")],
    node: Annotated[str, typer.Option(help="a name that no other node of the run has")],
    config: Annotated[Path | None, typer.Argument(help="a YAML file of settings; the run's own fill in the rest")] = None,
    set_: SetOption = None,
    generators: Annotated[int | None, typer.Option(min=0, help="generators on this machine; default 1")] = None,
    verifiers: Annotated[int | None, typer.Option(min=0, help="verifiers on this machine; default 1")] = None,
    fresh: Annotated[bool, typer.Option(help="set what this machine did for an earlier run of this name aside")] = False,
) -> None:
    """Take part with this machine in a run that another one hosts; continues after an interruption.

    Example: grapevine join 'redis://guest-demo:PASSWORD@10.0.0.5:6400/0?run=demo' --node laptop --generators 2
    """
    import sys

    from rich.console import Console

    from grapevine.joining.join import join as run_join
    from grapevine.logs import configure_logs

    configure_logs(console=False)
    given = sys.stdin.readline() if url == "-" else url
    raise typer.Exit(run_join(given, node, config, set_, generators, verifiers, fresh, Console()))
