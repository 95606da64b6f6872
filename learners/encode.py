"""Samples as tokens.

Guarantees: own completions train on the tokens that were sampled, foreign ones on the receiver's own tokens of their text;
the end-of-sequence token of a finished completion is there; whatever a stranger sends, the time to encode it and the length
of what comes out are bounded, and what the model could not read is left out and logged rather than met in the update.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import structlog

from common.chat import completion_ids, prompt_ids
from common.sections import NodeSettings
from learners.batches import Encoded
from learners.mix import Sample

log = structlog.get_logger()

# Longer text for so many tokens is never encoded whole: no tokenizer makes so little of ordinary text.
CHARACTERS_PER_TOKEN = 16
# One prompt must not take the memory that a whole micro-batch is meant for.
FOREIGN_PROMPT_TOKENS = 4096


class Encoder:
    """One model's view of samples."""

    def __init__(self, tokenizer: Any, vocabulary: int, positions: int, settings: NodeSettings) -> None:
        """`vocabulary` and `positions`: how many tokens the model knows, and how many it can read in a row."""
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._positions = positions
        self._most = settings.sampling.max_new_tokens
        self._prompts: dict[str, list[int]] = {}

    def all(self, samples: list[Sample]) -> list[Encoded]:
        """A round's samples, in order; a question that comes again is rendered once."""
        self._prompts = {}
        return [self(sample) for sample in samples]

    def __call__(self, sample: Sample) -> Encoded:
        """One sample; one that cannot be used has no tokens and no advantage."""
        prompt = self._prompts.get(sample.question)
        if prompt is None:
            prompt = self._prompts[sample.question] = prompt_ids(self._tokenizer, sample.question)
        encoded = self._sampled(sample, prompt) if sample.token_ids is not None else self._text(sample, prompt)
        if max(encoded.completion, default=0) >= self._vocabulary:
            # Only a generator with another model writes these; they must not end the learner.
            return self._unusable(sample, "it holds a token that this model does not know")
        if len(encoded) > self._positions:
            return self._unusable(sample, f"{len(encoded)} tokens with its prompt, and the model reads {self._positions}")
        if sample.foreign and len(prompt) > FOREIGN_PROMPT_TOKENS:
            return self._unusable(sample, f"its prompt has {len(prompt)} tokens, more than {FOREIGN_PROMPT_TOKENS}")
        return encoded

    def _sampled(self, sample: Sample, prompt: list[int]) -> Encoded:
        completion = np.frombuffer(sample.token_ids or b"", "<i4").tolist()
        sampled = None if sample.logprobs is None else np.frombuffer(sample.logprobs, "<f4").tolist()
        return Encoded(prompt, completion, sampled, sample.advantage, sample.foreign, sample.sender_logprob)

    def _text(self, sample: Sample, prompt: list[int]) -> Encoded:
        text = sample.text[: CHARACTERS_PER_TOKEN * self._most]
        cut = len(text) < len(sample.text)
        completion = completion_ids(self._tokenizer, text, sample.finished and not cut)
        # Another tokenizer may have needed fewer tokens for the same text; what we could not have written is cut.
        kept = completion[: self._most]
        # What the sender says of all of it does not hold for a part.
        whole = len(kept) == len(completion) and not cut
        return Encoded(prompt, kept, None, sample.advantage, sample.foreign, sample.sender_logprob if whole else None)

    def _unusable(self, sample: Sample, why: str) -> Encoded:
        log.error("completion left out", why=why, foreign=sample.foreign)
        return Encoded([], [], None, 0.0, sample.foreign)
