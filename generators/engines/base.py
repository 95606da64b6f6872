"""What an engine is to the generator worker."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from common.messages import Completion, Sampling, Version


@dataclass(frozen=True)
class Request:
    """One question to an engine. `seed` fixes the completions for a given policy, whatever else is in the batch."""

    id: str
    question: str
    completions: int
    sampling: Sampling
    seed: int


class PolicyUnusable(Exception):
    """The weights in a file do not fit the model. The engine still holds what it held before."""


class RequestUnfit(Exception):
    """A question that the model cannot answer, one longer than its context, say. Other requests are not touched."""


class Engine(Protocol):
    """A model that can be given other weights of the same shape, while it answers."""

    @property
    def in_flight(self) -> int:
        """Requests submitted whose completions did not come back yet."""

    def open_model(self, model: str) -> None:
        """Load a base model (hub id or folder): its tokenizer, shapes and weights. Does nothing if it is open already.

        Only while nothing is in flight. Raises PolicyUnusable when it cannot be loaded; then no model is in use until one
        is opened.
        """

    def load_policy(self, weights: Path, version: Version) -> None:
        """Take weights or adapters from a safetensors file, all or none; what is in flight goes on with them.

        Raises PolicyUnusable when names or shapes differ.
        """

    def submit(self, request: Request) -> None:
        """Add a request to those in flight. Raises RequestUnfit."""

    def step(self) -> list[tuple[str, list[Completion]]]:
        """Sample on, for as long as the engine's smallest unit of work takes; the requests completed by it, by id."""

    def cancel(self, ids: list[str]) -> None:
        """Give up these requests; those that are not in flight do not matter."""

    def close(self) -> None:
        """Free the memory of all models."""


def answer_all(engine: Engine, requests: list[Request]) -> list[list[Completion]]:
    """Completions per request, in order, of an engine with nothing else in flight. Ids must differ."""
    for request in requests:
        engine.submit(request)
    answered: dict[str, list[Completion]] = {}
    while engine.in_flight:
        answered.update(engine.step())
    return [answered[request.id] for request in requests]
