"""What a run was set to, and where that differs: from the defaults, from another run."""

from __future__ import annotations

from typing import Any

from common.settings import Settings
from grapevine.report.folder import RunFolder

# The run's name and place say nothing about how it was run.
NOT_COMPARED = ("run", "folder", "redis_url", "policies_url", "policies_token")


def leaves(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """A tree as `a.b.c: value`; an empty branch is a value."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            found |= leaves(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def from_defaults(run: RunFolder) -> list[tuple[str, str, str]]:
    """Setting, value, default; for those that differ and have something to say. What has no default shows none."""
    defaults = leaves(Settings().model_dump(mode="json"))
    return [
        (key, text(value), text(defaults[key]) if key in defaults else "")
        for key, value in leaves(run.settings).items()
        if key not in NOT_COMPARED and value != defaults.get(key)
    ]


def between(runs: list[RunFolder]) -> list[tuple[str, list[str]]]:
    """Setting and its value in each run, for those that are not alike in all."""
    trees = [leaves(run.settings) for run in runs]
    keys = dict.fromkeys(key for tree in trees for key in tree if key not in NOT_COMPARED)
    rows = [(key, [text(tree[key]) if key in tree else "" for tree in trees]) for key in keys]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


def text(value: Any) -> str:
    """A setting's value as one would write it."""
    if isinstance(value, list):
        return ", ".join(text(one) for one in value) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value is None or value == {} else str(value)
