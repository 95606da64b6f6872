"""An engine without a model: real messages at a fixed pace, to see how the rest behaves with many generators."""

from __future__ import annotations

import math
import struct
import time
from pathlib import Path
from random import Random

from common.messages import Completion, Span, Version
from generators.engines.base import Request


class PacedEngine:
    """Writes `<answer>0</answer>` or `<answer>1</answer>`, `tokens` tokens each, `tokens_per_second` in all."""

    def __init__(self, tokens_per_second: float = math.inf, tokens: int = 8) -> None:
        self._seconds_per_token = 1.0 / tokens_per_second
        self._tokens = tokens
        self._version = Version(0, 0)
        self._waiting: dict[str, Request] = {}
        self._free_at = 0.0

    @property
    def in_flight(self) -> int:
        """Requests not answered yet."""
        return len(self._waiting)

    def open_model(self, model: str) -> None:
        """Any name will do."""

    def load_policy(self, weights: Path, version: Version) -> None:
        """Only the version matters."""
        self._version = version

    def submit(self, request: Request) -> None:
        """One more."""
        self._waiting[request.id] = request

    def step(self) -> list[tuple[str, list[Completion]]]:
        """The oldest request, when its time has come."""
        id = next(iter(self._waiting), None)
        if id is None:
            return []
        request = self._waiting[id]
        # From when the one before was due, so that the pace holds however long the caller takes in between.
        now = time.monotonic()
        self._free_at = max(self._free_at, now - self._seconds_per_token) + self._cost(request)
        time.sleep(max(0.0, self._free_at - now))
        del self._waiting[id]
        return [(id, self._answers(request))]

    def cancel(self, ids: list[str]) -> None:
        """Forget them."""
        for id in ids:
            self._waiting.pop(id, None)

    def close(self) -> None:
        """Nothing to free."""

    def _cost(self, request: Request) -> float:
        return self._seconds_per_token * self._length(request) * request.completions

    def _length(self, request: Request) -> int:
        return min(self._tokens, request.sampling.max_new_tokens)

    def _answers(self, request: Request) -> list[Completion]:
        random = Random(request.seed)
        count = self._length(request)
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
