"""The server's memory does not grow with the rounds: everything on it is bounded by open orders, quotas and ages."""

from __future__ import annotations

import functools
import time
from pathlib import Path
from statistics import median

import pytest

from common.run import open_run
from common.settings import Settings
from grapevine.server import EmbeddedServer
from tests.chaos import __main__ as chaos

QUOTA = 16
EARLY, LATE = 200, 500
PATIENCE = 240.0


def settings_for(folder: Path, url: str) -> Settings:
    """Four nodes, rounds of one own and two swarm groups: many rounds a second, and every queue in use."""
    base = chaos.settings_for(folder, url, 4, ahead=16, mix={"own": 1, "swarm": 2, "tags": ["failed", "mixed", "solved"]})
    swarm = base.swarm.model_copy(update={"quota": QUOTA})
    generators = base.generators.model_copy(update={"batch_orders": 16})
    return base.model_copy(update={"shards": 1, "swarm": swarm, "generators": generators})


def test_memory_at_round_500_is_that_of_round_200(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # The paced engine and the null trainer at no pace at all.
    swift = functools.partial(chaos.make_worker, tokens_per_second=float("inf"), update_seconds=0.0)
    monkeypatch.setattr(chaos, "make_worker", swift)
    server = EmbeddedServer(tmp_path / "server")
    server.start()
    settings = settings_for(tmp_path, server.url)
    settings.run_folder.mkdir()
    nodes = settings.node_names()
    fleet = chaos.Fleet(settings, nodes, generators=1, verifiers=1)
    ledger, _ = open_run(settings)
    try:
        used = {}
        deadline = time.monotonic() + PATIENCE
        for goal in (EARLY, LATE):
            while min(ledger.books(node).round for node in nodes) < goal:
                fleet.tend()
                assert time.monotonic() < deadline, f"round {goal} was not reached"
                time.sleep(0.02)
            # The workers go on meanwhile: what is in flight varies by a few kilobytes.
            used[goal] = median(ledger.redis.info("memory")["used_memory"] for _ in range(51))
            lengths = [ledger.redis.xlen(ledger.keys.swarm(node, tag)) for node in nodes for tag in settings.node.mix.tags]
            assert lengths == [QUOTA] * len(lengths), "the swarm is full before the first measurement"
        assert sum(ledger.books(node).lost for node in nodes) == 0
    finally:
        late = fleet.end()
        server.stop()
    assert late == []
    assert fleet.restarts == 0
    with capsys.disabled():
        print(
            f"\nused_memory at round {EARLY}: {used[EARLY]:,} bytes, at round {LATE}: {used[LATE]:,} "
            f"({used[LATE] / used[EARLY]:.3f} x)"
        )
    assert used[LATE] <= 1.1 * used[EARLY]
