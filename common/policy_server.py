"""Policies over HTTP: a worker serves its own files to those who hold the site's token.

Guarantees: the token itself never travels; what does is a signature over one address and one minute, worth nothing
elsewhere or later; only policy files are served, whatever a path says.
"""

from __future__ import annotations

import hmac
import re
import shutil
import threading
import time
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import structlog

from common import metrics
from common.http_server import SILENT_SECONDS, Server
from common.settings import SettingsError

SCHEME = "Grapevine"
CLOCKS_APART_SECONDS = 60.0
PATH = re.compile(r"/[a-z0-9][a-z0-9.-]{0,126}/\d{6,}-\d{9,}\.safetensors")

log = structlog.get_logger()


def authorization(token: str, url: str, now: float | None = None) -> str:
    """The header `Authorization` for one request: HMAC-SHA256 over the address and the time."""
    seconds = int(time.time() if now is None else now)
    return f"{SCHEME} {seconds}:{_signature(token, url, seconds)}"


def is_authorized(header: str, token: str, url: str, now: float | None = None) -> bool:
    """Whether a header was made with one of the token's parts, for this address and not long ago."""
    scheme, _, rest = header.partition(" ")
    seconds, _, signature = rest.partition(":")
    if scheme != SCHEME or not re.fullmatch(r"\d{1,15}", seconds):
        return False
    apart = abs((time.time() if now is None else now) - int(seconds))
    known = [_signature(one, url, int(seconds)) for one in tokens(token)]
    fits = [hmac.compare_digest(one.encode(), signature.encode()) for one in known]
    return any(fits) and apart <= CLOCKS_APART_SECONDS


def tokens(text: str) -> list[str]:
    """The parts of `policies_token`: one, or while it is being replaced several, the newest first."""
    return [one for one in text.split(",") if one]


def _signature(token: str, url: str, seconds: int) -> str:
    return hmac.digest(token.encode(), f"GET {url} {seconds}".encode(), "sha256").hex()


def serve_policies(folder: Path, address: str, token: str, node: str) -> Server:
    """Serve the policies in `folder` on the port of `address`, in the background.

    `address` is the one that others use. Raises SettingsError when the port is taken.
    """
    parts = urlsplit(address.rstrip("/"))
    origin = f"{parts.scheme}://{parts.netloc}"

    class Handler(BaseHTTPRequestHandler):
        timeout = SILENT_SECONDS

        def do_GET(self) -> None:
            if not is_authorized(self.headers.get("Authorization", ""), token, f"{origin}{self.path}"):
                self.send_error(403, "not signed with this site's token, for another address, or with clocks apart")
                return
            path = self.path.removeprefix(parts.path)
            try:
                file = (folder / path[1:]).open("rb") if PATH.fullmatch(path) else None
            except OSError:
                file = None
            if file is None:
                self.send_error(404, "no such policy")
                return
            with file:
                self.send_response(200)
                self.send_header("Content-Type", "application/octet-stream")
                self.send_header("Content-Length", str(file.seek(0, 2)))
                self.end_headers()
                file.seek(0)
                shutil.copyfileobj(file, self.wfile, 2**20)
            metrics.policies_served.labels(node).inc()

        def log_message(self, format: str, *args: Any) -> None:
            log.debug("policy request", detail=format % args)

    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        server = Server(("0.0.0.0", port), Handler)
    except OSError as error:
        raise SettingsError(f"setting policies_url: port {port} cannot be served here ({error.strerror})") from None
    threading.Thread(target=server.serve_forever, name="policies", daemon=True).start()
    return server
