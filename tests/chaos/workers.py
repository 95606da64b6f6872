"""The real worker classes with stand-ins where a model would be: a paced engine, a coin for a scorer, a null trainer."""

from __future__ import annotations

import json
import time
from pathlib import Path

from common.identity import Identity
from common.run import open_run
from common.settings import Settings
from common.tasks import Components, Question
from common.worker import Loop, Worker
from generators.engines.paced import PacedEngine
from generators.generator import Generator
from learners.learner import Learner
from learners.mix import Sample
from verifiers.sandbox import GroupVerdict
from verifiers.verifier import Verifier

SOCKET_TIMEOUT = 3.0


class CoinScorer:
    """Accuracy is what the completion says; every question counts as a training question, evaluations apart."""

    def score(self, question: Question, texts: list[str], max_characters: int) -> GroupVerdict:
        """1 for `<answer>1</answer>`."""
        components = [Components(float("1" in text), 1.0, 1.0) for text in texts]
        return GroupVerdict(components, [None] * len(texts), False, "a question", "")

    def close(self) -> None:
        """Nothing to end."""


class NullTrainer:
    """Counts updates instead of making them; `seconds` each."""

    def __init__(self, seconds: float = 0.0) -> None:
        self._seconds = seconds
        self.updates = 0

    def update(self, own: list[Sample], swarm: list[Sample]) -> dict[str, float]:
        """One more."""
        time.sleep(self._seconds)
        self.updates += 1
        return {"tokens_own": float(len(own)), "tokens_swarm": float(len(swarm))}

    def save(self, folder: Path) -> None:
        """The count stands for the weights."""
        (folder / "model.safetensors").write_text(json.dumps(self.updates))

    def load(self, folder: Path) -> None:
        """Read it back."""
        self.updates = json.loads((folder / "model.safetensors").read_text())


def make_worker(
    role: str, name: str, settings: Settings, tokens_per_second: float = 3200.0, update_seconds: float = 0.01
) -> Loop:
    """A worker in its loop, ready to run in this process."""
    ledger, directory = open_run(settings, socket_timeout=SOCKET_TIMEOUT)
    worker: Worker
    if role == "learner":
        key = settings.run_folder / "nodes" / name / "key"
        identity = Identity.kept("node", name, settings.site, key)
        worker = Learner(name, settings, ledger, directory, identity, NullTrainer(update_seconds), "no-model")
    elif role == "generator":
        identity = Identity.fresh("generator", name, settings.site)
        cache = settings.run_folder / "cache" / name
        worker = Generator(name, settings, ledger, directory, identity, PacedEngine(tokens_per_second), cache)
    else:
        identity = Identity.fresh("verifier", name, settings.site)
        worker = Verifier(name, settings, ledger, directory, identity, CoinScorer())
    return Loop(worker, lambda: open_run(settings, socket_timeout=SOCKET_TIMEOUT))
