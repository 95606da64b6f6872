"""A learner's account: crashes, wiped and rolled-back servers, overdue and vanished orders."""

from __future__ import annotations

import zlib
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.clock import Clock
from common.identity import Identity
from common.ledger import NEWER_KEPT_MS, Ledger
from common.messages import SCHEMA, Envelope, Order, Sampling, Version, encode
from common.tasks import Question
from grapevine.server import EmbeddedServer
from learners.orders import Account, AccountState
from tests.site import Site


@given(st.data())
def test_settled_numbers_stay_settled(data: st.DataObject) -> None:
    state, settled, kinds = AccountState(), set[int](), [0, 0, 0]
    for _ in range(data.draw(st.integers(1, 12))):
        state = state.extended(state.next + data.draw(st.integers(0, 5)))
        outstanding = state.outstanding()
        assert outstanding == [number for number in range(state.next) if number not in settled]
        chosen = data.draw(st.lists(st.sampled_from(outstanding), unique=True)) if outstanding else []
        kind = data.draw(st.sampled_from(["trained", "filtered", "expired"]))
        state = state.settled(**{kind: chosen})
        kinds[["trained", "filtered", "expired"].index(kind)] += len(chosen)
        settled |= set(chosen)
        assert [state.trained, state.filtered, state.expired] == kinds
        assert all(state.is_settled(number) == (number in settled) for number in range(state.next))
        assert all(number > state.watermark for number in state.above), "what lies below the watermark is not kept twice"
    if settled:
        with pytest.raises(ValueError, match="again"):
            state.settled(trained=[min(settled)])
    with pytest.raises(ValueError, match="again"):
        state.settled(trained=[state.next])


@pytest.fixture
def site(tmp_path: Path, server: EmbeddedServer, request: pytest.FixtureRequest) -> Site:
    # A run's name is short; the parameters at the end of a test's name must still tell two runs apart.
    site = Site(tmp_path, server.url, f"orders-{zlib.crc32(request.node.name.encode()):08x}")
    site.learn(2)
    return site


class Node:
    """The first node's account alone, over several lives; rounds train the two oldest groups."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.ledger: Ledger = site.ledger
        self.target = "node-9"  # served by the site's generator and verifier beside the site's own nodes
        self.identity = Identity.fresh("node", self.target, "local")
        self.durable = AccountState()
        self.round = self.incarnation = 0
        self.deadline = 2**50
        self.rebirth()

    def rebirth(self) -> None:
        """A new process: all that is left is the durable state."""
        self.incarnation += 1
        self.site.directory.register(self.identity)
        lookup = self.site.directory.lookup
        self.account = Account(
            self.ledger, lookup, self.identity, self.target, self.incarnation, self._order, lambda: 6, self.durable
        )
        self.account.reconcile(self.round, self.policy())

    def policy(self) -> bytes:
        policy = self.site.directory.policy("node-0")
        assert policy is not None
        return self.site.directory.announcement(policy)

    def _order(self, number: int) -> Order:
        return Order(
            id=f"{self.target}/{number}",
            target=self.target,
            node=self.target,
            purpose="train",
            question=Question("gcd", {}, number, 0),
            completions=2,
            sampling=Sampling(max_new_tokens=8),
            lowest=Version(0, 0),
            deadline=self.deadline,
            share=[],
        )

    def answer(self, count: int = 100) -> None:
        """Let the generator and the verifier work."""
        self.site.directory.register(self.identity)
        self.site.directory.add_target(self.target, "local")
        self.site.generate()
        self.site.verify()

    def train(self, settle: bool = True, durable: bool = True) -> list[int]:
        """One round; without `settle` the process dies between checkpoint and script, without `durable` none is written."""
        self.account.poll()
        numbers = sorted(self.account.waiting)[:2]
        state = self.account.state.settled(trained=numbers)
        state = state.extended(state.next + self.account.room(6, leaving=len(numbers)))
        self.round += 1
        if durable:
            self.durable = state
        if settle:
            self.account.settle(self.round, state, self.policy(), durable)
        return numbers

    @property
    def lost(self) -> int:
        return self.ledger.books(self.target).lost


@pytest.fixture
def node(site: Site) -> Node:
    return Node(site)


def test_orders_flow_within_the_limit(node: Node) -> None:
    trained = []
    for _ in range(5):
        node.answer()
        trained += node.train()
        assert len(node.account.state.outstanding()) == 6
        assert node.lost == 0
    assert trained == list(range(10))


def test_a_crash_between_checkpoint_and_settle(node: Node) -> None:
    node.answer()
    first = node.train(settle=False)
    node.rebirth()
    assert node.lost == 0
    node.answer()
    assert not set(first) & set(node.train())
    assert node.ledger.books(node.target).trained == 4
    assert node.lost == 0


def test_a_crash_before_the_checkpoint_finds_everything_again(node: Node) -> None:
    node.answer()
    node.account.poll()
    assert len(node.account.waiting) == 6
    node.rebirth()
    node.account.poll()
    assert sorted(node.account.waiting) == list(range(6)), "read again from the stream"
    assert node.lost == 0


def test_orders_placed_after_the_checkpoint_are_taken_over(node: Node) -> None:
    old = node.durable
    node.answer()
    node.train()
    node.durable = old  # the disk knows nothing of that round
    node.rebirth()
    assert node.account.state.next == 8
    assert node.lost == 0
    node.answer()
    node.account.poll()
    assert sorted(node.account.waiting) == list(range(8)), "what the lost round trained is asked again"


def test_a_wiped_server_is_filled_again(node: Node) -> None:
    node.answer()
    node.train()
    for key in node.ledger.redis.scan_iter(match=f"gv:{{{node.site.settings.run}*"):
        node.ledger.redis.delete(key)
    for worker in (node.site.generator, node.site.verifier, *node.site.learners):
        worker.rejoin()
    node.site.directory.register(node.identity)
    node.account.reconcile(node.round, node.policy())
    assert node.lost == 0
    node.answer()
    assert node.train() == [2, 3]
    assert node.lost == 0


def test_a_server_that_went_back_in_time(node: Node) -> None:
    redis = node.ledger.redis
    names = list(redis.scan_iter(match=f"gv:{{{node.site.settings.run}*"))
    node.answer()
    names = sorted({*names, *redis.scan_iter(match=f"gv:{{{node.site.settings.run}*")})
    backup = {name: redis.dump(name) for name in names}
    trained = [*node.train(), *node.train()]
    for name in redis.scan_iter(match=f"gv:{{{node.site.settings.run}*"):
        redis.delete(name)
    for name, data in backup.items():
        if data is not None:
            redis.restore(name, 0, data)
    node.account.reconcile(node.round, node.policy())
    assert node.lost == 0
    node.answer()
    for _ in range(2):
        trained += node.train()
        node.answer()
    assert sorted(trained) == list(range(8)), "nothing twice, nothing skipped"
    assert node.lost == 0


def test_overdue_orders_are_asked_again_and_then_given_up(node: Node) -> None:
    node.deadline = 1
    node.rebirth()
    redis, keys = node.ledger.redis, node.ledger.keys
    redis.delete(keys.open(0), keys.orders(node.target))
    node.account.reconcile(node.round, node.policy())
    assert node.account.tend(node.round, node.policy()) == (6, 0)
    assert [node.account.tend(node.round, node.policy()) for _ in range(3)] == [(6, 0), (6, 0), (0, 6)]
    books = node.ledger.books(node.target)
    assert (books.ordered, books.expired, books.open, books.lost) == (12, 6, 6, 0)


def test_an_order_that_is_nowhere_is_asked_again(node: Node) -> None:
    node.answer()
    node.account.poll()
    redis, keys = node.ledger.redis, node.ledger.keys
    node.train()
    node.answer()
    # Its scored group is spoilt on the stream: refused when read, no longer open, so it is nowhere.
    (last,) = redis.xrevrange(keys.own(node.target), count=1)
    redis.xdel(keys.own(node.target), last[0])
    assert node.lost == 1
    for _ in range(3):
        node.account.poll()
        node.account.tend(node.round, node.policy())
    assert node.lost == 0
    node.answer()
    node.account.poll()
    assert sorted(node.account.waiting) == node.account.state.outstanding()


@pytest.mark.parametrize("seed", range(3))
def test_random_lives(site: Site, seed: int) -> None:
    """Rounds, crashes and lost replies in any order: nothing lost, nothing trained twice in the lineage that survives."""
    node, random = Node(site), Random(seed)
    lineage: list[int] = []
    for _ in range(40):
        what = random.choice(["answer", "train", "train", "crash", "crash in between", "tend"])
        if what == "answer":
            node.answer()
        elif what == "train":
            lineage += node.train()
        elif what == "crash in between":
            lineage += node.train(settle=False)
            node.rebirth()
        elif what == "crash":
            node.rebirth()
        else:
            node.account.tend(node.round, node.policy())
        assert node.lost == 0
    assert len(set(lineage)) == len(lineage) == node.ledger.books(node.target).trained


def wipe(node: Node, backup: dict[bytes, bytes] | None = None) -> None:
    """The server loses all it knows of this run, or all since a backup; everybody joins again."""
    redis = node.ledger.redis
    for key in redis.scan_iter(match=f"gv:{{{node.site.settings.run}*"):
        redis.delete(key)
    for key, data in (backup or {}).items():
        redis.restore(key, 0, data)
    for worker in (node.site.generator, node.site.verifier, *node.site.learners):
        worker.rejoin()
    node.site.directory.register(node.identity)
    node.account.reconcile(node.round, node.policy())


def test_groups_between_two_checkpoints_count_as_trained_when_the_server_forgets_them(node: Node) -> None:
    node.answer()
    assert node.train(durable=False) == [0, 1]
    books = node.ledger.books(node.target)
    assert (books.trained, books.waiting, books.lost) == (0, 6, 0), "pending until a checkpoint holds them"
    wipe(node)
    books = node.ledger.books(node.target)
    assert (books.trained, books.waiting, books.open, books.lost) == (2, 0, 6, 0), "not asked again: the learner lives"
    node.answer()
    assert node.train() == [2, 3]
    books = node.ledger.books(node.target)
    assert (books.trained, books.lost) == (4, 0)


def test_groups_between_two_checkpoints_survive_a_lost_connection_and_then_a_crash(node: Node) -> None:
    node.answer()
    assert node.train(durable=False) == [0, 1]
    node.account.reconcile(node.round, node.policy())
    assert sorted(one.number for one in node.account.poll()) == [2, 3, 4, 5]
    assert node.ledger.books(node.target).waiting == 6
    assert node.ledger.counts().get("duplicates", 0) == 0
    node.rebirth()
    node.account.poll()
    assert sorted(node.account.waiting) == list(range(6)), "not generated again"
    assert node.lost == 0


@pytest.mark.parametrize("seed", [1, 2, 11, 61])
def test_random_lives_on_a_forgetful_server(site: Site, seed: int) -> None:
    """As above, with checkpoints every other round or so, and a server that is wiped or goes back to a backup."""
    node, random = Node(site), Random(100 + seed)
    lineage: list[int] = []
    on_disk: list[int] = []
    backup: dict[bytes, bytes] = {}
    redis = node.ledger.redis
    for _ in range(60):
        what = random.choice(
            ["answer", "answer", "train", "train", "keep training", "crash", "wipe", "backup", "go back", "tend"]
        )
        if what == "answer":
            node.answer()
        elif what == "train":
            lineage += node.train()
            on_disk = list(lineage)
        elif what == "keep training":
            lineage += node.train(durable=False)
        elif what == "crash":
            node.rebirth()
            lineage = list(on_disk)
        elif what == "wipe":
            wipe(node)
        elif what == "backup":
            keys = list(redis.scan_iter(match=f"gv:{{{site.settings.run}*"))
            backup = {key: data for key in keys if (data := redis.dump(key)) is not None}
        elif what == "go back":
            wipe(node, backup)
        else:
            node.account.poll()
            node.account.tend(node.round, node.policy())
        assert node.lost == 0, what
        assert len(set(lineage)) == len(lineage), what
    node.answer()
    lineage += node.train()
    books = node.ledger.books(node.target)
    assert (books.trained, books.lost) == (len(lineage), 0)


def test_a_newer_message_among_the_scored_goes_after_a_day(node: Node) -> None:
    """Its one reader reads it once, so `tend` looks after it."""
    redis, stream = node.ledger.redis, node.ledger.keys.own(node.target)
    newer = encode(Envelope(SCHEMA + 1, "?", b"", b""))
    old = node.ledger.clock.now() - NEWER_KEPT_MS + 60_000
    redis.xadd(stream, {"m": newer}, id=f"{old}-0")
    redis.xadd(stream, {"m": newer})
    node.account.poll()
    assert node.account.poll() == []
    node.account.tend(node.round, node.policy())
    assert redis.xlen(stream) == 2
    node.ledger.clock = Later(node.ledger.clock, 120_000)
    node.account.tend(node.round, node.policy())
    assert redis.xlen(stream) == 1
    assert node.site.refused("own") == {"newer_schema": 1}


class Later(Clock):
    """Another clock, ahead by some milliseconds."""

    unit = "ms"

    def __init__(self, clock: Clock, ahead: int) -> None:
        self._clock = clock
        self._ahead = ahead

    def now(self) -> int:
        return self._clock.now() + self._ahead

    def stream_id(self) -> str:
        return self._clock.stream_id()


def test_a_scored_group_that_cannot_be_read_is_asked_again(node: Node) -> None:
    redis, stream = node.ledger.redis, node.ledger.keys.own(node.target)
    node.answer()
    (last,) = redis.xrevrange(stream, count=1)
    redis.xdel(stream, last[0])
    redis.xadd(stream, {"m": last[1][b"m"][:-1]})
    node.account.poll()
    assert node.site.refused("own") == {"malformed": 1}
    assert len(node.account.waiting) == 5
    for _ in range(2):
        node.account.poll()
        node.account.tend(node.round, node.policy())
    assert node.ledger.books(node.target).open == 1
    node.answer()
    node.account.poll()
    assert sorted(node.account.waiting) == list(range(6))
    assert node.lost == 0
