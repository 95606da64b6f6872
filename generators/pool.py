"""Which target a generator serves.

Guarantees: a choice is a hint that speeds things up and nothing more; two generators on one target, or none for a while,
cost time but no group.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from common.directory import Directory

DRY_SECONDS = 0.2
# A node that orders as fast as it is served would otherwise keep its generators for ever.
STAY_SECONDS = 1.0
ANNOUNCE_SECONDS = 2.0


class Pool:
    """Chooses the target with the most unanswered orders per generator; stays until it runs dry, or a second at most.

    Among equals the one served longest ago comes first.
    """

    def __init__(
        self, directory: Directory, me: str, site: str, fixed: str | None, now: Callable[[], float] = time.monotonic
    ) -> None:
        """`fixed` names the one target to serve; None chooses among those of the site."""
        self._directory = directory
        self._me = me
        self._site = site
        self._fixed = fixed
        self._now = now
        self._dry: dict[str, float] = {}
        self._served: dict[str, float] = {}
        self._since = float("-inf")
        self._announced = (float("-inf"), "")
        self.current: str | None = None

    def choose(self) -> str | None:
        """The target to serve now, None when nobody asks for anything."""
        now = self._now()
        if self.current is None or now - self._since > STAY_SECONDS:
            self.current = self._best(now)
            self._since = now
        if self.current is not None:
            self._served[self.current] = now
        if self._announced[1] != (self.current or "") or now - self._announced[0] > ANNOUNCE_SECONDS:
            self._announced = (now, self.current or "")
            self._directory.assign(self._me, self.current or "")
        return self.current

    def serve(self, target: str) -> None:
        """Serve this one next: lockstep and tests decide themselves."""
        self.current, self._since = target, self._now()

    def ran_dry(self, target: str) -> None:
        """No new order was found there: look elsewhere, and not there again at once (others may hold its orders)."""
        self._dry[target] = self._now()
        self.current = None

    def _best(self, now: float) -> str | None:
        served = [target for target in self._directory.targets(self._site) if self._fixed in (None, target)]
        waiting = self._directory.waiting_orders(served)
        others = self._directory.assigned(besides=self._me)
        candidates = [
            (orders / (1 + others.get(target, 0)), -self._served.get(target, float("-inf")), target)
            for target, orders in waiting.items()
            if orders and now - self._dry.get(target, float("-inf")) > DRY_SECONDS
        ]
        return max(candidates)[2] if candidates else None
