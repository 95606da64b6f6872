"""The transformers engine: plain batched sampling with a key-value cache, on CPU or GPU.

Guarantees: each completion depends on its question, the policy and its request's seed, not on what else is in the batch;
every token's log-probability is recorded as sampled, the end-of-sequence token's included; a prompt shared by a group is
computed once; weights are taken all or none; a policy of adapters leaves the weights of its base model as they are.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from common.chat import decode, prompt_ids
from common.messages import Completion, Sampling, Span, Version
from generators.engines.base import Request
from generators.engines.opened import OpenedModel


class TransformersEngine:
    """Models in memory, one of them in use. Not thread-safe."""

    def __init__(self, device: str = "auto", dtype: str = "float32", models_kept: int = 1) -> None:
        """`models_kept`: how many models stay in memory, those used last; more spare loading when nodes differ in model."""
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self._device = torch.device(device)
        self._dtype = getattr(torch, dtype)
        self._kept = models_kept
        self._opened: dict[str, OpenedModel] = {}
        self._waiting: dict[str, Request] = {}

    @property
    def in_flight(self) -> int:
        """Requests that the next step answers."""
        return len(self._waiting)

    def open_model(self, model: str) -> None:
        """Load a hub id or folder; one that is in memory still is only taken up again.

        Raises PolicyUnusable when it cannot be loaded here.
        """
        opened = self._opened.pop(model, None)
        if opened is None:
            opened = OpenedModel(model, self._device, self._dtype)
        self._opened[model] = opened
        while len(self._opened) > self._kept:
            del self._opened[next(iter(self._opened))]

    def load_policy(self, weights: Path, version: Version) -> None:
        """Take the file's weights, or its adapters on top of the base model, once all names and shapes agree.

        Raises PolicyUnusable otherwise, with the policy before it still whole.
        """
        self._in_use.load_policy(weights, version)

    @property
    def _in_use(self) -> OpenedModel:
        return next(reversed(self._opened.values()))

    def submit(self, request: Request) -> None:
        """To be answered by the next step."""
        self._waiting[request.id] = request

    def cancel(self, ids: list[str]) -> None:
        """Forget requests that no step has answered."""
        for id in ids:
            self._waiting.pop(id, None)

    def step(self) -> list[tuple[str, list[Completion]]]:
        """Answer all requests, in one batch."""
        requests = list(self._waiting.values())
        answers = self._generate(requests) if requests else []
        self._waiting.clear()
        return [(request.id, answer) for request, answer in zip(requests, answers, strict=True)]

    def close(self) -> None:
        """Let go of all models."""
        self._opened.clear()

    @torch.inference_mode()
    def _generate(self, requests: list[Request]) -> list[list[Completion]]:
        """Sample all completions of all requests together."""
        prompts = [prompt_ids(self._in_use.tokenizer, request.question) for request in requests]
        owner = torch.tensor([i for i, request in enumerate(requests) for _ in range(request.completions)])
        rows = len(owner)
        limits = torch.tensor([requests[i].sampling.max_new_tokens for i in owner], device=self._device)
        longest = int(limits.max())
        uniforms = torch.cat([_uniforms(request, longest) for request in requests]).to(self._device)
        sampler = _Sampler([requests[i].sampling for i in owner], self._device)

        logits, cache, attention = self._prefill(prompts)
        owner = owner.to(self._device)
        cache.batch_select_indices(owner)
        logits, attention = logits[owner], attention[owner]
        tokens = torch.zeros(rows, longest, dtype=torch.long, device=self._device)
        logprobs = torch.zeros(rows, longest, device=self._device)
        lengths = torch.zeros(rows, dtype=torch.long, device=self._device)
        stopped = torch.zeros(rows, dtype=torch.bool, device=self._device)
        stops = torch.tensor(sorted(self._in_use.stops), device=self._device)
        active = torch.arange(rows, device=self._device)

        for step in range(longest):
            chosen, chosen_logprobs = sampler(logits, active, uniforms[active, step])
            tokens[active, step] = chosen
            logprobs[active, step] = chosen_logprobs
            lengths[active] = step + 1
            ends = torch.isin(chosen, stops)
            stopped[active] = ends
            keep = ~ends & (step + 1 < limits[active])
            if not keep.any():
                break
            if not keep.all():
                kept = keep.nonzero().squeeze(1)
                cache.batch_select_indices(kept)
                active, attention, chosen = active[kept], attention[kept], chosen[kept]
            attention = torch.cat([attention, attention.new_ones(len(active), 1)], dim=1)
            positions = attention.sum(1, keepdim=True) - 1
            output = self._in_use.model(
                input_ids=chosen.unsqueeze(1), attention_mask=attention, position_ids=positions, past_key_values=cache
            )
            logits = output.logits[:, -1]
        return self._completions(requests, tokens.cpu(), logprobs.cpu(), lengths.tolist(), stopped.tolist())

    def _prefill(self, prompts: list[list[int]]) -> tuple[Tensor, Any, Tensor]:
        """Next-token logits, cache and attention mask of the prompts, padded on the left."""
        width = max(map(len, prompts))
        ids = torch.zeros(len(prompts), width, dtype=torch.long)
        attention = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            attention[row, width - len(prompt) :] = 1
        ids, attention = ids.to(self._device), attention.to(self._device)
        positions = (attention.cumsum(1) - 1).clamp(min=0)
        output = self._in_use.model(
            input_ids=ids, attention_mask=attention, position_ids=positions,
            past_key_values=DynamicCache(config=self._in_use.model.config), use_cache=True, logits_to_keep=1,
        )  # fmt: skip
        return output.logits[:, -1], output.past_key_values, attention

    def _completions(
        self, requests: list[Request], tokens: Tensor, logprobs: Tensor, lengths: list[int], stopped: list[bool]
    ) -> list[list[Completion]]:
        groups: list[list[Completion]] = []
        row = 0
        for request in requests:
            group = []
            for _ in range(request.completions):
                ids = tokens[row, : lengths[row]].numpy().astype("<i4")
                values = logprobs[row, : lengths[row]].numpy().astype("<f4")
                group.append(
                    Completion(
                        text=decode(self._in_use.tokenizer, ids.tolist(), self._in_use.stops),
                        token_ids=ids.tobytes(),
                        logprobs=values.tobytes(),
                        tokens=lengths[row],
                        logprob=float(values.sum(dtype=np.float64)),
                        finish_reason="stop" if stopped[row] else "length",
                        spans=[Span(0, lengths[row], self._in_use.version)],
                    )
                )
                row += 1
            groups.append(group)
        return groups


class _Sampler:
    """Draws tokens by inverting the cumulative distribution: one uniform number per token, whatever the vocabulary."""

    def __init__(self, samplings: list[Sampling], device: torch.device) -> None:
        self._temperature = torch.tensor([s.temperature for s in samplings], device=device)
        self._top_p = torch.tensor([s.top_p for s in samplings], device=device)
        self._cuts = any(s.top_p < 1.0 for s in samplings)
        self._greedy = any(s.temperature == 0.0 for s in samplings)

    def __call__(self, logits: Tensor, rows: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens and their log-probabilities as sampled: after temperature and top-p cut; greedy ones at temperature 1."""
        temperature = self._temperature[rows]
        greedy = temperature == 0.0
        spread = torch.log_softmax(logits.float() / torch.where(greedy, 1.0, temperature).unsqueeze(1), dim=-1)
        weights = spread.exp().double()
        if self._cuts:
            ordered, order = weights.sort(dim=-1, descending=True)
            before = ordered.cumsum(-1) - ordered
            ordered[before >= self._top_p[rows].double().unsqueeze(1)] = 0.0
            weights = torch.zeros_like(weights).scatter_(1, order, ordered)
            spread = spread - weights.sum(-1, keepdim=True).log().to(spread.dtype)
        heights = weights.cumsum(-1)
        chosen = torch.searchsorted(heights, (uniforms.double() * heights[:, -1]).unsqueeze(1), right=True).squeeze(1)
        chosen = chosen.clamp(max=logits.shape[1] - 1)
        if self._greedy:
            chosen = torch.where(greedy, logits.argmax(-1), chosen)
        return chosen, spread.gather(1, chosen.unsqueeze(1)).squeeze(1)


def _uniforms(request: Request, steps: int) -> Tensor:
    """[completions, steps] numbers in [0, 1) from the request's seed."""
    generator = torch.Generator().manual_seed(request.seed % 2**63)
    # Drawn row by row at a fixed width, so that the same completion gets the same numbers in a wider batch.
    width = request.sampling.max_new_tokens
    numbers = torch.rand(request.completions, width, generator=generator)
    return torch.nn.functional.pad(numbers, (0, steps - width))
