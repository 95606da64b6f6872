"""The connection to a Redis-protocol server (Redis or Valkey, 7 or newer).

Guarantees: a command is sent once (no silent retry), and no command reaches a server that restarted since the last one:
the first attempt raises ServerChanged instead, a ConnectionError, so that whoever keeps state beside the server's compares
the two before going on. A server that no retry would make usable is refused in one sentence that names its host and port
and never the password.
"""

from __future__ import annotations

import os
import ssl
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.connection import SSLConnection, parse_url
from redis.retry import Retry


class ServerChanged(redis.ConnectionError):
    """The server at this address is not the one last spoken to: it restarted, or another took its place."""


class ServerRefused(Exception):
    """The server answers but cannot be used (wrong password, too old). One sentence with the fix."""


class PasswordRefused(ServerRefused):
    """The server does not take this user and password."""


OLDEST = 7
# The passwords in the manifests, so that a cluster on a laptop comes up at once, begin with this word.
PUBLISHED = "published-"
RIGHTS = "~gv:* ~rq:* &* +@all"


class _Watch:
    """Remembers the run id of the server behind a client and says when it is another."""

    def __init__(self) -> None:
        self.run_id: str | None = None

    def __call__(self, connection: Any) -> None:
        try:
            self._greet(connection)
        except ServerRefused:
            # redis-py closes after its own errors only; the next command must not find this connection in place.
            connection.disconnect()
            raise

    def _greet(self, connection: Any) -> None:
        place = _place(connection)
        try:
            connection.on_connect()
            connection.send_command("INFO", "server")
            info = connection.read_response()
        except redis.AuthenticationError as error:
            # A ConnectionError to redis-py, but trying again would help nobody.
            raise PasswordRefused(
                f"the server wants another password than redis_url has for {place} ({_line(error)}); "
                f"correct redis_url, or REDIS_URL: redis://user:password@host:port/0"
            ) from None
        except redis.exceptions.NoPermissionError as error:
            raise ServerRefused(_permission(place, error)) from None
        except redis.InvalidResponse:
            raise ServerRefused(
                f"what answers at {place} does not speak the Redis protocol; correct redis_url, "
                f"and where the server wants TLS begin it with rediss://"
            ) from None
        except redis.ConnectionError:
            raise
        except redis.ResponseError as error:
            raise ServerRefused(f"the server at {place} refuses: {_line(error)}; correct redis_url") from None
        facts = dict(line.split(":", 1) for line in _text(info).splitlines() if ":" in line)
        known, self.run_id = self.run_id, facts.get("run_id", "").strip()
        version = (facts.get("valkey_version") or facts.get("redis_version", "0")).strip()
        if int(version.split(".")[0]) < OLDEST:
            raise ServerRefused(
                f"the server at {place} is version {version}; grapevine needs Redis or Valkey {OLDEST} or newer"
            )
        if (facts.get("redis_mode") or facts.get("server_mode") or "").strip() == "cluster":
            raise ServerRefused(f"the server at {place} is a Redis Cluster; grapevine needs one that stands alone")
        if known is not None and known != self.run_id:
            raise ServerChanged("the server restarted")


class _TlsConnection(SSLConnection):
    """Says what is wrong with the encryption, which no retry would mend."""

    def _connect(self) -> Any:
        try:
            return super()._connect()  # type: ignore[no-untyped-call]
        except ssl.SSLEOFError:
            raise  # a server that ends amid the greeting may be back in a moment
        except ssl.SSLError as error:
            raise ServerRefused(_encryption(_place(self), error)) from None


def connect(url: str, socket_timeout: float = 30.0) -> redis.Redis:
    """A client for the server at `url` (`redis://:password@host:port/0`); connects at the first command.

    Each worker thread needs a client of its own: a ServerChanged must reach whoever has to act on it.
    Socket timeout in seconds; a server that hangs (stopped, partitioned) counts as away after it.
    Raises ServerRefused when the address is none.
    """
    try:
        client = redis.Redis.from_url(
            url,
            protocol=2,
            retry=Retry(NoBackoff(), 0),
            socket_timeout=socket_timeout,
            socket_connect_timeout=min(5.0, socket_timeout),
            redis_connect_func=_Watch(),
        )
    except ValueError:  # its words can hold a part of the password
        raise ServerRefused(
            "redis_url cannot be used; write it as redis://user:password@host:port/0, and signs of the password other than "
            "letters and digits as %XX"
        ) from None
    pool = client.connection_pool
    if str(pool.connection_kwargs.get("password") or "").startswith(PUBLISHED) and not _published_allowed():
        raise ServerRefused(
            "the password in redis_url is published with the manifests, so anyone knows it; make passwords of your own with "
            "`grapevine cluster init OVERLAY FOLDER`, or set GRAPEVINE_PUBLISHED_PASSWORDS=allowed where nobody else gets in"
        )
    if pool.connection_class is SSLConnection:
        pool.connection_class = _TlsConnection
    return client


def _published_allowed() -> bool:
    return os.environ.get("GRAPEVINE_PUBLISHED_PASSWORDS") == "allowed"


def address(url: str) -> str:
    """Where a URL points, `host:port` or a socket's path: all of it that may be shown to anyone."""
    try:
        parts: dict[str, Any] = parse_url(url)  # type: ignore[no-untyped-call]
    except ValueError:
        return "redis_url"
    return str(parts.get("path") or f"{parts.get('host') or 'localhost'}:{parts.get('port') or 6379}")


def away(url: str, error: Exception) -> ServerRefused:
    """For a server that must be there now and does not answer: one sentence with its address and what to look at."""
    tls = " (with TLS, as rediss:// says)" if url.startswith("rediss:") else ""
    return ServerRefused(
        f"the server that redis_url names does not answer at {address(url)}{tls}: {_line(error)}; start it or correct "
        f"redis_url, or leave redis_url and REDIS_URL out and `grapevine up` starts a server of its own"
    )


def denied(error: Exception) -> str | None:
    """One sentence about an answer of the server that means a fault of its set-up; None for any other error."""
    if isinstance(error, redis.exceptions.NoPermissionError) or "ACL failure in script" in str(error):
        return _permission("redis_url", error)
    if isinstance(error, redis.ResponseError) and "MISCONF" in str(error):
        return (
            f"the server takes no writes since it cannot save them ({_line(error)}); make room on its disk, "
            f"then run the same command again: it goes on where it stopped"
        )
    return None


def _permission(place: str, error: Exception) -> str:
    return (
        f"the user that redis_url names may not do what grapevine needs at {place} ({_line(error)}); "
        f"give it the rights of its role (`grapevine cluster accounts`), or, where the server is this run's alone, all of "
        f"them: ACL SETUSER name {RIGHTS}"
    )


def _encryption(place: str, error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return (
            f"the certificate of the server at {place} cannot be trusted ({error.verify_message}); "
            f"add ?ssl_ca_certs=/path/to/ca.pem to redis_url"
        )
    return (
        f"the server at {place} does not answer with TLS ({error.reason or _line(error)}); "
        f"for one without TLS begin redis_url with redis:// instead of rediss://"
    )


def _place(connection: Any) -> str:
    path = getattr(connection, "path", None)
    return str(path) if path else f"{connection.host}:{connection.port}"


def _line(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".")


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
