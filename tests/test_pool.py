"""Which target a generator chooses: against a real server, with a clock of the test's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.directory import Directory, Policy
from common.ledger import Ledger
from common.messages import Version
from common.run import open_run
from common.settings import Settings
from generators.pool import STAY_SECONDS, Pool
from grapevine.server import EmbeddedServer


class World:
    """Targets of one site with some orders each, none of them real."""

    def __init__(self, server: EmbeddedServer, run: str) -> None:
        self.ledger: Ledger
        self.directory: Directory
        self.ledger, self.directory = open_run(Settings.model_validate({"run": run, "redis_url": server.url}))
        self.now = 100.0

    def orders(self, target: str, count: int, model: str = "m") -> None:
        """So many untaken orders, no more and no fewer."""
        self.directory.add_target(target, "local")
        policy = Policy(Version(1, 0), "file:///nowhere", "0" * 64, model)
        self.ledger.redis.set(self.ledger.keys.policy(target), self.directory.announcement(policy))
        self.ledger.redis.delete(self.ledger.keys.orders(target))
        for number in range(count):
            self.ledger.redis.xadd(self.ledger.keys.orders(target), {"m": str(number)})

    def pool(self, name: str, fixed: str | None = None, models: tuple[str, ...] = ()) -> Pool:
        return Pool(self.directory, name, "local", fixed, models, now=lambda: self.now)


@pytest.fixture
def world(server: EmbeddedServer, request: pytest.FixtureRequest) -> World:
    return World(server, request.node.name.replace("_", "-")[:40].strip("-"))


def test_the_most_orders_per_generator_win(world: World) -> None:
    world.orders("a", 10)
    world.orders("b", 6)
    chosen = [world.pool(f"g{number}").choose() for number in range(3)]
    assert chosen == ["a", "b", "a"], "10, then 6 against 5, then 5 against 3"


def test_orders_in_others_hands_attract_nobody(world: World) -> None:
    world.orders("a", 10)
    world.orders("b", 1)
    world.ledger.take_orders("a", "somebody", 10, 0)
    assert world.directory.waiting_orders(["a", "b"]) == {"a": 10, "b": 1}
    assert world.pool("g").choose() == "b"
    world.ledger.take_orders("b", "somebody", 10, 0)
    assert world.pool("h").choose() is None


def test_a_choice_holds_for_a_while_and_moves_when_it_ran_dry(world: World) -> None:
    world.orders("a", 3)
    pool = world.pool("g")
    assert pool.choose() == "a"
    world.orders("b", 100)
    world.now += 0.9 * STAY_SECONDS
    assert pool.choose() == "a"
    world.now += 0.2 * STAY_SECONDS
    assert pool.choose() == "b"
    world.orders("a", 1000)
    world.now += 5 * STAY_SECONDS
    assert pool.choose(stay=20) == "b", "a move that costs much is made less often"
    pool.ran_dry("b")
    assert pool.choose(stay=20) == "a"


def test_equals_are_served_in_turn(world: World) -> None:
    for target in "abc":
        world.orders(target, 5)
    pool = world.pool("g")
    turns = []
    for _ in range(6):
        turns.append(pool.choose())
        world.now += 1.1 * STAY_SECONDS
    assert sorted(turns[:3]) == ["a", "b", "c"] and turns[:3] == turns[3:]


def test_a_share_is_what_falls_to_each_generator(world: World) -> None:
    world.orders("a", 10)
    pools = [world.pool(f"g{number}", fixed="a") for number in range(4)]
    for pool in pools:
        pool.choose()
        world.now += 1
    for pool in pools:
        pool.current = None
        pool.choose()
    assert [pool.share("a", 64) for pool in pools] == [3, 3, 3, 3]
    assert pools[0].share("a", 2) == 2
    assert pools[0].share("a", 0) == 0
    assert pools[0].share("a", -1) == 0


def test_what_may_be_its_own_already_is_visited_though_nobody_asks(world: World) -> None:
    world.orders("a", 2)
    world.orders("b", 9)
    world.ledger.take_orders("a", "g", 10, 0)
    pool = world.pool("g")
    assert pool.choose() == "b"
    pool.come_back("a")
    pool.ran_dry("b")
    assert pool.choose() == "a"
    pool.current = None
    assert pool.choose() == "a", "until it was there"
    pool.visited("a")
    pool.current = None
    world.now += 1
    assert pool.choose() == "b"


def test_only_models_that_it_may_open(world: World, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    world.orders("a", 9, model="large")
    world.orders("b", 1, model="small")
    assert world.pool("g", models=("small",)).choose() == "b"
    idle = world.pool("h", models=("tiny",))
    assert idle.choose() is None
    world.now += 10
    assert idle.choose() is None
    said = capsys.readouterr().out
    assert said.count("no node needs this generator") == 1
    assert "large" in said and "tiny" in said
    world.orders("c", 1, model="tiny")
    world.now += 10
    assert idle.choose() == "c"


def test_a_node_with_few_orders_has_its_turn(world: World) -> None:
    world.orders("a", 100)
    world.orders("b", 8)
    pool = world.pool("g")
    turns = []
    for _ in range(40):
        turns.append(pool.choose())
        world.now += 1.1 * STAY_SECONDS
    assert 1 <= turns.count("b") < turns.count("a")
