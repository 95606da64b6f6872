"""One round's update of a policy: encode, forward, loss, step. The part of a learner that holds a model.

Guarantees: prompt and completion are joined without padding between them and padded on the right only, so a token's
log-probability does not depend on what else is in the batch; the end-of-sequence token of a finished completion carries
gradient; an update whose gradient is not finite is skipped and counted; nothing is pickled.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import structlog
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from common.chat import completion_ids, load_tokenizer, prompt_ids
from common.settings import NodeSettings
from learners.checkpoint import WEIGHTS_FILE
from learners.mix import Sample
from learners.objectives import grpo, truncated_importance

log = structlog.get_logger()

OPTIMIZER_FILE = "optimizer.safetensors"
BETAS = (0.9, 0.99)


@dataclass(frozen=True)
class Encoded:
    """A sample as tokens. `sampled` holds the generator's log-probabilities, None for swarm samples."""

    prompt: list[int]
    completion: list[int]
    sampled: list[float] | None
    advantage: float

    def __len__(self) -> int:
        return len(self.prompt) + len(self.completion)


class PolicyTrainer:
    """A causal language model with its optimizer, on the device that is there."""

    def __init__(self, model: str, settings: NodeSettings) -> None:
        """`model` is a hub id or folder. Weights and optimizer are float32."""
        self._settings = settings
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._tokenizer = load_tokenizer(model)
        loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self.model = loaded.to(self._device)
        # Evaluation mode: dropout would make the learner's log-probabilities differ from the generator's.
        self.model.eval()
        self._vocabulary: int = self.model.get_input_embeddings().num_embeddings
        self._parameters = dict(self.model.named_parameters())
        update = settings.update
        self._optimizer = torch.optim.AdamW(
            self._parameters.values(), lr=update.learning_rate, betas=BETAS, weight_decay=update.weight_decay
        )

    def update(self, own: list[Sample], swarm: list[Sample]) -> dict[str, float]:
        """One optimizer step over all samples, accumulated over minibatches.

        The loss is the mean over all completion tokens of the round, those of samples without signal included, as in the
        paper; such samples have no gradient and are not computed.
        """
        settings = self._settings.update
        encoded = [self._encode(sample) for sample in [*own, *swarm]]
        tokens_own = sum(len(sample.completion) for sample in encoded[: len(own)])
        tokens_swarm = sum(len(sample.completion) for sample in encoded[len(own) :])
        figures = {
            "tokens_own": float(tokens_own),
            "tokens_swarm": float(tokens_swarm),
            "informative_share": sum(s.advantage != 0 for s in own) / len(own) if own else 0.0,
            "loss": 0.0,
            "grad_norm": 0.0,
            "sampler_gap": 0.0,
            "skipped": 0.0,
        }
        gaps: list[Tensor] = []
        self._optimizer.zero_grad(set_to_none=True)
        for batch in self._minibatches([sample for sample in encoded if sample.advantage != 0]):
            logprobs, mask = self.logprobs(batch)
            old = logprobs.detach()
            weights = torch.ones_like(old)
            sampled, has_sampled = _sampled(batch, old)
            if has_sampled.any():
                weights = torch.where(has_sampled, truncated_importance(old, sampled, settings.importance_cap), weights)
                gaps.append((old - sampled)[has_sampled & mask.bool()].abs())
            advantages = torch.tensor([sample.advantage for sample in batch], device=self._device)
            loss = grpo(logprobs, old, advantages, mask, weights, settings.clip_low, settings.clip_high)
            loss = loss / (tokens_own + tokens_swarm)
            loss.backward()  # type: ignore[no-untyped-call]
            figures["loss"] += loss.item()
        if gaps:
            figures["sampler_gap"] = torch.cat(gaps).mean().item()
        norm = torch.nn.utils.clip_grad_norm_(self._parameters.values(), settings.max_grad_norm).item()
        if np.isfinite(norm):
            figures["grad_norm"] = norm
            self._optimizer.step()
        else:
            figures["skipped"] = 1.0
            log.error("update skipped: the gradient is not finite")
        return figures

    def logprobs(self, batch: list[Encoded]) -> tuple[Tensor, Tensor]:
        """Log-probability of every completion token at the sampling temperature, and the mask of real ones.

        Both [samples, longest completion], row i holding completion i from its first token on.
        """
        longest = max(len(sample) for sample in batch)
        ids = torch.zeros(len(batch), longest, dtype=torch.long)
        attention = torch.zeros_like(ids)
        for row, sample in enumerate(batch):
            ids[row, : len(sample)] = torch.tensor(sample.prompt + sample.completion)
            attention[row, : len(sample)] = 1
        ids, attention = ids.to(self._device), attention.to(self._device)
        first = min(len(sample.prompt) for sample in batch) - 1
        logits = self.model(input_ids=ids, attention_mask=attention, logits_to_keep=longest - first).logits
        temperature = self._settings.sampling.temperature
        width = max(len(sample.completion) for sample in batch)
        # Position p predicts token p + 1: the completion's first token is predicted by the prompt's last position.
        starts = torch.tensor([len(sample.prompt) - 1 for sample in batch], device=self._device)
        lengths = torch.tensor([len(sample.completion) for sample in batch], device=self._device)
        steps = torch.arange(width, device=self._device)
        mask = steps < lengths.unsqueeze(1)
        positions = (starts.unsqueeze(1) + steps).clamp(max=longest - 2)
        predictions = logits[torch.arange(len(batch), device=self._device).unsqueeze(1), positions - first]
        targets = ids.gather(1, positions + 1)
        spread = torch.log_softmax(predictions.float() / temperature, dim=-1)
        logprobs = spread.gather(2, targets.unsqueeze(2)).squeeze(2)
        return logprobs * mask, mask.float()

    def _encode(self, sample: Sample) -> Encoded:
        prompt = prompt_ids(self._tokenizer, sample.question)
        if sample.token_ids is not None and sample.logprobs is not None:
            completion = np.frombuffer(sample.token_ids, "<i4").tolist()
            if max(completion) >= self._vocabulary:
                # Only a generator with another model writes these; they must not end the learner.
                log.error("completion left out: it holds a token this model does not know", token=max(completion))
                return Encoded(prompt, completion, None, 0.0)
            return Encoded(prompt, completion, np.frombuffer(sample.logprobs, "<f4").tolist(), sample.advantage)
        completion = completion_ids(self._tokenizer, sample.text, sample.finished)
        # Another tokenizer may have needed fewer tokens for the same text; what we could not have written is cut.
        return Encoded(prompt, completion[: self._settings.sampling.max_new_tokens], None, sample.advantage)

    def _minibatches(self, samples: list[Encoded]) -> Iterator[list[Encoded]]:
        """Samples of similar length together, each batch within the token budget, padding included."""
        batch: list[Encoded] = []
        for sample in sorted((s for s in samples if s.completion), key=len):
            if batch and (len(batch) + 1) * len(sample) > self._settings.update.minibatch_tokens:
                yield batch
                batch = []
            batch.append(sample)
        if batch:
            yield batch

    def save(self, folder: Path) -> None:
        """Weights and optimizer state as safetensors; tied weights once."""
        weights = {name: parameter.detach().contiguous() for name, parameter in self._parameters.items()}
        save_file(weights, folder / WEIGHTS_FILE)
        state = {}
        for name, parameter in self._parameters.items():
            for key, value in self._optimizer.state.get(parameter, {}).items():
                state[f"{key}:{name}"] = value.detach().contiguous()
        save_file(state, folder / OPTIMIZER_FILE)

    def load(self, folder: Path) -> None:
        """The inverse of `save`."""
        weights = load_file(folder / WEIGHTS_FILE)
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(weights[name])
        self._optimizer.state.clear()
        for field, value in load_file(folder / OPTIMIZER_FILE).items():
            key, _, name = field.partition(":")
            parameter = self._parameters[name]
            self._optimizer.state[parameter][key] = value if key == "step" else value.to(self._device)


def _sampled(batch: list[Encoded], like: Tensor) -> tuple[Tensor, Tensor]:
    """The generators' log-probabilities and where there are any, both shaped as `like`."""
    values = torch.zeros(like.shape)
    present = torch.zeros(like.shape, dtype=torch.bool)
    for row, sample in enumerate(batch):
        if sample.sampled is not None:
            values[row, : len(sample.sampled)] = torch.tensor(sample.sampled)
            present[row, : len(sample.sampled)] = True
    return values.to(like.device), present.to(like.device)
