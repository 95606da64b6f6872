"""Log-probabilities of completions under a causal language model: batching, the forward pass, the vocabulary in chunks.

Guarantees: prompt and completion are joined without padding between them, and a token's log-probability does not depend on
what else is in the batch; logits are made for completion tokens only and, where the vocabulary is large, for so many
tokens at once, in the backward pass too; each short cut is taken only by a model for which a trial showed that it changes
nothing, every other model goes through its own forward pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import structlog
import torch
from torch import Tensor
from torch.nn import functional
from transformers import DynamicCache

from learners.batches import Encoded, cuts
from learners.chunks import ChunkedLogprobs

log = structlog.get_logger()

# Logits up to this many numbers are kept for the backward pass: making them again would cost more than their memory.
FEW_LOGITS = 2**24
# What a pass costs besides its tokens, in tokens: short completions are batched apart from long ones where that saves more.
PASS_TOKENS = {"cpu": 128, "cuda": 2048}
# A prompt that several completions share is computed once where that saves at least this share of the tokens.
SHARING_PAYS = 0.2
# Scales that some models put on their logits, besides the head: they go through their own forward pass.
LOGIT_SCALES = ("logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier_scale")


class CompletionLogprobs:
    """Log-probabilities of completions under one model, with gradient where it is enabled."""

    def __init__(
        self,
        model: Any,
        temperature: float,
        logit_tokens: int,
        autocast: torch.dtype | None = None,
        shares_prompts: bool = True,
    ) -> None:
        """`model` is a causal language model of transformers.

        Args:
            temperature: logits are divided by it.
            logit_tokens: tokens whose logits are held at once, where tokens x vocabulary is large.
            autocast: number format of matrix products; None: that of the weights.
            shares_prompts: False where activations are computed twice, which goes with no cache.
        """
        self._model = model
        self._head = model.get_output_embeddings()
        self._device = next(model.parameters()).device
        self._temperature = temperature
        self._logit_tokens = logit_tokens
        self._autocast = autocast
        config = model.config.get_text_config()
        self._softcap: float | None = getattr(config, "final_logit_softcapping", None)
        self._uses_backbone = (
            type(self._head) is torch.nn.Linear
            and model.base_model is not model
            and all(getattr(config, name, None) in (None, 1, 1.0) for name in LOGIT_SCALES)
        )
        self._shares = shares_prompts and self._uses_backbone and _attends_to_all(config)
        self._tried = False

    def __call__(self, batch: Sequence[Encoded]) -> tuple[Tensor, Tensor]:
        """Log-probability of every completion token at the temperature (float32, nats), and the mask of real ones.

        Both [samples, longest completion], row i holding completion i from its first token on, 0 after its last.
        """
        if not self._tried:
            self._tried = True
            self._try_shortcuts()
        return self._measure(batch)

    def micro_batches(self, samples: Sequence[Encoded], most_tokens: int) -> list[list[Encoded]]:
        """The samples that have a completion, similar lengths together, rows x longest within `most_tokens` each."""
        samples = [sample for sample in samples if sample.completion]
        if self._sharing_pays(samples):
            # The prompts are a pass of their own: what padding costs is decided by the completions.
            samples.sort(key=lambda sample: (len(sample.completion), len(sample.prompt)))
            widths = [len(sample.completion) for sample in samples]
        else:
            samples.sort(key=len)
            widths = [len(sample) for sample in samples]
        batches: list[list[Encoded]] = []
        start = 0
        for end in cuts(widths, PASS_TOKENS.get(self._device.type, 128)):
            batch: list[Encoded] = []
            longest = 0
            for sample in samples[start:end]:
                longest = max(longest, len(sample))
                if batch and (len(batch) + 1) * longest > most_tokens:
                    batches.append(batch)
                    batch, longest = [], len(sample)
                batch.append(sample)
            batches.append(batch)
            start = end
        return batches

    # --- the ways to compute them ---

    def _measure(self, batch: Sequence[Encoded]) -> tuple[Tensor, Tensor]:
        lengths = torch.tensor([len(sample.completion) for sample in batch])
        mask = torch.arange(int(lengths.max())) < lengths.unsqueeze(1)
        targets = torch.tensor([token for sample in batch for token in sample.completion], device=self._device)
        if not self._uses_backbone:
            packed = self._plainly(batch, targets)
        else:
            hidden = self._hidden_sharing(batch) if self._sharing_pays(batch) else self._hidden(batch)
            packed = self._of_hidden(hidden, targets)
        mask = mask.to(self._device)
        # Padding takes the zero at the end.
        places = torch.where(mask, mask.flatten().cumsum(0).view(mask.shape) - 1, len(targets))
        return torch.cat([packed, packed.new_zeros(1)])[places], mask.float()

    def _plainly(self, batch: Sequence[Encoded], targets: Tensor) -> Tensor:
        """[tokens], through the model's own forward pass, which holds all logits of the batch."""
        ids, places = self._padded(batch)
        first = min(len(sample.prompt) for sample in batch) - 1
        with self._format():
            logits = self._model(input_ids=ids, use_cache=False, logits_to_keep=ids.shape[1] - first).logits
        rows, columns = places // ids.shape[1], places % ids.shape[1]
        # A model that does not know `logits_to_keep` gives all of them.
        columns = columns - (ids.shape[1] - logits.shape[1])
        return -functional.cross_entropy(logits[rows, columns].float() / self._temperature, targets, reduction="none")

    def _hidden(self, batch: Sequence[Encoded]) -> Tensor:
        """[tokens, width]: the last hidden states from which the completions' tokens are predicted, one after another."""
        ids, places = self._padded(batch)
        with self._format():
            # No mask: what is padded on the right comes after all that is real, and attention looks back only.
            hidden = self._model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        return hidden.flatten(0, 1).index_select(0, places)  # type: ignore[no-any-return]

    def _padded(self, batch: Sequence[Encoded]) -> tuple[Tensor, Tensor]:
        """Token ids [samples, longest], padded on the right, and the places (row x longest + column) that predict.

        Position p predicts token p + 1, so the completion's first token is predicted by the prompt's last position and
        nothing by the completion's last, which is left out.
        """
        longest = max(map(len, batch)) - 1
        ids = torch.zeros(len(batch), longest, dtype=torch.long)
        places = []
        for row, sample in enumerate(batch):
            ids[row, : len(sample) - 1] = torch.tensor((sample.prompt + sample.completion)[:-1])
            start = row * longest + len(sample.prompt) - 1
            places.append(torch.arange(start, start + len(sample.completion)))
        return ids.to(self._device), torch.cat(places).to(self._device)

    def _hidden_sharing(self, batch: Sequence[Encoded]) -> Tensor:
        """As `_hidden`, with each distinct prompt computed once: its keys and values serve all its completions."""
        numbers: dict[tuple[int, ...], int] = {}
        owner = [numbers.setdefault(tuple(sample.prompt), len(numbers)) for sample in batch]
        width = max(map(len, numbers))
        ids = torch.zeros(len(numbers), width, dtype=torch.long)
        attention = torch.zeros_like(ids)
        for row, prompt in enumerate(numbers):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            attention[row, width - len(prompt) :] = 1
        steps = max(len(sample.completion) for sample in batch) - 1
        written = torch.zeros(len(batch), max(steps, 1), dtype=torch.long)
        places = []
        for row, sample in enumerate(batch):
            length = len(sample.completion) - 1
            written[row, :length] = torch.tensor(sample.completion[:-1], dtype=torch.long)
            # Rows 0 to P - 1 are the prompts' last states, the completions' follow.
            start = len(numbers) + row * steps
            places.append(torch.tensor([owner[row], *range(start, start + length)]))
        ids, attention, written = ids.to(self._device), attention.to(self._device), written.to(self._device)
        owners = torch.tensor(owner, device=self._device)
        positions = (attention.cumsum(1) - 1).clamp(min=0)
        padded = len({len(prompt) for prompt in numbers}) > 1
        backbone = self._model.base_model
        cache: Any = DynamicCache(config=self._model.config)
        with self._format():
            hidden = backbone(
                input_ids=ids, attention_mask=attention if padded else None, position_ids=positions if padded else None,
                past_key_values=cache, use_cache=True,
            ).last_hidden_state[:, -1]  # fmt: skip
            if steps:
                for layer in cache.layers:
                    layer.keys, layer.values = layer.keys[owners], layer.values[owners]
                seen = torch.cat([attention[owners], attention.new_ones(len(batch), steps)], 1) if padded else None
                follow = attention.sum(1)[owners].unsqueeze(1) + torch.arange(steps, device=self._device)
                later = backbone(
                    input_ids=written, attention_mask=seen, position_ids=follow, past_key_values=cache, use_cache=True
                ).last_hidden_state
                hidden = torch.cat([hidden, later.flatten(0, 1)])
        return hidden.index_select(0, torch.cat(places).to(self._device))  # type: ignore[no-any-return]

    def _of_hidden(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """[tokens]: head and log-softmax at the targets."""
        head = self._head
        if len(targets) * head.weight.shape[0] > FEW_LOGITS:
            product = self._autocast or head.weight.dtype
            args = (self._temperature, self._softcap, self._logit_tokens, product)
            return ChunkedLogprobs.apply(hidden, head.weight, head.bias, targets, *args)  # type: ignore[no-any-return, no-untyped-call]
        with self._format():
            logits = head(hidden).float()
        if self._softcap is not None:
            logits = torch.tanh(logits / self._softcap) * self._softcap
        if self._temperature != 1.0:
            logits = logits / self._temperature
        return -functional.cross_entropy(logits, targets, reduction="none")

    def _format(self) -> AbstractContextManager[Any]:
        return torch.autocast(self._device.type, self._autocast) if self._autocast else nullcontext()

    # --- which of them a model allows ---

    def _sharing_pays(self, batch: Sequence[Encoded]) -> bool:
        if not self._shares or len(batch) < 2:
            return False
        prompts = Counter(tuple(sample.prompt) for sample in batch)
        saved = sum(len(prompt) * (count - 1) for prompt, count in prompts.items())
        return saved >= SHARING_PAYS * sum(map(len, batch))

    @torch.no_grad()
    def _try_shortcuts(self) -> None:
        """Compare each short cut with the model's own forward pass on a few tokens; give up those that differ."""
        vocabulary = self._model.get_input_embeddings().num_embeddings
        prompts = [[(7 * i + 3) % vocabulary for i in range(length)] for length in (6, 3)]
        batch = [
            Encoded(prompts[row % 2], [(11 * row + 5 * i + 2) % vocabulary for i in range(length)], None, 0.0)
            for row, length in enumerate((3, 5, 1, 4, 2, 3))
        ]
        targets = torch.tensor([token for sample in batch for token in sample.completion], device=self._device)
        autocast, self._autocast = self._autocast, None  # as exactly as the weights allow
        own = self._plainly(batch, targets)
        if self._shares and not self._agrees(self._hidden_sharing, batch, targets, own):
            log.debug("prompts are not shared: the model's log-probabilities would change")
            self._shares = False
        if self._uses_backbone and not self._agrees(self._hidden, batch, targets, own):
            log.warning("the model's own forward pass is used, which holds all logits: it does more than apply its head")
            self._uses_backbone = self._shares = False
        self._autocast = autocast

    def _agrees(self, way: Any, batch: Sequence[Encoded], targets: Tensor, own: Tensor) -> bool:
        """Another way of rounding is no difference: of 16 bits a single number tells little, their mean does."""
        try:
            apart = (self._of_hidden(way(batch), targets) - own).abs()
        except (AttributeError, TypeError, ValueError, RuntimeError, IndexError) as error:
            # Models differ in what their inner parts take; the way round them is open.
            log.debug("a short cut failed on trial", error=" ".join(str(error).split()))
            return False
        return bool(apart.max() <= 0.01 if self._head.weight.dtype == torch.float32 else apart.mean() <= 0.25)


def _attends_to_all(config: Any) -> bool:
    """Whether every layer looks back to the first token: of others the cache keeps less than a second pass needs."""
    layers = getattr(config, "layer_types", None)
    if layers:
        return set(layers) == {"full_attention"}
    return getattr(config, "sliding_window", None) is None
