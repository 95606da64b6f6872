"""Policies as files: safetensors at an fsspec URL (a folder, a bucket) or at the learner's own HTTP address, and their
checksums.

Guarantees: a policy file is written aside and renamed, so nobody reads half a one; `fetch` gives a local file only after
its SHA-256 agreed with the announcement, and a source that stalls ends it; the last `kept` versions and every pinned one
stay.
"""

from __future__ import annotations

import hashlib
import http.client
import itertools
import os
import shutil
import time
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path

import fsspec

from common.directory import Policy
from common.messages import Version
from common.policy_server import authorization, tokens
from common.settings import Settings

STALLED_SECONDS = 10.0
LONGEST_SECONDS = 1800.0
_fetches = itertools.count()


class BadPolicy(Exception):
    """An announced policy that must not be loaded. `reason`: missing or checksum."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class PolicyStore:
    """Where one node publishes; any fsspec URL it may write to."""

    def __init__(self, url: str, node: str, kept: int, served_at: str | None = None) -> None:
        """`served_at`: the HTTP address under which others read what lies at `url`, where it is not `url` itself."""
        self._fs, root = fsspec.core.url_to_fs(f"{url.rstrip('/')}/{node}")
        self._root = str(root)
        self._served_at = f"{served_at.rstrip('/')}/{node}" if served_at is not None else None
        self._kept = kept
        self._fs.makedirs(self._root, exist_ok=True)
        self.pinned: set[Version] = set()

    @staticmethod
    def of(settings: Settings, node: str, kept: int, server: str | None = None) -> PolicyStore:
        """The store that the settings name; `server` is the worker that serves it over HTTP, the node itself by default."""
        address = served_address(settings, server or node)
        return PolicyStore(store_url(settings), node, kept, address)

    def publish(self, weights: Path, version: Version, model: str) -> Policy:
        """Copy a safetensors file into the store and describe it; prunes what is neither recent nor pinned."""
        place = f"{self._root}/{_file_name(version)}"
        checksum = sha256(weights)
        try:
            self._fs.put_file(str(weights), f"{place}.part")
        except OSError:
            if self._fs.exists(f"{place}.part"):
                self._fs.rm_file(f"{place}.part")  # on a full disk the half of it would be in the way
            raise
        self._fs.mv(f"{place}.part", place)
        self._prune()
        url = f"{self._served_at}/{_file_name(version)}" if self._served_at else self._fs.unstrip_protocol(place)
        return Policy(version, url, checksum, model)

    def remove(self) -> None:
        """Delete all of this node's files."""
        if self._fs.exists(self._root):
            self._fs.rm(self._root, recursive=True)

    def _prune(self) -> None:
        names = sorted(path for path in self._fs.ls(self._root, detail=False) if path.endswith(".safetensors"))
        pinned = {_file_name(version) for version in self.pinned}
        for path in names[: -self._kept]:
            if path.rsplit("/", 1)[-1] not in pinned:
                self._fs.rm_file(path)


def store_url(settings: Settings) -> str:
    """Where policy files are written: `policies_url`, or a folder of the run when others get them over HTTP or there."""
    if settings.policies_url is None or settings.serves_policies:
        return str(settings.run_folder.resolve() / "policies")
    return settings.policies_url


def served_address(settings: Settings, worker: str) -> str | None:
    """The HTTP address at which a worker serves policies; None where they travel otherwise."""
    if settings.policies_url is None or not settings.serves_policies:
        return None
    return settings.policies_url.replace("{node}", worker)


def fetch(policy: Policy, cache: Path, token: str | None = None) -> Path:
    """The policy as a local file whose checksum was verified. `token` opens the learners' own HTTP addresses.

    Raises BadPolicy when the file is missing or is not what was announced. The caller deletes the file.
    """
    cache.mkdir(parents=True, exist_ok=True)
    local = cache / f"policy-{os.getpid()}-{next(_fetches)}.safetensors"
    try:
        if policy.url.startswith(("http://", "https://")):
            _download(policy.url, local, token)
        else:
            with fsspec.open(policy.url, "rb") as source, local.open("wb") as sink:
                shutil.copyfileobj(source, sink, 2**20)
    # ImportError: a protocol whose package is not installed.
    except (OSError, ValueError, ImportError, http.client.HTTPException) as error:
        local.unlink(missing_ok=True)
        raise BadPolicy("missing", f"policy {policy.version} at {policy.url}: {error}") from None
    if sha256(local) != policy.checksum:
        local.unlink()
        raise BadPolicy("checksum", f"policy {policy.version} at {policy.url} is not the one that was announced")
    return local


def _download(url: str, local: Path, token: str | None) -> None:
    if token is None:
        _copy(urllib.request.build_opener(), urllib.request.Request(url), local)
        return
    # A proxy is for the way out of a cluster; with a token the address is within.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    *newer, oldest = tokens(token)
    for one in newer:
        with suppress(urllib.error.HTTPError):
            return _copy(opener, urllib.request.Request(url, headers={"Authorization": authorization(one, url)}), local)
    _copy(opener, urllib.request.Request(url, headers={"Authorization": authorization(oldest, url)}), local)


def _copy(opener: urllib.request.OpenerDirector, request: urllib.request.Request, local: Path) -> None:
    end = time.monotonic() + LONGEST_SECONDS
    with opener.open(request, timeout=STALLED_SECONDS) as source, local.open("wb") as sink:
        while block := source.read(2**20):
            if time.monotonic() > end:
                raise TimeoutError(f"not there after {LONGEST_SECONDS:.0f} s")
            sink.write(block)
        # A connection that ends early reads as an end.
        if source.length:
            raise OSError(f"{source.length} bytes short")


def sha256(path: Path) -> str:
    """Hex digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _file_name(version: Version) -> str:
    return f"{version.incarnation:06d}-{version.step:09d}.safetensors"
