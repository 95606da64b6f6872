"""A role's way into a run: one connection, with the ledger and the directory on it."""

from __future__ import annotations

from common.clock import Clock, ServerClock
from common.directory import Directory
from common.keys import Keys
from common.ledger import Ledger
from common.server import connect
from common.settings import Settings, SettingsError


def open_run(settings: Settings, clock: Clock | None = None, socket_timeout: float = 30.0) -> tuple[Ledger, Directory]:
    """The ledger and directory of a run, on a connection of their own; connects at the first command.

    Raises SettingsError when the settings name no server.
    """
    if settings.redis_url is None:
        raise SettingsError("no server: set redis_url, or REDIS_URL in the environment (redis://:password@host:6379/0)")
    client = connect(settings.redis_url, socket_timeout)
    keys = Keys(settings.run, settings.shards)
    return Ledger(client, keys, clock or ServerClock(client), settings.site), Directory(client, keys)


def run_keys(ledger: Ledger) -> list[bytes]:
    """All keys of a run, in no order."""
    run = ledger.keys.run
    ours = (f"gv:{{{run}}}".encode(), f"gv:{{{run}:".encode())
    return [key for key in ledger.redis.scan_iter(match=f"gv:{{{run}*", count=1000) if key.startswith(ours)]


def forget_run(ledger: Ledger) -> None:
    """Delete what the server knows of a run."""
    for key in run_keys(ledger):  # one by one: they need not share a slot
        ledger.redis.delete(key)
