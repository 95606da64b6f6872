"""Whether settings fit the run whose folder is there already.

Guarantees: what a run's checkpoints, orders and keys depend on cannot change under it unnoticed; whatever else was
changed (rates, mixes, numbers of workers, more rounds) is taken up by the continued run.
"""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import Any

from common.files import read_object
from common.settings import Settings, SettingsError, merged
from common.settings_checks import some
from grapevine.report.folder import run_tree
from grapevine.running.barrier import Barriers
from learners.checkpoint import Checkpoints


def check_continues(settings: Settings) -> None:
    """Compare with the settings that the run was last up with. Raises SettingsError naming the first that must stay."""
    before = read_object(settings.run_folder / "settings.json")
    _check_nodes(settings)
    if before is None:
        return  # a new run, or one whose file was lost: nothing to compare with
    for key in ("seed", "shards", "site"):
        if key in before and before[key] != getattr(settings, key):
            raise _changed(settings, key, before[key], getattr(settings, key))
    for name in settings.node_names():
        old, new = _model(before, name), settings.for_node(name).model
        # A folder that is no longer there was moved: the same model under another path.
        if old is not None and old != new and (Path(old).exists() or not Path(old).is_absolute()):
            raise _changed(settings, f"node.model of {name}", old, new)


def check_mode(folder: Path, lockstep: bool) -> None:
    """A run stays in lockstep, or out of it: its clock counts rounds or milliseconds. Raises SettingsError."""
    began = Barriers.there(folder)
    if lockstep and not began and any(folder.glob("nodes/*/checkpoints/*-*")):
        raise SettingsError(f"run {folder.name} was begun without --lockstep and cannot go on with it; add --fresh")
    if began and not lockstep:
        raise SettingsError(
            f"run {folder.name} was begun in lockstep; continue it with --lockstep, or begin anew with --fresh"
        )


def resumed(run: str) -> tuple[Path, list[str], bool]:
    """The settings that a run (its name, or its folder) was last up with, flags that fit where it lies, and its mode.

    Raises SettingsError when there is no such run, or its file of settings is damaged.
    """
    folder = Path(run) if "/" in run else Path("runs") / run
    path = folder / "settings.json"
    if not path.exists():
        near = difflib.get_close_matches(
            folder.name, [other.parent.name for other in folder.parent.glob("*/settings.json")], 1
        )
        hint = f"did you mean {near[0]}?" if near else "name one, or its folder"
        raise SettingsError(f"there is no run to resume in {folder}; {hint}")
    run_tree(folder)
    return path, [f"run={json.dumps(folder.name)}", f"folder={json.dumps(str(folder.parent))}"], Barriers.there(folder)


def is_complete(settings: Settings) -> bool:
    """Whether every node has trained all its rounds and evaluated what was due."""
    return all(node_is_complete(settings, node) for node in settings.node_names())


def node_is_complete(settings: Settings, node: str) -> bool:
    """The same of one node, by its newest checkpoint."""
    checkpoints = settings.run_folder / "nodes" / node / "checkpoints"
    found = Checkpoints(checkpoints).newest() if checkpoints.is_dir() else None
    return found is not None and found[0].round >= settings.for_node(node).rounds and not found[0].evaluations


def resume_points(settings: Settings) -> list[str]:
    """What a continued run begins from, node by node, in words; damaged checkpoints are named. Empty for a new run."""
    words = []
    for node in settings.node_names():
        checkpoints = Checkpoints(settings.run_folder / "nodes" / node / "checkpoints")
        for name in checkpoints.damaged():
            words.append(f"{node}: checkpoint {name} is damaged and is not used ({checkpoints.fault(name)})")
        found = checkpoints.newest()
        if found is not None and found[0].round:
            words.append(f"{node} goes on after round {found[0].round}")
    return words


def _check_nodes(settings: Settings) -> None:
    """Raises SettingsError when a node with a folder in this run is left out now; in lockstep also for a new one."""
    names = settings.node_names()
    folders = sorted(path.name for path in (settings.run_folder / "nodes").glob("*") if path.is_dir())
    left = [name for name in folders if name not in names]
    if folders and any((settings.run_folder / "barriers").glob("[0-9]*")) and set(folders) != set(names):
        raise SettingsError(
            f"setting nodes: the run has {some(folders)}; in lockstep they stay the same, or begin anew with --fresh"
        )
    if left:
        raise SettingsError(
            f"setting nodes: run {settings.run} has a node {left[0]}, with a folder of its own, that is left out; put it "
            f"back, begin anew with --fresh, or choose another name with --set run=NAME"
        )


def _model(before: dict[str, Any], name: str) -> str | None:
    """The model of a node in settings as they were written down; None when there was no such node."""
    nodes = before.get("nodes")
    if isinstance(nodes, dict) and name not in nodes:
        return None
    own = (nodes.get(name) if isinstance(nodes, dict) else None) or {}
    model = merged(before.get("node", {}), own).get("model")
    return model if isinstance(model, str) else None


def _changed(settings: Settings, key: str, old: object, new: object) -> SettingsError:
    return SettingsError(
        f"run {settings.run} began with {key} = {old} and cannot go on with {new}; set it back, "
        f"begin anew with --fresh, or choose another name with --set run=NAME"
    )
