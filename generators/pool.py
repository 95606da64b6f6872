"""Which target a generator serves.

Guarantees: a choice is a hint that speeds things up and nothing more; two generators on one target, or none for a while,
cost time but no group.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from common.directory import Directory

DRY_SECONDS = 0.2
ANNOUNCE_SECONDS = 2.0


class Pool:
    """Chooses the target with the most unanswered orders per generator; stays until it runs dry."""

    def __init__(self, directory: Directory, me: str, fixed: str | None, now: Callable[[], float] = time.monotonic) -> None:
        """`fixed` names the one target to serve; None chooses."""
        self._directory = directory
        self._me = me
        self._fixed = fixed
        self._now = now
        self._dry: dict[str, float] = {}
        self._announced = (float("-inf"), "")
        self.current: str | None = None
        self.models: dict[str, str] = {}

    def choose(self) -> str | None:
        """The target to serve now, None when nobody asks for anything."""
        if self.current is None:
            self.current = self._best()
        if (self.current is not None and self._announced[1] != self.current) or self._now() - self._announced[
            0
        ] > ANNOUNCE_SECONDS:
            self._announced = (self._now(), self.current or "")
            self._directory.assign(self._me, self.current or "")
        return self.current

    def ran_dry(self, target: str) -> None:
        """No new order was found there: look elsewhere, and not there again at once (others may hold its orders)."""
        self._dry[target] = self._now()
        self.current = None

    def _best(self) -> str | None:
        self.models = self._directory.targets()
        served = [target for target in self.models if self._fixed in (None, target)]
        waiting = self._directory.waiting_orders(served)
        others = self._directory.assigned(besides=self._me)
        now = self._now()
        candidates = [
            (orders / (1 + others.get(target, 0)), target)
            for target, orders in waiting.items()
            if orders and now - self._dry.get(target, float("-inf")) > DRY_SECONDS
        ]
        return max(candidates)[1] if candidates else None
