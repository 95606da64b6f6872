"""The engine samples what a plain forward pass says, and the learner agrees with it to 1e-4 per token."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from common.messages import Completion, Sampling, Version
from common.sections import NodeSettings
from generators.engines.base import PolicyUnusable, Request
from generators.engines.transformers import TransformersEngine
from learners.batches import Encoded
from learners.mix import Sample
from learners.update import PolicyTrainer
from tests.conftest import make_tiny_model

QUESTIONS = [
    "How many 1 bits are there in 9?",
    "Simplify the fraction 8/12 to its lowest terms.",
    "2",
    "Find the GCD of 4, 16." * 4,
]


def request(number: int, completions: int = 4, tokens: int = 12, temperature: float = 1.0, top_p: float = 1.0) -> Request:
    sampling = Sampling(max_new_tokens=tokens, temperature=temperature, top_p=top_p)
    return Request(QUESTIONS[number % len(QUESTIONS)], completions, sampling, seed=number)


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> TransformersEngine:
    engine = TransformersEngine("cpu")
    engine.open_model(str(tiny_model))
    return engine


def trainer_for(model: Path, temperature: float = 1.0, **update: float) -> PolicyTrainer:
    settings = NodeSettings.model_validate({"sampling": {"temperature": temperature}, "update": update})
    return PolicyTrainer(str(model), settings)


def encoded(trainer: PolicyTrainer, request: Request, completion: Completion, advantage: float = 1.0) -> Encoded:
    return trainer.encode(
        Sample(request.question, completion.text, True, advantage, completion.token_ids, completion.logprobs)
    )


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("tied", [True, False])
def test_learner_and_generator_agree_whatever_is_in_either_batch(tmp_path: Path, temperature: float, tied: bool) -> None:
    model = make_tiny_model(tmp_path / "model", tied)
    engine = TransformersEngine("cpu")
    engine.open_model(str(model))
    requests = [request(i, tokens=5 + 7 * i, temperature=temperature) for i in range(4)]
    groups = engine.generate(requests)
    trainer = trainer_for(model, temperature)
    samples = [encoded(trainer, r, c) for r, group in zip(requests, groups, strict=True) for c in group]
    # Alone, all together, and in a shuffled half: the same numbers.
    for batch in ([samples[5]], samples, samples[::-2]):
        logprobs, mask = trainer.logprobs(batch)
        for row, sample in enumerate(batch):
            ours = logprobs[row][mask[row].bool()].detach().numpy()
            assert sample.sampled is not None
            np.testing.assert_allclose(ours, sample.sampled, atol=1e-4, rtol=0)


def test_completions_do_not_depend_on_the_batch(engine: TransformersEngine) -> None:
    alone = engine.generate([request(1)])[0]
    together = engine.generate([request(0), request(1, tokens=12), request(3, tokens=30)])[1]
    assert [c.token_ids for c in alone] == [c.token_ids for c in together]
    np.testing.assert_allclose([c.logprob for c in alone], [c.logprob for c in together], atol=1e-4)


def test_seeds_decide(engine: TransformersEngine) -> None:
    first = engine.generate([request(0), request(4)])
    assert [c.text for c in first[0]] != [c.text for c in first[1]], "same question, other seed"
    assert [c.token_ids for c in engine.generate([request(0)])[0]] == [c.token_ids for c in first[0]]


def test_the_end_token_is_recorded_and_lengths_are_capped(engine: TransformersEngine) -> None:
    groups = engine.generate([request(i, completions=32, tokens=40) for i in range(4)])
    completions = [c for group in groups for c in group]
    reasons = {c.finish_reason for c in completions}
    assert reasons == {"stop", "length"}, "the tiny model both stops and runs on"
    end = engine._in_use.tokenizer.eos_token_id
    for c in completions:
        ids = np.frombuffer(c.token_ids, "<i4")
        assert len(ids) == c.tokens <= 40
        assert (ids[-1] == end) == (c.finish_reason == "stop")
        assert end not in ids[:-1]
        assert c.spans[0].end == c.tokens
        assert c.logprob == pytest.approx(float(np.frombuffer(c.logprobs, "<f4").sum()), abs=1e-4)


def test_greedy_takes_the_likeliest(engine: TransformersEngine) -> None:
    (group,) = engine.generate([request(2, completions=3, temperature=0.0)])
    assert len({c.token_ids for c in group}) == 1
    (sampled,) = engine.generate([request(2, completions=64, tokens=1)])
    best = max(np.frombuffer(c.logprobs, "<f4")[0] for c in sampled)
    assert np.frombuffer(group[0].logprobs, "<f4")[0] >= best - 1e-5


def test_top_p_cuts_the_tail(engine: TransformersEngine) -> None:
    (wide,) = engine.generate([request(2, completions=256, tokens=1)])
    (narrow,) = engine.generate([request(2, completions=256, tokens=1, top_p=0.3)])
    assert len({c.token_ids for c in narrow}) < len({c.token_ids for c in wide})
    assert min(c.logprob for c in narrow) > min(c.logprob for c in wide)


def test_sampling_follows_the_recorded_probabilities(engine: TransformersEngine) -> None:
    (group,) = engine.generate([request(2, completions=1024, tokens=1)])
    share: dict[bytes, int] = {}
    for c in group:
        share[c.token_ids] = share.get(c.token_ids, 0) + 1
    token, count = max(share.items(), key=lambda pair: pair[1])
    probability = float(np.exp(next(c.logprob for c in group if c.token_ids == token)))
    spread = (probability * (1 - probability) / 1024) ** 0.5
    assert abs(count / 1024 - probability) < 4 * spread


def test_a_bad_policy_leaves_the_old_one(tmp_path: Path, tiny_model: Path) -> None:
    engine = TransformersEngine("cpu")
    engine.open_model(str(tiny_model))
    before = [c.logprobs for c in engine.generate([request(0)])[0]]
    trainer = trainer_for(tiny_model)
    trainer.save(tmp_path)
    good = load_file(tmp_path / "model.safetensors")
    name = next(iter(good))
    missing = {key: value for key, value in good.items() if key != name}
    reshaped = {**good, name: torch.zeros(3)}
    for number, bad in enumerate((missing, reshaped)):
        save_file(bad, tmp_path / "bad.safetensors")
        with pytest.raises(PolicyUnusable):
            engine.load_policy(tmp_path / "bad.safetensors", Version(9, number))
    (tmp_path / "bad.safetensors").write_bytes(b"half a file")
    with pytest.raises(PolicyUnusable):
        engine.load_policy(tmp_path / "bad.safetensors", Version(9, 3))
    after = engine.generate([request(0)])[0]
    assert [c.logprobs for c in after] == before
    assert after[0].spans[0].version == Version(0, 0)


@pytest.mark.parametrize("tied", [True, False])
def test_a_new_policy_is_sampled_from(tmp_path: Path, tied: bool) -> None:
    model = make_tiny_model(tmp_path / "model", tied)
    engine = TransformersEngine("cpu")
    engine.open_model(str(model))
    requests = [request(0), request(1)]
    trainer = trainer_for(model, learning_rate=0.05)
    groups = engine.generate(requests)
    trainer.update(
        [Sample(r.question, c.text, True, (-1.0) ** i, c.token_ids, c.logprobs)
         for r, group in zip(requests, groups, strict=True) for i, c in enumerate(group)], []
    )  # fmt: skip
    trainer.save(tmp_path)
    engine.load_policy(tmp_path / "model.safetensors", Version(1, 1))
    renewed = engine.generate(requests)
    assert renewed[0][0].spans[0].version == Version(1, 1)
    samples = [encoded(trainer, r, c) for r, group in zip(requests, renewed, strict=True) for c in group]
    logprobs, mask = trainer.logprobs(samples)
    for row, sample in enumerate(samples):
        assert sample.sampled is not None
        np.testing.assert_allclose(logprobs[row][mask[row].bool()].detach().numpy(), sample.sampled, atol=1e-4)
    assert [c.logprobs for c in renewed[0]] != [c.logprobs for c in groups[0]]


def test_models_kept_are_taken_up_again_as_they_were(tiny_model: Path, tmp_path: Path) -> None:
    """Two nodes with models of their own take turns: what one's policy made of its model is there when its turn comes."""
    other = make_tiny_model(tmp_path / "other", tied=False)
    engine = TransformersEngine("cpu", models_kept=2)
    for folder, shift in ((tiny_model, 0.1), (other, 0.2)):
        engine.open_model(str(folder))
        weights = {name: p.detach() + shift for name, p in engine._in_use.model.named_parameters()}
        save_file(weights, tmp_path / "policy.safetensors")
        engine.load_policy(tmp_path / "policy.safetensors", Version(1, 1))
    answers = {}
    for folder in (other, tiny_model, other, tiny_model):
        engine.open_model(str(folder))
        groups = [[c.token_ids for c in group] for group in engine.generate([request(3)])]
        assert answers.setdefault(folder, groups) == groups
    assert len(engine._opened) == 2
    engine.open_model(str(make_tiny_model(tmp_path / "third", tied=False)))
    assert list(engine._opened) == [str(tiny_model), str(tmp_path / "third")], "the one used least lately goes"
