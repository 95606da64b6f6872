"""Loss and gradients of the trainer equal TRL's on the same batch: every objective, clips that bite, ragged completions."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from common.sections import NodeSettings
from learners import logprobs as logprobs_file
from learners.batches import Encoded
from learners.loss import Totals
from learners.update import PolicyTrainer

trl = pytest.importorskip("trl", reason="needs TRL, the peer that the losses are held against (extra `dev`)")

LOW, HIGH = 0.2, 0.28
MAX_NEW_TOKENS = 24
# Groups of two completions of one prompt.
PROMPTS = (9, 9, 12, 12, 7, 7)
LENGTHS = (7, 24, 1, 12, 12, 3)
ADVANTAGES = (1.3, -0.7, 0.4, -1.5, 0.9, 0.0)
# How much likelier the policy at the start of the round found a token: whole sequences leave the clips of gspo, too.
SHIFTS = (-0.1, 0.15, 0.1, -0.1, -0.15, 0.05)


@dataclass
class Case:
    """One objective as both sides are told it."""

    ours: dict[str, Any]
    theirs: dict[str, Any]
    clips: tuple[float, float] = (LOW, HIGH)


SEQUENCES = {"loss_type": "grpo", "importance_sampling_level": "sequence"}
CASES = {
    "grpo": Case({"objective": "grpo"}, {"loss_type": "dapo"}),
    "grpo_kl": Case({"objective": "grpo", "kl": 0.3}, {"loss_type": "dapo", "beta": 0.3}),
    "dr_grpo": Case({"objective": "dr_grpo"}, {"loss_type": "dr_grpo"}),
    "gspo": Case({"objective": "gspo"}, SEQUENCES, (0.02, 0.03)),
    # TRL reads epsilon_high of this one objective as the ratio's bound itself.
    "cispo": Case({"objective": "cispo"}, {"loss_type": "cispo", "epsilon_high": 1 + HIGH}),
}


@dataclass
class Way:
    """How our side computes it: in which micro-batches, with or without the whole of the logits at once."""

    rows: list[list[int]]
    in_chunks: bool = False


WAYS = {
    "at once, prompts shared": Way([[0, 1, 2, 3, 4, 5]]),
    "in micro-batches": Way([[2, 5], [0, 3, 4], [1]]),
    "logits in chunks": Way([[0, 1, 2, 3, 4, 5]], in_chunks=True),
}


@dataclass
class Batch:
    """Completions as both sides get them, with log-probabilities under three policies: `current` is to be updated."""

    encoded: list[Encoded]
    old: dict[Encoded, Tensor] = field(default_factory=dict)
    reference: dict[Encoded, Tensor] = field(default_factory=dict)
    current: dict[Encoded, Tensor] = field(default_factory=dict)


def trainer_of(model: Path, **update: Any) -> PolicyTrainer:
    tree = {"sampling": {"max_new_tokens": MAX_NEW_TOKENS}, "update": {"logit_tokens": 5, **update}}
    return PolicyTrainer(str(model), NodeSettings.model_validate(tree))


@pytest.fixture(scope="module")
def batch(tiny_model: Path) -> Batch:
    trainer = trainer_of(tiny_model)
    chance = np.random.default_rng(2)
    size = trainer.model.config.vocab_size
    prompts = {length: chance.integers(0, size, length).tolist() for length in PROMPTS}
    made = Batch(
        [
            Encoded(prompts[prompt], chance.integers(0, size, length).tolist(), None, advantage)
            for prompt, length, advantage in zip(PROMPTS, LENGTHS, ADVANTAGES, strict=True)
        ]
    )
    with torch.no_grad():
        values, _ = trainer.logprobs(made.encoded)
    assert trainer.logprobs._sharing_pays(made.encoded), "the first of the ways below would be the second again"
    for sample, row, shift in zip(made.encoded, values, SHIFTS, strict=True):
        length = len(sample.completion)
        made.current[sample] = row[:length]
        moved, apart = chance.normal(shift, 0.3, length), chance.normal(0.0, 0.5, length)
        made.old[sample] = row[:length] + torch.tensor(moved, dtype=torch.float32)
        made.reference[sample] = row[:length] + torch.tensor(apart, dtype=torch.float32)
    return made


def test_the_clips_bite(batch: Batch) -> None:
    """Else the cases below would compare less than they claim."""
    low, high = CASES["gspo"].clips
    bites = {"token up": 0, "token down": 0, "sequence up": 0, "sequence down": 0}
    for sample in batch.encoded:
        moved = batch.current[sample] - batch.old[sample]
        if sample.advantage > 0:
            bites["token up"] += int((moved.exp() > 1 + HIGH).sum())
            bites["sequence up"] += int(moved.mean().exp() > 1 + high)
        if sample.advantage < 0:
            bites["token down"] += int((moved.exp() < 1 - LOW).sum())
            bites["sequence down"] += int(moved.mean().exp() < 1 - low)
    assert min(bites.values()) > 0, bites


def gradients(model: Any) -> dict[str, Tensor]:
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def our_side(model: Path, case: Case, batch: Batch, way: Way) -> tuple[float, dict[str, Tensor]]:
    trainer = trainer_of(model, clip_low=case.clips[0], clip_high=case.clips[1], **case.ours)
    total = 0.0
    for rows in way.rows:
        part = [batch.encoded[row] for row in rows]
        loss = trainer.loss(part, batch.old, batch.reference, Totals(sum(LENGTHS), len(LENGTHS)))
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.item()
    return total, gradients(trainer.model)


def their_side(model: Path, case: Case, batch: Batch, folder: Path) -> tuple[float, dict[str, Tensor]]:
    from datasets import Dataset  # type: ignore[import-untyped]
    from transformers import AutoModelForCausalLM, AutoTokenizer

    arguments = trl.GRPOConfig(
        output_dir=str(folder), report_to=[], use_cpu=True, bf16=False, activation_checkpointing=False,
        per_device_train_batch_size=len(LENGTHS), num_generations=2, gradient_accumulation_steps=1,
        max_completion_length=MAX_NEW_TOKENS,
        **{"epsilon": case.clips[0], "epsilon_high": case.clips[1], "beta": 0.0, **case.theirs},
    )  # fmt: skip
    peer = trl.GRPOTrainer(
        AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), reward_funcs=lambda **_: [0.0], args=arguments,
        train_dataset=Dataset.from_dict({"prompt": ["a", "b"]}), processing_class=AutoTokenizer.from_pretrained(model),
    )  # fmt: skip
    # What its training loop would set.
    peer.current_gradient_accumulation_steps = 1
    peer.model.train()

    def padded(rows: list[Tensor], side: str = "right") -> Tensor:
        return pad_sequence(rows, batch_first=True, padding_side=side)

    prompts = [torch.tensor(sample.prompt) for sample in batch.encoded]
    completions = [torch.tensor(sample.completion) for sample in batch.encoded]
    inputs = {
        "prompt_ids": padded(prompts, "left"),
        "prompt_mask": padded([torch.ones_like(row) for row in prompts], "left"),
        "completion_ids": padded(completions),
        "completion_mask": padded([torch.ones_like(row) for row in completions]),
        "advantages": torch.tensor(ADVANTAGES),
        "old_per_token_logps": padded([batch.old[sample] for sample in batch.encoded]),
        "ref_per_token_logps": padded([batch.reference[sample] for sample in batch.encoded]),
        "num_items_in_batch": torch.tensor(sum(LENGTHS)),
    }
    loss = peer.compute_loss(peer.model, inputs)
    loss.backward()
    return loss.item(), gradients(peer.model)


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients_equal_trls(
    name: str, batch: Batch, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, theirs = their_side(tiny_model, CASES[name], batch, tmp_path)
    assert max(gradient.abs().max().item() for gradient in theirs.values()) > 0.1, "a gradient of nothing proves nothing"
    for title, way in WAYS.items():
        with monkeypatch.context() as patch:
            if way.in_chunks:
                patch.setattr(logprobs_file, "FEW_LOGITS", 0)
            loss, ours = our_side(tiny_model, CASES[name], batch, way)
        assert loss == pytest.approx(expected, abs=1e-5), title
        assert ours.keys() == theirs.keys()
        for parameter, gradient in ours.items():
            # Of the largest entry: float32 has seven digits, and some gradients here are above 10.
            largest = max(1.0, theirs[parameter].abs().max().item())
            np.testing.assert_allclose(
                gradient, theirs[parameter], rtol=0, atol=1e-5 * largest, err_msg=f"{title}: {parameter}"
            )
