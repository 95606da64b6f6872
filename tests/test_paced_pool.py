"""A pool of generator processes that grows, is asked for something else, and shrinks: nothing is lost on the way."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.pool import PacedPool
from grapevine.server import EmbeddedServer


@pytest.fixture
def pool(server: EmbeddedServer, tmp_path: Path) -> Iterator[PacedPool]:
    pool = PacedPool(tmp_path, server.url, "paced-pool", groups_per_second=40.0)
    yield pool
    pool.close()


def test_a_pool_grows_follows_and_shrinks(pool: PacedPool) -> None:
    pool.depth = {"a": 60, "b": 0}
    (first,) = pool.start(1)
    while pool.at_work() < 1:
        pool.turn()
    others = pool.start(2)
    while pool.at_work() < 3:
        pool.turn()
    # Everybody moves to the node that orders now; what the other one ordered is answered too.
    pool.depth = {"a": 0, "b": 60}
    while pool.directory.assigned(besides="nobody").get("b", 0) < 3:
        pool.turn()
    while pool.ordered["a"] > pool.answered["a"]:
        pool.turn()
    # One leaves in good order, one dies with orders in its hands.
    pool.stop(others[:1])
    redelivered = pool.ledger.counts().get("redelivered", 0)
    assert redelivered == 0, "who leaves in good order hands back what it has"
    pool.stop(others[1:], kill=True)
    pool.depth = {"a": 0, "b": 0}
    while pool.ordered["b"] > pool.answered["b"]:
        pool.turn()
    assert pool.lost == 0
    assert pool.processes[first].poll() is None
    assert pool.ledger.counts().get("refused:orders:deliveries", 0) == 0
