"""One round's update of a policy: encode, forward, loss, steps. The part of a learner that holds a model.

Guarantees: the end-of-sequence token of a finished completion carries gradient; a step whose loss or gradient is not finite
or is exploding leaves weights and optimizer as they were, and is counted; everything a round draws or looks up by number
derives from the count of updates, which is saved with the optimizer, so that a resumed run goes on exactly; nothing is
pickled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import structlog
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import Parameter
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from common.adapters import Adapter
from common.chat import completion_ids, load_tokenizer, prompt_ids
from common.sections import NodeSettings
from common.settings import SettingsError
from learners.checkpoint import WEIGHTS_FILE
from learners.logprobs import CompletionLogprobs, Encoded
from learners.lora import adapters_off, add_adapters
from learners.mix import Sample
from learners.objectives import (
    OBJECTIVES,
    hacpo,
    kl_penalty,
    likelihood_weights,
    luffy,
    token_weights,
    truncated_importance,
)
from learners.schedule import learning_rate

__all__ = ["OPTIMIZER_FILE", "Encoded", "PolicyTrainer", "Totals"]

log = structlog.get_logger()

OPTIMIZER_FILE = "optimizer.safetensors"
UPDATES_KEY = "updates"
BETAS = (0.9, 0.99)

# Log-probabilities of completions, [tokens] each.
Measured = dict[Encoded, Tensor]


class Totals(NamedTuple):
    """Of a whole minibatch, samples without signal included: what its means are taken over."""

    tokens: int
    samples: int


@dataclass
class _Round:
    """What a round's steps add up to."""

    losses: list[float]
    norms: list[float]
    skipped: int
    gap: Tensor
    gaps: int
    divergence: Tensor
    divergences: int


class PolicyTrainer:
    """A causal language model with its optimizer, on the device that is there."""

    def __init__(self, model: str, settings: NodeSettings) -> None:
        """`model` is a hub id or folder. What is trained, and its optimizer, are float32.

        Raises SettingsError when adapters are wanted for layers that the model has not.
        """
        self._base = model
        self._settings = settings
        update = settings.update
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._autocast = torch.bfloat16 if update.dtype == "bfloat16" else None
        self._tokenizer = load_tokenizer(model)
        # A base that is not trained need not be more exact than its forward pass.
        frozen = torch.bfloat16 if update.lora.rank and self._autocast else torch.float32
        loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=frozen)
        self._adapter: Adapter | None = None
        parameters: dict[str, Parameter] = {}
        if update.lora.rank:
            self._adapter, parameters = add_adapters(loaded, update.lora, model)
        self.model = loaded.to(self._device)
        # Evaluation mode: dropout would make the learner's log-probabilities differ from the generator's.
        self.model.eval()
        if update.gradient_checkpointing:
            _checkpoint_activations(self.model)
        self._vocabulary: int = self.model.get_input_embeddings().num_embeddings
        self._parameters: dict[str, Parameter] = parameters or dict(self.model.named_parameters())
        self._optimizer = torch.optim.AdamW(
            self._parameters.values(), lr=update.learning_rate, betas=BETAS, weight_decay=update.weight_decay, fused=True
        )
        self._updates = 0
        self.logprobs = self._logprobs_of(self.model, not update.gradient_checkpointing)
        self._reference: CompletionLogprobs | None = None

    def update(self, own: list[Sample], swarm: list[Sample]) -> dict[str, float]:
        """A round: `epochs` passes over all samples, `minibatches` optimizer steps each.

        The loss is a mean over all completion tokens of a minibatch, those of samples without signal included, as in the
        paper; such samples have no gradient and are computed only for a divergence. Ratios are to the policy at the start
        of the round.
        """
        settings = self._settings.update
        prompts: dict[str, list[int]] = {}
        encoded = [self._encode(sample, prompts) for sample in [*own, *swarm]]
        rate = learning_rate(settings, self._updates + 1, self._settings.rounds)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        steps = self._steps(encoded)
        self._updates += 1
        computed = [sample for sample in encoded if self._is_computed(sample)]
        # With one step the policy at the start of the round is the one that the step computes anyway.
        old = self._measure(self.logprobs, computed) if len(steps) > 1 else {}
        reference = self._measure_reference(computed) if settings.kl else {}
        done = _Round([], [], 0, torch.zeros((), device=self._device), 0, torch.zeros((), device=self._device), 0)
        for step in steps:
            self._step(step, old, reference, done)
        return {
            "tokens_own": float(sum(len(sample.completion) for sample in encoded[: len(own)])),
            "tokens_swarm": float(sum(len(sample.completion) for sample in encoded[len(own) :])),
            "loss": fmean(done.losses) if done.losses else 0.0,
            "grad_norm": fmean(done.norms) if done.norms else 0.0,
            "sampler_gap": _mean(done.gap, done.gaps),
            **({"kl": _mean(done.divergence, done.divergences)} if settings.kl else {}),
            "learning_rate": rate,
            "steps": float(len(done.losses)),
            "skipped": float(done.skipped),
        }

    def loss(
        self,
        batch: Sequence[Encoded],
        old: Measured | None = None,
        reference: Measured | None = None,
        totals: Totals | None = None,
    ) -> Tensor:
        """The loss of samples in one forward pass, with gradient: what an optimizer step over them would minimise.

        Args:
            old: their log-probabilities at the start of the round, [tokens] each; those of this pass where it has none.
            reference: those of the model that training began with; needed where `kl` is above 0.
            totals: of the minibatch that these samples are a part of; by default they are all of it.
        """
        totals = totals or Totals(sum(len(sample.completion) for sample in batch), len(batch))
        return self._loss(batch, old or {}, reference or {}, totals, None)

    # --- one step ---

    def _steps(self, encoded: list[Encoded]) -> list[list[Encoded]]:
        """The minibatches of a round, one optimizer step each. The split depends on the count of updates alone."""
        settings = self._settings.update
        count = min(settings.minibatches, max(len(encoded), 1))
        steps = []
        for epoch in range(settings.epochs):
            order = list(encoded)
            Random(f"minibatches {self._updates} {epoch}").shuffle(order)
            steps += [order[start::count] for start in range(count)] if count > 1 else [encoded]
        return steps

    def _step(self, minibatch: list[Encoded], old: Measured, reference: Measured, done: _Round) -> None:
        """One optimizer step, or none where there is nothing to learn or nothing sound."""
        settings = self._settings.update
        computed = [sample for sample in minibatch if self._is_computed(sample)]
        if not computed:
            return
        totals = Totals(sum(len(sample.completion) for sample in minibatch), len(minibatch))
        self._optimizer.zero_grad(set_to_none=True)
        loss = torch.zeros((), device=self._device)
        for batch in self.logprobs.micro_batches(computed, settings.microbatch_tokens):
            part = self._loss(batch, old, reference, totals, done)
            part.backward()  # type: ignore[no-untyped-call]
            loss += part.detach()
        gradients = [p.grad for p in self._parameters.values() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients, foreach=True)
        loss_here, norm_here = torch.stack([loss, norm]).tolist()  # one wait for the device
        if not (np.isfinite(loss_here) and norm_here <= settings.skip_grad_norm):
            done.skipped += 1
            log.error("update skipped: its gradient is not finite or too long", loss=loss_here, grad_norm=norm_here)
            self._optimizer.zero_grad(set_to_none=True)
            return
        if norm_here > settings.max_grad_norm:
            torch.nn.utils.clip_grads_with_norm_(self._parameters.values(), settings.max_grad_norm, norm, foreach=True)
        self._optimizer.step()
        done.losses.append(loss_here)
        done.norms.append(norm_here)

    def _is_computed(self, sample: Encoded) -> bool:
        return bool(sample.completion) and (sample.advantage != 0 or self._settings.update.kl > 0)

    def _loss(
        self, batch: Sequence[Encoded], old: Measured, reference: Measured, totals: Totals, done: _Round | None
    ) -> Tensor:
        """The share that a micro-batch has in its minibatch's loss."""
        settings = self._settings.update
        logprobs, mask = self.logprobs(batch)
        before = _padded(old, batch) if old else logprobs.detach()
        lengths = mask.sum(1)
        most = self._settings.sampling.max_new_tokens
        per_token = token_weights(settings.objective, lengths, totals.tokens, totals.samples, most).unsqueeze(1)
        losses = self._losses(batch, logprobs, before, mask) * self._importance(batch, before, mask, done)
        if settings.kl:
            divergence = kl_penalty(logprobs, _padded(reference, batch), before) * mask
            losses = losses + settings.kl * divergence
            if done is not None:
                done.divergence += divergence.detach().sum()
                done.divergences += sum(len(sample.completion) for sample in batch)
        return (losses * per_token).sum()

    def _losses(self, batch: Sequence[Encoded], logprobs: Tensor, before: Tensor, mask: Tensor) -> Tensor:
        """[samples, tokens]: the node's objective, and its correction for what others wrote."""
        settings = self._settings.update
        advantages = torch.tensor([sample.advantage for sample in batch], device=self._device)
        corrected = settings.correction in ("hacpo", "luffy")
        foreign = [corrected and sample.foreign for sample in batch]
        if not all(foreign):
            clips = settings.clip_low, settings.clip_high
            losses = OBJECTIVES[settings.objective](logprobs, before, advantages, mask, *clips)
            if not any(foreign):
                return losses
        if settings.correction == "hacpo":
            told = [torch.nan if sample.sender is None else sample.sender for sample in batch]
            others = hacpo(logprobs, before, advantages, mask, torch.tensor(told, device=self._device))
        else:
            others = luffy(logprobs, advantages, mask)
        if all(foreign):
            return others
        return torch.where(torch.tensor(foreign, device=self._device).unsqueeze(1), others, losses)

    def _importance(self, batch: Sequence[Encoded], before: Tensor, mask: Tensor, done: _Round | None) -> Tensor:
        """[samples, tokens]: what own tokens count by their sampler, and foreign ones by their likelihood."""
        settings = self._settings.update
        weights = torch.ones_like(before)
        if any(sample.sampled is not None for sample in batch):
            given = [torch.tensor(sample.sampled or [torch.nan] * len(sample.completion)) for sample in batch]
            sampled = pad_sequence(given, batch_first=True, padding_value=torch.nan).to(self._device)
            known = ~torch.isnan(sampled)
            sampled = torch.where(known, sampled, before)
            weights = truncated_importance(before, sampled, settings.importance_cap)
            if done is not None:
                done.gap += (before - sampled).abs().sum()
                done.gaps += sum(len(sample.sampled) for sample in batch if sample.sampled is not None)
        if settings.likelihood_weight and any(sample.foreign for sample in batch):
            foreign = torch.tensor([sample.foreign for sample in batch], device=self._device)
            likely = likelihood_weights(before, mask, settings.likelihood_weight)
            weights = weights * torch.where(foreign, likely, 1.0).unsqueeze(1)
        return weights

    # --- log-probabilities beside the gradient's ---

    def _logprobs_of(self, model: Any, shares_prompts: bool) -> CompletionLogprobs:
        temperature, logit_tokens = self._settings.sampling.temperature, self._settings.update.logit_tokens
        return CompletionLogprobs(model, temperature, logit_tokens, self._autocast, shares_prompts)

    @torch.no_grad()
    def _measure(self, logprobs: CompletionLogprobs, samples: list[Encoded]) -> Measured:
        measured: Measured = {}
        for batch in logprobs.micro_batches(samples, self._settings.update.microbatch_tokens):
            values, _ = logprobs(batch)
            measured |= {sample: row[: len(sample.completion)] for sample, row in zip(batch, values, strict=True)}
        return measured

    def _measure_reference(self, samples: list[Encoded]) -> Measured:
        """Under the model that training began with, also after a resume: that of the model's folder."""
        if self._adapter is not None:
            with adapters_off(self.model):
                return self._measure(self.logprobs, samples)
        if self._reference is None:
            loaded: Any = AutoModelForCausalLM.from_pretrained(self._base, dtype=torch.float32)
            self._reference = self._logprobs_of(loaded.to(self._device).eval().requires_grad_(False), True)
        return self._measure(self._reference, samples)

    # --- samples ---

    def _encode(self, sample: Sample, prompts: dict[str, list[int]] | None = None) -> Encoded:
        """A sample as tokens. `prompts` keeps those of questions that come again."""
        prompts = {} if prompts is None else prompts
        if sample.question not in prompts:
            prompts[sample.question] = prompt_ids(self._tokenizer, sample.question)
        prompt = prompts[sample.question]
        if sample.token_ids is not None:
            completion = np.frombuffer(sample.token_ids, "<i4").tolist()
            if max(completion, default=0) >= self._vocabulary:
                # Only a generator with another model writes these; they must not end the learner.
                log.error("completion left out: it holds a token this model does not know", token=max(completion))
                return Encoded(prompt, [], None, 0.0, sample.foreign)
            sampled = None if sample.logprobs is None else np.frombuffer(sample.logprobs, "<f4").tolist()
            return Encoded(prompt, completion, sampled, sample.advantage, sample.foreign, sample.sender_logprob)
        completion = completion_ids(self._tokenizer, sample.text, sample.finished)
        # Another tokenizer may have needed fewer tokens for the same text; what we could not have written is cut.
        kept = completion[: self._settings.sampling.max_new_tokens]
        # What the sender says of all of it does not hold for a part.
        sender = sample.sender_logprob if len(kept) == len(completion) else None
        return Encoded(prompt, kept, None, sample.advantage, sample.foreign, sender)

    # --- on disk ---

    def save(self, folder: Path) -> None:
        """Weights, or adapters alone, and optimizer state as safetensors; tied weights once."""
        weights = {name: parameter.detach().contiguous() for name, parameter in self._parameters.items()}
        save_file(weights, folder / WEIGHTS_FILE, metadata=self._adapter.metadata() if self._adapter else None)
        state = {}
        for name, parameter in self._parameters.items():
            for key, value in self._optimizer.state.get(parameter, {}).items():
                state[f"{key}:{name}"] = value.detach().contiguous()
        save_file(state, folder / OPTIMIZER_FILE, metadata={UPDATES_KEY: str(self._updates)})

    def load(self, folder: Path) -> None:
        """The inverse of `save`. Raises SettingsError, with nothing changed, when it holds adapters of another kind."""
        weights, state = load_file(folder / WEIGHTS_FILE), load_file(folder / OPTIMIZER_FILE)
        odd = sorted(weights.keys() ^ self._parameters.keys())
        odd = odd or [name for name, parameter in self._parameters.items() if weights[name].shape != parameter.shape]
        if odd:
            raise SettingsError(
                f"the checkpoint {folder} does not fit node.model and node.update.lora: {', '.join(odd[:3])} differ; "
                f"take the settings it was written with, or begin the run anew with `grapevine up --fresh`"
            )
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(weights[name])
        self._optimizer.state.clear()
        for field, value in state.items():
            key, _, name = field.partition(":")
            parameter = self._parameters[name]
            self._optimizer.state[parameter][key] = value.to(self._device)
        with safe_open(folder / OPTIMIZER_FILE, framework="numpy") as file:
            updates = (file.metadata() or {}).get(UPDATES_KEY)
        if updates is None:  # an earlier release counted the optimizer's steps alone
            updates = max([int(value.item()) for field, value in state.items() if field.startswith("step:")], default=0)
        self._updates = int(updates)

    def roll_back(self, folder: Path) -> None:
        """Weights and optimizer of an earlier checkpoint; the learning rate and the minibatches go on from here."""
        updates = self._updates
        self.load(folder)
        self._updates = updates


def _mean(total: Tensor, count: int) -> float:
    """0 without any, and where a skipped step left no number."""
    value = total.item() / max(count, 1)
    return value if np.isfinite(value) else 0.0


def _padded(measured: Measured, batch: Sequence[Encoded]) -> Tensor:
    """[samples, longest], 0 after the last token of each."""
    return pad_sequence([measured[sample] for sample in batch], batch_first=True)


def _checkpoint_activations(model: Any) -> None:
    """Gradient checkpointing without dropout: its layers alone are told that they train, and lose what they drop.

    Layers compute twice only in training mode, in which attention would drop, too.
    """
    model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False):
            module.training = True
            for name, value in vars(module).items():
                if "drop" in name and isinstance(value, float):
                    setattr(module, name, 0.0)
