"""Ten thousand malformed or hostile messages on every stream: exact counts by reason, no worker harmed, work goes on."""

from __future__ import annotations

import math
import struct
import time
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from common.identity import Identity
from common.ledger import DELIVERIES_ALLOWED, NEWER_KEPT_MS, QUARANTINE_HEAD, QUARANTINE_KEPT
from common.messages import (
    MAX_MESSAGE_BYTES,
    SCHEMA,
    Envelope,
    Order,
    RawGroup,
    ScoredGroup,
    Span,
    SwarmGroup,
    Version,
    encode,
)
from common.settings import Settings
from grapevine.server import EmbeddedServer
from tests.chaos.__main__ import Fleet, settings_for
from tests.site import Site

MESSAGES = 10_000
Sealer = Identity | None


def envelope(data: bytes) -> Envelope:
    return msgspec.msgpack.decode(data, type=Envelope)


def changed(data: bytes, **fields: Any) -> bytes:
    return encode(msgspec.structs.replace(envelope(data), **fields))


def flipped(data: bytes, random: Random) -> bytes:
    place = random.randrange(len(data))
    return data[:place] + bytes([data[place] ^ (1 << random.randrange(8))]) + data[place + 1 :]


class Mutator:
    """Ways to spoil a real sealed message, each with the reason it must be refused for, worked out by hand."""

    def __init__(self, real: bytes, other_role: Identity, random: Random) -> None:
        self._real = real
        self._other = other_role
        self._random = random

    def any(self) -> tuple[str, bytes]:
        """One spoilt message: (reason, bytes)."""
        ways: list[Callable[[], tuple[str, bytes]]] = [
            self._noise, self._cut, self._tail, self._body, self._signature, self._unknown, self._role, self._old,
            self._field, self._types, self._empty,
        ]  # fmt: skip
        return self._random.choice(ways)()

    def _noise(self) -> tuple[str, bytes]:
        # 0xc1 is the one byte that msgpack never uses: whatever follows, it is no message.
        return "malformed", b"\xc1" + self._random.randbytes(self._random.randrange(200))

    def _cut(self) -> tuple[str, bytes]:
        return "malformed", self._real[: self._random.randrange(len(self._real))]

    def _tail(self) -> tuple[str, bytes]:
        return "malformed", self._real + self._random.randbytes(1 + self._random.randrange(9))

    def _body(self) -> tuple[str, bytes]:
        return "bad_signature", changed(self._real, body=flipped(envelope(self._real).body, self._random))

    def _signature(self) -> tuple[str, bytes]:
        return "bad_signature", changed(self._real, signature=flipped(envelope(self._real).signature, self._random))

    def _unknown(self) -> tuple[str, bytes]:
        return "unknown_key", changed(self._real, key=f"{self._random.getrandbits(64):016x}")

    def _role(self) -> tuple[str, bytes]:
        return "wrong_role", changed(self._real, key=self._other.key)

    def _old(self) -> tuple[str, bytes]:
        return "old_schema", changed(self._real, schema=-self._random.randrange(100))

    def _field(self) -> tuple[str, bytes]:
        fields = msgspec.to_builtins(envelope(self._real), builtin_types=(bytes,))
        return "malformed", msgspec.msgpack.encode({**fields, "extra": self._random.random()})

    def _types(self) -> tuple[str, bytes]:
        fields = msgspec.to_builtins(envelope(self._real), builtin_types=(bytes,))
        spoilt = self._random.choice(["key", "signature", "body"])
        return "malformed", msgspec.msgpack.encode({**fields, spoilt: self._random.choice([None, 7, [1], {"a": 1}, 1e308])})

    def _empty(self) -> tuple[str, bytes]:
        return "malformed", self._random.choice([b"", b"\x80", b"\x90", b"\xc0", b"\x01", b'{"schema": 1}'])


def inside(data: bytes, kind: type[Any], **fields: Any) -> Any:
    """The message in an envelope with some fields changed."""
    return msgspec.structs.replace(msgspec.msgpack.decode(envelope(data).body, type=kind), **fields)


def sealed_raw(identity: Identity, kind: str, message: dict[str, Any]) -> bytes:
    """A body that no struct of ours could hold, signed by someone who may sign."""
    from common.identity import _digest

    body = msgspec.msgpack.encode(message)
    return encode(Envelope(SCHEMA, identity.key, identity._private.sign(_digest(kind.encode(), body)), body))


def insider_orders(real: bytes, node: Identity) -> list[tuple[str, bytes]]:
    """Orders signed by a registered node that break the rules inside."""
    order = inside(real, Order)
    plain = msgspec.to_builtins(order)
    return [
        ("malformed", node.seal(msgspec.structs.replace(order, target="node-1"))),
        ("wrong_node", node.seal(msgspec.structs.replace(order, node="node-1", target="node-1", id="node-1/7"))),
        ("malformed", sealed_raw(node, "order", {**plain, "completions": 0})),
        ("malformed", sealed_raw(node, "order", {**plain, "completions": 10**9})),
        ("malformed", sealed_raw(node, "order", {**plain, "id": "../../etc/passwd"})),
        ("malformed", sealed_raw(node, "order", {**plain, "purpose": "eval()"})),
        ("malformed", sealed_raw(node, "order", {**plain, "lowest": [1]})),
        ("malformed", sealed_raw(node, "order", {**plain, "id": f"{order.id}\n"})),
        ("malformed", sealed_raw(node, "order", {**plain, "id": order.id.replace("/", "/0")})),
        (
            "malformed",
            sealed_raw(
                node, "order", {**plain, "question": {**plain["question"], "settings": {"a": {(1,): 2}}, "seed": "1"}}
            ),
        ),
        ("malformed", node.seal(msgspec.structs.replace(order, purpose="eval"))),
        ("malformed", node.seal(msgspec.structs.replace(order, target="eval-node-0-1", id="eval-node-0-1/0"))),
        (
            "malformed",
            node.seal(msgspec.structs.replace(order, target="eval-node-0-1-2", id="eval-node-0-1-2/0", purpose="eval")),
        ),
        ("malformed", sealed_raw(node, "order", {})),
    ]


def insider_raw(real: bytes, generator: Identity, node: Identity, foreign: Identity) -> list[tuple[str, bytes]]:
    """Raw groups signed by a registered generator that break the rules inside."""
    group = inside(real, RawGroup)
    one = group.completions[0]
    order = inside(group.order, Order)

    def spoilt(**fields: Any) -> bytes:
        worse = [msgspec.structs.replace(one, **fields), *group.completions[1:]]
        return generator.seal(msgspec.structs.replace(group, completions=worse))

    def reordered(**fields: Any) -> bytes:
        return generator.seal(msgspec.structs.replace(group, order=node.seal(msgspec.structs.replace(order, **fields))))

    plain = msgspec.to_builtins(group, builtin_types=(bytes,))
    invalid = msgspec.msgpack.encode(plain).replace(b"<answer>", b"\xed\xa0\x80swer>", 1)
    from common.identity import _digest

    surrogate = Envelope(SCHEMA, generator.key, generator._private.sign(_digest(b"raw", invalid)), invalid)
    return [
        ("wrong_count", generator.seal(msgspec.structs.replace(group, completions=group.completions[:1]))),
        ("malformed", spoilt(logprob=math.nan)),
        ("malformed", spoilt(logprob=-math.inf)),
        ("malformed", spoilt(tokens=one.tokens + 1)),
        ("malformed", spoilt(logprobs=struct.pack("<f", math.nan) + one.logprobs[4:])),
        ("malformed", spoilt(logprobs=one.logprobs[:-4] + struct.pack("<f", -math.inf))),
        ("malformed", spoilt(token_ids=struct.pack("<i", -1) + one.token_ids[4:])),
        ("malformed", spoilt(token_ids=b"")),
        ("malformed", spoilt(spans=[])),
        ("malformed", spoilt(spans=[Span(0, 1, Version(1, 0)), Span(2, one.tokens, Version(1, 0))])),
        ("stale", spoilt(spans=[Span(0, one.tokens, Version(0, 0))])),
        ("too_long", reordered(sampling=msgspec.structs.replace(order.sampling, max_new_tokens=1))),
        ("held_out", reordered(purpose="eval", target="eval-node-0-1", id="eval-node-0-1/0")),
        ("foreign_site", foreign.seal(group)),
        ("bad_signature", generator.seal(msgspec.structs.replace(group, order=flipped_body(group.order)))),
        ("wrong_role", generator.seal(msgspec.structs.replace(group, order=changed(group.order, key=generator.key)))),
        ("malformed", encode(surrogate)),
    ]


def flipped_body(data: bytes) -> bytes:
    return changed(data, body=flipped(envelope(data).body, Random(0)))


def insider_scored(real: bytes, verifier: Identity, foreign: Identity) -> list[tuple[str, bytes]]:
    """Scored groups signed by a registered verifier that nobody ordered or that do not add up."""
    group = inside(real, ScoredGroup)
    return [
        ("foreign_site", foreign.seal(group)),
        ("unknown_order", verifier.seal(msgspec.structs.replace(group, order_id="node-0/999999999"))),
        ("unknown_order", verifier.seal(msgspec.structs.replace(group, order_id="node-1/0"))),
        ("malformed", verifier.seal(msgspec.structs.replace(group, components=group.components[:1]))),
        ("malformed", verifier.seal(msgspec.structs.replace(group, completions=[], components=[]))),
        ("malformed", verifier.seal(msgspec.structs.replace(group, order_id=f"{group.order_id}\n"))),
        *out_of_range(group, verifier),
    ]


def out_of_range(group: ScoredGroup | SwarmGroup, verifier: Identity) -> list[tuple[str, bytes]]:
    """Reward components that would spoil whatever is averaged over them."""
    first, *others = group.components
    worse = [msgspec.structs.replace(first, accuracy=value) for value in (math.nan, math.inf, -0.5, 1e300)]
    return [("malformed", verifier.seal(msgspec.structs.replace(group, components=[one, *others]))) for one in worse]


def insider_swarm(real: bytes, verifier: Identity) -> list[tuple[str, bytes]]:
    """Swarm groups signed by a registered verifier that may not be learnt from."""
    group = inside(real, SwarmGroup)
    first, *others = group.completions

    def spoilt(**fields: Any) -> bytes:
        worse = [msgspec.structs.replace(first, **fields), *others]
        return verifier.seal(msgspec.structs.replace(group, completions=worse))

    held_out = next(text for text in map(str, range(1000)) if is_held_out_text(text))
    return [
        ("misplaced", verifier.seal(msgspec.structs.replace(group, author="node-0"))),
        ("misplaced", verifier.seal(msgspec.structs.replace(group, tag="hard" if group.tag != "hard" else "easy"))),
        ("held_out", verifier.seal(msgspec.structs.replace(group, question_text=held_out))),
        ("malformed", verifier.seal(msgspec.structs.replace(group, components=[]))),
        (
            "malformed",
            verifier.seal(
                msgspec.structs.replace(group, completions=group.completions[:1], components=group.components[:1])
            ),
        ),
        ("malformed", verifier.seal(msgspec.structs.replace(group, question_text=""))),
        ("malformed", spoilt(logprob=math.nan)),
        ("malformed", spoilt(logprob=math.inf)),
        *out_of_range(group, verifier),
        ("malformed", verifier.seal(msgspec.structs.replace(group, completions=[], components=[]))),
    ]


def is_held_out_text(text: str) -> bool:
    from common.tasks import is_held_out

    return is_held_out(text)


def flood(site: Site, stream: str, real: bytes, insider: list[tuple[str, bytes]], count: int) -> Counter[str]:
    """Append `count` hostile messages to a stream; the reasons they must be refused for."""
    random = Random(stream)
    other = site.identities["generator" if "raw" not in stream else "verifier"]
    mutator = Mutator(real, other, random)
    expected: Counter[str] = Counter()
    pipeline = site.ledger.redis.pipeline(transaction=False)
    for number in range(count):
        reason, data = random.choice(insider) if number % 4 == 0 else mutator.any()
        expected[reason] += 1
        pipeline.xadd(stream, {"m": data})
    pipeline.execute()
    return expected


@pytest.fixture
def site(tmp_path: Path, server: EmbeddedServer, request: pytest.FixtureRequest) -> Site:
    # A run's name is short; the parameters at the end of a test's name must still tell two runs apart.
    site = Site(tmp_path, server.url, f"hostile-{zlib.crc32(request.node.name.encode()):08x}")
    site.learn()
    return site


def check_afterwards(site: Site) -> None:
    """The quarantine is bounded, nothing is lost, honest work goes on."""
    samples = site.ledger.redis.lrange(site.ledger.keys.quarantine(0), 0, -1)
    assert len(samples) == QUARANTINE_KEPT
    assert all(len(msgspec.msgpack.decode(sample)["head"]) <= QUARANTINE_HEAD for sample in samples)
    before = [learner.facts()["round"] for learner in site.learners]
    site.learn(2)
    assert [learner.facts()["round"] for learner in site.learners] == [round + 2 for round in before]
    assert [site.ledger.books(node).lost for node in site.settings.node_names()] == [0, 0]


def test_hostile_orders(site: Site) -> None:
    stream = site.ledger.keys.orders("node-0")
    site.order()
    (real, *_) = [entry.data for entry in site.entries(stream)]
    expected = flood(site, stream, real, insider_orders(real, site.identities["node"]), MESSAGES - 1)
    site.ledger.redis.xadd(stream, {"m": b"\0" * (MAX_MESSAGE_BYTES + 1)})
    expected["too_large"] += 1
    site.generate()
    assert site.refused("orders") == expected
    assert site.ledger.redis.xlen(stream) == 0
    check_afterwards(site)


def test_hostile_raw_groups(site: Site) -> None:
    stream = site.ledger.raw(0)
    site.order()
    site.generate()
    (real, *_) = [entry.data for entry in site.entries(stream)]
    foreign = Identity.fresh("generator", "elsewhere", "another-site")
    site.directory.register(foreign)
    insider = insider_raw(real, site.identities["generator"], site.identities["node"], foreign)
    expected = flood(site, stream, real, insider, MESSAGES - 1)
    site.ledger.redis.xadd(stream, {"m": b"\0" * (MAX_MESSAGE_BYTES + 1)})
    expected["too_large"] += 1
    site.verify()
    assert site.refused("raw") == expected
    assert site.ledger.redis.xlen(stream) == 0
    check_afterwards(site)


def test_hostile_scored_groups(site: Site) -> None:
    stream = site.ledger.keys.own("node-0")
    site.order()
    site.generate()
    site.verify()
    (real, *_) = [entry.data for entry in site.entries(stream)]
    foreign = Identity.fresh("verifier", "elsewhere", "another-site")
    site.directory.register(foreign)
    insider = insider_scored(real, site.identities["verifier"], foreign)
    expected = flood(site, stream, real, insider, MESSAGES - 1)
    site.ledger.redis.xadd(stream, {"m": b"\0" * (MAX_MESSAGE_BYTES + 1)})
    expected["too_large"] += 1
    while sum(site.refused("own").values()) < MESSAGES:
        site.learn()
    assert site.refused("own") == expected
    check_afterwards(site)


def test_hostile_swarm_groups(site: Site) -> None:
    site.learn(3)
    keys, redis = site.ledger.keys, site.ledger.redis
    tag, real = next(
        (tag, entries[-1].data)
        for tag in site.settings.node.mix.tags
        if (entries := site.entries(keys.swarm("node-1", tag)))
    )
    reader, depth = site.learners[0], site.settings.swarm.quota
    expected: Counter[str] = Counter()
    insider = insider_swarm(real, site.identities["verifier"])
    while (sent := sum(expected.values())) < MESSAGES:
        # A stream holds its author's quota, and what the author shares meanwhile evicts the oldest: half at a time.
        stream = keys.swarm("node-1", tag)
        redis.delete(stream)
        expected += flood(site, stream, real, insider, min(depth // 2, MESSAGES - sent))
        redis.zadd(keys.authors(0, tag), {"node-1": site.ledger.clock.now()})
        reader._swarm._asked = float("-inf")  # the list of authors is kept for a second
        while sum(site.refused("swarm").values()) < sum(expected.values()):
            site.generate()
            site.verify()
            reader.step()
            # Only the first node reads; what the second shares meanwhile would be drawn before the flood.
            for shared in site.settings.node.mix.tags:
                if shared != tag:
                    redis.delete(keys.swarm("node-1", shared))
    assert site.refused("swarm") == expected
    check_afterwards(site)


def test_replays_are_counted_and_change_nothing(site: Site) -> None:
    keys, redis = site.ledger.keys, site.ledger.redis
    site.order()
    orders = [entry.data for entry in site.entries(keys.orders("node-0"))]
    site.generate()
    raw = [entry.data for entry in site.entries(site.ledger.raw(0))]
    site.verify()
    own = [entry.data for entry in site.entries(keys.own("node-0"))]
    before = site.ledger.counts()
    for _ in range(100):
        for data in orders:
            redis.xadd(keys.orders("node-0"), {"m": data})
        for data in raw:
            redis.xadd(site.ledger.raw(0), {"m": data})
        for data in own:
            redis.xadd(keys.own("node-0"), {"m": data})
    site.generate()
    site.verify()
    site.learners[0].step()
    after = site.ledger.counts()
    assert after["skipped"] - before.get("skipped", 0) == 100 * len(orders)
    assert after["duplicates"] - before.get("duplicates", 0) == 100 * (len(raw) + len(own))
    assert site.ledger.books("node-0").lost == 0
    assert site.refused("orders") == site.refused("raw") == site.refused("own") == {}


def test_a_copied_swarm_group_is_drawn_once(site: Site) -> None:
    keys, redis = site.ledger.keys, site.ledger.redis
    site.learn(2)
    tag, real = next(
        (tag, entries[-1].data)
        for tag in site.settings.node.mix.tags
        if (entries := site.entries(keys.swarm("node-1", tag)))
    )
    for other in site.settings.node.mix.tags:
        redis.delete(keys.swarm("node-1", other))
    for _ in range(20):
        redis.xadd(keys.swarm("node-1", tag), {"m": real})
    redis.zadd(keys.authors(0, tag), {"node-1": site.ledger.clock.now()})
    site.learners[0]._swarm._asked = float("-inf")  # the list of authors is kept for a second
    before = site.learners[0].facts()["round"]
    while site.learners[0].facts()["round"] < before + 3:
        site.generate()
        site.verify()
        site.learners[0].step()
    assert site.refused("swarm").get("replayed", 0) >= 19


def test_a_newer_schema_is_left_for_a_day(site: Site) -> None:
    redis = site.ledger.redis
    site.order()
    site.generate()
    (real, *_) = [entry.data for entry in site.entries(site.ledger.raw(0))]
    site.verify()
    newer = changed(real, schema=SCHEMA + 1)
    # A stream takes ids in ascending order only: the old entry goes first, into a stream begun anew.
    redis.delete(site.ledger.raw(0))
    redis.xgroup_create(site.ledger.raw(0), "verifiers", id="0", mkstream=True)
    redis.xadd(site.ledger.raw(0), {"m": newer}, id=f"{site.ledger.clock.now() - NEWER_KEPT_MS - 60_000}-0")
    young = redis.xadd(site.ledger.raw(0), {"m": newer})
    site.verify()
    assert site.refused("raw") == {"newer_schema": 1}
    (pending,) = redis.xpending_range(site.ledger.raw(0), "verifiers", "-", "+", 10)
    assert pending["message_id"] == young
    assert pending["times_delivered"] == 0, "waiting for a newer release does not wear a message out"
    site.learn()


@pytest.mark.parametrize("stream", ["orders", "raw", "own"])
def test_newer_messages_hide_nothing_behind_them(site: Site, stream: str) -> None:
    """More than one page of them, and honest work behind: taken, then forgotten by a crash, then read again."""
    keys, redis, ledger = site.ledger.keys, site.ledger.redis, site.ledger
    name, group = {
        "orders": (keys.orders("node-0"), "generators"),
        "raw": (site.ledger.raw(0), "verifiers"),
        "own": (keys.own("node-0"), "learner"),
    }[stream]
    newer = encode(Envelope(SCHEMA + 1, "?", b"", b""))
    pipeline = redis.pipeline(transaction=False)
    for _ in range(2100):
        pipeline.xadd(name, {"m": newer})
    pipeline.execute()
    learner = site.learners[0]
    while not redis.xlen(keys.orders("node-0")) - 2100 * (stream == "orders"):
        site.verify()
        learner.step()
    if stream == "orders":
        ledger.take_orders("node-0", "g", 5000, 0)
        site.generator.rejoin()
    site.generator.pool.serve("node-0")
    site.generator.step()
    if stream == "raw":
        assert ledger.take_raw(0, "v", 5000, 0)
        site.verifier.rejoin()
    for _ in range(3):
        site.verifier.step()
    if stream == "own":
        for _ in range(3):
            ledger.take_own("node-0", 0)
        learner.rejoin()
    before = learner.facts()["round"]
    learner.step()
    assert learner.facts()["round"] == before + 1
    waiting = redis.xpending_range(name, group, "-", "+", 3000)
    assert sum(one["times_delivered"] == 0 for one in waiting) == 2100
    assert site.refused(stream) == {}


def test_an_answer_to_another_question_is_asked_again(site: Site) -> None:
    """A verifier's key on a group whose number was ordered, but not with this question (here one that nobody can build)."""
    keys, redis, learner = site.ledger.keys, site.ledger.redis, site.learners[0]
    site.order()
    site.generate()
    site.verify()
    first, *_ = site.entries(keys.own("node-0"))
    group = inside(first.data, ScoredGroup)
    question = msgspec.structs.replace(group.question, task="no-such-task")
    redis.delete(keys.own("node-0"))
    redis.xadd(
        keys.own("node-0"), {"m": site.identities["verifier"].seal(msgspec.structs.replace(group, question=question))}
    )
    learner.rejoin()
    learner.step()
    assert site.refused("own") == {"wrong_question": 1}
    assert site.ledger.still_open("node-0", [group.order_id]) == [False]
    # Found nowhere twice: asked again.
    for _ in range(3):
        learner._tended = float("-inf")
        learner.step()
    assert site.ledger.still_open("node-0", [group.order_id]) == [True]
    site.learn(3)
    assert site.ledger.books("node-0").lost == 0


def test_a_group_too_large_once_scored_is_refused_and_stays_open(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.order()
    site.generate()
    count = site.ledger.redis.xlen(site.ledger.raw(0))
    before = site.ledger.books("node-0")
    monkeypatch.setattr("verifiers.verifier.MAX_MESSAGE_BYTES", 300)
    site.verify()
    assert site.refused("raw") == {"too_large": count}
    after = site.ledger.books("node-0")
    assert (after.open, after.waiting, after.lost) == (before.open, before.waiting, 0)


def test_waiting_for_a_policy_wears_no_order_out(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("generators.generator.IDLE_WAIT_MS", 1)
    keys, redis = site.ledger.keys, site.ledger.redis
    site.order()
    announced = redis.getdel(keys.policy("node-0"))
    for _ in range(2 * DELIVERIES_ALLOWED):
        site.generator.pool.serve("node-0")
        site.generator.step()
    waiting = site.directory.waiting_orders(["node-0"])["node-0"]
    assert waiting and site.directory.untaken_orders(["node-0"])["node-0"] == waiting, "nothing was taken, or it came back"
    redis.set(keys.policy("node-0"), announced)
    site.learn()
    assert site.refused("orders") == {}


def test_no_worker_restarts_under_fire(tmp_path: Path, server: EmbeddedServer) -> None:
    """Real processes, ten thousand hostile messages on each work stream while they train."""
    settings = settings_for(tmp_path, server.url, nodes=2).model_copy(update={"run": "under-fire", "shards": 1})
    settings = Settings.model_validate(settings.model_dump())
    settings.run_folder.mkdir(parents=True)
    fleet = Fleet(settings, settings.node_names(), generators=1, verifiers=1)
    fleet.tend()
    from common.run import open_run

    ledger, directory = open_run(settings)
    generator = Identity.fresh("generator", "real", "local")
    directory.register(generator)
    deadline = time.monotonic() + 60
    while min(ledger.books(node).round for node in settings.node_names()) < 2:
        assert time.monotonic() < deadline, "the fleet never started"
        fleet.tend()
        time.sleep(0.05)
    streams = {"orders": ledger.keys.orders("node-0"), "raw": ledger.raw(0), "own": ledger.keys.own("node-0")}
    for label, stream in streams.items():
        random = Random(label)
        pipeline = ledger.redis.pipeline(transaction=False)
        for _ in range(MESSAGES):
            pipeline.xadd(stream, {"m": b"\xc1" + random.randbytes(50)})
        pipeline.execute()
    while True:
        counts = ledger.counts()
        if all(counts.get(f"refused:{label}:malformed", 0) >= MESSAGES for label in streams):
            break
        assert time.monotonic() < deadline, counts
        fleet.tend()
        time.sleep(0.05)
    goal = ledger.books("node-0").round + 3
    while ledger.books("node-0").round < goal:
        assert time.monotonic() < deadline
        fleet.tend()
        time.sleep(0.05)
    assert fleet.restarts == 0
    assert {label: ledger.counts()[f"refused:{label}:malformed"] for label in streams} == dict.fromkeys(streams, MESSAGES)
    assert fleet.end() == []
    assert ledger.books("node-0").lost == 0
