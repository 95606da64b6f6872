"""The models of a study that are made for each seed, kept in the user's cache.

Guarantees: the arguments decide the folder, so that all arms of a seed use the same model, and no study another's; a model
is made once, also when several cells want it at the same time.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
from pathlib import Path

from grapevine.experiment.study import StarterArguments, task_specs
from grapevine.starter.cache import MARKER, cache_folder


def folder_of(model: StarterArguments, seed: int) -> Path:
    """Where a model lies, or would lie once it is made."""
    arguments = json.dumps([model.model_dump(mode="json"), seed], sort_keys=True)
    return cache_folder().resolve() / f"starter-{hashlib.sha256(arguments.encode()).hexdigest()[:16]}"


def is_made(model: StarterArguments, seed: int) -> bool:
    """Whether it is there already."""
    return (folder_of(model, seed) / MARKER).exists()


def made(name: str, model: StarterArguments, seed: int) -> Path:
    """A model's folder; it is made when it is not there. Raises SettingsError when its tasks cannot be used."""
    from grapevine.starter.model import make_starter

    folder = folder_of(model, seed)
    tasks = task_specs(model.tasks, f"models.{name}.tasks")
    words = None if model.vocabulary is None else task_specs(model.vocabulary, f"models.{name}.vocabulary")
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return make_starter(
            folder, seed, tasks, model.steps, model.width, model.layers, model.sloppy, model.tokenizer,
            progress=False, shares=model.shares, vocabulary=words,
        )  # fmt: skip
