"""What an engine is to the generator worker."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from common.messages import Completion, Sampling, Version


@dataclass(frozen=True)
class Request:
    """One question to an engine. `seed` fixes the completions for a given policy, whatever else is in the batch."""

    question: str
    completions: int
    sampling: Sampling
    seed: int


class PolicyUnusable(Exception):
    """The weights in a file do not fit the model. The engine still holds what it held before."""


class Engine(Protocol):
    """A model that can be given other weights of the same shape."""

    def open_model(self, model: str) -> None:
        """Load a base model (hub id or folder): its tokenizer, shapes and weights. Does nothing if it is open already.

        Raises PolicyUnusable when it cannot be loaded, with the model opened before still whole.
        """

    def load_policy(self, weights: Path, version: Version) -> None:
        """Take weights from a safetensors file, all or none. Raises PolicyUnusable when names or shapes differ."""

    def generate(self, requests: list[Request]) -> list[list[Completion]]:
        """Completions per request, in order."""
