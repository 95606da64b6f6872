"""The update: its gradients against the loss written out, its samples, its steps, its state on disk."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor

from common.chat import load_tokenizer
from common.messages import Completion, ScoredGroup, SharedCompletion, Span, SwarmGroup, Version
from common.sections import NodeSettings, RewardSettings, UpdateSettings
from common.tasks import Components, Question
from learners.advantages import SPREAD_FLOOR, group_advantages, rewards
from learners.batches import Encoded
from learners.checkpoint import WEIGHTS_FILE
from learners.mix import Sample, own_samples, swarm_samples
from learners.objectives import OBJECTIVES, hacpo, luffy
from learners.schedule import learning_rate
from learners.update import BETAS, OPTIMIZER_FILE, PolicyTrainer

QUESTIONS = ("How many 1 bits are there in 9?", "2", "Simplify the fraction 8/12 to its lowest terms.")
ANSWERS = ("<answer>7</answer>", "1", "Let me see: 12, 14 and 5. <answer>2/3</answer>", "<answer>0", "no")


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
    plain = swarm_samples(group, NodeSettings.model_validate({"update": {"correction": "none"}}))
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
        ids = trainer.encode(sample).completion
        near = measured(trainer, [trainer.encode(sample)])[0] + chance.normal(scale=0.3, size=len(ids))
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
    encoded = [trainer.encode(sample) for sample in [*own, *swarm]]
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
    end = load_tokenizer(str(tiny_model)).eos_token_id
    finished = Sample(QUESTIONS[0], "", True, 1.0, None, None)
    encoded = trainer.encode(finished)
    assert encoded.completion == [end]
    (before,) = measured(trainer, [encoded])
    assert trainer.update([], [finished])["grad_norm"] > 0
    (after,) = measured(trainer, [encoded])
    assert after[0] > before[0]
    unfinished = Sample(QUESTIONS[0], "", False, 1.0, None, None)
    assert trainer.update([], [unfinished])["grad_norm"] == 0.0, "nothing was written, so there is nothing to learn"


def test_the_batch_changes_nothing(tiny_model: Path) -> None:
    one, many = (trainer_for(tiny_model, learning_rate=0.0, microbatch_tokens=limit) for limit in (10**6, 1))
    encoded = [one.encode(sample) for sample in own_batch(one)]
    assert len(one.logprobs.micro_batches(encoded, 10**6)) < 3
    assert len(many.logprobs.micro_batches(encoded, 1)) == len(encoded)
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


def test_micro_batches_keep_the_budget(tiny_model: Path) -> None:
    trainer = trainer_for(tiny_model)
    encoded = [trainer.encode(sample) for sample in swarm_batch()]
    batches = trainer.logprobs.micro_batches(encoded, 120)
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
    assert (figures["loss"], figures["grad_norm"], figures["skipped"]) == (0, 0, 0)
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
    encoded = [trainer.encode(sample) for sample in own]
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


def test_an_exploding_gradient_leaves_weights_and_optimizer_alone(tiny_model: Path, tmp_path: Path) -> None:
    trainer = trainer_for(tiny_model)
    trainer.update([], swarm_batch())
    for folder in ("before", "after"):
        (tmp_path / folder).mkdir()
    trainer.save(tmp_path / "before")
    trainer._settings = trainer_for(tiny_model, skip_grad_norm=1e-4)._settings
    figures = trainer.update([], swarm_batch())
    assert (figures["skipped"], figures["steps"], figures["loss"], figures["grad_norm"]) == (1, 0, 0, 0)
    assert gradients(trainer) == {}
    trainer.save(tmp_path / "after")
    for name in (WEIGHTS_FILE, OPTIMIZER_FILE):
        kept, found = (load_file(tmp_path / folder / name) for folder in ("before", "after"))
        assert_same(kept, found)


def test_a_skipped_step_does_not_end_its_round(tiny_model: Path) -> None:
    trainer = trainer_for(tiny_model, minibatches=3, max_grad_norm=1.0)
    poisoned = [*swarm_batch(), Sample(QUESTIONS[0], "7", True, math.nan, None, None)]
    figures = trainer.update([], poisoned)
    assert (figures["skipped"], figures["steps"]) == (1, 2)
    assert all(math.isfinite(value) for value in figures.values())
    assert all(torch.isfinite(parameter).all() for parameter in weights(trainer).values())


@pytest.mark.parametrize("objective", ["grpo", "gspo"])
def test_epochs_and_minibatches_are_the_loop_written_out(tiny_model: Path, objective: str) -> None:
    """Ratios to the start of the round, each step a mean over its own minibatch, the optimizer's state going on."""
    chosen = {"objective": objective, "importance_cap": 1.2, "max_grad_norm": 0.5}
    trainer = trainer_for(tiny_model, epochs=2, minibatches=3, microbatch_tokens=100, **chosen)
    plain = trainer_for(tiny_model)
    own, swarm = own_batch(trainer)[:7], swarm_batch()[4:8]
    optimizer = torch.optim.AdamW(plain.model.parameters(), lr=1e-3, betas=BETAS, weight_decay=0.0)

    def alone(sample: Encoded) -> Tensor:
        ids = torch.tensor([sample.prompt + sample.completion])
        spread = torch.log_softmax(plain.model(input_ids=ids).logits[0], dim=-1)[len(sample.prompt) - 1 : -1]
        return spread.gather(1, torch.tensor(sample.completion).unsqueeze(1)).squeeze(1)

    losses = []
    for _ in range(2):  # rounds
        encoded = [trainer.encode(sample) for sample in [*own, *swarm]]
        steps = trainer._steps(encoded)
        assert len(steps) == 6
        for epoch in (steps[:3], steps[3:]):
            assert sorted(id(sample) for step in epoch for sample in step) == sorted(map(id, encoded))
        with torch.no_grad():
            old = {sample: alone(sample) for sample in encoded}
        expected = []
        for step in steps:
            total = torch.zeros(())
            tokens = sum(len(sample.completion) for sample in step)
            for sample in step:
                ratio = torch.exp(alone(sample) - old[sample])
                if objective == "gspo":
                    ratio = torch.exp((alone(sample) - old[sample]).mean()).expand(len(sample.completion))
                gain = torch.minimum(ratio * sample.advantage, ratio.clamp(0.8, 1.28) * sample.advantage)
                if sample.sampled is not None:
                    gain = gain * torch.exp(old[sample] - torch.tensor(sample.sampled)).clamp(max=1.2)
                total = total - (gain.mean() / len(step) if objective == "gspo" else gain.sum() / tokens)
            optimizer.zero_grad()
            total.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(plain.model.parameters(), 0.5)
            optimizer.step()
            expected.append(total.item())
        # `_steps` above did not count as an update: the trainer splits the same way.
        real = trainer.encode.all
        trainer.encode.all = lambda _, encoded=encoded: encoded  # type: ignore[method-assign]
        losses.append((trainer.update(own, swarm)["loss"], float(np.mean(expected))))
        trainer.encode.all = real  # type: ignore[method-assign]
    for ours, theirs in losses:
        assert ours == pytest.approx(theirs, abs=1e-5)
    for name, parameter in weights(plain).items():
        # Adam makes a step of full length of a gradient near 0, so single numbers may differ more than its rounding.
        apart = (weights(trainer)[name] - parameter).abs()
        assert apart.mean() < 1e-6, name
        assert apart.max() < 3e-4, name


def test_minibatches_go_on_after_a_resume(tiny_model: Path, tmp_path: Path) -> None:
    update = {"epochs": 2, "minibatches": 4, "warmup_rounds": 4, "schedule": "cosine", "kl": 0.05}
    through = trainer_for(tiny_model, **update)
    through.update([], swarm_batch())
    through.save(tmp_path)
    resumed = trainer_for(tiny_model, **update)
    resumed.load(tmp_path)
    figures = [trainer.update([], swarm_batch()[3:]) for trainer in (through, resumed)]
    assert figures[0] == figures[1]
    assert_same(weights(through), weights(resumed))
    other = trainer_for(tiny_model, **update)
    other.load(tmp_path)
    other._updates += 1
    assert other.update([], swarm_batch()[3:])["loss"] != figures[0]["loss"], "another round, another split"


def test_one_step_needs_no_second_pass(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = trainer_for(tiny_model), trainer_for(tiny_model, epochs=2)
    calls: list[str] = []
    for trainer, name in ((one, "one"), (two, "two")):
        real = trainer._measure
        monkeypatch.setattr(trainer, "_measure", lambda *a, real=real, name=name: (calls.append(name), real(*a))[1])
        trainer.update([], swarm_batch())
    assert calls == ["two"]


def foreign_rows() -> list[Sample]:
    """Foreign completions: with what the sender says of them, and one without."""
    return [
        Sample(s.question, s.text, s.finished, s.advantage, None, None, True, None if row == 2 else -1.5 * (row + 1))
        for row, s in enumerate(swarm_batch()[:6])
    ]


@pytest.mark.parametrize("correction", ["none", "successes", "hacpo", "luffy"])
@pytest.mark.parametrize("power", [0.0, 0.5])
def test_what_others_wrote_gets_its_correction_and_own_rows_do_not(tiny_model: Path, correction: str, power: float) -> None:
    trainer = trainer_for(tiny_model, learning_rate=0.0, correction=correction, likelihood_weight=power)
    own, foreign = swarm_batch()[6:10], foreign_rows()
    trainer.update(own, foreign)
    found = gradients(trainer)
    trainer.model.zero_grad(set_to_none=True)
    encoded = [trainer.encode(sample) for sample in [*own, *foreign]]
    tokens = sum(len(sample.completion) for sample in encoded)
    total = torch.zeros(())
    for sample in encoded:
        logprobs, mask = trainer.logprobs([sample])
        old, advantages = logprobs.detach(), torch.tensor([sample.advantage])
        if not sample.foreign or correction in ("none", "successes"):
            losses = OBJECTIVES["grpo"](logprobs, old, advantages, mask, 0.2, 0.28)
        elif correction == "hacpo":
            told = torch.tensor([math.nan if sample.sender is None else sample.sender])
            losses = hacpo(logprobs, old, advantages, mask, told)
        else:
            losses = luffy(logprobs, advantages, mask)
        weight = math.exp(power * old.mean().item()) if sample.foreign else 1.0
        total = total + weight * losses.sum() / tokens
    total.backward()  # type: ignore[no-untyped-call]
    for name, gradient in gradients(trainer).items():
        np.testing.assert_allclose(found[name], gradient, atol=1e-5)


def test_the_losss_own_method_is_what_a_step_minimises(tiny_model: Path) -> None:
    trainer = trainer_for(tiny_model, learning_rate=0.0)
    own = own_batch(trainer)
    figures = trainer.update(own, [])
    found = gradients(trainer)
    trainer.model.zero_grad(set_to_none=True)
    loss = trainer.loss([trainer.encode(sample) for sample in own])
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss.item() == pytest.approx(figures["loss"], abs=1e-6)
    for name, gradient in gradients(trainer).items():
        np.testing.assert_allclose(found[name], gradient, atol=1e-6)


def test_a_cut_text_keeps_no_word_of_its_sender(tiny_model: Path) -> None:
    trainer = trainer_for(tiny_model)
    long = Sample(QUESTIONS[0], "12 " * 100, True, 1.0, None, None, True, -5.0)
    assert len(trainer.encode(long).completion) == 64
    assert trainer.encode(long).sender is None
    assert trainer.encode(replace(long, text="12")).sender == -5.0


def test_what_a_model_cannot_read_is_left_out(tiny_model: Path) -> None:
    """A stranger's question of any length neither ends the learner nor takes its memory."""
    trainer = trainer_for(tiny_model)
    good = Sample(QUESTIONS[0], "12", True, 1.0, None, None, foreign=True)
    for bad in (
        replace(good, question="7 " * 600),  # past the model's positions
        replace(good, question="7 " * 16_000),
        Sample(QUESTIONS[0], "12", True, 1.0, (10**6).to_bytes(4, "little"), b"\0\0\0\0"),
    ):
        assert trainer.encode(bad).completion == []
        figures = trainer.update([], [bad, good])
        assert figures["skipped"] == 0 and figures["grad_norm"] > 0
    endless = replace(good, text="9" * 10**7)
    assert len(trainer.encode(endless).completion) == 64


def test_a_silent_sample_is_held_near_the_base_where_that_is_wanted(tiny_model: Path) -> None:
    trainer = trainer_for(tiny_model, kl=0.5, learning_rate=3e-3)
    trainer.update([], swarm_batch())
    silent = [Sample(s.question, s.text, s.finished, 0.0, None, None) for s in swarm_batch()]
    apart = [trainer.update([], silent)["kl"] for _ in range(12)]
    assert apart[0] > 1e-4
    assert apart[-1] < 0.7 * apart[0]


# --- the learning rate ---


@pytest.mark.parametrize(
    ("settings", "rounds", "expected"),
    [
        ({}, 4, [1, 1, 1, 1]),
        ({"warmup_rounds": 4}, 6, [0.25, 0.5, 0.75, 1, 1, 1]),
        ({"schedule": "linear"}, 4, [1, 0.7, 0.4, 0.1]),
        ({"schedule": "linear", "warmup_rounds": 2}, 5, [0.5, 1, 0.7, 0.4, 0.1]),
        ({"schedule": "cosine"}, 5, [1, 0.1 + 0.9 * (2 + 2**0.5) / 4, 0.55, 0.1 + 0.9 * (2 - 2**0.5) / 4, 0.1]),
        ({"schedule": "cosine"}, 1, [1]),
        ({"warmup_rounds": 9}, 3, [1 / 9, 2 / 9, 3 / 9]),
    ],
)
def test_the_learning_rate_by_rounds(settings: dict[str, object], rounds: int, expected: list[float]) -> None:
    update = UpdateSettings.model_validate({"learning_rate": 1.0, **settings})
    assert [learning_rate(update, round, rounds) for round in range(1, rounds + 1)] == pytest.approx(expected)


def test_the_learning_rate_is_told_and_goes_on_after_a_resume(tiny_model: Path, tmp_path: Path) -> None:
    trainer = trainer_for(tiny_model, warmup_rounds=10)
    told = [trainer.update([], swarm_batch()[:3])["learning_rate"] for _ in range(3)]
    assert told == pytest.approx([1e-4, 2e-4, 3e-4])
    trainer.save(tmp_path)
    resumed = trainer_for(tiny_model, warmup_rounds=10)
    resumed.load(tmp_path)
    assert resumed.update([], swarm_batch()[:3])["learning_rate"] == pytest.approx(4e-4)
    trainer.roll_back(tmp_path)
    trainer.update([], swarm_batch()[:3])
    trainer.roll_back(tmp_path)
    assert trainer.update([], swarm_batch()[:3])["learning_rate"] == pytest.approx(5e-4), "a rollback turns no round back"


def test_tokens_the_model_does_not_know_are_left_out(tiny_model: Path) -> None:
    trainer = trainer_for(tiny_model)
    before = weights(trainer)
    alien = np.array([10**6], "<i4").tobytes()
    figures = trainer.update([Sample("What?", "?", True, 1.0, alien, np.zeros(1, "<f4").tobytes())], [])
    assert figures["grad_norm"] == 0.0
    assert_same(before, weights(trainer))
