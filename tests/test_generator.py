"""The generator worker with orders in flight: on a real server, with real messages and a paced engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from common.identity import Identity
from common.messages import Completion, Version
from generators.engines.base import Request, RequestUnfit
from generators.engines.paced import PacedEngine
from generators.generator import Generator
from grapevine.server import EmbeddedServer
from tests.site import Site


class HeldEngine(PacedEngine):
    """Answers when it is told to, the newest request first."""

    def __init__(self) -> None:
        super().__init__()
        self.go = 0
        self.cancelled: list[str] = []

    def step(self) -> list[tuple[str, list[Completion]]]:
        if not self.go or not self._waiting:
            return []
        self.go -= 1
        id = list(self._waiting)[-1]
        request = self._waiting.pop(id)
        return [(id, self._answers(request))]

    def cancel(self, ids: list[str]) -> None:
        self.cancelled += [id for id in ids if id in self._waiting]
        super().cancel(ids)


class Choosy(PacedEngine):
    """Finds every question too long."""

    def submit(self, request: Request) -> None:
        raise RequestUnfit("a prompt of 9 tokens exceeds the 8 of the model")


@pytest.fixture
def site(server: EmbeddedServer, tmp_path: Path, request: pytest.FixtureRequest) -> Site:
    return Site(tmp_path, server.url, request.node.name.replace("_", "-")[:40].strip("-"))


def generator_with(site: Site, engine: PacedEngine, name: str = "h", **generators: Any) -> Generator:
    changed = {**site.settings.generators.model_dump(), **generators}
    settings = type(site.settings).model_validate({**site.settings.model_dump(), "generators": changed})
    identity = Identity.fresh("generator", name, site.settings.site)
    made = Generator(name, settings, site.ledger, site.directory, identity, engine, site.settings.folder / name)
    made.rejoin()
    return made


def pending(site: Site) -> dict[str, int]:
    found = site.ledger.redis.xpending_range(site.ledger.keys.orders("node-0"), "generators", "-", "+", 100)
    names = [row["consumer"].decode() for row in found]
    return {name: names.count(name) for name in names}


def raw(site: Site) -> int:
    return int(site.ledger.redis.xlen(site.ledger.raw(0)))


def test_orders_are_admitted_while_others_are_answered_and_sent_when_whole(site: Site) -> None:
    site.order()
    waiting = site.directory.waiting_orders(["node-0"])["node-0"]
    assert waiting >= 3
    engine = HeldEngine()
    generator = generator_with(site, engine, batch_orders=2)
    generator.pool.serve("node-0")
    generator.step()
    assert (engine.in_flight, raw(site)) == (2, 0)
    engine.go = 1
    generator.step()
    assert (engine.in_flight, raw(site)) == (1, 1), "a group that is whole does not wait for the others"
    generator.step()
    assert engine.in_flight == 2, "its place is taken"
    engine.go = waiting
    while site.directory.waiting_orders(["node-0"])["node-0"]:
        generator.step()
    assert raw(site) == waiting
    assert pending(site) == {}


def test_what_nobody_waits_for_any_more_is_given_up(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("generators.generator.STILL_WANTED_SECONDS", 0.0)
    monkeypatch.setattr("generators.generator.POLL_SECONDS", 0.0)
    site.order()
    engine = HeldEngine()
    generator = generator_with(site, engine, batch_orders=2)
    generator.pool.serve("node-0")
    generator.step()
    first, second = engine._waiting
    # Somebody else answers the first of them.
    site.ledger.redis.hdel(site.ledger.keys.open(0), first)
    generator.step()
    assert engine.cancelled == [first]
    assert second in engine._waiting and first not in engine._waiting
    assert site.ledger.counts()["skipped"] == 1


def test_an_end_in_time_answers_what_was_begun(site: Site) -> None:
    site.order()
    engine = HeldEngine()
    generator = generator_with(site, engine, batch_orders=2)
    generator.pool.serve("node-0")
    generator.step()
    engine.go = 2
    generator.drain()
    assert (engine.in_flight, raw(site)) == (0, 2)
    assert pending(site) == {}


def test_an_end_out_of_time_hands_the_rest_back(site: Site) -> None:
    site.order()
    waiting = site.directory.waiting_orders(["node-0"])["node-0"]
    engine = HeldEngine()
    generator = generator_with(site, engine, drain_seconds=0)
    generator.pool.serve("node-0")
    generator.step()
    taken = pending(site)["h"]
    assert taken == waiting
    # One of them is in another generator's hands by now: it stays there.
    (entry,) = site.ledger.redis.xpending_range(site.ledger.keys.orders("node-0"), "generators", "-", "+", 1)
    site.ledger.keep([(site.ledger.keys.orders("node-0"), entry["message_id"].decode())], "generators", "other")
    generator.drain()
    assert pending(site) == {"other": 1}
    assert site.directory.untaken_orders(["node-0"])["node-0"] == waiting - 1, "others need not wait for them to fall silent"
    assert len(engine.cancelled) == waiting
    site.generator.pool.serve("node-0")
    site.generator.step()
    while site.directory.untaken_orders(["node-0"])["node-0"] or len(pending(site)) > 1:
        site.generator.step()
    assert raw(site) == waiting - 1
    books = site.ledger.books("node-0")
    assert books.lost == 0


def test_generators_of_one_node_share_its_orders(site: Site) -> None:
    """Each takes what falls to it and not all there is, so that none is idle."""
    site.order()
    waiting = site.directory.waiting_orders(["node-0"])["node-0"]
    engines = [HeldEngine(), HeldEngine()]
    generators = [generator_with(site, engine, name, target="node-0") for engine, name in zip(engines, "hi", strict=True)]
    for generator in generators:
        generator.pool.choose()
        generator.pool.current = None
    for generator in generators:
        generator.step()
    assert pending(site)["h"] == pytest.approx(waiting / 2, abs=1)


def test_a_question_that_no_model_can_take_is_refused(site: Site) -> None:
    site.order()
    waiting = site.directory.waiting_orders(["node-0"])["node-0"]
    generator = generator_with(site, Choosy())
    generator.pool.serve("node-0")
    generator.step()
    assert site.refused("orders") == {"too_long": waiting}
    assert pending(site) == {}


def test_an_order_asked_again_while_it_is_in_flight_is_answered_once(site: Site) -> None:
    site.order()
    engine = HeldEngine()
    generator = generator_with(site, engine)
    generator.pool.serve("node-0")
    generator.step()
    in_flight = engine.in_flight
    stream = site.ledger.keys.orders("node-0")
    again = site.entries(stream)[0]
    site.ledger.redis.xadd(stream, {"m": again.data})
    engine.go = 1
    generator.step()
    generator.step()
    assert engine.in_flight == in_flight - 1
    engine.go = in_flight
    while engine.in_flight:
        generator.step()
    assert raw(site) == in_flight


def test_a_generator_that_comes_back_answers_what_it_had_taken(site: Site) -> None:
    """Nobody counts orders in somebody's hands, so it has to look at its own without being asked."""
    site.order()
    waiting = site.directory.waiting_orders(["node-0"])["node-0"]
    dead = generator_with(site, HeldEngine())
    dead.pool.serve("node-0")
    dead.step()
    assert pending(site) == {"h": waiting}
    again = generator_with(site, PacedEngine())
    for _ in range(4 * waiting):
        again.step()
    assert site.directory.waiting_orders(["node-0"])["node-0"] == 0
    assert raw(site) >= waiting


def test_reading_what_is_in_hand_again_is_no_attempt_at_it(site: Site) -> None:
    site.order()
    generator = generator_with(site, HeldEngine())
    generator.pool.serve("node-0")
    generator.step()
    for _ in range(9):
        generator._intake.forget()
        generator._polled = float("-inf")
        generator.step()
    stream = site.ledger.keys.orders("node-0")
    found = site.ledger.redis.xpending_range(stream, "generators", "-", "+", 100)
    assert found and all(row["times_delivered"] <= 2 for row in found)


def test_nodes_without_a_policy_starve_nobody_and_keep_their_orders(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("generators.generator.IDLE_WAIT_MS", 1)
    site.order()
    keys, redis = site.ledger.keys, site.ledger.redis
    (order, *_) = site.entries(keys.orders("node-0"))
    for target in ("bad-0", "bad-1"):
        site.directory.add_target(target, site.settings.site)
        redis.xadd(keys.orders(target), {"m": order.data})
    waiting = site.directory.waiting_orders(["node-0"])["node-0"]
    generator = generator_with(site, PacedEngine())
    for _ in range(20 * waiting):
        generator.step()
    assert raw(site) >= waiting and site.directory.waiting_orders(["node-0"])["node-0"] == 0
    assert site.directory.untaken_orders(["bad-0", "bad-1"]) == {"bad-0": 1, "bad-1": 1}, "nothing of theirs was taken"


def test_orders_that_ask_for_a_newer_policy_wait_beside_what_is_in_flight(site: Site) -> None:
    site.order()
    engine = HeldEngine()
    generator = generator_with(site, engine, batch_orders=3, target="node-0")
    generator.pool.serve("node-0")
    generator.step()
    assert engine.in_flight == 3
    first = next(iter(generator._flight.values()))[0]
    engine.go = 1
    generator.step()
    newer = msgspec.structs.replace(first.order, id="node-0/900", lowest=Version(9, 9))
    node = site.identities["node"]
    redis, keys = site.ledger.redis, site.ledger.keys
    redis.delete(keys.orders("node-0"))
    redis.xgroup_create(keys.orders("node-0"), "generators", id="0", mkstream=True)
    redis.hset(keys.open(0), newer.id, newer.deadline)
    redis.xadd(keys.orders("node-0"), {"m": node.seal(newer)})
    for _ in range(5):
        generator._polled = float("-inf")
        generator.step()
    assert list(generator._hand) == [newer.id] and engine.in_flight == 2
    engine.go = 2
    for _ in range(5):
        generator._polled = float("-inf")
        generator.step()
    assert not generator._hand and not generator._flight
    assert site.directory.untaken_orders(["node-0"])["node-0"] == 1, "handed back: another may have that policy"
