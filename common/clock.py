"""Time as the run counts it: milliseconds of the server's clock, or rounds in lockstep.

Guarantees: deadlines, ages and stream ids of one run all come from one clock, so a lockstep run holds no wall-clock time.
"""

from __future__ import annotations

import time
from typing import Any, Protocol


class Clock(Protocol):
    """What the ledger asks of time. `unit` is `ms` or `round`."""

    unit: str

    def now(self) -> int:
        """Time in `unit`."""

    def stream_id(self) -> str:
        """The id for XADD: `*` in real time, `<round>-*` in lockstep."""


class ServerClock:
    """The server's clock in milliseconds, asked once a minute and carried on by the monotonic clock in between."""

    unit = "ms"

    def __init__(self, redis: Any) -> None:
        self._redis = redis
        self._offset = 0.0
        self._asked = float("-inf")

    def now(self) -> int:
        """Milliseconds since 1970, as the server counts them."""
        here = time.monotonic()
        if here - self._asked > 60:
            seconds, micros = self._redis.time()
            self._offset = seconds + micros / 1e6 - here
            self._asked = here
        return int((here + self._offset) * 1000)

    def stream_id(self) -> str:
        """The server numbers entries by its own time."""
        return "*"


class RoundClock:
    """Counts rounds; the lockstep scheduler turns it."""

    unit = "round"

    def __init__(self, round: int = 0) -> None:
        self.round = round

    def now(self) -> int:
        """The round."""
        return self.round

    def stream_id(self) -> str:
        """Entries are numbered within the round; round 0 is entry 1, since stream ids start above 0-0."""
        return f"{self.round + 1}-*"
