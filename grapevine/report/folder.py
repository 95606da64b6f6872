"""A run's folder, read whole.

Guarantees: reads only files, never a server, so it works while the run goes on, after it ended, and on a copy; what a run
that has just begun does not have yet is empty, not an error.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from common.files import read_object
from common.settings import SettingsError
from learners.journal import read

Lines = list[dict[str, Any]]
M = TypeVar("M", bound=msgspec.Struct)


class Clock(msgspec.Struct, frozen=True):
    """A run's run.json: over all its starts."""

    elapsed_seconds: float = 0.0
    restarts: int = 0


class _Ledger(msgspec.Struct, frozen=True):
    """A run's ledger.json."""

    books: dict[str, dict[str, int]] = {}
    counts: dict[str, int] = {}


@dataclass(frozen=True)
class RunFolder:
    """What a run wrote down. Mappings are by node, in the settings' order; lines are in order of their rounds."""

    name: str
    path: Path
    settings: dict[str, Any]
    rounds: dict[str, Lines]
    timing: dict[str, Lines]
    heldout: dict[str, Lines]
    rollouts: dict[str, Lines]
    evaluations: Lines
    events: Lines
    books: dict[str, dict[str, int]]
    counts: dict[str, int]
    elapsed_seconds: float
    restarts: int

    @property
    def nodes(self) -> list[str]:
        """The nodes' names."""
        return list(self.rounds)

    @property
    def rounds_done(self) -> int:
        """Rounds that every node has completed."""
        return min(len(lines) for lines in self.rounds.values())

    def of_node(self, node: str, *keys: str) -> Any:
        """A setting of the section `node`, as it holds for one node; None when it is not known."""
        own = self.settings.get("nodes")
        for tree in (own.get(node) if isinstance(own, dict) else None, self.settings.get("node")):
            value: Any = tree
            for key in keys:
                value = value.get(key) if isinstance(value, dict) else None
            if value is not None:
                return value
        return None


def read_run(path: Path) -> RunFolder:
    """Raises SettingsError when there is no such run, or its settings are damaged."""
    settings = run_tree(path)
    nodes = _node_names(settings, path / "nodes")
    if not nodes:
        raise SettingsError(_no_such_run(path))
    ledger, clock = _kept(path / "ledger.json", _Ledger), read_clock(path)
    return RunFolder(
        name=path.name,
        path=path,
        settings=settings,
        rounds={node: read(path / "nodes" / node / "rounds.jsonl") for node in nodes},
        timing={node: read(path / "nodes" / node / "timing.jsonl") for node in nodes},
        heldout={node: _once(read(path / "nodes" / node / "heldout.jsonl")) for node in nodes},
        rollouts={node: read(path / "nodes" / node / "rollouts.jsonl") for node in nodes},
        evaluations=read(path / "evaluations.jsonl"),
        events=read(path / "events.jsonl"),
        books=ledger.books,
        counts=ledger.counts,
        elapsed_seconds=clock.elapsed_seconds,
        restarts=clock.restarts,
    )


def _node_names(settings: dict[str, Any], folder: Path) -> list[str]:
    """Those of the settings first, then others that left a folder, as node-2 before node-10."""
    wanted = settings.get("nodes", {})
    named = [f"node-{i}" for i in range(wanted)] if isinstance(wanted, int) else list(wanted)
    left = sorted((path.name for path in folder.glob("*") if path.is_dir()), key=_natural)
    return list(dict.fromkeys([*named, *left]))


def _natural(name: str) -> tuple[str, int, str]:
    head = name.rstrip("0123456789")
    return head, int(name[len(head) :] or -1), name


def _once(lines: Iterable[dict[str, Any]]) -> Lines:
    """By round; a line repeated after a restart counts once, the later one."""
    return [line for _, line in sorted({line["round"]: line for line in lines}.items())]


def run_tree(folder: Path) -> dict[str, Any]:
    """A run's settings.json; empty where there is none. Raises SettingsError when it is damaged."""
    path = folder / "settings.json"
    if not path.exists():
        return {}
    found = read_object(path)
    if found is None or not isinstance(found.get("nodes"), int | dict):
        raise SettingsError(f"{path} is damaged; `grapevine up` with the run's own YAML file writes it anew and goes on")
    return found


def read_clock(folder: Path) -> Clock:
    """A run's figures of time; zeros where there are none, or damaged ones."""
    return _kept(folder / "run.json", Clock)


def _kept(path: Path, kind: type[M]) -> M:
    """A file that a run that is up writes again every few seconds: a damaged one is as good as none."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (FileNotFoundError, ValueError):
        return kind()


def _no_such_run(path: Path) -> str:
    marks = [*path.parent.glob("*/settings.json"), *path.parent.glob("*/nodes")]
    runs = sorted({mark.parent.name for mark in marks})
    near = difflib.get_close_matches(path.name, runs, n=1, cutoff=0.5)
    if near:
        return f"{path} holds no run; did you mean {near[0]}?"
    if runs:
        return f"{path} holds no run; {path.parent} has {', '.join(runs[:8])}{', ...' if len(runs) > 8 else ''}"
    return f"{path} holds no run; `grapevine up` makes one"
