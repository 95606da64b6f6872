"""Two sites on one server: each scores its own groups, both train, and they share with one another."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.identity import unseal
from common.messages import RawGroup
from grapevine.server import EmbeddedServer
from learners.journal import read
from tests.site import Site


@pytest.fixture
def sites(tmp_path: Path, server: EmbeddedServer, request: pytest.FixtureRequest) -> tuple[Site, Site]:
    run = request.node.name.replace("_", "-")[:40].rstrip("-")
    return (
        Site(tmp_path / "east", server.url, run, "east", ("e-0", "e-1")),
        Site(tmp_path / "west", server.url, run, "west", ("w-0",)),
    )


def drawn_from(site: Site, node: str) -> set[str]:
    """The authors whose groups a node trained on."""
    lines = read(site.settings.run_folder / "nodes" / node / "rounds.jsonl")
    return {id.partition("/")[0] for line in lines for id in line["swarm_ids"]}


def test_both_train_and_share(sites: tuple[Site, Site]) -> None:
    east, west = sites
    rounds = 0
    # A learner asks who shares once a second: until then it may know those of its own site only.
    while drawn_from(west, "w-0") != {"e-0", "e-1"} or drawn_from(east, "e-0") != {"e-1", "w-0"}:
        for site in sites:
            site.learn()
        rounds += 1
    assert [name for name in east.ledger.counts() if name.startswith("refused:")] == []
    for site in sites:
        for node in site.settings.node_names():
            books = site.ledger.books(node)
            assert (books.round, books.lost) == (rounds, 0)


def test_a_verifier_leaves_the_groups_of_other_sites_alone(sites: tuple[Site, Site]) -> None:
    """Both sites' groups wait at once, and either verifier comes first: each takes its own."""
    east, west = sites
    for site in sites:
        site.order()
        site.generate()
    waiting = {site.settings.site: site.ledger.redis.xlen(site.ledger.raw(0)) for site in sites}
    assert all(waiting.values())
    west.verify()
    assert west.ledger.redis.xlen(west.ledger.raw(0)) == 0
    assert east.ledger.redis.xlen(east.ledger.raw(0)) == waiting["east"], "not even read"
    east.verify()
    assert east.ledger.counts()["scored:train"] == sum(waiting.values())
    assert "duplicates" not in east.ledger.counts()


def test_a_group_put_into_another_sites_stream_is_refused_and_its_order_stays_open(sites: tuple[Site, Site]) -> None:
    east, west = sites
    east.order()
    east.generate()
    entries = east.entries(east.ledger.raw(0))
    before = [east.ledger.books(node) for node in ("e-0", "e-1")]
    for entry in entries:
        assert unseal(RawGroup, entry.data, west.directory.lookup)[1].site == "east"
        west.ledger.redis.xadd(west.ledger.raw(0), {"m": entry.data})
    west.verify()
    assert west.refused("raw") == {"foreign_site": len(entries)}
    assert [east.ledger.books(node) for node in ("e-0", "e-1")] == before
    # The real ones lie where they lay, and count.
    east.verify()
    assert sum(east.ledger.books(node).waiting for node in ("e-0", "e-1")) == len(entries)


def test_orders_of_another_site_are_refused(sites: tuple[Site, Site]) -> None:
    """Whoever tells a pool to serve a stranger's node gets no work out of it, and the node's own site still does it."""
    east, west = sites
    east.order()
    orders = east.directory.waiting_orders(["e-0"])["e-0"]
    west.generator.pool.serve("e-0")
    west.generator.step()
    assert west.refused("orders") == {"foreign_site": orders}
    assert east.ledger.books("e-0").open == orders
    assert east.directory.targets("east") == ["e-0", "e-1"]
    assert west.directory.targets("west") == ["w-0"]
