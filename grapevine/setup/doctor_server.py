"""The part of `grapevine doctor` that looks at the server: the one that the settings name, or the embedded one.

Guarantees: only commands that read; what a managed server does not tell is left out, not guessed.
"""

from __future__ import annotations

import socket
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from common.server import ServerRefused, address, away, connect, denied
from common.settings import Settings, SettingsError
from grapevine.setup.findings import Finding

PINGS = 15
SLOW_MS = 50.0
CLOCK_SECONDS = 2.0  # heartbeats of other machines count as fresh for 15


def examine_server(settings: Settings) -> Iterator[Finding]:
    """Findings about the server of a run."""
    if settings.redis_url is None:
        yield from _embedded(settings)
    else:
        yield from _named(settings.redis_url)


def _embedded(settings: Settings) -> Iterator[Finding]:
    try:
        from grapevine.server import EmbeddedServer
    except ImportError:
        fix = "pip install 'grapevine-rl[server]', or name a server with redis_url or REDIS_URL"
        yield Finding("failure", "server", "none is named, and the embedded one is not installed", fix)
        return
    with tempfile.TemporaryDirectory() as folder:
        try:
            # On any free port: that of a run that is up would be taken.
            server = EmbeddedServer(Path(folder))
            began = time.monotonic()
            server.start()
        except (RuntimeError, OSError, SettingsError) as error:
            fix = "name a server with redis_url or REDIS_URL"
            yield Finding("failure", "server", f"the embedded one does not start: {' '.join(str(error).split())}", fix)
            return
        try:
            with connect(server.url) as client:
                found = f"embedded {_version(client.info('server'))} starts in {time.monotonic() - began:.1f} s and answers"
            yield Finding("ok", "server", found)
        finally:
            server.stop()
    if ":" in settings.listen:
        yield from _port(settings.listen)


def _port(listen: str) -> Iterator[Finding]:
    from common.addresses import listen_address

    place, port = listen_address(listen)
    if port is None:
        return
    with socket.socket(socket.AF_INET6 if ":" in place else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((place, port))
            yield Finding("ok", "port", f"{listen} is free")
        except OSError as error:
            fix = "fine if this run is up already; otherwise choose another port for listen"
            yield Finding("warning", "port", f"{listen} cannot be had: {error.strerror}", fix)


def _named(url: str) -> Iterator[Finding]:
    try:
        client = connect(url, socket_timeout=5.0)
        client.ping()
    except ServerRefused as error:
        yield Finding("failure", "server", str(error), "see above")
        return
    except (redis.ConnectionError, redis.TimeoutError) as error:
        sentence, _, fix = str(away(url, error)).partition("; ")
        yield Finding("failure", "server", sentence, fix)
        return
    with client:
        try:
            facts: dict[str, Any] = dict(client.info())
            times = [_timed(client) for _ in range(PINGS)]
            offset = _clock_offset(client)
        except redis.RedisError as error:
            yield Finding("failure", "server", denied(error) or str(error), "let the user read INFO and TIME")
            return
    latency = statistics.median(times)
    found = f"{_version(facts)} at {address(url)}, answers in {latency:.1f} ms"
    if latency > SLOW_MS:
        yield Finding("warning", "server", found, "far away: keep more batches ahead (node.ahead), or move it closer")
    else:
        yield Finding("ok", "server", found)
    yield from _memory_policy(facts)
    yield from _persistence(facts)
    yield from _protection(url)
    found = f"the server's differs by {abs(offset):.1f} s from this machine's"
    if abs(offset) > CLOCK_SECONDS:
        yield Finding("warning", "clock", found, "set both by NTP, or workers seem away and groups too old")
    else:
        yield Finding("ok", "clock", found)


def _memory_policy(facts: dict[str, Any]) -> Iterator[Finding]:
    policy = facts.get("maxmemory_policy")
    limit = int(facts.get("maxmemory", 0))
    if policy is None:
        return
    found = f"maxmemory-policy {policy}, " + (f"limit {limit / 2**20:.0f} MB" if limit else "no limit")
    if policy == "noeviction" or not limit:
        yield Finding("ok", "eviction", found)
    else:
        fix = "CONFIG SET maxmemory-policy noeviction: a full server must refuse, not forget orders and groups"
        yield Finding("failure", "eviction", found, fix)


def _persistence(facts: dict[str, Any]) -> Iterator[Finding]:
    if facts.get("aof_enabled") is None:
        return
    failing = "err" in (facts.get("aof_last_write_status"), facts.get("rdb_last_bgsave_status"))
    if failing:
        fix = "make room on the server's disk; until then it may take no writes"
        yield Finding("failure", "persistence", "the server cannot save its data", fix)
    elif facts["aof_enabled"]:
        yield Finding("ok", "persistence", "append-only file")
    else:
        fix = "CONFIG SET appendonly yes; without it a restart forgets answered groups, and they are asked again"
        yield Finding("warning", "persistence", "no append-only file", fix)


def _protection(url: str) -> Iterator[Finding]:
    """Whether the server lets strangers in: asked by being one."""
    from redis.connection import parse_url

    parts: dict[str, Any] = parse_url(url)  # type: ignore[no-untyped-call]
    host, port = parts.get("host", "localhost"), parts.get("port", 6379)
    encrypted = url.startswith("rediss://")
    if "path" in parts:
        return
    options: dict[str, Any] = {"ssl_cert_reqs": "none"} if encrypted else {}
    stranger = redis.Redis(
        host=host, port=port, ssl=encrypted, socket_timeout=5.0, socket_connect_timeout=5.0,
        retry=Retry(NoBackoff(), 0), **options,
    )  # fmt: skip
    try:
        open_to_all = bool(stranger.ping())
    except redis.RedisError:
        open_to_all = False
    finally:
        stranger.close()
    here = host in ("localhost", "127.0.0.1", "::1")
    if open_to_all and not here:
        fix = "set a password (requirepass or ACL): whoever reaches the port can read and change the run"
        yield Finding("failure", "protection", "the server lets anyone in without a password", fix)
    elif open_to_all:
        yield Finding("warning", "protection", "no password; only this machine should reach it", "set requirepass")
    elif not encrypted and not here:
        fix = "use TLS (rediss://) or a private network between the machines"
        yield Finding("warning", "protection", "password set, but nothing on the way is encrypted", fix)
    else:
        yield Finding("ok", "protection", "password set" + (", TLS" if encrypted else ""))


def _timed(client: redis.Redis) -> float:
    """Milliseconds of a round trip."""
    began = time.perf_counter()
    client.ping()
    return 1000 * (time.perf_counter() - began)


def _clock_offset(client: redis.Redis) -> float:
    """Seconds that the server's clock is ahead of this machine's, half a round trip allowed for."""
    before = time.time()
    seconds, micros = client.time()
    return float(seconds + micros / 1e6 - (before + time.time()) / 2)


def _version(facts: Any) -> str:
    if "valkey_version" in facts:
        return f"Valkey {facts['valkey_version']}"
    return f"Redis {facts.get('redis_version', '?')}"
