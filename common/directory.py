"""Who takes part in a run: registered keys, targets with their policies, workers' heartbeats, pool assignments.

Guarantees: what others wrote and nobody can read counts as not there, and ends no reader. Nothing here is needed for
correctness of the ledger: everything is refreshed by heartbeats, so a server that lost its memory is filled again within
seconds, and everything that ages out does so by the heartbeat's time.
"""

from __future__ import annotations

import time
from math import isfinite
from typing import Any

import msgspec
import redis
import structlog

from common.identity import Identity, KeyRecord, key_id
from common.keys import Keys
from common.messages import Version

log = structlog.get_logger()

HEARTBEAT_SECONDS = 2.0
WORKER_GONE_SECONDS = 15.0
KEY_CACHE_SECONDS = 60.0

# What decoding bytes of others can raise: no text, no message, a number that is none, brackets without end.
UNREADABLE = (ValueError, RecursionError)


class NameTaken(Exception):
    """A node's name is registered with another key."""


class Policy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The last-value announcement of a policy: which version, where its weights lie, their SHA-256."""

    version: Version
    url: str
    checksum: str
    model: str


class Heartbeat(msgspec.Struct, frozen=True):
    """A worker's sign of life. `at` in seconds since 1970; `facts` are the figures it shows to the status screen.

    `metrics` is where the worker's figures for Prometheus are, as `host:port`; empty where they are nowhere.
    """

    role: str
    name: str
    at: float
    facts: dict[str, Any] = {}
    metrics: str = ""


_policies = msgspec.json.Decoder(Policy)
_records = msgspec.msgpack.Decoder(KeyRecord)
_heartbeats = msgspec.json.Decoder(Heartbeat)


class Directory:
    """Reads and writes the run's directory. One per worker; caches keys, since every message needs one."""

    def __init__(self, client: redis.Redis, keys: Keys) -> None:
        self._redis: Any = client
        self._keys = keys
        self._cache: dict[str, tuple[float, KeyRecord | None]] = {}
        self._ours: dict[str, bool] = {}

    # --- identities ---

    def register(self, identity: Identity) -> None:
        """Make a public key known. A node's name belongs to the key that registered it first.

        Raises NameTaken when the node's name has another key.
        """
        record = identity.record
        if record.role == "node":
            claim = f"node:{record.name}"
            if not self._redis.hsetnx(self._keys.identities(), claim, identity.key):
                holder = self._redis.hget(self._keys.identities(), claim)
                if holder is not None and holder != identity.key.encode():
                    raise NameTaken(
                        f"node {record.name} is registered with another key; choose another node name, "
                        f"or start it where its key file lies"
                    )
        self._redis.hset(self._keys.identities(), identity.key, msgspec.msgpack.encode(record))

    def lookup(self, key: str) -> KeyRecord | None:
        """The record of a key id. Unknown keys are asked for again after a second, known ones after a minute."""
        now = time.monotonic()
        cached = self._cache.get(key)
        if cached is not None and now - cached[0] < (KEY_CACHE_SECONDS if cached[1] else 1.0):
            return cached[1]
        record = self._fetch(key)
        if len(self._cache) > 4096:
            self._cache.clear()
        self._cache[key] = (now, record)
        return record

    def _fetch(self, key: str) -> KeyRecord | None:
        if len(key) != 16:
            return None
        data = self._redis.hget(self._keys.identities(), key)
        if data is None:
            return None
        try:
            record = _records.decode(data)
        except UNREADABLE:
            return None
        return record if key_id(record.public_key) == key else None

    # --- targets and policies ---

    def add_target(self, target: str, site: str) -> None:
        """Make a target known to the generator pool of its site."""
        self._redis.hset(self._keys.targets(), target, site)

    def targets(self, site: str) -> list[str]:
        """The site's targets, by name."""
        found = self._redis.hgetall(self._keys.targets())
        ours = [_text(name) for name, place in found.items() if place == site.encode()]
        return sorted(name for name in ours if name is not None and self._is_ours(name))

    def _is_ours(self, target: str) -> bool:
        """Whether this account may read a target's orders: anyone can call a target one of this site."""
        if target not in self._ours:
            try:
                self._redis.xlen(self._keys.orders(target))
                self._ours[target] = True
            except redis.exceptions.NoPermissionError:
                log.warning("not served, since this account may not read its orders", target=target)
                self._ours[target] = False
        return self._ours[target]

    def waiting_orders(self, targets: list[str]) -> dict[str, int]:
        """Orders per target that are not answered yet: waiting or in a generator's hands."""
        pipeline = self._redis.pipeline(transaction=False)
        for target in targets:
            pipeline.xlen(self._keys.orders(target))
        return dict(zip(targets, pipeline.execute(), strict=True))

    def untaken_orders(self, targets: list[str]) -> dict[str, int]:
        """Orders per target that no generator has in its hands."""
        pipeline = self._redis.pipeline(transaction=False)
        for target in targets:
            pipeline.xlen(self._keys.orders(target))
            pipeline.xpending(self._keys.orders(target), "generators")
        found = pipeline.execute(raise_on_error=False)
        untaken = {}
        for target, length, pending in zip(targets, found[::2], found[1::2], strict=True):
            if isinstance(length, Exception):
                raise length
            # Before the first generator came there is no group, and nothing is taken.
            untaken[target] = max(0, length - (pending["pending"] if isinstance(pending, dict) else 0))
        return untaken

    def policy(self, target: str) -> Policy | None:
        """The policy announced last; None where there is none, or none that can be read."""
        return self.policies([target])[target]

    def policies(self, targets: list[str]) -> dict[str, Policy | None]:
        """The same for several."""
        pipeline = self._redis.pipeline(transaction=False)
        for target in targets:
            pipeline.get(self._keys.policy(target))
        return {target: _policy(data) for target, data in zip(targets, pipeline.execute(), strict=True)}

    @staticmethod
    def announcement(policy: Policy) -> bytes:
        """A policy as it is written by the ledger's settle script."""
        return msgspec.json.encode(policy)

    # --- workers ---

    def beat(self, role: str, name: str, facts: dict[str, Any], metrics: str = "") -> None:
        """Sign of life."""
        data = msgspec.json.encode(Heartbeat(role, name, time.time(), facts, metrics))
        self._redis.hset(self._keys.workers(), f"{role}:{name}", data)

    def gone(self, role: str, name: str) -> None:
        """A worker leaves in good order."""
        self._redis.hdel(self._keys.workers(), f"{role}:{name}")

    def workers(self) -> list[Heartbeat]:
        """All workers heard of within WORKER_GONE_SECONDS, by role and name."""
        now = time.time()
        beats = []
        for field, data in sorted(self._redis.hgetall(self._keys.workers()).items()):
            try:
                beat = _heartbeats.decode(data)
            except UNREADABLE:
                continue
            if now - beat.at < WORKER_GONE_SECONDS:
                beats.append(beat)
            elif now - beat.at > 100 * WORKER_GONE_SECONDS:
                self._redis.hdel(self._keys.workers(), field)
        return beats

    # --- the pool's hints ---

    def assign(self, generator: str, target: str) -> None:
        """Say which target a generator serves."""
        self._redis.hset(self._keys.assignments(), generator, f"{time.time():.1f} {target}")

    def assigned(self, besides: str) -> dict[str, int]:
        """Generators per target, without one's own and without those gone quiet."""
        now = time.time()
        counts: dict[str, int] = {}
        for generator, value in self._redis.hgetall(self._keys.assignments()).items():
            try:
                text, _, target = value.decode().partition(" ")
                at = float(text)
            except UNREADABLE:
                continue
            if not isfinite(at) or now - at > WORKER_GONE_SECONDS:
                self._redis.hdel(self._keys.assignments(), generator)
            elif generator != besides.encode():
                counts[target] = counts.get(target, 0) + 1
        return counts


def _policy(data: bytes | None) -> Policy | None:
    try:
        return _policies.decode(data) if data else None
    except UNREADABLE:
        return None


def _text(value: bytes) -> str | None:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return None
