"""The HTTP server under health pages and policy files: small, and patient with many at once.

Guarantees: a burst of connections waits instead of being refused; a visitor that stalls or leaves costs a thread for a
limited time, and its traceback is not in the log.
"""

from __future__ import annotations

import socket
import threading
from http.server import ThreadingHTTPServer
from typing import Any

import structlog

MOST_AT_ONCE = 64
# For handlers: how long a visitor may stay silent.
SILENT_SECONDS = 30

log = structlog.get_logger()


class Server(ThreadingHTTPServer):
    """Threads for at most so many visitors; the others wait for their turn."""

    request_queue_size = 256
    daemon_threads = True

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._room = threading.BoundedSemaphore(MOST_AT_ONCE)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Give the visitor a thread, as soon as there is one."""
        self._room.acquire()
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """The visitor's thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: socket.socket | tuple[bytes, socket.socket], client_address: Any) -> None:
        """A visitor that left in the middle is no fault of ours."""
        log.debug("request broken off", visitor=str(client_address))
