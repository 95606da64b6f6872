"""An engine without a model: real messages at a fixed pace, for chaos tests and scale tests."""

from __future__ import annotations

import math
import struct
import time
from pathlib import Path
from random import Random

from common.messages import Completion, Span, Version
from generators.engines.base import Request


class PacedEngine:
    """Writes `<answer>0</answer>` or `<answer>1</answer>`, `seconds` per request, `tokens` tokens each."""

    def __init__(self, seconds: float = 0.0, tokens: int = 8) -> None:
        self._seconds = seconds
        self._tokens = tokens
        self._version = Version(0, 0)

    def open_model(self, model: str) -> None:
        """Any name will do."""

    def load_policy(self, weights: Path, version: Version) -> None:
        """Only the version matters."""
        self._version = version

    def generate(self, requests: list[Request]) -> list[list[Completion]]:
        """Seeded coin flips."""
        time.sleep(self._seconds * len(requests))
        return [self._answers(request) for request in requests]

    def _answers(self, request: Request) -> list[Completion]:
        random = Random(request.seed)
        count = min(self._tokens, request.sampling.max_new_tokens)
        logprob = struct.pack("<f", math.log(0.5))
        return [
            Completion(
                text=f"<answer>{random.randrange(2)}</answer>",
                token_ids=bytes(4 * count),
                logprobs=logprob * count,
                tokens=count,
                logprob=count * math.log(0.5),
                finish_reason="stop",
                spans=[Span(0, count, self._version)],
            )
            for _ in range(request.completions)
        ]
