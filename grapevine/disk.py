"""Errors of the disk, told to people: where there is no room, or no right to write, and what to do.

Guarantees: only an error that the operating system reported as such is translated, whether it was raised itself or is the
stated cause of what was; every other one passes unchanged.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from common.settings import SettingsError

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
CLOSED = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR}

# What is no OSError by the time it reaches us: safetensors' own errors, and the log of a server that could not start.
_RUST = re.compile(r"\(os error (\d+)\)")
_WORDS = {os.strerror(number): number for number in FULL}


@contextmanager
def writing_to(folder: Path) -> Iterator[None]:
    """For the whole of a command that keeps its files in `folder`. Raises SettingsError in place of a disk's error."""
    try:
        yield
    except SettingsError:
        raise
    except Exception as error:
        sentence = disk_trouble(error, folder)
        if sentence is None:
            raise
        raise SettingsError(sentence) from error


def disk_trouble(error: BaseException, folder: Path | None = None) -> str | None:
    """One sentence about an error of the disk; None for any other. `folder`: where writing went on, if the error does
    not say it itself."""
    link: BaseException | None = error
    while link is not None:
        number = _number(link)
        if number in FULL or number in CLOSED:
            named = getattr(link, "filename", None)
            place = Path(os.fsdecode(named)).parent if isinstance(named, str | bytes) else folder
            if number in FULL and place is None:
                return f"there is no room left to write ({os.strerror(number)}); make room and run the same command again"
            if number in FULL:
                return (
                    f"there is no room left to write in {place} ({os.strerror(number)}); make room there and run the same "
                    f"command again: it goes on with the last checkpoint"
                )
            if isinstance(named, str | bytes):
                return (
                    f"{os.fsdecode(named)} cannot be written ({os.strerror(number)}); "
                    f"make it writable, or choose another place with --set folder=PATH"
                )
        link = link.__cause__
    return None


def _number(error: BaseException) -> int:
    """The operating system's number of an error, 0 when it has none."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    text = str(error)
    found = _RUST.search(text)
    if found:
        return int(found[1])
    return next((number for words, number in _WORDS.items() if words in text), 0)
