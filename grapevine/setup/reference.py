"""The reference of all settings as Markdown, made from the models themselves.

Guarantees: every setting that can be set is listed once, with the type, limits and default that the code holds; the page
is a pure function of the code, so a test can tell when `docs/configuration.md` is out of date.
"""

from __future__ import annotations

import json
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from common.sections import OwnTaskSettings
from common.settings import Settings
from common.settings_checks import OTHER_VARIABLES

INTRODUCTION = """\
# Settings

*Made from the code by `grapevine settings --write docs/configuration.md`; edit the descriptions there.*

Settings come from a YAML file, then the environment, then `--set` flags; later ones win, key by key. In all three an
unknown name is refused with the nearest one. The same setting in each:

```
grapevine up my.yaml                                # my.yaml: node: {mix: {own: 8}}
GRAPEVINE_NODE__MIX__OWN=8 grapevine up my.yaml     # two underscores between the levels
grapevine up my.yaml --set node.mix.own=8           # a dot between the levels; lists as [hard, easy]
```

`grapevine init` writes a file to start from, `grapevine doctor my.yaml` says whether a run of it can work here.

The section `node` holds for every node. `nodes` may name the nodes, and everything of `node` can be set anew for one:

```
nodes:
  small: {model: Qwen/Qwen2.5-0.5B-Instruct}
  large: {model: Qwen/Qwen2.5-3B-Instruct, mix: {own: 4, swarm: 12}}
  helper: {learner: none}
```

Groups carry a tag by the mean accuracy of their completions: `failed` (0), `hard` (up to 1/3), `mixed` (up to 2/3), `easy`
(above), `solved` (1).
"""


def reference() -> str:
    """The whole page."""
    parts = [INTRODUCTION]
    for path, model in _sections("", Settings):
        title = f"`{path}`" if path else "The run"
        parts.append(f"## {title}\n\n{_words(model.__doc__ or '')}\n\n{_table(path, model)}")
    parts.append(
        "## Tasks of one's own, `own_tasks.<name>`\n\n"
        f"{_words(OwnTaskSettings.__doc__ or '')}\n\n{_table('own_tasks.<name>', OwnTaskSettings)}"
    )
    rows = [f"| `{name}` | {meaning} |" for name, meaning in {**_SERVER, **OTHER_VARIABLES}.items()]
    parts.append("## Other variables\n\n| Variable | Meaning |\n|---|---|\n" + "\n".join(rows))
    return "\n\n".join(part.strip() for part in parts) + "\n"


_SERVER = {"REDIS_URL": "`redis_url`, under the name that others use; GRAPEVINE_REDIS_URL wins over it, as a flag does"}


def write(path: Path) -> bool:
    """Write the page; False when the file was up to date."""
    page = reference()
    if path.exists() and path.read_text() == page:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page)
    return True


def _sections(path: str, model: type[BaseModel]) -> Iterator[tuple[str, type[BaseModel]]]:
    """A section and those inside it, by dotted path, in the order in which the code names them."""
    yield path, model
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _sections(f"{path}.{name}".lstrip("."), field.annotation)


def _table(path: str, model: type[BaseModel]) -> str:
    rows = ["| Setting | Type | Limits | Default | Meaning |", "|---|---|---|---|---|"]
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            continue
        cells = [
            f"`{path}.{name}`" if path else f"`{name}`",
            _type(field.annotation),
            _limits(field),
            _default(field),
            _words(field.description or ""),
        ]
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows)


def _type(annotation: Any) -> str:
    """A type in words."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(parts[0])
    if origin is Literal:
        return ", ".join(f"`{part}`" for part in parts)
    if origin in (Union, types.UnionType):
        return " or ".join("nothing" if part is type(None) else _type(part) for part in parts)
    if origin in (tuple, list):
        inner = _type(parts[0]) if parts and parts[0] is not Any else ""
        return f"list of {inner}" if inner else "list"
    if origin is dict:
        plain = _type(parts[1]) in ("number", "whole number", "text")
        return f"`name: {_type(parts[1])}`" if plain else "`name: settings`"
    words = {int: "whole number", float: "number", str: "text", bool: "`true`, `false`", Path: "path"}
    return words.get(annotation, getattr(annotation, "__name__", str(annotation)))


def _limits(field: FieldInfo) -> str:
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    found = []
    for meta in _flat(field.metadata):
        found += [f"{sign} {_number(getattr(meta, name))}" for name, sign in signs.items() if hasattr(meta, name)]
        if getattr(meta, "pattern", None):
            found.append("1 to 40 of a-z, 0-9, `.`, `-`")
    return ", ".join(found)


def _flat(metadata: Any) -> Iterator[Any]:
    """Constraints, those inside a FieldInfo included."""
    for meta in metadata:
        if isinstance(meta, FieldInfo):
            yield from _flat(meta.metadata)
        else:
            yield meta


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if value is None or value == {}:
        return ""
    return f"`{value}`" if isinstance(value, str | Path) else f"`{json.dumps(value)}`"


def _number(value: float) -> str:
    exponent = value.bit_length() - 1 if isinstance(value, int) else 0
    return f"2^{exponent}" if exponent > 20 and value == 2**exponent else f"{value:g}"


def _words(text: str) -> str:
    return " ".join(text.split())
