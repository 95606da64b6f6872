"""The ledger's scripts on a real server."""

from __future__ import annotations

import time
from random import Random

import msgspec
import pytest
from redis.crc import key_slot

from common.clock import ServerClock
from common.keys import Keys
from common.ledger import (
    DELIVERIES_ALLOWED,
    NEWER_KEPT_MS,
    QUARANTINE_HEAD,
    Entry,
    Fenced,
    Ledger,
    quarantine_sample,
)
from common.messages import TAGS, Order, Sampling, Version
from common.server import connect
from common.tasks import Question
from grapevine.server import EmbeddedServer

NO_POLICY = b""


@pytest.fixture
def ledger(server: EmbeddedServer, request: pytest.FixtureRequest) -> Ledger:
    client = connect(server.url)
    return Ledger(client, Keys(request.node.name.replace("_", "-").replace("[", "-").strip("]")), ServerClock(client))


def order(number: int, target: str = "a", purpose: str = "train") -> Order:
    return Order(
        id=f"{target}/{number}",
        target=target,
        node="a",
        purpose=purpose,  # type: ignore[arg-type]
        question=Question("gcd", {}, number, 0),
        completions=2,
        sampling=Sampling(max_new_tokens=8),
        lowest=Version(0, 0),
        deadline=2**50,
        share=[],
    )


def place(ledger: Ledger, numbers: range, round: int = 0, incarnation: int = 1, deadline: int = 2**50) -> bool:
    orders = [(f"a/{number}", deadline, b"order %d" % number) for number in numbers]
    return ledger.settle("a", incarnation, round, (numbers.stop, 0, 0, 0), NO_POLICY, orders=orders)


def take_orders(ledger: Ledger, me: str = "g") -> list[Entry]:
    return ledger.take_orders("a", me, 100, 0)


def to_raw(ledger: Ledger) -> list[Entry]:
    for entry in ledger.take_orders("a", "g", 100, 0):
        ledger.answer("a", entry.id, entry.data.replace(b"order", b"raw"))
    return ledger.take_raw(0, "v", 100, 0)


def publish(ledger: Ledger, number: int, entry: Entry, swarm: bytes = b"") -> bool:
    return ledger.publish(order(number), entry.id, b"own %d" % number, "mixed", swarm, 4, 60_000)


def test_a_group_goes_all_the_way_and_the_books_follow(ledger: Ledger) -> None:
    place(ledger, range(3))
    books = ledger.books("a")
    assert (books.ordered, books.open, books.waiting, books.lost) == (3, 3, 0, 0)
    for number, entry in enumerate(to_raw(ledger)):
        assert entry.data == b"raw %d" % number
        assert publish(ledger, number, entry)
    books = ledger.books("a")
    assert (books.open, books.waiting, books.lost) == (0, 3, 0)
    own = ledger.take_own("a", 0)
    ledger.settle("a", 1, 1, (3, 2, 1, 0), NO_POLICY, acks=[entry.id for entry in own])
    books = ledger.books("a")
    assert (books.trained, books.filtered, books.open, books.waiting, books.lost) == (2, 1, 0, 0, 0)
    for stream in (ledger.keys.orders("a"), ledger.raw(0), ledger.keys.own("a")):
        assert ledger.redis.xlen(stream) == 0, "entries are deleted with their acknowledgement"


def test_settle_happens_once_a_round(ledger: Ledger) -> None:
    assert place(ledger, range(2), round=5)
    assert not place(ledger, range(4), round=5), "the same round again changes nothing"
    assert not place(ledger, range(4), round=4)
    assert ledger.books("a").ordered == 2
    assert place(ledger, range(4), round=6)
    assert ledger.redis.xlen(ledger.keys.orders("a")) == 4, "an order that is open is not placed again"


def test_an_older_incarnation_is_fenced_off(ledger: Ledger) -> None:
    place(ledger, range(1), round=7, incarnation=2)
    before = ledger.books("a")
    with pytest.raises(Fenced):
        place(ledger, range(9), round=99, incarnation=1)
    with pytest.raises(Fenced):
        ledger.replace("a", 1, "a/0", 2**50, ("a/0", 2**51, b"again"))
    assert ledger.books("a") == before
    assert place(ledger, range(2), round=0, incarnation=3), "a later one begins its rounds where it likes"


def test_an_answered_order_is_not_replaced(ledger: Ledger) -> None:
    place(ledger, range(2), deadline=1000)
    (first, _) = to_raw(ledger)
    publish(ledger, 0, first)
    assert not ledger.replace("a", 1, "a/0", 1000, ("a/0", 2000, b"again"))
    assert not ledger.replace("a", 1, "a/1", 999, ("a/1", 2000, b"again")), "somebody renewed it meanwhile"
    assert ledger.replace("a", 1, "a/1", 1000, ("a/1", 2000, b"again"))
    assert ledger.deadlines("a", ["a/0", "a/1"]) == [None, 2000]
    assert ledger.replace("a", 1, "a/1", 2000, ("a/2", 3000, b"another"))
    books = ledger.books("a")
    assert (books.ordered, books.expired, books.open, books.waiting, books.lost) == (3, 1, 1, 1, 0)


def test_the_first_answer_wins(ledger: Ledger) -> None:
    place(ledger, range(1))
    (entry,) = to_raw(ledger)
    for _ in range(2):
        ledger.redis.xadd(ledger.raw(0), {"m": entry.data})
    again = ledger.take_raw(0, "v", 10, 0)
    assert [publish(ledger, 0, one, b"shared") for one in [entry, *again]] == [True, False, False]
    counts = ledger.counts()
    assert (counts["scored:train"], counts["duplicates"], counts["shared"]) == (1, 2, 1)
    assert ledger.redis.xlen(ledger.keys.swarm("a", "mixed")) == 1


def test_swarm_streams_are_bounded_by_their_quota(ledger: Ledger) -> None:
    place(ledger, range(10))
    for number, entry in enumerate(to_raw(ledger)):
        publish(ledger, number, entry, b"shared")
    assert ledger.redis.xlen(ledger.keys.swarm("a", "mixed")) == 4
    assert 0 < ledger.redis.pttl(ledger.keys.swarm("a", "mixed")) <= 60_000


def test_an_entry_is_finished_and_counted_once(ledger: Ledger) -> None:
    place(ledger, range(1))
    (entry,) = take_orders(ledger)
    assert ledger.finish(0, "generators", entry, "skipped")
    assert not ledger.finish(0, "generators", entry, "skipped")
    assert ledger.counts()["skipped"] == 1


def redeliver(ledger: Ledger, me: str, quiet_ms: int) -> int:
    return ledger.redeliver(0, ledger.keys.orders("a"), "generators", "orders", me, quiet_ms, 100)


def test_only_quiet_work_is_taken_over(ledger: Ledger) -> None:
    place(ledger, range(3))
    held = take_orders(ledger, "dead")
    assert redeliver(ledger, "alive", 60_000) == 0
    assert redeliver(ledger, "dead", 0) == 0, "one's own work is not taken over"
    assert redeliver(ledger, "alive", 0) == 3
    assert [entry.id for entry in ledger.take_orders("a", "alive", 10, 0, backlog=True)] == [entry.id for entry in held]
    ledger.keep([(entry.stream, entry.id) for entry in held], "generators", "alive")
    assert redeliver(ledger, "third", 60_000) == 0
    assert ledger.counts()["redelivered"] == 3


def test_what_is_delivered_too_often_is_quarantined(ledger: Ledger) -> None:
    place(ledger, range(1))
    take_orders(ledger, "g0")
    read = 1
    while redeliver(ledger, f"g{read}", 0):
        read += len(ledger.take_orders("a", f"g{read}", 10, 0, backlog=True))
    assert read == DELIVERIES_ALLOWED
    assert ledger.counts()["refused:orders:deliveries"] == 1
    assert ledger.redis.xlen(ledger.keys.orders("a")) == 0
    (sample,) = ledger.redis.lrange(ledger.keys.quarantine(0), 0, -1)
    assert msgspec.msgpack.decode(sample, strict=False)["reason"] in ("deliveries", b"deliveries")
    assert ledger.books("a").open == 1, "the order stays open: its deadline brings it back"


def test_a_worker_may_fail_at_an_entry_so_often_and_no_oftener(ledger: Ledger) -> None:
    """Only reading counts as a delivery, and a worker that comes back under its own name counts as well."""
    place(ledger, range(1))
    take_orders(ledger, "g0")
    for attempt in range(1, DELIVERIES_ALLOWED):
        # Odd attempts are somebody else's, even ones the same worker's after a restart.
        if attempt % 2:
            assert redeliver(ledger, f"g{attempt}", 0) == 1
        else:
            redeliver(ledger, f"g{attempt - 1}", 60_000)
        assert len(ledger.take_orders("a", f"g{attempt - (attempt + 1) % 2}", 10, 0, backlog=True)) == 1
    assert "refused:orders:deliveries" not in ledger.counts()
    assert redeliver(ledger, f"g{DELIVERIES_ALLOWED - 2}", 60_000) == 0
    assert ledger.counts()["refused:orders:deliveries"] == 1
    assert ledger.redis.xlen(ledger.keys.orders("a")) == 0


def test_any_bytes_fit_the_quarantine(ledger: Ledger) -> None:
    """Samples written by scripts can be read like those written by workers."""
    data = bytes(range(256)) * 10
    ledger.settle("a", 1, 0, (1, 0, 0, 0), NO_POLICY, orders=[("a/0", 2**50, data)])
    for _ in range(DELIVERIES_ALLOWED):
        ledger.take_orders("a", "g", 10, 0)
        ledger.take_orders("a", "g", 10, 0, backlog=True)
    redeliver(ledger, "g", 60_000)
    (sample,) = ledger.redis.lrange(ledger.keys.quarantine(0), 0, -1)
    found = msgspec.msgpack.decode(sample)
    assert found.keys() == msgspec.msgpack.decode(quarantine_sample("s", "r", "d", "b", data)).keys()
    assert (found["stream"], found["reason"], found["by"]) == ("orders", "deliveries", "g")
    assert found["head"] == data[:QUARANTINE_HEAD]


def test_what_waits_for_a_newer_release_holds_up_no_takeover(ledger: Ledger) -> None:
    place(ledger, range(60))
    held = ledger.take_orders("a", "dead", 100, 0)
    ledger.keep([(entry.stream, entry.id) for entry in held[:50]], "generators", "dead", deliveries=0)
    stream = ledger.keys.orders("a")
    assert ledger.redeliver(0, stream, "generators", "orders", "alive", 0, 10) == 10
    assert [entry.data for entry in ledger.take_orders("a", "alive", 100, 0, backlog=True)] == [
        entry.data for entry in held[50:]
    ]
    assert ledger.redeliver(0, stream, "generators", "orders", "newer", 60_000, 100) == 0
    ledger.keep([(entry.stream, entry.id) for entry in held[50:]], "generators", "alive")
    assert ledger.redeliver(0, stream, "generators", "orders", "newer", 0, 50) == 50


def test_what_waits_for_a_newer_release_waits_a_day_whoever_holds_it(ledger: Ledger) -> None:
    """Also when its one reader never reads it again; what this release can read is not touched, however old."""
    stream = ledger.keys.orders("a")
    old = ledger.clock.now() - NEWER_KEPT_MS - 60_000
    ids = [ledger.redis.xadd(stream, {"m": b"x"}, id=id).decode() for id in (f"{old}-0", f"{old}-1", "*")]
    assert [entry.id for entry in take_orders(ledger, "g")] == ids
    ledger.keep([(stream, ids[0]), (stream, ids[2])], "generators", "g", deliveries=0)
    assert redeliver(ledger, "g", 60_000) == 0
    assert ledger.counts() == {"refused:orders:newer_schema": 1}
    assert [id.decode() for id, _ in ledger.redis.xrange(stream)] == ids[1:]


def test_a_server_that_knows_nothing_is_no_fault(ledger: Ledger) -> None:
    """After a wipe every call finds nothing, and none raises."""
    entry = Entry(ledger.keys.orders("a"), "1-1", b"")
    ledger.keep([(entry.stream, entry.id)], "generators", "g")
    assert redeliver(ledger, "g", 0) == 0
    assert not ledger.finish(0, "generators", entry, "skipped")
    assert not ledger.refuse(0, "generators", entry, "orders", "malformed", "", "g")
    assert not publish(ledger, 0, Entry(ledger.raw(0), "1-1", b""))
    assert not ledger.replace("a", 1, "a/0", 1, ("a/0", 2, b""))
    for backlog in (False, True):
        assert ledger.take_orders("a", "g", 10, 0, backlog) == ledger.take_raw(0, "v", 10, 0, backlog) == []
        assert ledger.take_own("a", 0, backlog) == []
    books = ledger.books("a")
    assert (books.ordered, books.open, books.waiting, books.lost) == (0, 0, 0, 0)
    assert ledger.counts() == {"duplicates": 1}


def test_a_consumer_with_work_is_never_deleted(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.ledger.CONSUMER_RETIRED_MS", 0)
    place(ledger, range(2))
    take_orders(ledger, "busy")
    ledger.take_orders("a", "idle", 1, 0)
    deadline = time.monotonic() + 5
    while True:
        redeliver(ledger, "janitor", 60_000)
        names = {row["name"] for row in ledger.redis.xinfo_consumers(ledger.keys.orders("a"), "generators")}
        if b"idle" not in names or time.monotonic() > deadline:
            break
    assert names == {b"busy"}
    assert ledger.redis.xpending(ledger.keys.orders("a"), "generators")["pending"] == 2


def test_keys_of_a_target_share_a_slot_and_runs_never_meet() -> None:
    for shards in (1, 16):
        keys, other = Keys("run", shards), Keys("run-2", shards)
        for target in ("node-0", "eval-node-0-100", "x" * 60):
            shard = keys.shard_of(target)
            names = [
                keys.open(shard), keys.raw(shard, "local"), keys.counts(shard), keys.quarantine(shard),
                keys.orders(target), keys.own(target), keys.books(target), keys.policy(target),
                *(keys.authors(shard, tag) for tag in TAGS), *(keys.swarm(target, tag) for tag in TAGS),
            ]  # fmt: skip
            assert len(set(names)) == len(names)
            assert len({key_slot(name.encode()) for name in names}) == 1
            assert all(name.count("{") == name.count("}") == 1 for name in names)
            assert not set(names) & {other.orders(target), other.open(shard), other.books(target)}


@pytest.mark.parametrize("seed", range(5))
def test_books_balance_after_any_sequence(ledger: Ledger, seed: int) -> None:
    """A plain model of the books beside the real ones, after every one of 300 random steps."""
    random = Random(seed)
    ordered = trained = filtered = expired = 0
    open_, waiting = set(), {}

    def totals() -> tuple[int, int, int, int]:
        return ordered, trained, filtered, expired

    for round in range(1, 301):
        step = random.choice(["order", "answer", "publish", "settle", "replace", "refuse"])
        if step == "order":
            count = random.randrange(4)
            orders = [(f"a/{ordered + i}", 1000, b"%d" % (ordered + i)) for i in range(count)]
            open_ |= set(range(ordered, ordered + count))
            ordered += count
            ledger.settle("a", 1, round, totals(), NO_POLICY, orders=orders)
        elif step == "answer":
            for entry in ledger.take_orders("a", "g", 2, 0):
                ledger.answer("a", entry.id, entry.data)
        elif step in ("publish", "refuse"):
            for entry in ledger.take_raw(0, "v", 2, 0):
                number = int(entry.data)
                if step == "refuse":
                    ledger.refuse(0, "verifiers", entry, "raw", "malformed", "", "v")
                elif publish(ledger, number, entry):
                    open_.remove(number)
                    waiting[number] = None
                else:
                    assert number not in open_
        elif step == "settle":
            for entry in ledger.take_own("a", 0):
                waiting[int(entry.data.split()[1])] = entry.id
            ready = [number for number, id in waiting.items() if id is not None][:3]
            cut = random.randint(0, len(ready))
            trained, filtered = trained + cut, filtered + len(ready) - cut
            ledger.settle("a", 1, round, totals(), NO_POLICY, acks=[waiting.pop(number) for number in ready])
        elif open_:
            old = random.choice(sorted(open_))
            new = old if random.random() < 0.5 else ordered
            assert ledger.replace("a", 1, f"a/{old}", 1000, (f"a/{new}", 1000, b"%d" % new))
            if new != old:
                open_.remove(old)
                open_.add(new)
                ordered, expired = ordered + 1, expired + 1
        books = ledger.books("a")
        assert (books.ordered, books.trained, books.filtered, books.expired) == totals()
        assert (books.open, books.waiting, books.lost) == (len(open_), len(waiting), 0)
