"""Which groups a round trains on: the own filter, the draw from the swarm, and what foreign completions are worth."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.clock import RoundClock
from common.messages import TAGS, Completion, ScoredGroup, SharedCompletion, Span, SwarmGroup, Tag, Version, tag_of
from common.run import open_run
from common.sections import NodeSettings
from common.settings import Settings
from common.shared_streams import SwarmReader
from common.tasks import Components, Question
from grapevine.server import EmbeddedServer
from learners.advantages import group_advantages, is_informative
from learners.auto_mix import decide
from learners.capability import MIDDLES, accuracy, capabilities
from learners.journal import read
from learners.mix import own_batch, own_samples, swarm_samples, to_refill
from learners.orders import Arrived
from tests.site import Site

QUESTION = Question("gcd", {}, 0, 0)


def node(**tree: Any) -> NodeSettings:
    return NodeSettings.model_validate(tree)


def completion(logprob: float | None = 0.0) -> Completion:
    return Completion(
        text="<answer>1</answer>", token_ids=b"\1\0\0\0", logprobs=b"" if logprob is None else b"\0\0\0\0", tokens=1,
        logprob=logprob, finish_reason="stop", spans=[Span(0, 1, Version(1, 1))],
    )  # fmt: skip


def arrived(number: int, accuracies: list[float]) -> Arrived:
    group = ScoredGroup(
        order_id=f"me/{number}", node="me", purpose="train", question=QUESTION, completions=[completion()] * len(accuracies),
        components=[Components(accuracy, 1.0, 1.0) for accuracy in accuracies], tag="mixed", model="m", generator="g",
    )  # fmt: skip
    return Arrived(number, f"0-{number}", group)


def foreign(accuracies: list[float], logprob: float | None = -2.0) -> SwarmGroup:
    return SwarmGroup(
        order_id="other/0", author="other", question=QUESTION, question_text="1 + 1?",
        completions=[SharedCompletion(text="<answer>1</answer>", tokens=4, logprob=logprob, finish_reason="stop")]
        * len(accuracies),
        components=[Components(accuracy, 1.0, 1.0) for accuracy in accuracies], tag="mixed", model="m",
        version=Version(1, 1),
    )  # fmt: skip


ALIKE, UNLIKE = [1.0, 1.0], [0.0, 1.0]


@pytest.mark.parametrize(
    ("own_filter", "groups", "numbers", "trained"),
    [
        ("none", [ALIKE, UNLIKE, UNLIKE], [0, 1], [0, 1]),
        ("drop", [ALIKE, UNLIKE, UNLIKE], [0, 1], [1]),
        ("drop", [ALIKE, ALIKE], [0, 1], []),
        ("refill", [ALIKE, UNLIKE, UNLIKE, UNLIKE], [0, 1, 2], [1, 2]),
        ("refill", [UNLIKE, UNLIKE, UNLIKE], [0, 1], [0, 1]),
        ("refill", [ALIKE] * 9, [0, 1, 2, 3, 4, 5], []),
        ("refill", [ALIKE, ALIKE, UNLIKE], None, None),
        ("none", [ALIKE], None, None),
    ],
)
def test_own_filters(
    own_filter: str, groups: list[list[float]], numbers: list[int] | None, trained: list[int] | None
) -> None:
    settings = node(mix={"own": 2, "own_filter": own_filter, "refill_most": 3})
    batch = own_batch([arrived(number, rewards) for number, rewards in enumerate(groups)], settings)
    if numbers is None:
        assert batch is None
        return
    assert batch is not None
    assert [one.number for one in batch.groups] == numbers
    assert [one.number for one in batch.trained] == trained
    assert batch.filtered == [number for number in numbers if number not in (trained or [])]


@given(st.lists(st.booleans(), max_size=40), st.integers(1, 5), st.integers(1, 4))
def test_refill_always_ends(informative: list[bool], own: int, most: int) -> None:
    """However many groups teach nothing, ordering the missing ones makes a batch within the bound."""
    settings = node(mix={"own": own, "own_filter": "refill", "refill_most": most})
    there = [arrived(number, UNLIKE if good else ALIKE) for number, good in enumerate(informative[:own])]
    while (batch := own_batch(there, settings)) is None:
        wanted = own + to_refill(there, settings)
        assert len(there) < wanted <= own * most, "nothing would be ordered, and nothing trained"
        there += [
            arrived(n, UNLIKE if n < len(informative) and informative[n] else ALIKE) for n in range(len(there), wanted)
        ]
    assert len(batch.groups) <= own * most
    assert len(batch.trained) <= own


def test_refilled_groups_are_counted_and_the_books_agree(tmp_path: Path, server: EmbeddedServer) -> None:
    rounds = 6
    mix = {"own": 2, "swarm": 0, "own_filter": "refill", "refill_most": 4}
    site = Site(tmp_path, server.url, "refill", rounds=rounds, mix=mix)
    (learner, _) = site.learners
    for _ in range(40 * rounds):
        site.generate()
        site.verify()
        if not learner.step():
            break
    lines = read(site.settings.run_folder / "nodes" / "node-0" / "rounds.jsonl")
    assert [line["round"] for line in lines] == list(range(1, rounds + 1))
    for line in lines:
        trained = len(line["own_ids"]) - len(line["filtered_ids"])
        assert trained == 2 or len(line["own_ids"]) == 8
        assert line["own_tokens"] == 2 * 8 * len(line["own_ids"]), "tokens of groups that taught nothing are charged"
        assert line["own_reward"] == pytest.approx(sum(line["own_group_rewards"]) / len(line["own_ids"]))
    assert any(line["filtered_ids"] for line in lines)
    books = site.ledger.books("node-0")
    assert books.lost == 0
    assert books.filtered == sum(len(line["filtered_ids"]) for line in lines)
    assert books.trained == sum(len(line["own_ids"]) - len(line["filtered_ids"]) for line in lines)


def test_tags_are_drawn_by_their_weights(tmp_path: Path, server: EmbeddedServer) -> None:
    """The tag that weighs most comes first as long as its author has groups under it."""
    mix = {"own": 8, "swarm": 4, "tags": ["failed", "mixed", "solved"], "weights": {"mixed": 1e6}}
    site = Site(tmp_path, server.url, "weights", mix=mix, ahead=1)
    reader, other = site.learners
    for _ in range(4):
        site.generate()
        site.verify()
        other.step()
    there = Counter(tag for line in read(site.settings.run_folder / "nodes/node-1/rounds.jsonl") for tag in line["own_tags"])
    drawn = Counter(group.tag for group in reader._draw(1, 4))
    assert there["mixed"] >= 4
    assert drawn == {"mixed": 4}


# --- what foreign completions are worth ---


@pytest.mark.parametrize("correction", ["none", "successes", "hacpo", "luffy"])
def test_corrections_choose_and_weigh(correction: str) -> None:
    settings = node(update={"correction": correction})
    samples = swarm_samples(foreign([1.0, 0.0, 0.0]), settings, capability=2.0)
    good, bad = group_advantages([1.0, 0.0, 0.0])[:2]
    factor = 2.0 if correction == "hacpo" else 1.0
    expected = [good] if correction == "successes" else [good, bad, bad]
    assert [sample.advantage for sample in samples] == pytest.approx([factor * value for value in expected])
    assert all(sample.foreign and sample.sender_logprob == -2.0 for sample in samples)


def test_a_sender_without_log_probabilities_is_as_good_as_any() -> None:
    assert [s.sender_logprob for s in swarm_samples(foreign([0.0, 1.0], logprob=None), node())] == [None]
    group = ScoredGroup(
        order_id="me/0", node="me", purpose="train", question=QUESTION, completions=[completion(None)] * 2,
        components=[Components(1.0, 1.0, 1.0)] * 2, tag="solved", model="m", generator="g",
    )  # fmt: skip
    assert [(s.token_ids, s.logprobs) for s in own_samples(group, "1 + 1?", node())] == [(b"\1\0\0\0", None)] * 2


def test_dr_grpo_does_not_divide_by_the_spread() -> None:
    samples = swarm_samples(foreign([1.0, 0.0, 0.0, 0.0]), node(update={"objective": "dr_grpo", "correction": "none"}))
    assert [sample.advantage for sample in samples] == [0.75, -0.25, -0.25, -0.25]


@given(st.lists(st.sampled_from([0.0, 0.25, 1.0]), min_size=2, max_size=8))
def test_informative_means_some_advantage(group: list[float]) -> None:
    assert is_informative(group) == any(group_advantages(group))


# --- capability ---


def twin_tags(chance: Random, strength: float, groups: int) -> list[Tag]:
    """Tags of groups of eight whose questions differ in difficulty; `strength` is the mean chance of a right answer."""
    tags = []
    for _ in range(groups):
        p = chance.betavariate(4 * strength, 4 * (1 - strength))
        tags.append(tag_of([float(chance.random() < p) for _ in range(8)]))
    return tags


@pytest.mark.parametrize("strength", [0.15, 0.5, 0.85])
def test_equal_nodes_come_out_equal(server: EmbeddedServer, strength: float) -> None:
    """Whatever tags are drawn, and although the streams of frequent tags overflow."""
    chance, run = Random(strength), f"twins-{strength}"
    reader, publish = swarm_of(server, run)
    for round in range(40):
        for tag in twin_tags(chance, strength, 8):
            publish("twin", tag, round)
        for tag in twin_tags(chance, min(0.95, 1.5 * strength), 8):
            publish("better", tag, round)
    records = [{"own_tags": twin_tags(chance, strength, 8)} for _ in range(64)]
    found = capabilities(reader, ["twin", "better", "nobody"], records)
    assert found["twin"] == pytest.approx(1.0, abs=0.25)
    assert found["better"] > found["twin"] + 0.05
    assert "nobody" not in found
    assert capabilities(reader, ["twin"], [{"own_tags": ["failed"] * 8}] * 9) == {}, "nothing to divide by"
    assert capabilities(reader, ["twin"], []) == {}


def swarm_of(server: EmbeddedServer, run: str) -> tuple[SwarmReader, Callable[[str, Tag, int], None]]:
    """A reader at round 40 in lockstep, and a way to share a group in a round."""
    clock = RoundClock()
    clock.round = 40
    ledger, _ = open_run(Settings(run=run, redis_url=server.url), clock)

    def publish(author: str, tag: Tag, round: int) -> None:
        stream = ledger.keys.swarm(author, tag)
        ledger.redis.xadd(stream, {"m": b"x"}, id=f"{round + 1}-*", maxlen=32, approximate=False)
        ledger.redis.xtrim(stream, minid=f"{max(0, round - 20)}-0", approximate=False)

    return SwarmReader(ledger.redis, ledger.keys, clock, "me", TAGS, 20, depth=32), publish


@given(st.dictionaries(st.sampled_from(TAGS), st.floats(0.01, 100)))
def test_accuracy_is_a_mean(weights: dict[Tag, float]) -> None:
    found = accuracy(weights)
    assert (found is None) == (not weights)
    assert found is None or min(MIDDLES[tag] for tag in weights) - 1e-9 <= found <= max(MIDDLES[t] for t in weights) + 1e-9


# --- how many to draw ---


def rounds_of(rewards: list[float], informative: float = 1.0) -> list[dict[str, Any]]:
    return [{"own_reward": reward, "informative_share": informative} for reward in rewards]


def test_auto_draws_more_where_it_learns_little_and_peers_are_strong() -> None:
    mix = node(mix={"own": 8, "swarm": "auto", "most": 64}).mix
    assert decide([], [], {}, mix).swarm == 8
    assert decide(rounds_of([0.5] * 16), [], {}, mix).swarm == 8
    assert decide(rounds_of([0.5] * 16, informative=0.25), [], {}, mix).swarm == 14
    assert decide(rounds_of([0.5] * 16), [], {"a": 1.0, "b": 2.0}, mix).swarm == 12
    assert decide(rounds_of([0.5] * 16), [], {"a": 0.5}, mix).swarm == 4


def test_auto_halves_when_reward_falls() -> None:
    mix = node(mix={"own": 8, "swarm": "auto", "most": 64}).mix
    chance = Random(0)
    high = [0.6 + chance.uniform(-0.1, 0.1) for _ in range(32)]
    low = [0.3 + chance.uniform(-0.1, 0.1) for _ in range(16)]
    assert not decide(rounds_of(high), [], {}, mix).falling
    fallen = decide(rounds_of(high + low), [], {}, mix)
    assert fallen.falling
    assert fallen.swarm == 4
    assert not decide(rounds_of(low + high), [], {}, mix).falling
    heldout = [{"low": 0.5, "high": 0.6}, {"low": 0.2, "high": 0.4}]
    assert decide(rounds_of(high), heldout, {}, mix).falling
    assert not decide(rounds_of(high), heldout[::-1], {}, mix).falling


@given(st.lists(st.floats(0, 1), max_size=64), st.floats(0, 1), st.floats(0.5, 2), st.integers(1, 32), st.integers(1, 64))
def test_auto_stays_within_its_bounds(rewards: list[float], informative: float, theirs: float, own: int, most: int) -> None:
    mix = node(mix={"own": own, "swarm": "auto", "most": most}).mix
    assert 1 <= decide(rounds_of(rewards, informative), [], {"other": theirs}, mix).swarm <= most


def test_an_auto_mix_trains_and_tells_why(tmp_path: Path, server: EmbeddedServer) -> None:
    site = Site(tmp_path, server.url, "auto", mix={"own": 2, "swarm": "auto", "most": 3})
    site.learn(4)
    lines = read(site.settings.run_folder / "nodes" / "node-1" / "rounds.jsonl")
    assert [set(line["auto"]) for line in lines] == [{"swarm", "informative", "strength", "falling"}] * 4
    assert all(len(line["swarm_ids"]) + line["swarm_missing"] == line["auto"]["swarm"] <= 3 for line in lines)
    assert any(line["swarm_ids"] for line in lines)
