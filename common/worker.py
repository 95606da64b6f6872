"""The one loop under every role: signals, heartbeats, a server that comes and goes, health and metrics over HTTP.

Guarantees:
- what is transient (the server away, restarting, loading or full) is retried with growing pauses, and the worker is told to
  `rejoin` before its next step; any other exception is a bug and ends the process with a traceback and exit code 70;
- SIGTERM and SIGINT end the loop after the current step, then the worker drains;
- while a step runs, or the worker drains, a second thread keeps its entries from being taken over.
"""

from __future__ import annotations

import errno
import signal
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from types import FrameType
from typing import Any, Protocol

import redis
import structlog
from prometheus_client import CONTENT_TYPE_LATEST

from common import metrics
from common.directory import HEARTBEAT_SECONDS, Directory
from common.http_server import SILENT_SECONDS, Server
from common.ledger import Ledger
from common.server import ServerChanged
from common.settings import SettingsError

TRANSIENT = (
    redis.ConnectionError,
    redis.TimeoutError,
    redis.exceptions.ReadOnlyError,
    redis.exceptions.OutOfMemoryError,
)
LONGEST_PAUSE_SECONDS = 2.0
BUG_EXIT_CODE = 70
# A learner's step is a whole update, a generator's first one fetches and opens a model; others never take long.
STALLED_SECONDS = {"learner": 7200.0, "generator": 3600.0}

log = structlog.get_logger()


class Worker(Protocol):
    """What a role must be to run in the loop."""

    role: str
    name: str

    def rejoin(self) -> None:
        """Called before the first step and after every lost connection: register, and forget what was in hand."""

    def step(self) -> bool:
        """A bounded piece of work, or a wait of about a second for some. False: this worker's task is complete."""

    def drain(self) -> None:
        """Finish or hand back what is in hand; called once, with the server possibly away."""

    def facts(self) -> dict[str, Any]:
        """Figures for the status screen. Called from the heartbeat's thread: read only."""

    def in_hand(self) -> tuple[str, list[tuple[str, str]]]:
        """Consumer group, and (stream, entry id) pairs being worked on. Called from the heartbeat's thread."""


class Loop:
    """Runs one worker until it is complete, is told to stop, or meets a bug."""

    def __init__(self, worker: Worker, heart: Callable[[], tuple[Ledger, Directory]]) -> None:
        """`heart` makes the heartbeat thread's own ledger and directory, on a connection of its own."""
        self._worker = worker
        self._heart = heart
        self._stop = threading.Event()
        self._drained = threading.Event()
        self._failure: BaseException | None = None
        self.joined = False
        self.last_step = time.monotonic()
        self.metrics_at = ""

    @property
    def role(self) -> str:
        """The worker's."""
        return self._worker.role

    def stop(self, *_: int | FrameType | None) -> None:
        """End after the current step. Usable as a signal handler."""
        self._stop.set()

    def run(self) -> None:
        """Run to the end. Exceptions that are not transient propagate."""
        signal.signal(signal.SIGTERM, self.stop)
        signal.signal(signal.SIGINT, self.stop)
        beating = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        beating.start()
        pause = 0.05
        while not self._stop.is_set():
            try:
                if not self.joined:
                    self._worker.rejoin()
                    # However long the server was away, the first step after it has its full time.
                    self.last_step = time.monotonic()
                    self.joined = True
                if not self._worker.step():
                    break
                self.last_step = time.monotonic()
                pause = 0.05
            except ServerChanged:
                # It is back already: join at once.
                self.joined, pause = False, 0.05
                metrics.reconnects.inc()
            except TRANSIENT as error:
                self.joined = False
                metrics.reconnects.inc()
                log.warning("server away, will retry", worker=self._worker.name, pause=round(pause, 2), error=str(error))
                self._stop.wait(pause)
                pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
            if self._failure is not None:
                raise self._failure
        self._stop.set()
        try:
            self._worker.drain()
        except TRANSIENT as error:
            log.warning("server away while draining; redelivery takes over", worker=self._worker.name, error=str(error))
        self._drained.set()
        beating.join(timeout=HEARTBEAT_SECONDS + 1)

    def _beat(self) -> None:
        ledger, directory = self._heart()
        stopping = counted = False
        # The first beat comes at once: who looks for workers must see one that has just begun.
        while True:
            try:
                if stopping:
                    directory.gone(self._worker.role, self._worker.name)
                    return
                directory.beat(self._worker.role, self._worker.name, self._worker.facts(), self.metrics_at)
                if not counted:
                    ledger.count_start(self._worker.role)
                    counted = True
                group, entries = self._worker.in_hand()
                if entries:
                    ledger.keep(entries, group, self._worker.name)
            except TRANSIENT:
                if stopping:
                    return
            except BaseException as error:
                self._failure = error
                return
            stopping = self._drained.wait(HEARTBEAT_SECONDS)


class Alive(Protocol):
    """What health is asked of: a loop, or what turns like one. `metrics_at` is told where the figures are."""

    joined: bool
    last_step: float
    metrics_at: str

    @property
    def role(self) -> str:
        """Whose it is."""


def serve_health(loop: Alive, run: str, port: int, address: str = "0.0.0.0", stalled_after: float | None = None) -> Server:
    """Serve /healthz (the loop turns), /readyz (joined to the server) and /metrics on `port`, in the background.

    Port 0 takes any that is free. A step longer than `stalled_after` seconds (by default as long as the role may take) makes
    the worker unhealthy. Raises SettingsError when the port is taken.
    """

    patience = stalled_after or STALLED_SECONDS.get(loop.role, 600.0)

    class Handler(BaseHTTPRequestHandler):
        timeout = SILENT_SECONDS

        def do_GET(self) -> None:
            if self.path == "/metrics":
                self._send(200, metrics.page(run, loop.role), CONTENT_TYPE_LATEST)
            elif self.path == "/healthz":
                alive = time.monotonic() - loop.last_step < patience or not loop.joined
                self._send(200 if alive else 503, b"ok\n" if alive else b"stalled\n")
            elif self.path == "/readyz":
                self._send(200 if loop.joined else 503, b"ok\n" if loop.joined else b"the server is away\n")
            else:
                self._send(404, b"try /healthz, /readyz or /metrics\n")

        def _send(self, status: int, body: bytes, kind: str = "text/plain") -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    try:
        server = Server((address, port), Handler)
    except (OSError, OverflowError) as error:
        reason = "it is in use" if getattr(error, "errno", None) == errno.EADDRINUSE else " ".join(str(error).split())
        raise SettingsError(f"--port {port} cannot be served: {reason}; choose another port, or 0 for none") from None
    loop.metrics_at = f"{address}:{server.server_port}"
    threading.Thread(target=server.serve_forever, name="health", daemon=True).start()
    return server
