"""What `grapevine.screen.watch` says of a run on a real server, who waits for whom, and how a run is found."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import pytest

from common.directory import WORKER_GONE_SECONDS, Heartbeat
from common.keys import Keys
from common.ledger import Entry
from grapevine.screen.find import keys_of, quarantine, runs_on
from grapevine.screen.view import View, plain, tree
from grapevine.screen.watch import look
from grapevine.server import EmbeddedServer
from tests.site import Site


@pytest.fixture
def site(tmp_path: Path, server: EmbeddedServer, request: pytest.FixtureRequest) -> Site:
    return Site(tmp_path, server.url, "watch-" + str(abs(hash(request.node.name))))


def beat(site: Site) -> None:
    """What the heartbeats' threads would do."""
    for worker in (site.generator, site.verifier, *site.learners):
        site.directory.beat(worker.role, worker.name, worker.facts())


def seen(site: Site, before: View | None = None) -> View:
    return look(site.ledger.redis, site.ledger.keys, before)


def test_a_view_holds_what_books_and_heartbeats_say(site: Site) -> None:
    site.learn(3)
    site.order()
    beat(site)
    view = seen(site)
    assert [node.name for node in view.nodes] == ["node-0", "node-1"]
    for node, learner in zip(view.nodes, site.learners, strict=True):
        facts = learner.facts()
        assert node.books == site.ledger.books(node.name)
        assert node.lost == 0
        assert node.target.unanswered == site.directory.waiting_orders([node.name])[node.name]
        assert (node.facts.round, node.facts.version) == (facts["round"], facts["version"])
        assert node.facts.own_reward == facts["own_reward"]
        assert node.facts.curve == facts["curve"]
        assert sum(node.facts.mix.own.values()) == 2
        assert not node.silent
    assert view.round == 3
    assert view.nodes[0].target.unanswered > 0
    assert [one.name for one in view.generators] == ["g"]
    assert [(one.role, one.scored) for one in view.helpers] == [("verifier", site.verifier.facts()["scored"])]
    assert view.counts == site.ledger.counts()
    # All of it can be written as JSON and read again.
    again = msgspec.json.decode(msgspec.json.encode(tree(view)))
    assert again["nodes"][0]["books"]["trained"] == view.nodes[0].books.trained
    assert again["nodes"][0]["lost"] == 0


def test_orders_are_told_apart_by_who_has_them(site: Site) -> None:
    site.order()
    waiting = seen(site).nodes[0].target.unanswered
    taken = site.ledger.take_orders("node-0", "g", 1, 0)
    target = seen(site).nodes[0].target
    assert (target.unanswered, target.taken) == (waiting, len(taken) == 1)
    site.generator.pool.serve("node-0")
    site.generator.step()
    view = seen(site)
    assert view.nodes[0].target.unanswered < waiting
    assert sum(raw.waiting for raw in view.raw) == waiting - view.nodes[0].target.unanswered
    assert view.nodes[0].books.open == waiting, "an order stays open until its group is published"


def test_tokens_per_second_between_two_looks(site: Site) -> None:
    keys, redis = site.ledger.keys, site.ledger.redis
    now = time.time()
    views: list[View] = []
    for at, tokens in ((now, 100), (now + 2, 300), (now + 2, 300), (now + 4, 50)):
        heartbeat = Heartbeat("generator", "g", at, {"target": "node-0", "policy": "1.2", "tokens": tokens, "groups": 1})
        redis.hset(keys.workers(), "generator:g", msgspec.json.encode(heartbeat))
        views.append(seen(site, views[-1] if views else None))
    # The last one has restarted: its count begins anew, and says nothing yet.
    assert [view.generators[0].tokens_per_second for view in views] == [None, 100.0, 100.0, 100.0]


def test_who_waits_for_whom(site: Site) -> None:
    site.order()
    site.directory.beat("learner", "node-0", site.learners[0].facts())
    site.directory.beat("verifier", "v", site.verifier.facts())
    site.directory.beat("generator", "g", {"target": "node-0"})
    orders = seen(site).nodes[0].target.unanswered
    assert any(
        words == f"node-0 waits for generators ({orders} orders unanswered, 1 on it)" for words in _of(site, "node-0")
    )
    site.directory.gone("generator", "g")
    assert any("and no generator is up" in words for words in _of(site, "node-0"))
    site.generate()
    raw = sum(one.waiting for one in seen(site).raw)
    site.directory.beat("generator", "g", {"target": None})
    assert any(f"for verifiers (raw {raw})" in words for words in _of(site, "node-0"))
    assert "g idle: no node asks" in seen(site).waits
    site.directory.gone("verifier", "v")
    assert any("no verifier is up" in words for words in _of(site, "node-0"))


def _of(site: Site, node: str) -> list[str]:
    return [words for words in seen(site).waits if node in words]


def test_a_silent_heartbeat_and_one_that_left(site: Site) -> None:
    site.learn(2)
    beat(site)
    before = seen(site)
    old = Heartbeat("learner", "node-1", time.time() - WORKER_GONE_SECONDS - 5, site.learners[1].facts())
    site.ledger.redis.hset(site.ledger.keys.workers(), "learner:node-1", msgspec.json.encode(old))
    view = seen(site, before)
    assert [node.silent for node in view.nodes] == [False, True]
    assert view.nodes[1].state == "silent"
    assert view.waits[0].startswith("node-1: heartbeat silent for 2")
    # One that left in good order keeps its figures on the screen.
    site.directory.gone("learner", "node-1")
    view = seen(site, before)
    assert (view.nodes[1].state, view.nodes[1].silent) == ("no learner", False)
    assert view.nodes[1].facts.curve == before.nodes[1].facts.curve
    assert seen(site).nodes[1].facts.round == site.ledger.books("node-1").round


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b'"\xff"',
        b"[" * 100_000,
        b'{"role":"learner","name":"node-0","at":1e400}',
        b'{"role":1}',
        b'{"role":"learner","name":"node-0","at":1e9,"facts":{"round":"many","curve":5}}',
    ],
)
def test_a_strange_heartbeat_costs_its_own_figures_alone(site: Site, data: bytes) -> None:
    beat(site)
    site.ledger.redis.hset(site.ledger.keys.workers(), "learner:node-0", data)
    site.ledger.redis.hset(site.ledger.keys.workers(), b"generator:\x1b[2J\xff", data)
    view = seen(site)
    assert [node.name for node in view.nodes] == ["node-0", "node-1"]
    assert view.nodes[0].silent and not view.nodes[1].silent
    assert view.nodes[0].books == site.ledger.books("node-0")
    assert "\x1b" not in str(tree(view))


def test_refusals_duplicates_and_what_waits_for_a_newer_release(site: Site) -> None:
    site.order()
    ledger = site.ledger
    raw = ledger.raw(0)
    ledger.redis.xadd(raw, {"m": b"nonsense \x1b[31m"})
    ledger.redis.xadd(ledger.keys.own("node-0"), {"m": b"later"})
    site.verify()
    assert sum(seen(site).refused.values()) == 1
    (entry,) = ledger.take_own("node-0", 0)
    ledger.leave(0, "learner", entry, "own", "node-0")
    view = seen(site)
    assert view.newer == 1
    assert any("newer release" in words for words in view.waits)
    ledger.note_refusal(0, Entry(raw, "1-1", b"x"), "raw", "odd", "evil \x1b[2J\n text", "v")
    (newest, *_) = quarantine(ledger.redis, ledger.keys, 5)
    assert (newest.stream, newest.reason, newest.by) == ("raw", "odd", "v")
    assert newest.detail == "evil \\x1b[2J\\n text"


def test_nothing_in_a_look_is_written(site: Site) -> None:
    site.learn(1)
    beat(site)
    redis = site.ledger.redis

    def all_of_it() -> dict[bytes, bytes]:
        return {key: redis.dump(key) for key in redis.scan_iter(match=f"gv:{{{site.settings.run}*", count=1000)}

    before = all_of_it()
    seen(site)
    keys_of(redis, site.settings.run)
    assert all_of_it() == before


@pytest.mark.parametrize("shards", [1, 2, 5])
def test_a_run_is_found_by_its_name_alone(site: Site, shards: int) -> None:
    client, run = site.ledger.redis, f"found-{shards}"
    keys = Keys(run, shards)
    assert keys_of(client, run) is None
    client.hset(keys.targets(), mapping={f"node-{i}": "local" for i in range(20)})
    for i in range(20):
        client.hset(keys.books(f"node-{i}"), "round", i)
    client.hset(Keys(f"{run}-other", 9).books("node-0"), "round", 1)
    assert keys_of(client, run) == keys
    assert run in runs_on(client)
    assert keys_of(client, "*") is None
    assert [node.books.round for node in look(client, keys).nodes] == list(range(20))


def test_plain_text() -> None:
    assert plain(b"node-\xff\x00\x9b") == "node-\\xff\\x00\\x9b"
    assert plain("a" * 500, 10) == "a" * 9 + "…"


def test_what_nobody_can_read_in_the_directory_counts_as_absent(site: Site) -> None:
    beat(site)
    client, keys, directory = site.ledger.redis, site.ledger.keys, site.directory
    known = (directory.targets("local"), [one.name for one in directory.workers()], directory.assigned("nobody"))
    client.hset(keys.targets(), mapping={b"\xff": "local", "x": b"\xff"})
    client.hset(keys.workers(), mapping={"a": b"\xff", "b": b"[" * 100_000, "c": b"{}", "d": b'{"at":1e400}'})
    client.hset(keys.assignments(), mapping={"a": b"\xff \xff", "b": "soon node-0", b"\xff": "nan node-0", "d": ""})
    client.hset(keys.identities(), "0" * 16, b"\xff")
    assert (directory.targets("local"), [one.name for one in directory.workers()], directory.assigned("nobody")) == known
    assert directory.lookup("0" * 16) is None
    for data in (b"\xff", b"{}", b"[" * 100_000, b'{"version":"1"}'):
        client.set(keys.policy("node-0"), data)
        assert directory.policy("node-0") is None
