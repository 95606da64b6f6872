"""A run's folder, read whole.

Guarantees: reads only files, never a server, so it works while the run goes on, after it ended, and on a copy; what a run
that has just begun does not have yet is empty, not an error.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.settings import SettingsError
from learners.journal import read

Lines = list[dict[str, Any]]


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
    """Raises SettingsError when there is no such run."""
    settings = _json(path / "settings.json", {})
    nodes = _node_names(settings, path / "nodes")
    if not nodes:
        raise SettingsError(_no_such_run(path))
    ledger = _json(path / "ledger.json", {"books": {}, "counts": {}})
    clock = _json(path / "run.json", {})
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
        books=ledger["books"],
        counts=ledger["counts"],
        elapsed_seconds=clock.get("elapsed_seconds", 0.0),
        restarts=clock.get("restarts", 0),
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


def _json(path: Path, default: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else default
    return found


def _no_such_run(path: Path) -> str:
    marks = [*path.parent.glob("*/settings.json"), *path.parent.glob("*/nodes")]
    runs = sorted({mark.parent.name for mark in marks})
    near = difflib.get_close_matches(path.name, runs, n=1, cutoff=0.5)
    if near:
        return f"{path} holds no run; did you mean {near[0]}?"
    if runs:
        return f"{path} holds no run; {path.parent} has {', '.join(runs[:8])}{', ...' if len(runs) > 8 else ''}"
    return f"{path} holds no run; `grapevine up` makes one"
