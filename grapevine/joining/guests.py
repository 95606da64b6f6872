"""Guests: an account on the run's server for other machines, and the address under which they reach it.

Guarantees: the account sees this run's keys and no others, and can neither list, configure nor empty the server; asking for
an invitation again gives the same one until it is revoked; revoking cuts the connections that use it.
"""

from __future__ import annotations

import fcntl
import json
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

import redis

from common.addresses import in_url, is_loopback, is_wildcard, listen_address, outward_addresses
from common.files import read_object, write_whole
from common.ledger import Ledger
from common.run import open_run
from common.server import away
from common.settings import Settings, SettingsError, load
from common.worker import TRANSIENT
from grapevine.cluster import accounts
from grapevine.joining.invitation import facts_of, publish, read_facts
from grapevine.report.folder import run_tree
from grapevine.server_place import server_url

# A guest's machine runs all three roles, and looks at the run as the exporter does.
COMMANDS = (
    "-@all",
    *sorted({f"+{name}" for role in ("learner", "generator", "verifier", "exporter") for name in accounts.COMMANDS[role]}),
)


@dataclass(frozen=True)
class Invitation:
    """URLs that lead into the run, the likeliest first, and what whoever sends one should know."""

    urls: list[str]
    notes: list[str]


def invite(run: str | None, folder: Path, settings_file: Path | None, address: str | None) -> Invitation:
    """An invitation to a run that is up. `address` (host or host:port) is how the other machine reaches the server.

    Raises SettingsError, ServerRefused.
    """
    settings, own_server = _hosted(run, folder, settings_file)
    ledger = _reach(settings)
    if settings_file is not None:
        publish(ledger, facts_of(settings))
    elif read_facts(ledger) is None:
        raise SettingsError(f"run {settings.run} takes no guests: it runs in lockstep, where all nodes share one process")
    user, password, rules = guest_account(settings.run, _account_file(settings))
    warning = admit(ledger.redis, user, rules, own_server)
    url = settings.redis_url or ""
    places = [address] if address else _places(settings) if own_server else [None]
    notes = [warning] if warning else []
    if url.startswith("redis:"):
        notes.append("nothing is encrypted on the way: between machines that are not alone on their network use a tunnel")
    return Invitation([invitation_url(url, user, password, place, settings.run) for place in places], notes)


def revoke(run: str | None, folder: Path, settings_file: Path | None) -> tuple[str, bool]:
    """Take the invitation back. Returns the run, and whether there was one. Raises SettingsError, ServerRefused."""
    settings, _ = _hosted(run, folder, settings_file)
    server: Any = _reach(settings).redis
    path = _account_file(settings)
    # The file first: a server that comes back after a crash in between must not admit them again.
    path.unlink(missing_ok=True)
    gone = bool(server.execute_command("ACL", "DELUSER", f"guest-{settings.run}"))
    return settings.run, gone


def is_up(folder: Path) -> bool:
    """Whether a process on this machine has this run's folder in use."""
    path = folder / "lock"
    if not path.exists():
        return False
    with path.open("r") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


def _hosted(run: str | None, folder: Path, settings_file: Path | None) -> tuple[Settings, bool]:
    """The settings of the run that guests are for, its server's URL among them, and whether that server is its own."""
    if settings_file is not None:
        settings = load(settings_file)
    else:
        if run is None:
            found = sorted(path.parent.name for path in folder.glob("*/lock") if is_up(path.parent))
            if len(found) != 1:
                which = f"several runs are up ({', '.join(found)}); name one" if found else f"no run in {folder} is up"
                raise SettingsError(f"{which}: grapevine invite RUN")
            run = found[0]
        if not is_up(folder / run):
            raise SettingsError(
                f"run {run} is not up in {folder}; start it with `grapevine up`, and invite from another shell"
            )
        run_tree(folder / run)
        settings = load(folder / run / "settings.json").model_copy(update={"folder": folder})
    if settings.redis_url is not None:
        return settings, False
    url = server_url(settings.run_folder / "server")
    if url is None:
        raise SettingsError("no server: name it with redis_url, or REDIS_URL in the environment")
    return settings.model_copy(update={"redis_url": url}), True


def _reach(settings: Settings) -> Ledger:
    ledger, _ = open_run(settings, socket_timeout=5.0)
    try:
        ledger.redis.ping()
    except TRANSIENT as error:
        raise away(settings.redis_url or "", error) from None
    return ledger


def _places(settings: Settings) -> list[str]:
    """How others reach the server that `up` started. Raises SettingsError when they cannot."""
    listens, _ = listen_address(settings.listen)
    if is_loopback(listens):
        raise SettingsError(
            f"the server of run {settings.run} can be reached from this machine only; start the run with "
            f"`--listen 0.0.0.0` (or --set listen=0.0.0.0), or name the near end of a tunnel to it with --address"
        )
    places = outward_addresses() if is_wildcard(listens) else [listens]
    if not places:
        raise SettingsError("no address of this machine was found that others could use; name one with --address")
    return places


def _account_file(settings: Settings) -> Path:
    return settings.run_folder / "server" / "guest.json"


def guest_account(run: str, path: Path) -> tuple[str, str, list[str]]:
    """User, password and ACL rules of a run's guests; made on first use and kept at `path` (mode 0600)."""
    kept = read_object(path) or {}
    user, password = f"guest-{run}", str(kept.get("password") or secrets.token_urlsafe(24))
    # Two patterns: `gv:{demo*` alone would open the run `demo-2` as well.
    keys = [f"~gv:{{{run}}}:*", f"~gv:{{{run}:*"]
    rules = ["reset", "on", "#" + accounts.digest(password), *keys, *COMMANDS]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps({"user": user, "password": password, "rules": rules}), mode=0o600)
    return user, password, rules


def admit(client: redis.Redis, user: str, rules: list[str], own_server: bool) -> str | None:
    """Make the account on a running server. Returns a warning, or None. Raises SettingsError when the server refuses."""
    server: Any = client
    try:
        server.execute_command("ACL", "SETUSER", user, *rules)
    except redis.exceptions.NoPermissionError as error:
        raise SettingsError(
            f"this account may not make others on the server ({error}); let the server's keeper make one for the keys "
            f"~gv:* or give the other machine the redis_url that this one uses, with ?run=NAME at its end"
        ) from None
    if own_server:
        return None  # its configuration is written anew at every start, with the account in it
    try:
        server.execute_command("ACL", "SAVE")
    except redis.ResponseError:
        return (
            "the server keeps no file of accounts and forgets this one when it restarts; then run `grapevine invite` again"
        )
    return None


def invitation_url(server_url: str, user: str, password: str, address: str | None, run: str) -> str:
    """The URL to give away. `address` (host, or host:port) takes the place of the server's own."""
    parts = urlsplit(server_url)
    host, port = in_url(parts.hostname or "localhost"), parts.port or 6379
    if address:
        head, colon, tail = address.rpartition(":")
        if colon and tail.isdigit() and (head.startswith("[") or ":" not in head):
            host, port = head, int(tail)
        else:
            host = in_url(address)
    query = urlencode([*parse_qsl(parts.query), ("run", run)])
    return urlunsplit((parts.scheme, f"{user}:{password}@{host}:{port}", parts.path or "/0", query, ""))


def split_url(url: str) -> tuple[str, str]:
    """An invitation's URL as the server's URL and the run's name. Raises SettingsError."""
    try:
        parts = urlsplit(url.strip().strip("'\""))
        runs = [value for key, value in parse_qsl(parts.query) if key == "run"]
        fits = parts.scheme in ("redis", "rediss") and bool(parts.hostname) and len(runs) == 1 and parts.port != 0
    except ValueError:
        fits = False
    if not fits:
        raise SettingsError(
            "that is no invitation: it looks like redis://guest-demo:PASSWORD@HOST:PORT/0?run=demo, put in quotes, and "
            "`grapevine invite` on the machine of the run prints it"
        )
    rest = urlencode([(key, value) for key, value in parse_qsl(parts.query) if key != "run"])
    return urlunsplit((parts.scheme, parts.netloc, parts.path or "/0", rest, "")), runs[0]
