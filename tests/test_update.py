"""The update: its objective against an independent computation, its gradients, its samples, its state on disk."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.messages import Completion, ScoredGroup, SharedCompletion, Span, SwarmGroup, Version
from common.settings import NodeSettings, RewardSettings
from common.tasks import Components, Question
from learners.advantages import SPREAD_FLOOR, group_advantages, rewards
from learners.mix import Sample, own_samples, swarm_samples
from learners.objectives import grpo, truncated_importance
from learners.update import OPTIMIZER_FILE, Encoded, PolicyTrainer

Floats = NDArray[np.float64]

QUESTIONS = ("How many 1 bits are there in 9?", "2", "Simplify the fraction 8/12 to its lowest terms.")
ANSWERS = ("<answer>7</answer>", "1", "Let me see: 12, 14 and 5. <answer>2/3</answer>", "<answer>0", "no")


# --- the objective ---


def by_hand(
    new: Floats, old: Floats, advantages: Floats, mask: Floats, weights: Floats, low: float, high: float
) -> tuple[float, Floats]:
    """The loss and its gradient with respect to the new log-probabilities, token by token.

    The gradient of `ratio * advantage` is itself; where the clipped value is the smaller one there is none.
    """
    loss, gradient = 0.0, np.zeros_like(new)
    for row, column in np.ndindex(new.shape):
        ratio = math.exp(new[row, column] - old[row, column])
        plain = ratio * advantages[row]
        clipped = min(max(ratio, 1 - low), 1 + high) * advantages[row]
        share = weights[row, column] * mask[row, column]
        loss -= min(plain, clipped) * share
        if plain <= clipped:
            gradient[row, column] = -plain * share
    return loss, gradient


@pytest.mark.parametrize("spread", [0.0, 0.1, 1.0])
def test_grpo_agrees_with_numpy(spread: float) -> None:
    chance = np.random.default_rng(0)
    old = -chance.exponential(size=(5, 7))
    new = old + spread * chance.normal(size=old.shape)
    advantages = chance.normal(size=5)
    advantages[2] = 0.0
    mask = (chance.random(old.shape) < 0.8).astype(float)
    weights = chance.uniform(0.2, 2.0, size=old.shape)
    logprobs = torch.tensor(new, requires_grad=True)
    loss = grpo(logprobs, *(torch.tensor(a) for a in (old, advantages, mask, weights)), clip_low=0.2, clip_high=0.28)
    loss.backward()  # type: ignore[no-untyped-call]
    expected, gradient = by_hand(new, old, advantages, mask, weights, 0.2, 0.28)
    assert loss.item() == pytest.approx(expected, abs=1e-5)
    assert logprobs.grad is not None
    np.testing.assert_allclose(logprobs.grad.numpy(), gradient, atol=1e-5)


def test_grpo_gradient_by_finite_differences() -> None:
    chance = np.random.default_rng(1)
    old = -chance.exponential(size=(3, 4))
    new = old + 0.05 * chance.normal(size=old.shape)
    rest = [torch.tensor(a) for a in (old, chance.normal(size=3), np.ones_like(old), np.ones_like(old))]

    def loss_at(values: Floats) -> float:
        return grpo(torch.tensor(values), *rest, clip_low=0.2, clip_high=0.28).item()

    logprobs = torch.tensor(new, requires_grad=True)
    grpo(logprobs, *rest, clip_low=0.2, clip_high=0.28).backward()  # type: ignore[no-untyped-call]
    assert logprobs.grad is not None
    for place in np.ndindex(new.shape):
        step = np.zeros_like(new)
        step[place] = 1e-6
        slope = (loss_at(new + step) - loss_at(new - step)) / 2e-6
        assert logprobs.grad[place].item() == pytest.approx(slope, abs=1e-5)


@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "moves"),
    [
        (1.0, 1.0, 1.0, True),
        (1.27, 1.0, 1.27, True),
        (1.5, 1.0, 1.28, False),  # far enough up: no further reward
        (0.5, 1.0, 0.5, True),  # below what it was: still pulled up
        (0.81, -1.0, -0.81, True),
        (0.5, -1.0, -0.8, False),  # far enough down
        (1.5, -1.0, -1.5, True),  # above what it was: still pushed down
    ],
)
def test_clipping_on_both_sides(ratio: float, advantage: float, value: float, moves: bool) -> None:
    logprobs = torch.tensor([[math.log(ratio)]], dtype=torch.float64, requires_grad=True)
    one = torch.ones(1, 1, dtype=torch.float64)
    loss = grpo(logprobs, 0 * one, advantage * one[0], one, one, clip_low=0.2, clip_high=0.28)
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss.item() == pytest.approx(-value)
    assert logprobs.grad is not None
    assert (logprobs.grad.abs().item() > 0) == moves


def test_importance_weights_are_capped_and_carry_no_gradient() -> None:
    old = torch.log(torch.tensor([[0.5, 0.5, 0.9]])).requires_grad_()
    sampled = torch.log(torch.tensor([[0.5, 0.8, 0.1]]))
    weights = truncated_importance(old, sampled, cap=2.0)
    np.testing.assert_allclose(weights.numpy(), [[1.0, 0.625, 2.0]], atol=1e-6)
    assert not weights.requires_grad


# --- advantages and samples ---


def test_advantages_are_centred_and_scaled() -> None:
    values = [0.0, 1.0, 1.0, 0.25]
    advantages = group_advantages(values)
    assert sum(advantages) == pytest.approx(0.0, abs=1e-12)
    expected = (np.array(values) - np.mean(values)) / (np.std(values) + SPREAD_FLOOR)
    np.testing.assert_allclose(advantages, expected)


@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, 1 / 3])
def test_a_group_all_alike_teaches_nothing(value: float) -> None:
    assert group_advantages([value] * 7) == [0.0] * 7


def test_rewards_are_the_nodes_own_weighting() -> None:
    components = [Components(1.0, 0.0, 0.5), Components(0.0, 1.0, 1.0)]
    assert rewards(components, RewardSettings()) == [1.0, 0.0]
    assert rewards(components, RewardSettings(accuracy=2.0, format=0.5, length=-1.0)) == [1.5, -0.5]


def foreign_group(accuracies: list[float]) -> SwarmGroup:
    return SwarmGroup(
        order_id="other/0", author="other", question=Question("bitwise_arithmetic", {}, 0, 0), question_text="1 + 1?",
        completions=[SharedCompletion(text=f"<answer>{i}</answer>", tokens=4, logprob=-2.0, finish_reason="stop")
                     for i in range(len(accuracies))],
        components=[Components(accuracy, 1.0, 1.0) for accuracy in accuracies],
        tag="mixed", model="m", version=Version(1, 1),
    )  # fmt: skip


def test_successes_leaves_out_what_did_worse() -> None:
    group = foreign_group([1.0, 0.0, 0.0, 1.0])
    plain = swarm_samples(group, NodeSettings())
    only = swarm_samples(group, NodeSettings.model_validate({"update": {"correction": "successes"}}))
    assert [sample.advantage > 0 for sample in plain] == [True, False, False, True]
    assert only == [sample for sample in plain if sample.advantage > 0]
    assert all(sample.token_ids is None and sample.logprobs is None for sample in plain)


def test_own_samples_keep_tokens_and_those_without_signal() -> None:
    completion = Completion(
        text="<answer>1</answer>", token_ids=b"\1\0\0\0", logprobs=b"\0\0\0\0", tokens=1, logprob=0.0,
        finish_reason="length", spans=[Span(0, 1, Version(1, 1))],
    )  # fmt: skip
    group = ScoredGroup(
        order_id="me/0", node="me", purpose="train", question=Question("bitwise_arithmetic", {}, 0, 0),
        completions=[completion] * 3, components=[Components(1.0, 1.0, 1.0)] * 3, tag="solved", model="m", generator="g",
    )  # fmt: skip
    samples = own_samples(group, "1 + 1?", NodeSettings())
    assert [sample.advantage for sample in samples] == [0.0, 0.0, 0.0]
    assert samples[0].token_ids == completion.token_ids
    assert not samples[0].finished


# --- the trainer ---


def trainer_for(model: Path, **update: object) -> PolicyTrainer:
    settings = {"sampling": {"max_new_tokens": 64}, "update": {"learning_rate": 1e-3, "max_grad_norm": 1e9, **update}}
    return PolicyTrainer(str(model), NodeSettings.model_validate(settings))


def swarm_batch() -> list[Sample]:
    """Texts of many lengths, to be encoded; one is not finished."""
    chance = np.random.default_rng(2)
    return [
        Sample(question, answer, finished=index != 1, advantage=float(chance.normal()), token_ids=None, logprobs=None)
        for index, (question, answer) in enumerate((q, a) for q in QUESTIONS for a in ANSWERS)
    ]


def own_batch(trainer: PolicyTrainer) -> list[Sample]:
    """The same as own samples: tokens with log-probabilities a little beside the trainer's."""
    chance = np.random.default_rng(3)
    samples = []
    for sample in swarm_batch():
        ids = trainer._encode(sample).completion
        near = measured(trainer, [trainer._encode(sample)])[0] + chance.normal(scale=0.3, size=len(ids))
        samples.append(
            Sample(sample.question, sample.text, sample.finished, sample.advantage, np.array(ids, "<i4").tobytes(),
                   near.astype("<f4").tobytes())
        )  # fmt: skip
    return samples


def measured(trainer: PolicyTrainer, batch: list[Encoded]) -> list[NDArray[np.float32]]:
    with torch.no_grad():
        logprobs, mask = trainer.logprobs(batch)
    return [row[present.bool()].numpy() for row, present in zip(logprobs, mask, strict=True)]


def gradients(trainer: PolicyTrainer) -> dict[str, Tensor]:
    """What the last update left: the gradient before the optimizer's step, whose rate is set to 0 by the callers."""
    found = {name: parameter.grad for name, parameter in trainer.model.named_parameters()}
    return {name: gradient.clone() for name, gradient in found.items() if gradient is not None}


def weights(trainer: PolicyTrainer) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def test_gradient_is_that_of_the_loss_written_out(tiny_model: Path) -> None:
    """One sample at a time, without padding, with the model's own forward pass."""
    trainer = trainer_for(tiny_model, learning_rate=0.0, importance_cap=1.2)
    own, swarm = own_batch(trainer)[:4], swarm_batch()[4:8]
    figures = trainer.update(own, swarm)
    encoded = [trainer._encode(sample) for sample in [*own, *swarm]]
    tokens = sum(len(sample.completion) for sample in encoded)
    assert figures["tokens_own"] + figures["tokens_swarm"] == tokens

    plain = PolicyTrainer(str(tiny_model), NodeSettings()).model
    total = torch.zeros(())
    for sample in encoded:
        ids = torch.tensor([sample.prompt + sample.completion])
        spread = torch.log_softmax(plain(input_ids=ids).logits[0], dim=-1)
        start = len(sample.prompt)
        for offset, token in enumerate(sample.completion):
            logprob = spread[start + offset - 1, token]
            weight = 1.0
            if sample.sampled is not None:
                weight = min(1.2, math.exp(logprob.item() - sample.sampled[offset]))
            # The ratio to the round's first policy is 1, its gradient that of the log-probability.
            total = total - weight * sample.advantage * logprob / tokens
    total.backward()
    for name, gradient in gradients(trainer).items():
        expected = dict(plain.named_parameters())[name].grad
        np.testing.assert_allclose(gradient.numpy(), expected.numpy(), atol=1e-5)


def test_the_end_token_carries_gradient(tiny_model: Path) -> None:
    trainer = trainer_for(tiny_model, learning_rate=0.05)
    end = trainer._tokenizer.eos_token_id
    finished = Sample(QUESTIONS[0], "", True, 1.0, None, None)
    encoded = trainer._encode(finished)
    assert encoded.completion == [end]
    (before,) = measured(trainer, [encoded])
    assert trainer.update([], [finished])["grad_norm"] > 0
    (after,) = measured(trainer, [encoded])
    assert after[0] > before[0]
    unfinished = Sample(QUESTIONS[0], "", False, 1.0, None, None)
    assert trainer.update([], [unfinished])["grad_norm"] == 0.0, "nothing was written, so there is nothing to learn"


def test_the_batch_changes_nothing(tiny_model: Path) -> None:
    one, many = (trainer_for(tiny_model, learning_rate=0.0, minibatch_tokens=limit) for limit in (10**6, 1))
    encoded = [one._encode(sample) for sample in own_batch(one)]
    assert len(list(one._minibatches(encoded))) == 1
    assert len(list(many._minibatches(encoded))) == len(encoded)
    alone = [measured(one, [sample])[0] for sample in encoded]
    for together, single in zip(measured(one, encoded), alone, strict=True):
        np.testing.assert_allclose(together, single, atol=1e-5)
    own, swarm = own_batch(one), swarm_batch()
    figures = [trainer.update(own, swarm) for trainer in (one, many)]
    assert figures[0] == pytest.approx(figures[1], abs=1e-5)
    first, second = gradients(one), gradients(many)
    assert max(gradient.abs().max().item() for gradient in first.values()) > 1e-2, "the comparison means something"
    for name in first:
        np.testing.assert_allclose(first[name].numpy(), second[name].numpy(), atol=1e-5)


def test_minibatches_keep_the_budget(tiny_model: Path) -> None:
    trainer = trainer_for(tiny_model, minibatch_tokens=120)
    encoded = [trainer._encode(sample) for sample in swarm_batch()]
    batches = list(trainer._minibatches(encoded))
    assert sorted(map(id, encoded)) == sorted(id(sample) for batch in batches for sample in batch)
    assert all(len(batch) == 1 or len(batch) * max(map(len, batch)) <= 120 for batch in batches)


def test_samples_without_signal_only_thin_the_mean(tiny_model: Path) -> None:
    with_signal = swarm_batch()[:3]
    silent = [Sample(s.question, s.text, s.finished, 0.0, None, None) for s in swarm_batch()[3:]]
    plain, thinned = (trainer_for(tiny_model, learning_rate=0.0) for _ in range(2))
    figures = plain.update([], with_signal), thinned.update([], [*with_signal, *silent])
    factor = figures[0]["tokens_swarm"] / figures[1]["tokens_swarm"]
    assert 0 < factor < 1
    assert figures[1]["loss"] == pytest.approx(factor * figures[0]["loss"], abs=1e-6)
    first, second = gradients(plain), gradients(thinned)
    for name in first:
        np.testing.assert_allclose(second[name].numpy(), factor * first[name].numpy(), atol=1e-6)


def test_a_round_without_signal_changes_nothing(tiny_model: Path) -> None:
    trainer = trainer_for(tiny_model, weight_decay=0.1)
    before = weights(trainer)
    silent = [Sample(s.question, s.text, s.finished, 0.0, None, None) for s in swarm_batch()]
    figures = trainer.update(silent, [])
    assert (figures["loss"], figures["grad_norm"], figures["skipped"], figures["informative_share"]) == (0, 0, 0, 0)
    assert_same(weights(trainer), before)
    assert trainer.update([], [])["tokens_own"] == 0.0


def test_saved_and_loaded_it_goes_on_bit_by_bit(tiny_model: Path, tmp_path: Path) -> None:
    batch = swarm_batch()
    through, first = (trainer_for(tiny_model, weight_decay=0.01) for _ in range(2))
    through.update([], batch[:8])
    first.update([], batch[:8])
    first.save(tmp_path)
    resumed = trainer_for(tiny_model, weight_decay=0.01)
    resumed.load(tmp_path)
    assert_same(weights(resumed), weights(first))
    figures = [trainer.update([], batch[8:]) for trainer in (through, resumed)]
    assert figures[0] == figures[1]
    assert_same(weights(resumed), weights(through))
    for name, parameter in resumed.model.named_parameters():
        other = dict(through.model.named_parameters())[name]
        assert_same(resumed._optimizer.state[parameter], through._optimizer.state[other])


def test_loading_a_state_from_before_the_first_update(tiny_model: Path, tmp_path: Path) -> None:
    fresh, used = trainer_for(tiny_model), trainer_for(tiny_model)
    fresh.save(tmp_path)
    assert (tmp_path / OPTIMIZER_FILE).exists()
    used.update([], swarm_batch())
    used.load(tmp_path)
    fresh.update([], swarm_batch())
    used.update([], swarm_batch())
    assert_same(weights(used), weights(fresh))


@pytest.mark.parametrize("rate", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_is_skipped(tiny_model: Path, rate: float) -> None:
    trainer = trainer_for(tiny_model, max_grad_norm=1.0)
    batch = swarm_batch()
    trainer.update([], batch)
    before = weights(trainer)
    poisoned = [*batch, Sample(QUESTIONS[0], "7", True, rate, None, None)]
    figures = trainer.update([], poisoned)
    assert figures["skipped"] == 1.0
    assert_same(weights(trainer), before)
    assert msgspec.json.decode(msgspec.json.encode(figures))["grad_norm"] == 0.0
    healthy = trainer.update([], batch)
    assert healthy["skipped"] == 0.0
    assert math.isfinite(healthy["grad_norm"])


def test_learning_raises_what_was_good_and_lowers_what_was_bad(tiny_model: Path) -> None:
    trainer = trainer_for(tiny_model, learning_rate=2e-3)
    good, bad = ("<answer>7</answer>", "<answer>9</answer>")
    own = [Sample(QUESTIONS[0], good, True, 1.0, None, None), Sample(QUESTIONS[0], bad, True, -1.0, None, None)]
    encoded = [trainer._encode(sample) for sample in own]
    before = [values.sum() for values in measured(trainer, encoded)]
    for _ in range(5):
        trainer.update([], own)
    after = [values.sum() for values in measured(trainer, encoded)]
    assert after[0] > before[0]
    assert after[1] < before[1]


def test_gradients_are_cut_to_the_norm(tiny_model: Path) -> None:
    trainer = trainer_for(tiny_model, learning_rate=0.0, max_grad_norm=0.01)
    figures = trainer.update([], swarm_batch())
    norm = math.sqrt(sum(gradient.pow(2).sum().item() for gradient in gradients(trainer).values()))
    assert figures["grad_norm"] > 0.01
    assert norm == pytest.approx(0.01, rel=1e-3)


def test_tokens_the_model_does_not_know_are_left_out(tiny_model: Path) -> None:
    trainer = trainer_for(tiny_model)
    before = weights(trainer)
    alien = np.array([10**6], "<i4").tobytes()
    figures = trainer.update([Sample("What?", "?", True, 1.0, alien, np.zeros(1, "<f4").tobytes())], [])
    assert figures["grad_norm"] == 0.0
    assert_same(before, weights(trainer))
