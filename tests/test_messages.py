"""Messages survive the wire unchanged; anything else is refused with a reason."""

from __future__ import annotations

import math
import struct
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from common.identity import Identity, unseal
from common.messages import (
    SCHEMA,
    TAGS,
    Completion,
    Envelope,
    Name,
    NewerSchema,
    Order,
    OrderId,
    RawGroup,
    Refused,
    Sampling,
    ScoredGroup,
    SharedCompletion,
    Span,
    SwarmGroup,
    Version,
    decode,
    encode,
    open_envelope,
    tag_of,
)
from common.tasks import Components, Question

texts = st.text(st.characters(codec="utf-8"), max_size=40)
names = st.from_regex(r"[a-z0-9]([a-z0-9.-]{0,20}[a-z0-9])?", fullmatch=True)
counts = st.integers(0, 2**40)
logprobs = st.floats(-1e6, 0)
token_logprobs = st.floats(width=32, allow_nan=False, allow_infinity=False)
versions = st.builds(Version, counts, counts)
questions = st.builds(
    Question, texts, st.dictionaries(texts, st.integers(-9, 9) | texts, max_size=3), counts, st.integers(0, 2**20 - 1)
)
samplings = st.builds(Sampling, max_new_tokens=st.integers(1, 9999), temperature=st.floats(0, 10), top_p=st.floats(0.01, 1))
components = st.builds(Components, *[st.floats(0, 1)] * 3)
finishes = st.sampled_from(["stop", "length"])
tags = st.sampled_from(TAGS)


@st.composite
def orders(draw: Any) -> Order:
    node = draw(names)
    purpose = draw(st.sampled_from(["train", "eval"]))
    target = node if purpose == "train" else f"eval-{node}-3"
    return Order(
        id=f"{target}/{draw(st.integers(0, 10**9))}",
        target=target,
        node=node,
        purpose=purpose,
        question=draw(questions),
        completions=draw(st.integers(1, 1024)),
        sampling=draw(samplings),
        lowest=draw(versions),
        deadline=draw(counts),
        share=draw(st.lists(tags, unique=True)),
    )


@st.composite
def completions(draw: Any) -> Completion:
    tokens = draw(st.integers(1, 9))
    cut = draw(st.integers(0, tokens - 1))
    edges = sorted({0, cut, tokens})
    known = draw(st.booleans())
    return Completion(
        text=draw(texts),
        token_ids=struct.pack(f"<{tokens}i", *draw(st.lists(st.integers(0, 2**31 - 1), min_size=tokens, max_size=tokens))),
        logprobs=struct.pack(f"<{tokens}f", *draw(st.lists(logprobs, min_size=tokens, max_size=tokens))) if known else b"",
        tokens=tokens,
        logprob=draw(logprobs) if known else None,
        finish_reason=draw(finishes),
        spans=[Span(a, b, draw(versions)) for a, b in pairwise(edges)],
    )


raw_groups = st.builds(
    RawGroup, order=st.binary(max_size=99), completions=st.lists(completions(), min_size=1, max_size=3), model=texts
)


@st.composite
def scored_groups(draw: Any) -> ScoredGroup:
    group = draw(st.lists(completions(), min_size=1, max_size=3))
    node = draw(names)
    return ScoredGroup(
        order_id=f"{node}/{draw(counts) % 10**9}",
        node=node,
        purpose="train",
        question=draw(questions),
        completions=group,
        components=[draw(components) for _ in group],
        tag=draw(tags),
        model=draw(texts),
        generator=draw(texts),
    )


@st.composite
def swarm_groups(draw: Any) -> SwarmGroup:
    shared = st.builds(SharedCompletion, text=texts, tokens=counts, logprob=st.none() | logprobs, finish_reason=finishes)
    group = draw(st.lists(shared, min_size=1, max_size=3))
    author = draw(names)
    return SwarmGroup(
        order_id=f"{author}/{draw(counts) % 10**9}",
        author=author,
        question=draw(questions),
        question_text=draw(texts.filter(bool)),
        completions=group,
        components=[draw(components) for _ in group],
        tag=draw(tags),
        model=draw(texts),
        version=draw(versions),
    )


ROLES = ("node", "generator", "verifier")
identities = {role: Identity.fresh(role, f"a-{role}", "site", seed=role.encode().ljust(32)) for role in ROLES}
records = {identity.key: identity.record for identity in identities.values()}


@settings(deadline=None)
@given(orders() | raw_groups | scored_groups() | swarm_groups())
def test_every_message_comes_back_as_it_was(message: Any) -> None:
    signer = {Order: "node", RawGroup: "generator"}.get(type(message), "verifier")
    back, record = unseal(type(message), identities[signer].seal(message), records.get)
    assert back == message
    assert record.name == f"a-{signer}"


@settings(deadline=None)
@given(orders(), st.sampled_from([RawGroup, ScoredGroup, SwarmGroup]))
def test_a_signature_over_one_kind_is_none_over_another(order: Order, kind: type[Any]) -> None:
    role = "generator" if kind is RawGroup else "verifier"
    everyone = {key: msgspec.structs.replace(record, role=role) for key, record in records.items()}
    with pytest.raises(Refused, match="bad_signature"):
        unseal(kind, identities["node"].seal(order), everyone.get)


@settings(deadline=None, max_examples=400)
@given(st.binary(max_size=200))
def test_any_bytes_are_refused_and_nothing_worse(data: bytes) -> None:
    for kind in (Order, RawGroup, ScoredGroup, SwarmGroup):
        with pytest.raises((Refused, NewerSchema)):
            unseal(kind, data, records.get)
        with pytest.raises(Refused):
            decode(msgspec.msgpack.Decoder(kind), data)


def test_schemas() -> None:
    for schema in (SCHEMA + 1, 2**31):
        with pytest.raises(NewerSchema):
            open_envelope(msgspec.msgpack.encode({"schema": schema, "whatever": "comes", "later": [1, 2]}))
    with pytest.raises(Refused, match="old_schema"):
        open_envelope(encode(Envelope(0, "", b"", b"")))
    assert open_envelope(encode(Envelope(SCHEMA, "k", b"s", b"b"))).key == "k"


@given(st.lists(st.floats(0, 1) | st.sampled_from([0.0, 1.0, 1 - 2**-53, 5e-324]), min_size=1, max_size=16))
@example([1.0, 1 - 2**-53])
@example([5e-324, 0.0])
def test_tags_follow_the_mean(accuracies: list[float]) -> None:
    tag, mean = tag_of(accuracies), sum(accuracies) / len(accuracies)
    assert (tag == "failed") == (set(accuracies) == {0.0})
    assert (tag == "solved") == (set(accuracies) == {1.0})
    if tag not in ("failed", "solved"):
        assert tag == ("hard" if mean <= 1 / 3 else "mixed" if mean <= 2 / 3 else "easy")
    assert tag_of(accuracies[::-1]) == tag or len(set(accuracies)) > 1, "the order matters at most to the last digit"


class Named(msgspec.Struct):
    name: Name
    id: OrderId


@given(names, st.integers(0, 10**15 - 1), st.text(max_size=3))
def test_a_name_has_one_spelling(name: str, number: int, tail: str) -> None:
    """Ids are compared as text and read as numbers: the two must agree."""
    fits = msgspec.convert({"name": name, "id": f"{name}/{number}"}, Named)
    assert int(fits.id.rpartition("/")[2]) == number
    for worse in (f"{name}/0{number}", f"{name}/{number}\n", f"{name}/+{number}", f"{name}/{number}_0", f"{name}/-1", name):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert({"name": name, "id": worse}, Named)
    for worse in (f"{name}\n", f"{name}:{tail}", f"{name}{{}}", f"{name}-", f"-{name}", name.upper() + "A", ""):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert({"name": worse, "id": f"{name}/0"}, Named)


@settings(deadline=None)
@given(scored_groups() | swarm_groups(), st.sampled_from([math.nan, math.inf, -math.inf, -0.1, 1.1, "1", None]), st.data())
def test_rewards_out_of_range_are_refused(group: Any, value: Any, data: st.DataObject) -> None:
    plain = msgspec.to_builtins(group, builtin_types=(bytes,))
    one = data.draw(st.sampled_from(plain["components"]))
    one[data.draw(st.sampled_from(["accuracy", "format", "length"]))] = value
    with pytest.raises(Refused, match="malformed"):
        decode(msgspec.msgpack.Decoder(type(group)), msgspec.msgpack.encode(plain))


@settings(deadline=None)
@given(
    st.one_of(orders(), raw_groups, scored_groups(), swarm_groups()),
    st.recursive(st.none() | st.booleans() | st.floats() | st.integers(-(2**63), 2**64 - 1) | texts | st.binary(max_size=8),
                 lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3), max_leaves=5),
    st.data(),
)  # fmt: skip
def test_any_value_in_any_field_is_decoded_or_refused(message: Any, value: Any, data: st.DataObject) -> None:
    """What is decoded encodes again to the same message: nothing was repaired on the way."""
    plain = msgspec.to_builtins(message, builtin_types=(bytes,))
    place: Any = plain
    while True:
        key = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
        if not isinstance(place[key], dict | list) or not place[key] or data.draw(st.booleans()):
            break
        place = place[key]
    place[key] = value
    decoder = msgspec.msgpack.Decoder(type(message))
    try:
        back = decode(decoder, msgspec.msgpack.encode(plain))
    except Refused as refusal:
        assert refusal.reason == "malformed"
    else:
        assert encode(decode(decoder, encode(back))) == encode(back)


@settings(deadline=None)
@given(st.one_of(orders(), raw_groups, scored_groups(), swarm_groups()), st.data())
def test_a_spoilt_envelope_never_opens(message: Any, data: st.DataObject) -> None:
    """One flipped bit anywhere, or a cut: refused, or (the bit was the schema's) left for a newer release."""
    signer = {Order: "node", RawGroup: "generator"}.get(type(message), "verifier")
    real = identities[signer].seal(message)
    place = data.draw(st.integers(0, 8 * len(real) - 1))
    flipped = bytearray(real)
    flipped[place // 8] ^= 1 << place % 8
    with pytest.raises((Refused, NewerSchema)):
        unseal(type(message), bytes(flipped), records.get)
    with pytest.raises(Refused, match="malformed"):
        unseal(type(message), real[: place // 8], records.get)
