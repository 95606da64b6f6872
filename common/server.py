"""The connection to a Redis-protocol server (Redis or Valkey, 7 or newer).

Guarantees: a command is sent once (no silent retry), and no command reaches a server that restarted since the last one:
the first attempt raises ServerChanged instead, a ConnectionError, so that whoever keeps state beside the server's compares
the two before going on.
"""

from __future__ import annotations

from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry


class ServerChanged(redis.ConnectionError):
    """The server at this address is not the one last spoken to: it restarted, or another took its place."""


class ServerRefused(Exception):
    """The server answers but cannot be used (wrong password, too old). One sentence with the fix."""


OLDEST = 7


class _Watch:
    """Remembers the run id of the server behind a client and says when it is another."""

    def __init__(self) -> None:
        self.run_id: str | None = None

    def __call__(self, connection: Any) -> None:
        try:
            connection.on_connect()
            connection.send_command("INFO", "server")
            info = connection.read_response()
        except redis.AuthenticationError as error:
            # A ConnectionError to redis-py, but trying again would help nobody.
            raise ServerRefused(f"the server wants another password than redis_url has: {error}") from None
        facts = dict(line.split(":", 1) for line in _text(info).splitlines() if ":" in line)
        known, self.run_id = self.run_id, facts.get("run_id", "").strip()
        version = facts.get("valkey_version") or facts.get("redis_version", "0")
        if int(version.split(".")[0]) < OLDEST:
            raise ServerRefused(
                f"the server is version {version.strip()}; grapevine needs Redis or Valkey {OLDEST} or newer"
            )
        if known is not None and known != self.run_id:
            raise ServerChanged("the server restarted")


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def connect(url: str, socket_timeout: float = 30.0) -> redis.Redis:
    """A client for the server at `url` (`redis://:password@host:port/0`); connects at the first command.

    Each worker thread needs a client of its own: a ServerChanged must reach whoever has to act on it.
    Socket timeout in seconds; a server that hangs (stopped, partitioned) counts as away after it.
    Raises ServerRefused when the address is none.
    """
    try:
        return redis.Redis.from_url(
            url,
            protocol=2,
            retry=Retry(NoBackoff(), 0),
            socket_timeout=socket_timeout,
            socket_connect_timeout=min(5.0, socket_timeout),
            redis_connect_func=_Watch(),
        )
    except ValueError as error:
        raise ServerRefused(f"redis_url cannot be used: {' '.join(str(error).split())}") from None
