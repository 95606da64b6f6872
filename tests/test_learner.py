"""The learner's loop on a real server, without a model."""

from __future__ import annotations

from pathlib import Path

import pytest

from grapevine.server import EmbeddedServer
from learners.journal import read
from tests.site import Site


@pytest.mark.parametrize(("ahead", "max_staleness"), [(1, 0), (2, 0), (3, 1), (4, 0)])
def test_batches_gone_stale_hold_up_no_round(tmp_path: Path, server: EmbeddedServer, ahead: int, max_staleness: int) -> None:
    """Every order is answered before each step, so whatever was ordered ahead of its round is stale by then."""
    rounds = 4
    run = f"stale-{ahead}-{max_staleness}"
    site = Site(tmp_path, server.url, run, rounds=rounds, ahead=ahead, max_staleness=max_staleness)
    (learner, _) = site.learners
    for _ in range(10 * rounds):
        site.generate()
        site.verify()
        if not learner.step():
            break
    lines = read(site.settings.run_folder / "nodes" / "node-0" / "rounds.jsonl")
    assert [line["round"] for line in lines] == list(range(1, rounds + 1))
    assert all(line["staleness"] <= max_staleness for line in lines)
    books = site.ledger.books("node-0")
    assert books.lost == 0
    assert books.trained == sum(len(line["own_ids"]) for line in lines)
    assert books.filtered == sum(len(line["stale_ids"]) for line in lines)
