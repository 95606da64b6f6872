"""Cells: one arm under one regime with one seed. What each is to run with, and the file that says it has been run.

Guarantees: settings win in the order study, regime, arm; a cell whose file was written with other settings is never taken
for one of now; the environment changes nothing of a cell.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.files import read_object
from common.sections import STARTER_MODELS
from common.settings import DEFAULT_NODES, Settings, SettingsError, from_tree, merged
from common.settings_tree import with_named_nodes
from grapevine.experiment.study import StarterArguments, Study, Tree
from grapevine.report.settings import leaves, text

# Where a cell lies, not what it is. The checksum of a task of one's own stands for its files.
PLACES = ("run", "folder", "redis_url", "policies_url", "policies_token")
_PLACE_ENDS = (".folder", ".file")


@dataclass(frozen=True)
class Cell:
    """One run of the study. `settings` name models as the study does; `models` are those that are made for its seed."""

    regime: str
    arm: str
    seed: int
    settings: Settings
    models: dict[str, StarterArguments]

    @property
    def name(self) -> str:
        """For people, and unlike that of any other cell."""
        return f"{self.regime}/{self.arm}-{self.seed}"

    @property
    def scratch(self) -> Path:
        """Its run's folder, which goes when the cell is finished."""
        return self.settings.run_folder

    def file(self, out: Path) -> Path:
        """Where its figures are kept."""
        return out / "cells" / self.regime / f"{self.arm}-{self.seed}.json"

    def log(self, out: Path) -> Path:
        """What its process printed."""
        return out / "logs" / self.regime / f"{self.arm}-{self.seed}.log"

    @property
    def node_rounds(self) -> int:
        """Rounds of all its nodes together."""
        return sum(self.settings.for_node(node).rounds for node in self.settings.node_names())

    @property
    def rounds(self) -> int:
        """Rounds of its longest node."""
        return max(self.settings.for_node(node).rounds for node in self.settings.node_names())

    def resolved(self) -> Tree:
        """All that decides what it comes to, as its file keeps it."""
        return {
            "settings": self.settings.model_dump(mode="json", exclude=set(PLACES)),
            "models": {name: model.model_dump(mode="json") for name, model in sorted(self.models.items())},
        }


def plan(study: Study, out: Path) -> list[Cell]:
    """All cells in the order they are run: seed by seed, descriptive arms last. Raises SettingsError."""
    cells = []
    for regime, about in study.regimes.items():
        arms = {arm: _settings(study, regime, arm, out) for arm in study.arms_of(regime)}
        order = [
            (arm, seed)
            for descriptive in (False, True)
            for seed in about.seeds
            for arm in arms
            if (arm in about.descriptive_arms) == descriptive and seed in study.seeds_of(regime, arm)
        ]
        for arm, seed in order:
            own = arms[arm].model_copy(update={"seed": seed, "run": f"{arm}-{seed}"})
            cells.append(Cell(regime, arm, seed, own, _made(study, arms[arm])))
    return cells


def _settings(study: Study, regime: str, arm: str, out: Path) -> Settings:
    """The settings of a regime and an arm, still without a seed."""
    try:
        tree = _over(study.settings or {}, study.regimes[regime].settings or {}, default=0)
        tree = _over(tree, study.arms[arm] or {}, default=DEFAULT_NODES)
        # The longest name a seed can make, so that none fails later.
        settings = from_tree(
            {**tree, "run": f"{arm}-{2**31 - 1}", "folder": str(out.absolute() / "runs" / regime)}, study.path
        )
        _check_models(study, settings)
    except SettingsError as error:
        raise SettingsError(f"{study.path}: regime {regime}, arm {arm}: {error}") from None
    return settings


def _over(below: Tree, above: Tree, default: int) -> Tree:
    """One tree over another. Nodes given by their number stay, where `above` names one; `default`: there are so many."""
    if default or below.get("nodes") is not None:
        below = with_named_nodes(below, above, default or DEFAULT_NODES)
    return merged(below, above)


def _made(study: Study, settings: Settings) -> dict[str, StarterArguments]:
    """Those of the study's models that these settings use."""
    return {name: study.models[name] or StarterArguments() for name in models_of(settings) if name in study.models}


def models_of(settings: Settings) -> list[str]:
    """The models that the nodes name, each once."""
    return list(dict.fromkeys(settings.for_node(node).model for node in settings.node_names()))


def _check_models(study: Study, settings: Settings) -> None:
    """A misspelt model would be looked for at the hub, hours later."""
    known = [*study.models, *STARTER_MODELS]
    for model in models_of(settings):
        near = difflib.get_close_matches(model, known, n=1, cutoff=0.75)
        if model not in known and near and "/" not in model and not Path(model).exists():
            raise SettingsError(f"node.model: there is no model {model}; did you mean {near[0]}?")


def kept(cell: Cell, out: Path) -> Tree | None:
    """A finished cell's figures, None where it is not finished. Raises SettingsError when it was run with other settings."""
    path = cell.file(out)
    if not path.exists():
        return None
    found = read_object(path)
    if found is None or not {"settings", "models", "rounds", "nodes", "heldout"} <= found.keys():
        raise SettingsError(f"{path} is damaged; delete it, and the cell is run anew")
    # As JSON gives it back, so that only what is different differs.
    now = json.loads(json.dumps(cell.resolved()))
    for key, was, is_ in _differences(found, now):
        raise SettingsError(
            f"cell {cell.name} was run with {key} = {text(was)}, and {'the study' if is_ is not None else 'now'} says "
            f"{text(is_)}; keep both with --out elsewhere, or delete {path} to run it anew"
        )
    return found


def _differences(found: Tree, now: Tree) -> Iterator[tuple[str, Any, Any]]:
    """Setting, its value when the cell was run, its value now; a setting that was not known then had its default."""
    defaults = leaves(Settings().model_dump(mode="json"))
    was, is_ = leaves(found["settings"]), leaves(now["settings"])
    for key in dict.fromkeys([*is_, *was]):
        if key.endswith(_PLACE_ENDS) and key.startswith("own_tasks."):
            continue
        before = was.get(key, defaults.get(key))
        after = is_.get(key, defaults.get(key))
        if before != after:
            yield key, before, after
    made, makes = leaves(found["models"]), leaves(now["models"])
    for key in dict.fromkeys([*makes, *made]):
        if made.get(key) != makes.get(key):
            yield f"models.{key}", made.get(key), makes.get(key)
