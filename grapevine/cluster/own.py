"""`grapevine cluster init`: a folder with one's own cluster on top of an overlay of the manifests.

Guarantees: passwords are random, readable by their owner alone and kept out of git; nothing that lies in the folder is
overwritten, but passwords when new ones are asked for; the old ones stay valid until the next time, so that a running
cluster can change over.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Any

import yaml

from common.files import write_whole
from common.policy_server import tokens
from common.settings import Settings, SettingsError, load
from grapevine.cluster.accounts import ROLES, Scope, acl_file

HEAD = "# Made by `grapevine cluster init`; yours to change. Apply it with: kubectl apply -k {folder}\n"
IGNORED = "passwords.env\nprevious.env\nusers.acl\n"


def init(overlay: Path, folder: Path) -> list[Path]:
    """Make a cluster's folder on top of `overlay`; the files written. Raises SettingsError."""
    for name in ("kustomization.yaml", "run.yaml"):
        if not (overlay / name).is_file():
            raise SettingsError(f"{overlay} is no overlay: it has no {name}; choose one of k8s/overlays")
    if folder.exists() and any(folder.iterdir()):
        raise SettingsError(
            f"{folder} is not empty; choose another folder, or make new passwords in it: grapevine cluster passwords FOLDER"
        )
    settings = load(overlay / "run.yaml")
    base = yaml.safe_load((overlay / "kustomization.yaml").read_text())
    folder.mkdir(parents=True, exist_ok=True)
    kustomization: dict[str, Any] = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": base.get("namespace", "default"),
        "resources": [os.path.relpath(overlay.resolve(), folder.resolve())],
        "configMapGenerator": [{"name": "run", "behavior": "replace", "files": ["run.yaml"]}],
        "secretGenerator": [{"name": "passwords", "behavior": "replace", "envs": ["passwords.env"]}],
    }
    if any(component.rstrip("/").endswith("/redis") for component in base.get("components", ())):
        kustomization["secretGenerator"].append({"name": "redis-users", "behavior": "replace", "files": ["users.acl"]})
    written = {
        "kustomization.yaml": HEAD.format(folder=folder) + yaml.safe_dump(kustomization, sort_keys=False),
        "run.yaml": (overlay / "run.yaml").read_text(),
        ".gitignore": IGNORED,
    }
    for name, text in written.items():
        write_whole(folder / name, text)
    return [*(folder / name for name in written), *passwords(folder, settings)]


def passwords(folder: Path, settings: Settings | None = None) -> list[Path]:
    """New passwords for a cluster's folder; those before stay valid beside them until the next time. The files written.

    Raises SettingsError when the folder is none of a cluster.
    """
    if not (folder / "kustomization.yaml").is_file() or not (folder / "run.yaml").is_file():
        raise SettingsError(f"{folder} holds no cluster; make one with `grapevine cluster init OVERLAY {folder}`")
    settings = settings or load(folder / "run.yaml")
    current, previous = folder / "passwords.env", folder / "previous.env"
    if current.exists():
        write_whole(previous, current.read_bytes(), mode=0o600)
    fresh = {role: secrets.token_urlsafe(24) for role in ("admin", *ROLES, "policies")}
    if previous.exists():
        fresh["policies"] += "," + tokens(read_passwords(previous)["policies"])[0]
    write_whole(current, env_file(fresh), mode=0o600)
    write_whole(folder / "users.acl", acl_file(scope_of(settings), *valid_passwords(folder)), mode=0o600)
    return [current, folder / "users.acl"]


def valid_passwords(folder: Path) -> list[dict[str, str]]:
    """The passwords that a cluster's server accepts: the newest, and those before. Raises SettingsError."""
    files = [folder / "passwords.env", folder / "previous.env"]
    return [read_passwords(path) for path in files if path.exists() or path is files[0]]


def scope_of(settings: Settings) -> Scope:
    """Whose accounts a run's site needs. Where nodes have names, the accounts are limited to what these begin with."""
    if settings.site == "local":
        return Scope(settings.run)
    return Scope(settings.run, settings.site, f"{settings.site}-*", f"{settings.site}-")


def env_file(passwords: dict[str, str]) -> str:
    """`role=password` lines."""
    return "".join(f"{role}={password}\n" for role, password in passwords.items())


def read_passwords(path: Path) -> dict[str, str]:
    """The passwords of an env file by role. Raises SettingsError when some are missing."""
    if not path.exists():
        raise SettingsError(f"{path.parent} holds no passwords; make them with `grapevine cluster init OVERLAY FOLDER`")
    pairs = dict(line.split("=", 1) for line in path.read_text().splitlines() if "=" in line and not line.startswith("#"))
    missing = [role for role in ("admin", *ROLES, "policies") if not pairs.get(role)]
    if missing:
        raise SettingsError(f"{path} lacks passwords for {', '.join(missing)}")
    return pairs
