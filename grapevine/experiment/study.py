"""The study file: what is compared with what, under which circumstances, over which seeds.

Guarantees: an unknown key or a wrong value is one sentence that names the key and what would be right; whatever the file
names (an arm, a model, a reference) is in it.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from common.sections import STARTER_MODELS
from common.settings import SettingsError
from common.settings_checks import some
from common.task_settings import TaskRefused
from common.tasks import TaskSpec, resolve_tasks
from common.yaml_text import BadYaml, parse

# Short, since arm and seed make the name of a run.
Name = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9.-]{0,23}[a-z0-9])?$")]
Seed = Annotated[int, Field(ge=0, lt=2**31)]
Tree = dict[str, Any]

# What a cell decides by itself.
RESERVED = {
    "run": "each cell is a run of its own name",
    "folder": "cells keep their files under --out",
    "seed": "seeds stand in `seeds` of a regime",
    "redis_url": "each cell has a server of its own",
    "policies_url": "each cell keeps its policies in its own folder",
}


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class StarterArguments(_Part):
    """A model that is made for each seed (see `grapevine.starter.model.make_starter`)."""

    tasks: str | list[Any] = "starter"
    shares: dict[str, Annotated[float, Field(ge=0)]] | None = None
    vocabulary: str | list[Any] | None = None
    steps: int = Field(500, ge=0)
    width: int = Field(96, ge=32, multiple_of=32)
    layers: int = Field(2, ge=1)
    sloppy: float = Field(0.4, ge=0.0, le=1.0)
    tokenizer: Literal["sentences", "words"] = "sentences"


class Regime(_Part):
    """Circumstances under which arms are compared: shared settings, and the seeds that each arm is run with.

    `descriptive_arms` are run with the first `descriptive_seeds` seeds only: to be looked at, not to be tested.
    """

    purpose: Literal["confirmatory", "descriptive"] = "descriptive"
    about: str = ""
    seeds: list[Seed] = Field(min_length=1)
    arms: list[str] = []
    descriptive_arms: list[str] = []
    descriptive_seeds: int = Field(2, ge=1)
    reference: list[str] = []
    settings: Tree | None = None


class Study(_Part):
    """A whole study file. `path` is where it came from."""

    experiment: Name
    question: str = ""
    settings: Tree | None = None
    models: dict[Name, StarterArguments | None] = {}
    arms: dict[Name, Tree | None] = Field(min_length=1)
    regimes: dict[Name, Regime] = Field(min_length=1)
    path: Path = Field(Path("study.yaml"), exclude=True)

    @property
    def default_out(self) -> Path:
        """Where its cells and its page are kept unless told otherwise."""
        return Path("runs") / "experiments" / self.experiment

    def arms_of(self, regime: str) -> list[str]:
        """The arms of a regime, those to be tested first; all of them when it names none."""
        about = self.regimes[regime]
        return (about.arms or [arm for arm in self.arms if arm not in about.descriptive_arms]) + about.descriptive_arms

    def seeds_of(self, regime: str, arm: str) -> list[int]:
        """The seeds that an arm is run with."""
        about = self.regimes[regime]
        return about.seeds[: about.descriptive_seeds] if arm in about.descriptive_arms else about.seeds

    def references_of(self, regime: str) -> list[str]:
        """The arms that the others are compared with; the first one when none is named."""
        return self.regimes[regime].reference or self.arms_of(regime)[:1]


def load_study(path: Path) -> Study:
    """Raises SettingsError."""
    try:
        tree = parse(path.read_text())
    except FileNotFoundError:
        raise SettingsError(f"{path} does not exist; configs/experiments/tiny.yaml is one to start from") from None
    except (OSError, UnicodeDecodeError, BadYaml) as error:
        raise SettingsError(f"{path} cannot be read as YAML: {' '.join(str(error).split())}") from None
    if not isinstance(tree, dict) or any(not isinstance(key, str) for key in tree) or "path" in tree:
        raise SettingsError(f"{path} must be a study: `experiment`, `arms` and `regimes`, each as `key: value`")
    try:
        study = Study(**tree, path=path)
    except ValidationError as error:
        raise SettingsError(f"{path}: {_sentence(error)}") from None
    if wrong := _contradiction(study):
        raise SettingsError(f"{path}: {wrong}")
    return study


def task_specs(value: str | list[Any], key: str) -> tuple[TaskSpec, ...]:
    """Tasks as a study names them. Raises SettingsError."""
    try:
        return resolve_tasks(value)
    except TaskRefused as error:
        raise SettingsError(f"{key}: {error}") from None


def _sentence(error: ValidationError) -> str:
    """The first thing wrong, in one sentence."""
    # A misspelt key is one too many and one too few: the first says more.
    first = min(error.errors(), key=lambda one: one["type"] != "extra_forbidden")
    path = [str(part) for part in first["loc"]]
    key = ".".join(path)
    if first["type"] == "extra_forbidden":
        inside: dict[str, type[BaseModel]] = {"models": StarterArguments, "regimes": Regime}
        part = inside.get(path[0], Study) if len(path) > 1 else Study
        near = difflib.get_close_matches(path[-1], [name for name in part.model_fields if name != "path"], n=1)
        return f"unknown key {key}" + (f"; did you mean {'.'.join([*path[:-1], near[0]])}?" if near else "")
    if first["type"] == "missing":
        return f"{key} is missing; add it"
    if path[-1] == "[key]":
        return f"{path[0]}: {first['input']!r} cannot be a name; up to 25 of a-z, 0-9, '.' and '-'"
    text = first["msg"]
    return f"{key}: {text[0].lower()}{text[1:]} (got {str(first.get('input'))[:100]!r})"


def _contradiction(study: Study) -> str | None:
    """The first thing that the file names and does not have, or that a cell decides by itself; None: nothing."""
    trees = {"settings": study.settings, **{f"arms.{name}": tree for name, tree in study.arms.items()}}
    trees |= {f"regimes.{name}.settings": regime.settings for name, regime in study.regimes.items()}
    for place, tree in trees.items():
        for key in tree or {}:
            if key in RESERVED:
                return f"{place}.{key}: {RESERVED[key]}; take it out"
    for name in study.models:
        if name in STARTER_MODELS:
            return f"models.{name}: this model is there already; choose another name"
    for name, model in study.models.items():
        if model is not None and (wrong := _shares(name, model)):
            return wrong
    for name, regime in study.regimes.items():
        for key, among, listed in (
            ("arms", list(study.arms), regime.arms),
            ("descriptive_arms", list(study.arms), regime.descriptive_arms),
            ("reference", study.arms_of(name), regime.reference),
        ):
            for arm in listed:
                if arm not in among:
                    near = difflib.get_close_matches(arm, among, n=1)
                    hint = f"did you mean {near[0]}?" if near else f"there are {some(among)}"
                    return f"regimes.{name}.{key}: there is no arm {arm}; {hint}"
        for key, values in (
            ("seeds", regime.seeds),
            ("arms", [*regime.arms, *regime.descriptive_arms]),
            ("reference", regime.reference),
        ):
            twice = next((value for i, value in enumerate(values) if value in values[:i]), None)
            if twice is not None:
                return f"regimes.{name}.{key}: {twice} is there twice; keep one of the two"
    return None


def _shares(name: str, model: StarterArguments) -> str | None:
    """What is wrong with a model's tasks and shares; None: nothing."""
    names = [spec.name for spec in task_specs(model.tasks, f"models.{name}.tasks")]
    if model.vocabulary is not None:
        task_specs(model.vocabulary, f"models.{name}.vocabulary")
    if model.shares is not None and (sorted(model.shares) != sorted(names) or not sum(model.shares.values())):
        return f"models.{name}.shares: give each of its tasks a share, not all 0; the tasks are {some(names)}"
    return None
