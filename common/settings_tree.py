"""Settings as trees, before anyone checked them: flags, merging, what an empty section means.

Guarantees: nothing that was set is lost on the way: a later source changes the leaves that it names and no others.
"""

from __future__ import annotations

import difflib
from typing import Any

from pydantic import BaseModel

from common.settings_checks import some
from common.yaml_text import BadYaml, parse

MOST_NODES = 10_000


class SettingsError(Exception):
    """A setting that cannot be used: one sentence that names the key and the fix."""


def branch_of(flag: str) -> dict[str, Any]:
    """`a.b=1` as a tree."""
    key, sign, value = flag.partition("=")
    if not sign:
        raise SettingsError(f"--set {flag}: write it as key=value, for example node.mix.swarm=0")
    try:
        branch: Any = parse(value)
    except BadYaml as error:
        raise SettingsError(f"--set {flag[:200]}: {error}") from None
    for part in reversed(key.split(".")):
        branch = {part: branch}
    return dict(branch)


def merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Two trees as one, `above` winning leaf by leaf; an empty section of it says nothing."""
    result = dict(below)
    for key, value in above.items():
        if value is None and isinstance(result.get(key), dict):
            continue
        if isinstance(value, dict) and isinstance(result.get(key), dict):
            result[key] = merged(result[key], value)
        else:
            result[key] = value
    return result


def with_named_nodes(tree: dict[str, Any], above: dict[str, Any], default: int) -> dict[str, Any]:
    """A tree that gives its nodes by their number, written out where `above` names one: the others must not go.

    Raises SettingsError for a name that is none of them.
    """
    number = default if tree.get("nodes") is None else tree["nodes"]
    named = above.get("nodes")
    if not isinstance(named, dict) or type(number) is not int or not 0 < number <= MOST_NODES:
        return tree
    known: dict[str, Any] = {f"node-{i}": None for i in range(number)}
    for name in named:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise SettingsError(f"setting nodes.{name}: nodes is {number}, that is {some(list(known))}{hint}")
    return {**tree, "nodes": known}


def without_empty(tree: Any, model: type[BaseModel]) -> Any:
    """A tree without the sections that are there and hold nothing (`mix:`): they mean their defaults."""
    if not isinstance(tree, dict):
        return tree

    def is_section(key: Any) -> bool:
        field = model.model_fields.get(key)
        return key == "nodes" or (field is not None and isinstance(field.default, BaseModel | dict))

    return {key: value for key, value in tree.items() if value is not None or not is_section(key)}
