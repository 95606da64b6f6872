"""Which target a generator serves.

Guarantees: a choice is a hint that speeds things up and nothing more; two generators on one target, or none for a while,
cost time but no group.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection

import structlog

from common.directory import Directory

DRY_SECONDS = 0.2
# A node that orders as fast as it is served would otherwise keep its generators for ever.
STAY_SECONDS = 1.0
LONGEST_WAIT_SECONDS = 60.0
ANNOUNCE_SECONDS = 2.0

log = structlog.get_logger()


class Pool:
    """Chooses the target with the most untaken orders per generator, the longer it was not served the sooner.

    Stays until the target runs dry, or for a while at most.
    """

    def __init__(
        self,
        directory: Directory,
        me: str,
        site: str,
        fixed: str | None,
        models: Collection[str] = (),
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`fixed` names the one target to serve, None chooses among those of the site; `models` are those it may open,
        none: any.
        """
        self._directory = directory
        self._me = me
        self._site = site
        self._fixed = fixed
        self._models = frozenset(models)
        self._now = now
        self._dry: dict[str, float] = {}
        self._served: dict[str, float] = {}
        self._to_visit: set[str] = set()
        self._others: dict[str, int] = {}
        self._since = float("-inf")
        self._announced = (float("-inf"), "")
        self._unneeded = False
        self.current: str | None = None

    def choose(self, stay: float = STAY_SECONDS) -> str | None:
        """The target to serve now, None when nobody asks for anything. `stay`: how long a choice holds, in seconds."""
        now = self._now()
        if self.current is None or now - self._since > max(stay, STAY_SECONDS):
            self.current = self._best(now)
            self._since = now
        if self.current is not None:
            self._served[self.current] = now
        if self._announced[1] != (self.current or "") or now - self._announced[0] > ANNOUNCE_SECONDS:
            self._announced = (now, self.current or "")
            self._directory.assign(self._me, self.current or "")
        return self.current

    def share(self, target: str, room: int) -> int:
        """How many of a target's orders to take when there is `room`: no more than fall to each of its generators."""
        if room <= 0:
            return 0
        untaken = self._directory.untaken_orders([target])[target]
        return min(room, math.ceil(untaken / (1 + self._others.get(target, 0))))

    def serve(self, target: str) -> None:
        """Serve this one next: lockstep and tests decide themselves."""
        self.current, self._since = target, self._now()

    def ran_dry(self, target: str, seconds: float = DRY_SECONDS) -> None:
        """Nothing to do there: look elsewhere, and not there again for so long."""
        self._dry[target] = self._now() + seconds
        self.current = None

    def come_back(self, target: str) -> None:
        """Orders of this target may be with this generator already, where nobody counts them: pay it a visit."""
        self._to_visit.add(target)

    def visited(self, target: str) -> None:
        """Its orders are being taken."""
        self._to_visit.discard(target)

    def served_targets(self) -> list[str]:
        """All targets that this generator may serve."""
        targets = [target for target in self._directory.targets(self._site) if self._fixed in (None, target)]
        if not self._models or not targets:
            return targets
        policies = self._directory.policies(targets)
        mine = [target for target, policy in policies.items() if policy is not None and policy.model in self._models]
        self._tell(needed=bool(mine), asked=sorted({policy.model for policy in policies.values() if policy is not None}))
        return mine

    def _tell(self, needed: bool, asked: list[str]) -> None:
        if needed == self._unneeded and (needed or asked):
            self._unneeded = not needed
            if not needed:
                log.warning("no node needs this generator", serves=sorted(self._models), needed=asked)

    def _best(self, now: float) -> str | None:
        served = self.served_targets()
        untaken = self._directory.untaken_orders(served)
        self._others = self._directory.assigned(besides=self._me)
        candidates = [
            (max(1, orders) / (1 + self._others.get(target, 0)) * self._patience(target, now), target)
            for target, orders in untaken.items()
            if (orders or target in self._to_visit) and now >= self._dry.get(target, now)
        ]
        return max(candidates)[1] if candidates else None

    def _patience(self, target: str, now: float) -> float:
        """Grows while a target is not served, so that one with few orders has its turn too."""
        return STAY_SECONDS + min(now - self._served.get(target, float("-inf")), LONGEST_WAIT_SECONDS)
