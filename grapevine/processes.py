"""Child processes that never outlive their starter."""

from __future__ import annotations

import ctypes
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Run in a new child (preexec_fn): the kernel kills it when its parent dies. Linux only; elsewhere nothing happens."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def end_on_sigterm() -> None:
    """End on SIGTERM until the worker has a handler of its own: a container's first process ignores it otherwise."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
