"""`grapevine cluster`: what a cluster needs besides its manifests."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

cluster = typer.Typer(no_args_is_help=True, help="Kubernetes: a folder of one's own on top of an overlay, and its accounts.")
FolderArgument = Annotated[Path, typer.Argument(help="the cluster's folder")]


@cluster.command()
def init(
    overlay: Annotated[Path, typer.Argument(help="one of k8s/overlays")],
    folder: Annotated[Path, typer.Argument(help="where to keep your own settings, patches and passwords")],
) -> None:
    """Make a folder on top of an overlay, with settings to edit and passwords that nobody else has.

    Example: grapevine cluster init k8s/overlays/gpu my-cluster
    """
    from rich.console import Console

    from grapevine.cluster.own import init as make

    console = Console()
    for path in make(overlay, folder):
        console.print(f"wrote {path}", highlight=False, soft_wrap=True)
    console.print(
        f"next: edit {folder / 'run.yaml'}, then kubectl apply -k {folder}; keep passwords.env where others cannot read it",
        highlight=False, soft_wrap=True,
    )  # fmt: skip


@cluster.command()
def passwords(folder: FolderArgument) -> None:
    """Make new passwords; those before stay valid until the next time, so that a running cluster can change over.

    Example: grapevine cluster passwords my-cluster
    """
    from rich.console import Console

    from grapevine.cluster.own import passwords as make

    console = Console()
    for path in make(folder):
        console.print(f"wrote {path}", highlight=False, soft_wrap=True)
    console.print(
        f"next: kubectl apply -k {folder}; when all pods are new, once more, and the old passwords are gone",
        highlight=False, soft_wrap=True,
    )  # fmt: skip


@cluster.command()
def accounts(folder: FolderArgument) -> None:
    """Print the server's accounts of a cluster's folder, as lines of an ACL file: for the keeper of a server elsewhere.

    Example: grapevine cluster accounts my-site
    """
    from common.settings import load
    from grapevine.cluster.accounts import acl_lines
    from grapevine.cluster.own import scope_of, valid_passwords

    settings = load(folder / "run.yaml")
    for line in acl_lines(scope_of(settings), *valid_passwords(folder)):
        print(line)
