"""The loss of a micro-batch: each sample's objective or correction, what its tokens count, and the divergence.

Guarantees: the losses of a minibatch's micro-batches add up to the minibatch's loss, however it was cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from common.sections import NodeSettings
from learners.batches import Encoded
from learners.logprobs import CompletionLogprobs
from learners.objectives import (
    OBJECTIVES,
    hacpo,
    kl_penalty,
    likelihood_weights,
    luffy,
    token_weights,
    truncated_importance,
)

# Log-probabilities of completions, [tokens] each.
Measured = dict[Encoded, Tensor]


class Totals(NamedTuple):
    """Of a whole minibatch, samples without signal included: what its means are taken over."""

    tokens: int
    samples: int


@dataclass
class Tally:
    """Sums over a round, and how many tokens they are over: kept on the device until the round ends."""

    gap: Tensor
    gaps: int
    divergence: Tensor
    divergences: int


class PolicyLoss:
    """What an update minimises, for one node."""

    def __init__(self, settings: NodeSettings, logprobs: CompletionLogprobs, device: torch.device) -> None:
        self._settings = settings
        self._logprobs = logprobs
        self._device = device

    def __call__(
        self, batch: Sequence[Encoded], old: Measured, reference: Measured, totals: Totals, tally: Tally | None
    ) -> Tensor:
        """The share that a micro-batch has in its minibatch's loss, with gradient.

        Args:
            old: log-probabilities at the start of the round, [tokens] each; empty: those of this pass.
            reference: those of the model that training began with; needed where `kl` is above 0.
            totals: of the minibatch.
            tally: where figures are added up.
        """
        settings = self._settings.update
        logprobs, mask = self._logprobs(batch)
        before = _padded(old, batch) if old else logprobs.detach()
        lengths = mask.sum(1)
        most = self._settings.sampling.max_new_tokens
        per_token = token_weights(settings.objective, lengths, totals.tokens, totals.samples, most).unsqueeze(1)
        losses = self._losses(batch, logprobs, before, mask) * self._importance(batch, before, mask, tally)
        if settings.kl:
            divergence = kl_penalty(logprobs, _padded(reference, batch), before) * mask
            losses = losses + settings.kl * divergence
            if tally is not None:
                tally.divergence += divergence.detach().sum()
                tally.divergences += sum(len(sample.completion) for sample in batch)
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

    def _importance(self, batch: Sequence[Encoded], before: Tensor, mask: Tensor, tally: Tally | None) -> Tensor:
        """[samples, tokens]: what own tokens count by their sampler, and foreign ones by their likelihood."""
        settings = self._settings.update
        weights = torch.ones_like(before)
        if any(sample.sampled is not None for sample in batch):
            given = [torch.tensor(sample.sampled or [torch.nan] * len(sample.completion)) for sample in batch]
            sampled = pad_sequence(given, batch_first=True, padding_value=torch.nan).to(self._device)
            known = ~torch.isnan(sampled)
            sampled = torch.where(known, sampled, before)
            weights = truncated_importance(before, sampled, settings.importance_cap)
            if tally is not None:
                tally.gap += (before - sampled).abs().sum()
                tally.gaps += sum(len(sample.sampled) for sample in batch if sample.sampled is not None)
        if settings.likelihood_weight and any(sample.foreign for sample in batch):
            foreign = torch.tensor([sample.foreign for sample in batch], device=self._device)
            likely = likelihood_weights(before, mask, settings.likelihood_weight)
            weights = weights * torch.where(foreign, likely, 1.0).unsqueeze(1)
        return weights


def _padded(measured: Measured, batch: Sequence[Encoded]) -> Tensor:
    """[samples, longest], 0 after the last token of each."""
    return pad_sequence([measured[sample] for sample in batch], batch_first=True)
