"""Policies over HTTP: from any address, and from a learner that asks who wants them."""

from __future__ import annotations

import os
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.directory import Policy
from common.messages import Version
from common.policies import BadPolicy, PolicyStore, fetch, sha256
from common.policy_server import CLOCKS_APART_SECONDS, authorization, is_authorized, serve_policies
from common.settings import Settings, SettingsError, load

TOKEN = "a token of this site"
TOKENS = st.text(st.characters(min_codepoint=45, max_codepoint=126), min_size=1, max_size=40)
TEXTS = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=40)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A folder served over HTTP; requests for `/broken` break off in the middle."""

    class Quiet(SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path.startswith("/broken"):
                self.send_response(200)
                self.send_header("Content-Length", "1000")
                self.end_headers()
                self.wfile.write(b"only so much")
            else:
                super().do_GET()

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    folder = tmp_path / "site"
    folder.mkdir()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=os.fspath(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield folder, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_policies_at_any_address(tmp_path: Path, site: tuple[Path, str]) -> None:
    folder, url = site
    file = folder / "x.safetensors"
    file.write_text("weights")
    policy = Policy(Version(1, 1), f"{url}/x.safetensors", sha256(file), "model")
    assert fetch(policy, tmp_path / "cache").read_text() == "weights"
    for path in ("none.safetensors", "broken.safetensors"):
        with pytest.raises(BadPolicy) as raised:
            fetch(msgspec.structs.replace(policy, url=f"{url}/{path}"), tmp_path / "cache")
        assert raised.value.reason in ("missing", "checksum")
    with pytest.raises(BadPolicy):
        fetch(msgspec.structs.replace(policy, url="http://127.0.0.1:1/x.safetensors"), tmp_path / "cache")
    assert len(list((tmp_path / "cache").iterdir())) == 1, "what was fetched, and nothing of what was not"


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Settings, str]]:
    """A run whose learners serve their policies, and the address of node-0's."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    settings = Settings(folder=tmp_path / "runs", policies_url=address, policies_token=TOKEN, nodes=1)
    server = serve_policies(settings.run_folder / "policies", address, TOKEN, "node-0")
    yield settings, address
    server.shutdown()
    server.server_close()


def published(settings: Settings, tmp_path: Path, step: int = 1) -> Policy:
    weights = tmp_path / "weights"
    weights.write_bytes(b"w" * 3_000_000)
    return PolicyStore.of(settings, "node-0", kept=2).publish(weights, Version(1, step), "model")


def status_of(url: str, header: str | None) -> int:
    request = urllib.request.Request(url, headers={"Authorization": header} if header else {})
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_a_learner_serves_its_policies_to_its_site(tmp_path: Path, served: tuple[Settings, str]) -> None:
    settings, address = served
    policy = published(settings, tmp_path)
    assert policy.url == f"{address}/node-0/000001-000000001.safetensors"
    assert fetch(policy, tmp_path / "cache", TOKEN).stat().st_size == 3_000_000
    for token in (None, "another token of another site"):
        with pytest.raises(BadPolicy, match="403"):
            fetch(policy, tmp_path / "cache", token)
    # A generator that has the token to come already, and this one still.
    assert fetch(policy, tmp_path / "cache", f"a token to come,{TOKEN}").stat().st_size == 3_000_000
    for step in (2, 3, 4):
        published(settings, tmp_path, step)
    with pytest.raises(BadPolicy, match="404"):
        fetch(policy, tmp_path / "cache", TOKEN)


def test_nothing_but_policies_is_served(tmp_path: Path, served: tuple[Settings, str]) -> None:
    settings, address = served
    policy = published(settings, tmp_path)
    (settings.run_folder / "secret").write_text("x")
    (settings.run_folder / "000001-000000001.safetensors").write_text("x")
    for path in (
        "/", "/node-0", "/node-0/", "/../secret", "/node-0/../../secret", "/%2e%2e/secret", "//etc/passwd",
        "/../000001-000000001.safetensors", "/node-0/000001-000000001.safetensors?x", "/node-0/000001-000000009.safetensors",
    ):  # fmt: skip
        assert status_of(address + path, authorization(TOKEN, address + path)) in (403, 404), path
    good = authorization(TOKEN, policy.url)
    assert status_of(policy.url, good) == 200
    # A header serves for one address: not for another file, nor for another learner that was named instead.
    other = policy.url.replace("000000001.", "000000002.")
    assert status_of(other, good) == 403
    assert status_of(policy.url, authorization(TOKEN, policy.url.replace("127.0.0.1", "127.0.0.2"))) == 403
    assert status_of(policy.url, None) == 403


@given(TOKENS, TOKENS, TEXTS, TEXTS, st.integers(0, 10**10), st.floats(-1e4, 1e4))
def test_a_header_fits_one_token_one_address_and_one_time(
    token: str, other: str, url: str, elsewhere: str, at: int, later: float
) -> None:
    header = authorization(token, url, at)
    assert token not in header.partition(":")[2] or len(token) < 8
    assert is_authorized(header, token, url, at)
    assert is_authorized(header, other, url, at) == (other == token)
    # While it is being replaced, either will do.
    assert is_authorized(header, f"{other},{token}", url, at)
    assert is_authorized(header, token, elsewhere, at) == (elsewhere == url)
    assert is_authorized(header, token, url, at + later) == (abs(at + later - at) <= CLOCKS_APART_SECONDS)


@given(st.text(max_size=80))
def test_no_header_of_strangers_passes_or_breaks_anything(header: str) -> None:
    assert not is_authorized(header, TOKEN, "http://x/y")


def test_serving_needs_a_token() -> None:
    with pytest.raises(SettingsError, match="policies_token"):
        load(None, ["policies_url=http://{node}.node:9101"])
    with pytest.raises(SettingsError, match="policies_token"):
        load(None, ["policies_url=http://{node}.node:9101", "policies_token=short"])
    assert load(None, ["policies_url=http://{node}.node:9101", f"policies_token={TOKEN}"]).serves_policies
