"""How a pool of generators behaves as it grows, shrinks and is asked for something else: real processes, paced engines.

    python -m benchmarks.pool [--json FILE]

Each generator is a process of its own with an engine that takes a fixed time per group, so what is measured is the pool:
how orders are divided, how long they wait, who goes where. Two nodes order; in place of verifiers this process takes the
raw groups off the server and checks their signatures.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

from common.directory import Directory, Policy
from common.identity import Identity, unseal
from common.messages import Order, RawGroup, Sampling, Version
from common.policies import sha256
from common.run import open_run
from common.settings import Settings
from common.tasks import PRESETS, draw
from grapevine.server import EmbeddedServer

COMPLETIONS, TOKENS, GROUPS_PER_SECOND = 8, 8, 30.0
# Deep enough that no generator waits for the node.
DEPTH, SETTLE_SECONDS, COUNT_SECONDS = 400, 3.0, 10.0
SIZES = (1, 2, 4, 8)


class PacedPool:
    """A server, two nodes that order, and generators that come and go."""

    def __init__(self, folder: Path, url: str, run: str, groups_per_second: float = GROUPS_PER_SECOND) -> None:
        pace = {"tokens_per_second": groups_per_second * COMPLETIONS * TOKENS, "tokens": TOKENS}
        tree = {
            "run": run, "folder": str(folder), "redis_url": url, "nodes": {"a": None, "b": None},
            "redeliver_seconds": 3.0, "generators": {"engine": "paced", "engine_options": pace, "drain_seconds": 5.0},
        }  # fmt: skip
        self._file = folder / f"{run}.yaml"
        self._file.write_text(yaml.safe_dump(tree))
        self._folder = folder
        self.ledger, self.directory = open_run(Settings.model_validate(tree))
        self._nodes = {name: Identity.fresh("node", name, "local") for name in "ab"}
        weights = folder / f"{run}.weights"
        weights.write_bytes(b"a paced engine does not look at them")
        for name, identity in self._nodes.items():
            self.directory.register(identity)
            self.directory.add_target(name, "local")
            policy = Policy(Version(1, 0), str(weights), sha256(weights), "no-model")
            self._settle(name, [], Directory.announcement(policy))
        self.ordered: Counter[str] = Counter()
        self.answered: Counter[str] = Counter()
        self.duplicates = 0
        self.depth = dict.fromkeys("ab", 0)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._started = 0

    # --- generators ---

    def start(self, count: int) -> list[str]:
        """More of them; their names."""
        names = []
        for _ in range(count):
            name = f"generator-{self._started}"
            self._started += 1
            command = [sys.executable, "-m", "grapevine", "worker", "generator", name, "--settings", str(self._file)]
            log = (self._folder / f"{name}.log").open("wb")
            environment = {**os.environ, "GRAPEVINE_LOG": "json"}
            self.processes[name] = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
            names.append(name)
        return names

    def stop(self, names: list[str], kill: bool = False) -> None:
        """SIGTERM, or SIGKILL, and the wait for their end; nodes go on ordering."""
        leaving = [self.processes.pop(name) for name in names]
        for process in leaving:
            process.kill() if kill else process.terminate()
        while any(process.poll() is None for process in leaving):
            self.turn()

    def close(self) -> None:
        """End all of them."""
        for process in self.processes.values():
            process.kill()
            process.wait()

    def at_work(self) -> int:
        """Generators that have answered something."""
        beats = [beat for beat in self.directory.workers() if beat.role == "generator"]
        return sum(1 for beat in beats if beat.name in self.processes and beat.facts.get("groups", 0) > 0)

    # --- nodes ---

    def _settle(self, node: str, orders: list[Order], policy: bytes = b"") -> None:
        self._rounds = getattr(self, "_rounds", 0) + 1
        sealed = [(order.id, order.deadline, self._nodes[node].seal(order)) for order in orders]
        self.ledger.settle(node, 1, self._rounds, (0, 0, 0, 0), policy, orders=sealed)

    def _order(self, node: str) -> Order:
        self.ordered[node] += 1
        return Order(
            id=f"{node}/{self.ordered[node]}", target=node, node=node, purpose="train",
            question=draw(PRESETS["starter"], 0, self.ordered[node], held_out=False), completions=COMPLETIONS,
            sampling=Sampling(max_new_tokens=TOKENS), lowest=Version(0, 0), deadline=2**50, share=[],
        )  # fmt: skip

    def turn(self) -> None:
        """Take what was answered off the server, and order anew up to each node's depth."""
        raw, keys = self.ledger.raw(0), self.ledger.keys
        pipeline = self.ledger.redis.pipeline(transaction=False)
        for entry in self.ledger.take_raw(0, "bench", 200, 20):
            group, _ = unseal(RawGroup, entry.data, self.directory.lookup)
            order, _ = unseal(Order, group.order, self.directory.lookup)
            if self.ledger.redis.hdel(keys.open(0), order.id):
                self.answered[order.node] += 1
            else:
                self.duplicates += 1
            pipeline.xack(raw, "verifiers", entry.id)
            pipeline.xdel(raw, entry.id)
        pipeline.execute()
        for node, depth in self.depth.items():
            missing = depth - (self.ordered[node] - self.answered[node])
            if missing > 0:
                self._settle(node, [self._order(node) for _ in range(missing)])

    def turn_for(self, seconds: float) -> dict[str, float]:
        """Groups per second of each node, over so long."""
        before, began = self.answered.copy(), time.monotonic()
        while time.monotonic() - began < seconds:
            self.turn()
        passed = time.monotonic() - began
        return {node: (self.answered[node] - before[node]) / passed for node in self.depth}

    @property
    def lost(self) -> int:
        """Orders that are neither answered nor open."""
        return sum(self.ordered.values()) - sum(self.answered.values()) - self.ledger.redis.hlen(self.ledger.keys.open(0))


def growing(pool: PacedPool) -> list[dict[str, float]]:
    """Groups per second with 1, 2, 4 and 8 generators."""
    pool.depth = {"a": DEPTH, "b": 0}
    found = []
    for size in SIZES:
        pool.start(size - len(pool.processes))
        while pool.at_work() < size:
            pool.turn()
        pool.turn_for(SETTLE_SECONDS)
        rate = pool.turn_for(COUNT_SECONDS)["a"]
        times_one = rate / found[0]["groups_per_second"] if found else 1.0
        found.append({"generators": size, "groups_per_second": rate, "times_one": times_one})
        print(f"  {size} generators  {rate:8.1f} groups/s  {times_one:6.2f}x of one")
    return found


def moving(pool: PacedPool, full: float) -> float:
    """Seconds until node b, which orders from now on in place of node a, gets nine tenths of the pool."""
    pool.depth = {"a": 0, "b": DEPTH}
    began = time.monotonic()
    while pool.turn_for(1.0)["b"] < 0.9 * full:
        if time.monotonic() - began > 60:
            raise SystemExit("the pool did not follow within a minute")
    return time.monotonic() - began


def shrinking(pool: PacedPool) -> dict[str, float]:
    """From 8 to 2 at once, by SIGTERM; then everything that was ordered is answered."""
    began = time.monotonic()
    pool.stop(list(pool.processes)[2:])
    left = time.monotonic() - began
    rate = sum(pool.turn_for(5.0).values())
    pool.depth = dict.fromkeys("ab", 0)
    while sum(pool.ordered.values()) > sum(pool.answered.values()):
        pool.turn()
    counts = pool.ledger.counts()
    return {
        "seconds_to_leave": left, "groups_per_second": rate, "lost": pool.lost, "duplicates": pool.duplicates,
        "redelivered": counts.get("redelivered", 0), "ordered": sum(pool.ordered.values()),
        "answered": sum(pool.answered.values()),
    }  # fmt: skip


def main() -> None:
    """Measure, print and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    print(
        f"one generator's pace: {GROUPS_PER_SECOND:.0f} groups/s of {COMPLETIONS} completions; {DEPTH} orders open; "
        f"{COUNT_SECONDS:.0f} s per figure; {os.cpu_count()} cores"
    )
    with tempfile.TemporaryDirectory() as scratch:
        server = EmbeddedServer(Path(scratch) / "server")
        server.start()
        pool = PacedPool(Path(scratch), server.url, "bench-pool")
        try:
            figures: dict[str, Any] = {"growing": growing(pool)}
            figures["seconds_to_move"] = moving(pool, figures["growing"][-1]["groups_per_second"])
            print(f"  from node a to node b: nine tenths of the pool after {figures['seconds_to_move']:.1f} s")
            figures["shrinking"] = found = shrinking(pool)
            print(
                f"  8 to 2 generators: gone after {found['seconds_to_leave']:.1f} s, then {found['groups_per_second']:.1f} "
                f"groups/s; {found['ordered']:.0f} ordered, {found['answered']:.0f} answered, {found['lost']:.0f} lost, "
                f"{found['duplicates']:.0f} answered twice"
            )
        finally:
            pool.close()
            server.stop()
    if asked.json:
        asked.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
