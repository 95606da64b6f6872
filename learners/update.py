"""One round's update of a policy: encode, measure, step. The part of a learner that holds a model.

Guarantees: a step whose loss or gradient is not finite
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
from typing import Any

import numpy as np
import structlog
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import Parameter
from transformers import AutoModelForCausalLM

from common.adapters import Adapter, adapter_of
from common.chat import load_tokenizer
from common.sections import NodeSettings
from common.settings import SettingsError
from learners.batches import Encoded
from learners.checkpoint import WEIGHTS_FILE
from learners.encode import Encoder
from learners.logprobs import CompletionLogprobs
from learners.lora import adapters_off, add_adapters
from learners.loss import Measured, PolicyLoss, Tally, Totals
from learners.mix import Sample
from learners.schedule import learning_rate

log = structlog.get_logger()

OPTIMIZER_FILE = "optimizer.safetensors"
UPDATES_KEY = "updates"
BETAS = (0.9, 0.99)
MANY_POSITIONS = 2**20  # of models that set no limit


@dataclass
class _Round:
    """What a round's steps add up to."""

    losses: list[float]
    norms: list[float]
    skipped: int
    tally: Tally


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
        self._parameters: dict[str, Parameter] = parameters or dict(self.model.named_parameters())
        self._optimizer = torch.optim.AdamW(
            self._parameters.values(), lr=update.learning_rate, betas=BETAS, weight_decay=update.weight_decay, fused=True
        )
        self._updates = 0
        self.logprobs = self._logprobs_of(self.model, not update.gradient_checkpointing)
        self._loss = PolicyLoss(settings, self.logprobs, self._device)
        self._reference: CompletionLogprobs | None = None
        positions = getattr(self.model.config.get_text_config(), "max_position_embeddings", None) or MANY_POSITIONS
        vocabulary = self.model.get_input_embeddings().num_embeddings
        self.encode = Encoder(load_tokenizer(model), vocabulary, positions, settings)

    def update(self, own: list[Sample], swarm: list[Sample]) -> dict[str, float]:
        """A round: `epochs` passes over all samples, `minibatches` optimizer steps each.

        The loss is a mean over all completion tokens of a minibatch, those of samples without signal included, as in the
        paper; such samples have no gradient and are computed only for a divergence. Ratios are to the policy at the start
        of the round.
        """
        settings = self._settings.update
        encoded = self.encode.all([*own, *swarm])
        rate = learning_rate(settings, self._updates + 1, self._settings.rounds)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        steps = self._steps(encoded)
        self._updates += 1
        computed = [sample for sample in encoded if self._is_computed(sample)]
        # With one step the policy at the start of the round is the one that the step computes anyway.
        old = self._measure(self.logprobs, computed) if len(steps) > 1 else {}
        reference = self._measure_reference(computed) if settings.kl else {}
        nothing = torch.zeros((), device=self._device)
        tally = Tally(nothing.clone(), 0, nothing.clone(), 0)
        done = _Round([], [], 0, tally)
        for step in steps:
            self._step(step, old, reference, done)
        return {
            "tokens_own": float(sum(len(sample.completion) for sample in encoded[: len(own)])),
            "tokens_swarm": float(sum(len(sample.completion) for sample in encoded[len(own) :])),
            "loss": fmean(done.losses) if done.losses else 0.0,
            "grad_norm": fmean(done.norms) if done.norms else 0.0,
            "sampler_gap": _mean(tally.gap, tally.gaps),
            **({"kl": _mean(tally.divergence, tally.divergences)} if settings.kl else {}),
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
            part = self._loss(batch, old, reference, totals, done.tally)
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
        written = adapter_of(folder / WEIGHTS_FILE)
        if not odd and written is not None and self._adapter is not None and written.scale != self._adapter.scale:
            odd = ["node.update.lora.alpha"]
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
