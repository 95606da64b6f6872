"""Which policy the engine holds, and how it follows the one announced last.

Guarantees: a policy is handed to the engine only after its checksum agreed; one that is missing, damaged or of another shape
leaves the old one serving, and is counted; while something is in flight, a policy is fetched beside the sampling, and one
that comes over a network never keeps the generator from serving others.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import structlog

from common import metrics
from common.directory import Directory, Policy
from common.messages import Version
from common.policies import BadPolicy, fetch
from generators.engines.base import Engine, PolicyUnusable

# Until a policy that could not be fetched, or not be used, is tried again.
FETCH_AGAIN_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 60.0
# Fetches under way: so many learners may be unreachable at once before others have to wait.
MOST_FETCHES = 8
MOMENT_SECONDS = 0.2
LOAD_AGAIN_SECONDS = 10.0

log = structlog.get_logger()


class Following:
    """Keeps an engine at the newest policy of whichever target is served."""

    def __init__(self, engine: Engine, directory: Directory, cache: Path, token: str | None = None) -> None:
        """`cache`: a folder for policy files on their way in; `token` opens those that learners serve over HTTP.

        `change_seconds` is how long it took to open another model in place of one, the last time that happened.
        """
        self._engine = engine
        self._directory = directory
        self._cache = cache
        self._token = token
        self._failed: dict[str, tuple[Policy, float, str]] = {}
        self._target: str | None = None
        self._fetcher = ThreadPoolExecutor(MOST_FETCHES, thread_name_prefix="policy")
        self._fetching: dict[str, tuple[Policy, Future[Path]]] = {}
        self._tries: dict[str, int] = {}
        self._opened = False
        for left in cache.glob("policy-*.safetensors"):
            left.unlink()  # by a process that was killed while it fetched
        self.model: str | None = None
        self.version: Version | None = None
        self.change_seconds = 0.0

    def serving(self, target: str) -> Version | None:
        """The version of this target's policy that the engine holds; None when it holds none of it."""
        return self.version if self._target == target else None

    def follow(self, target: str) -> Version | None:
        """Take on the target's newest policy where that can be done; returns what is served then.

        None: nothing of this target, or it has announced none.
        """
        policy = self._directory.policy(target)
        if policy is None:
            return None
        if (self._target, self.version) == (target, policy.version) or self._failed_lately(target, policy):
            return self.serving(target)
        if self._engine.in_flight and (self._target != target or policy.model != self.model):
            return self.serving(target)  # another model or another node's: first what is in flight
        try:
            local = self._fetched(target, policy)
            if local is None:
                return self.serving(target)
            try:
                self._take(target, policy, local)
            finally:
                local.unlink()
        except (BadPolicy, PolicyUnusable) as error:
            metrics.policies_refused.labels(getattr(error, "reason", "shape")).inc()
            log.warning("policy not loaded", target=target, version=str(policy.version), detail=str(error))
            pause = LOAD_AGAIN_SECONDS if isinstance(error, PolicyUnusable) else self._longer(target)
            self._failed[target] = (policy, time.monotonic() + max(pause, 10 * self.change_seconds), str(error))
        return self.serving(target)

    def _longer(self, target: str) -> float:
        """Seconds until a policy is fetched again: longer with each try in vain."""
        self._tries[target] = self._tries.get(target, 0) + 1
        return min(FETCH_AGAIN_SECONDS * 2.0 ** (self._tries[target] - 1), LONGEST_PAUSE_SECONDS)

    def _fetched(self, target: str, policy: Policy) -> Path | None:
        """The policy's file; None while it is on its way and there is something else to do. Raises BadPolicy."""
        near = not policy.url.startswith(("http://", "https://"))
        if target in self._fetching:
            announced, future = self._fetching[target]
            if not future.done() and (self._engine.in_flight or not near):
                return None
            if announced == policy:
                del self._fetching[target]
                return future.result()
            self._forget(target)  # it was overtaken by a newer one
        if near and not self._engine.in_flight:
            return fetch(policy, self._cache, self._token)
        if not self._has_room():
            return None
        future = self._fetcher.submit(fetch, policy, self._cache, self._token)
        self._fetching[target] = (policy, future)
        if self._engine.in_flight:
            return None
        # With nothing else in hand it is worth a moment's wait.
        wait([future], timeout=MOMENT_SECONDS)
        return self._fetched(target, policy) if future.done() else None

    def _has_room(self) -> bool:
        """Whether another fetch may begin. The oldest that is through makes room, since its target may be gone."""
        if len(self._fetching) < MOST_FETCHES:
            return True
        through = next((target for target, (_, future) in self._fetching.items() if future.done()), None)
        if through is not None:
            self._forget(through)
        return through is not None

    def _forget(self, target: str) -> None:
        """Drop a fetch that is through, and its file."""
        _, future = self._fetching.pop(target)
        if future.exception() is None:
            future.result().unlink()

    def _take(self, target: str, policy: Policy, local: Path) -> None:
        if policy.model != self.model:
            self._open(policy.model)
        begun = time.monotonic()
        self._engine.load_policy(local, policy.version)
        metrics.policy_swap_seconds.observe(time.monotonic() - begun)
        metrics.policies_loaded.labels(metrics.node_label(target)).inc()
        self._target, self.version = target, policy.version
        self._tries.pop(target, None)

    def _open(self, model: str) -> None:
        begun = time.monotonic()
        self._target = self.version = self.model = None
        try:
            self._engine.open_model(model)
            self.model = model
        finally:
            if self._opened:
                self.change_seconds = time.monotonic() - begun
            self._opened = True

    def _failed_lately(self, target: str, policy: Policy) -> bool:
        """Whether this policy was tried in vain and not long ago: others are served meanwhile."""
        failed, until, _ = self._failed.get(target, (None, 0.0, ""))
        return failed == policy and time.monotonic() < until

    def refusal(self, target: str) -> str | None:
        """Why nothing of a target is served, where its policy was tried in vain."""
        return self._failed[target][2] if target in self._failed and self.serving(target) is None else None
