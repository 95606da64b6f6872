"""The swarm: every author has the same say, whatever it sends; nothing is drawn twice, too old, or of another tag."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import count
from random import Random
from typing import Any

import pytest

from common.clock import Clock, RoundClock
from common.keys import Keys
from common.ledger import Ledger
from common.messages import TAGS, Order, Sampling, Tag, Version
from common.server import connect
from common.shared_streams import AUTHORS_FRESH_MS, LOOK_BACK, SwarmReader
from common.tasks import Question
from grapevine.server import EmbeddedServer

MAX_AGE = 600_000
NAMES = count()


class SetClock:
    """Milliseconds, turned by hand; entries are numbered by it."""

    unit = "ms"

    def __init__(self) -> None:
        self.at = 1_000_000

    def now(self) -> int:
        return self.at

    def stream_id(self) -> str:
        return f"{self.at}-*"


class Recorder:
    """A client that remembers which keys were asked for."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self.keys: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(key: str, *arguments: Any, **named: Any) -> Any:
            self.keys.append(key)
            return getattr(self._client, name)(key, *arguments, **named)

        return call


class Swarm:
    """A run of its own on the server, written to as verifiers write to it."""

    def __init__(self, url: str, clock: Clock) -> None:
        self.clock = clock
        self.keys = Keys(f"swarm-{next(NAMES)}", shards=3)
        self.ledger = Ledger(connect(url), self.keys, clock)
        self._numbers = count()

    def publish(self, author: str, tag: Tag, quota: int = 32, max_age: int = MAX_AGE) -> bytes:
        """One more group of this author; returns what it holds."""
        order = Order(
            id=f"{author}/{next(self._numbers)}", target=author, node=author, purpose="train",
            question=Question("gcd", {}, 0, 0), completions=2, sampling=Sampling(max_new_tokens=1), lowest=Version(1, 0),
            deadline=0, share=list(TAGS),
        )  # fmt: skip
        content = f"{order.id} {tag}".encode()
        self.ledger.redis.hset(self.keys.open(self.keys.shard_of(author)), order.id, 0)
        assert self.ledger.publish(order, "0-1", b"", tag, content, quota, max_age)
        return content

    def reader(self, me: str = "me", tags: tuple[Tag, ...] = TAGS, max_age: int = MAX_AGE, **more: Any) -> SwarmReader:
        client = more.pop("client", self.ledger.redis)
        return SwarmReader(client, self.keys, self.clock, me, tags, max_age, **more)


def drawn(reader: SwarmReader, random: Random) -> Iterator[bytes]:
    while (entry := reader.draw(random)) is not None:
        yield entry.data


@pytest.fixture
def clock() -> SetClock:
    return SetClock()


@pytest.fixture
def swarm(server: EmbeddedServer, clock: SetClock) -> Swarm:
    return Swarm(server.url, clock)


def test_authors_are_drawn_alike_whatever_their_volume(swarm: Swarm) -> None:
    tags: tuple[Tag, ...] = ("hard", "mixed", "easy")
    for author in range(8):
        for number in range(1 + 4 * author):
            swarm.publish(f"node-{author}", tags[number % (1 + author % 3)])
    random = Random(0)
    counts: Counter[str] = Counter()
    for _ in range(800):
        entry = swarm.reader().draw(random)
        assert entry is not None
        counts[entry.data.decode().partition("/")[0]] += 1
    # 100 expected each, standard deviation 9.4.
    assert len(counts) == 8
    assert all(50 < n < 150 for n in counts.values()), counts


def test_a_used_up_tag_does_not_cost_its_author_a_turn(swarm: Swarm) -> None:
    swarm.publish("a", "hard")
    for number in range(30):
        swarm.publish("a", "easy")
        swarm.publish("b", "hard" if number % 2 else "easy")
    random, first = Random(1), Counter[bytes]()
    for _ in range(400):
        reader = swarm.reader()
        while not any("swarm-hard:a" in name for name in reader.seen):
            assert reader.draw(random) is not None
        entry = reader.draw(random)
        assert entry is not None
        first[entry.data[:1]] += 1
    # 200 expected, standard deviation 10; giving up the turn with the tag would make it 150.
    assert first[b"a"] > 170, first


def test_everything_is_drawn_once_and_nothing_twice(swarm: Swarm) -> None:
    sent = [swarm.publish(f"node-{n % 3}", TAGS[n % 5]) for n in range(90)]
    assert LOOK_BACK < 90 / 15, "streams are longer than one look"
    reader = swarm.reader()
    assert sorted(drawn(reader, Random(2))) == sorted(sent)
    assert reader.draw(Random(2)) is None
    late = swarm.publish("node-1", "hard")
    assert list(drawn(reader, Random(2))) == [late]


def test_a_copy_of_a_group_is_not_new(swarm: Swarm) -> None:
    for author in ("a", "b"):
        swarm.publish(author, "hard")
    reader, random = swarm.reader(), Random(0)
    first, copy = reader.draw(random), reader.draw(random)
    assert first is not None
    assert copy is not None
    assert reader.is_new("a/0", first)
    assert not reader.is_new("a/0", copy)


def test_what_is_too_old_is_not_drawn_and_its_mark_goes(swarm: Swarm, clock: SetClock) -> None:
    swarm.publish("gone", "hard")
    swarm.publish("still", "hard")
    reader, other = swarm.reader(max_age=1000), swarm.reader(max_age=5000)
    assert reader.draw(Random(0)) is not None
    assert len(reader.seen) == 1
    clock.at += 1001
    fresh = swarm.publish("still", "hard")
    assert list(drawn(reader, Random(0))) == [fresh]
    assert len(reader.seen) == 1, "what can never be read again needs no mark"
    assert len(list(drawn(other, Random(0)))) == 3, "each reader has its own idea of age"
    clock.at += 1001
    assert reader.draw(Random(0)) is None


def test_an_author_who_comes_later_is_noticed(swarm: Swarm, clock: SetClock) -> None:
    reader = swarm.reader()
    assert reader.draw(Random(0)) is None
    sent = swarm.publish("new", "hard")
    clock.at += AUTHORS_FRESH_MS + 1
    assert list(drawn(reader, Random(0))) == [sent]


def test_ones_own_groups_are_left_out(swarm: Swarm) -> None:
    theirs = [swarm.publish(author, "hard") for author in ("me", "a", "b", "me")]
    assert sorted(drawn(swarm.reader(), Random(0))) == sorted(theirs[1:3])


def test_a_flooder_evicts_only_itself(swarm: Swarm) -> None:
    quiet = [swarm.publish("quiet", "hard", quota=4) for _ in range(4)]
    other_tag = swarm.publish("flooder", "easy", quota=4)
    flood = [swarm.publish("flooder", "hard", quota=4) for _ in range(300)]
    assert swarm.ledger.redis.xlen(swarm.keys.swarm("flooder", "hard")) == 4
    assert sorted(drawn(swarm.reader(), Random(0))) == sorted([*quiet, other_tag, *flood[-4:]])


def test_other_tags_are_never_read(swarm: Swarm) -> None:
    for number in range(20):
        swarm.publish(f"node-{number % 4}", TAGS[number % 5])
    recorder = Recorder(swarm.ledger.redis)
    contents = list(drawn(swarm.reader(tags=("hard", "easy"), client=recorder), Random(0)))
    assert Counter(content.split()[1] for content in contents) == {b"hard": 4, b"easy": 4}
    assert recorder.keys
    asked = {key.rpartition("}:")[2] for key in recorder.keys}
    wanted = [f"swarm-{tag}:node-{n}" for tag in ("hard", "easy") for n in range(4)] + ["authors:hard", "authors:easy"]
    assert asked == set(wanted)


def test_what_was_seen_is_handed_on(swarm: Swarm) -> None:
    sent = [swarm.publish(f"node-{n % 3}", "hard") for n in range(30)]
    before, random = swarm.reader(), Random(0)
    first = [entry.data for _ in range(13) if (entry := before.draw(random)) is not None]
    after = swarm.reader(seen=json.loads(json.dumps(before.seen)))
    assert sorted([*first, *drawn(after, random)]) == sorted(sent)


def test_in_lockstep_only_earlier_rounds_are_read(server: EmbeddedServer) -> None:
    clock = RoundClock()
    swarm = Swarm(server.url, clock)
    sent = []
    for clock.round in range(3):
        sent.append(swarm.publish("a", "hard", max_age=2))
    for clock.round, expected in ((0, []), (1, sent[:1]), (2, sent[1::-1]), (3, sent[:0:-1]), (9, [])):
        assert list(drawn(swarm.reader(max_age=2), Random(0))) == expected, clock.round


def test_a_stream_is_read_no_deeper_than_asked(swarm: Swarm) -> None:
    sent = [swarm.publish("a", "hard", quota=300) for _ in range(300)]
    assert list(drawn(swarm.reader(depth=2 * LOOK_BACK), Random(0))) == sent[: -2 * LOOK_BACK - 1 : -1]


def test_a_draw_costs_one_look_in_a_large_swarm(swarm: Swarm) -> None:
    for number in range(60):
        for _ in range(2 * LOOK_BACK):
            swarm.publish(f"node-{number}", "hard")
    recorder = Recorder(swarm.ledger.redis)
    reader, random = swarm.reader(tags=("hard",), client=recorder), Random(0)
    assert all(reader.draw(random) is not None for _ in range(30))
    looks = [key for key in recorder.keys if "swarm-hard" in key]
    # A second look only where the same author was drawn again and again.
    assert 30 <= len(looks) <= 33
