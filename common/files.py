"""Small files that are there whole or not at all, and reading them back when they are not.

Guarantees: a file is written aside and renamed, so neither a reader nor a crash sees half of it; a file with a mode has it
from its first byte on.
"""

from __future__ import annotations

import fcntl
import glob
import json
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

LEFT_SECONDS = 3600.0


def write_whole(path: Path, data: str | bytes, mode: int | None = None, durable: bool = False) -> None:
    """Write all of a file in place of what was there.

    `mode`: its permissions, 0o600 for a secret; None: the usual ones. `durable`: it is on the disk when this returns, and
    outlasts a power cut.
    """
    # By a name of its own: several processes, on several machines even, may write one file.
    aside = path.with_name(f"{path.name}.{secrets.token_hex(4)}.new")
    _sweep(path)
    handle = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666 if mode is None else mode)
    with open(handle, "wb") as file:
        file.write(data.encode() if isinstance(data, str) else data)
        if durable:
            file.flush()
            os.fsync(file.fileno())
    os.replace(aside, path)
    if durable:
        sync(path.parent)


def _sweep(path: Path) -> None:
    """Remove what writers that were killed left beside a file long ago."""
    for left in path.parent.glob(f"{glob.escape(path.name)}.*.new"):
        with suppress(FileNotFoundError):
            if time.time() - left.stat().st_mtime > LEFT_SECONDS:
                left.unlink()


@contextmanager
def lock(path: Path) -> Iterator[bool]:
    """Hold a lock file for as long as the block runs, without waiting; gives False when another process holds it."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
            return
        yield True
    finally:
        os.close(handle)


def sync(path: Path) -> None:
    """Have a file's content, or a folder's list of names, on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_object(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file; None where there is no file, or no such object in it."""
    try:
        found = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
