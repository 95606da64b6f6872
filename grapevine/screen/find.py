"""Finds runs: on a server of which one knows nothing but the address, and in this machine's folder of runs.

Guarantees: reads only; the number of shards is taken from the keys themselves, so no settings file is needed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import redis

from common.directory import UNREADABLE
from common.keys import Keys
from grapevine.screen.view import plain
from grapevine.server_place import server_url

MOST_SHARDS = 1024
# What stands between braces in a key; nothing in it means anything to SCAN.
RUN_NAME = re.compile(r"[a-z0-9.-]+")


@dataclass(frozen=True)
class Refused:
    """A sample of the quarantine, newest first: the stream it stood on, why it was refused, in words, by whom."""

    stream: str
    reason: str
    detail: str
    by: str


def runs_on(client: redis.Redis) -> list[str]:
    """The runs that a server knows, by name."""
    found = {_run_of(key) for key in client.scan_iter(match="gv:{*", count=1000)}
    return sorted(name for name in found if name)


def keys_of(client: redis.Redis, run: str) -> Keys | None:
    """The keys of a run with the number of shards that it was started with; None when the server knows no such run.

    A target lies in shard crc32(name) mod S: S is the least number that puts every target where it was found. Verifiers
    make a stream in every shard, so there is hardly ever a choice.
    """
    if not RUN_NAME.fullmatch(run):
        return None
    seen: set[tuple[int, str]] = set()
    exists = False
    for key in client.scan_iter(match=f"gv:{{{run}[:}}]*", count=1000):
        exists = True
        place, _, name = plain(key, 10**4).partition("}:")
        shard = place.partition(":")[2].partition(":")[2]
        kind, _, target = name.partition(":")
        if shard.isdigit():
            seen.add((int(shard), target if kind in ("orders", "own", "books", "policy") else ""))
    if not exists:
        return None
    least = max((shard for shard, _ in seen), default=0) + 1
    for shards in range(least, MOST_SHARDS + 1):
        keys = Keys(run, shards)
        if all(keys.shard_of(target) == shard for shard, target in seen if target):
            return keys
    return Keys(run, least)


def quarantine(client: redis.Redis, keys: Keys, count: int) -> Iterator[Refused]:
    """The last refused messages of every shard, newest first."""
    for shard in range(keys.shards):
        rows: Any = client.lrange(keys.quarantine(shard), 0, count - 1)
        for row in rows:
            try:
                sample = msgspec.msgpack.decode(row, type=dict[str, Any])
            except UNREADABLE:
                continue
            yield Refused(*(plain(str(sample.get(name, "")), 400) for name in ("stream", "reason", "detail", "by")))


def local_runs(folder: Path) -> list[str]:
    """The runs of this machine that have a server of their own, by name."""
    return sorted(path.parents[1].name for path in folder.glob("*/server/port"))


def local_url(folder: Path, run: str) -> str | None:
    """The address of a local run's own server, up or not; None when it has none. Raises SettingsError (see `server_url`)."""
    return server_url(folder / run / "server") if RUN_NAME.fullmatch(run) else None


def _run_of(key: bytes) -> str:
    return plain(key).removeprefix("gv:{").partition("}")[0].partition(":")[0]
