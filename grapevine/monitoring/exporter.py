"""`grapevine exporter`: what only the server knows of a run, for Prometheus.

Guarantees: reads only, but for its own heartbeat; counts come from the server's own totals, so that they outlast every
worker; while the server is away the page says so, and holds no figure from before.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from prometheus_client import REGISTRY
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from common import metrics
from common.directory import Directory
from common.ledger import Ledger
from common.messages import REASONS, TAGS
from grapevine.screen.view import Node, View
from grapevine.screen.waits import waits_for
from grapevine.screen.watch import look

LOOK_SECONDS = 1.0
SIZES_SECONDS = 10.0
STALE_SECONDS = 10.0
ROLES = ("learner", "generator", "verifier", "control", "exporter")
STREAMS = ("orders", "raw", "own", "swarm", "quarantine")
# More keys than these are not measured one by one.
KEYS_MEASURED = 4096
NODES_SHOWN = 1024
NAME = re.compile(r"[a-z0-9][a-z0-9.-]{0,62}")


class Exporter(Collector):
    """A worker whose work is looking."""

    role = "exporter"

    def __init__(self, name: str, ledger: Ledger, directory: Directory, max_age: int) -> None:
        """`max_age`: milliseconds for which a shared group can be drawn."""
        self.name = name
        self._ledger = ledger
        self._directory = directory
        self._max_age = max_age
        self._view: View | None = None
        self._server: dict[str, float] = {}
        self._sizes: dict[str, dict[str, float]] = {}
        self._assigned: dict[str, int] = {}
        self._waited: Counter[tuple[str, str]] = Counter()
        self._looked = self._measured = float("-inf")
        REGISTRY.register(self)

    # --- the worker's side ---

    def rejoin(self) -> None:
        """Nothing is kept on the server."""
        self._measured = float("-inf")

    def step(self) -> bool:
        """One look a second; sizes every ten."""
        begun = time.monotonic()
        view = look(self._ledger.redis, self._ledger.keys, self._view)
        if self._view is not None:
            # A pause of the exporter is nobody's waiting.
            self._wait(view, min(begun - self._looked, 2 * LOOK_SECONDS))
        info = self._ledger.redis.info("memory")
        self._server = {"used": info.get("used_memory", 0), "most": info.get("maxmemory", 0)}
        self._assigned = self._directory.assigned(besides="")
        if begun - self._measured > SIZES_SECONDS:
            self._directory.workers()  # which removes those that are long gone
            self._sizes = self._measure(view)
            self._measured = begun
        self._view, self._looked = view, begun
        time.sleep(LOOK_SECONDS)
        return True

    def drain(self) -> None:
        """Nothing is in hand."""

    def facts(self) -> dict[str, Any]:
        """None."""
        return {}

    def in_hand(self) -> tuple[str, list[tuple[str, str]]]:
        """Nothing."""
        return "exporters", []

    # --- looking ---

    def _wait(self, view: View, seconds: float) -> None:
        raw = sum(one.waiting for one in view.raw)
        for node in self._named(view):
            on = waits_for(node, raw)
            if on is not None:
                self._waited[node.name, on] += seconds  # type: ignore[assignment]  # a Counter of seconds

    def _measure(self, view: View) -> dict[str, dict[str, float]]:
        """Bytes by stream, groups and authors by tag."""
        keys, redis = self._ledger.keys, self._ledger.redis
        oldest = self._ledger.clock.now() - self._max_age
        authors: dict[str, set[str]] = {tag: set() for tag in TAGS}
        for shard in range(keys.shards):
            for tag in TAGS:
                found = redis.zrangebyscore(keys.authors(shard, tag), oldest, "+inf")
                authors[tag] |= {name.decode(errors="replace") for name in found}
        swarm = [(tag, keys.swarm(author, tag)) for tag in TAGS for author in sorted(authors[tag])][:KEYS_MEASURED]
        targets = [*(node.name for node in view.nodes), *(one.name for one in view.evaluations)]
        measured = {
            "orders": [keys.orders(target) for target in targets],
            "own": [keys.own(target) for target in targets],
            "raw": [keys.raw(one.shard, one.site) for one in view.raw],
            "swarm": [key for _, key in swarm],
            "quarantine": [keys.quarantine(shard) for shard in range(keys.shards)],
        }
        pipeline = redis.pipeline(transaction=False)
        for names in measured.values():
            for key in names:
                pipeline.memory_usage(key)
        for _, key in swarm:
            pipeline.xlen(key)
        for shard in range(keys.shards):
            pipeline.hlen(keys.open(shard))
        replies = iter(pipeline.execute())
        sizes = {stream: float(sum(next(replies) or 0 for _ in names)) for stream, names in measured.items()}
        groups: dict[str, float] = {tag: 0.0 for tag in TAGS}
        for tag, _ in swarm:
            groups[tag] += next(replies)
        return {
            "bytes": sizes,
            "groups": groups,
            "authors": {tag: float(len(names)) for tag, names in authors.items()},
            "open": {"": float(sum(replies))},
        }

    # --- a scrape ---

    def collect(self) -> Iterator[Metric]:
        """All of `metrics.EXPORTED`."""
        fresh = time.monotonic() - self._looked < STALE_SECONDS
        rows: dict[metrics.Exported, list[tuple[tuple[str, ...], float]]] = {one: [] for one in metrics.EXPORTED}
        rows[metrics.server_up] = [((), float(fresh))]
        if fresh and self._view is not None:
            for exported, found in (*self._of_view(self._view), *self._of_sizes()):
                rows[exported] = list(found)
        for exported, found in rows.items():
            family = exported.family()
            for labels, value in found:
                family.add_metric(labels, value)
            yield family

    @staticmethod
    def _named(view: View) -> list[Node]:
        """Nodes that registered as such, and no more of them than a run can have: anyone can write a heartbeat."""
        return [node for node in view.nodes if node.target.site and NAME.fullmatch(node.name)][:NODES_SHOWN]

    def _of_view(self, view: View) -> Iterator[tuple[metrics.Exported, Iterable[tuple[tuple[str, ...], float]]]]:
        up = Counter(one.role for one in (*view.helpers,) if not one.silent)
        up["learner"] += sum(node.age is not None and not node.silent for node in view.nodes)
        up["generator"] += sum(not one.silent for one in view.generators)
        yield metrics.workers, [((role,), float(up[role])) for role in ROLES]
        counts = view.counts
        yield metrics.workers_started, [((role,), float(counts.get(f"started:{role}", 0))) for role in ROLES]
        nodes = [node.name for node in self._named(view)]
        yield metrics.generators_assigned, [((name,), float(self._assigned.get(name, 0))) for name in nodes]
        # Of a learner that left before this exporter came, nobody knows how many were planned.
        yield (
            metrics.rounds_left,
            [
                ((node.name,), float(max(0, node.facts.rounds - max(node.facts.round, node.books.round))))
                for node in self._named(view)
                if node.facts.rounds > 0
            ],
        )
        waiting: Counter[tuple[str, ...]] = Counter()
        taken: Counter[tuple[str, ...]] = Counter()
        for target in (*(node.target for node in self._named(view)), *view.evaluations):
            name = metrics.node_label(target.name)
            waiting["orders", name] += target.unanswered - target.taken
            taken["orders", name] += target.taken
            if name != metrics.EVALUATION:  # a learner's own stream stays pending until its checkpoint
                waiting["own", name] += target.own
        for raw in view.raw[:NODES_SHOWN]:
            waiting["raw", raw.site] += raw.waiting - raw.taken
            taken["raw", raw.site] += raw.taken
        yield metrics.backlog, [(key, float(value)) for key, value in waiting.items()]
        yield metrics.pending, [(key, float(value)) for key, value in taken.items()]
        yield (
            metrics.waiting_seconds,
            [((name, on), float(self._waited[name, on])) for name in nodes for on in ("generators", "verifiers", "overdue")],
        )
        yield metrics.groups_published, [((purpose,), _count(counts, f"scored:{purpose}")) for purpose in ("train", "eval")]
        yield metrics.groups_shared, [((), _count(counts, "shared"))]
        yield metrics.duplicates, [((), _count(counts, "duplicates"))]
        yield metrics.redelivered, [((), _count(counts, "redelivered"))]
        # From 0 on, so that the first refusal of a kind is an increase.
        refused = {(stream, reason): 0 for stream in ("orders", "raw", "own", "swarm") for reason in REASONS}
        for name, number in view.refused.items():
            stream, _, reason = name.partition(":")
            if (stream, reason) in refused:  # everyone may write there
                refused[stream, reason] = number
        yield metrics.quarantined, [(key, float(number)) for key, number in refused.items()]

    def _of_sizes(self) -> Iterator[tuple[metrics.Exported, Iterable[tuple[tuple[str, ...], float]]]]:
        sizes = self._sizes
        yield metrics.server_bytes, [((), float(self._server["used"]))]
        yield metrics.server_most_bytes, [((), float(self._server["most"]))]
        for exported, name in (
            (metrics.stream_bytes, "bytes"),
            (metrics.swarm_available, "groups"),
            (metrics.swarm_authors, "authors"),
        ):
            yield exported, [((key,), value) for key, value in sizes[name].items()]
        yield metrics.orders_open, [((), value) for value in sizes["open"].values()]


def _count(counts: Any, name: str) -> float:
    return float(counts.get(name, 0))
