"""Policies as files: safetensors at an fsspec URL (a folder, a bucket, an HTTP endpoint), and their checksums.

Guarantees: a policy file is written aside and renamed, so nobody reads half a one; `fetch` gives a local file only after
its SHA-256 agreed with the announcement; the last `kept` versions and every pinned one stay.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

import fsspec

from common.directory import Policy
from common.messages import Version


class BadPolicy(Exception):
    """An announced policy that must not be loaded. `reason`: missing or checksum."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class PolicyStore:
    """Where one node publishes; any fsspec URL it may write to."""

    def __init__(self, url: str, node: str, kept: int) -> None:
        self._fs, root = fsspec.core.url_to_fs(f"{url.rstrip('/')}/{node}")
        self._root = str(root)
        self._kept = kept
        self._fs.makedirs(self._root, exist_ok=True)
        self.pinned: set[Version] = set()

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
        return Policy(version, self._fs.unstrip_protocol(place), checksum, model)

    def _prune(self) -> None:
        names = sorted(path for path in self._fs.ls(self._root, detail=False) if path.endswith(".safetensors"))
        pinned = {_file_name(version) for version in self.pinned}
        for path in names[: -self._kept]:
            if path.rsplit("/", 1)[-1] not in pinned:
                self._fs.rm_file(path)


def fetch(policy: Policy, cache: Path) -> Path:
    """The policy as a local file whose checksum was verified.

    Raises BadPolicy when the file is missing or is not what was announced. The caller deletes the file.
    """
    cache.mkdir(parents=True, exist_ok=True)
    local = cache / f"policy-{os.getpid()}.safetensors"
    try:
        with fsspec.open(policy.url, "rb") as source, local.open("wb") as sink:
            shutil.copyfileobj(source, sink, 2**20)
    except (OSError, ValueError, ImportError) as error:  # the last: a protocol whose package is not installed
        local.unlink(missing_ok=True)
        raise BadPolicy("missing", f"policy {policy.version} at {policy.url}: {error}") from None
    if sha256(local) != policy.checksum:
        local.unlink()
        raise BadPolicy("checksum", f"policy {policy.version} at {policy.url} is not the one that was announced")
    return local


def sha256(path: Path) -> str:
    """Hex digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _file_name(version: Version) -> str:
    return f"{version.incarnation:06d}-{version.step:09d}.safetensors"
