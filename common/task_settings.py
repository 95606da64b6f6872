"""What is refused about a task before ReasoningGYM runs.

Guaranteed here: the checks are cheap and bounded for any name and settings a message can hold; what passes is a dataset
that can be rebuilt and scored, and settings of known names, right types and JSON values.
"""

import dataclasses
import difflib
import functools
from collections.abc import Iterable
from typing import Any

import msgspec

SETTINGS_BYTES = 4096
TEXT_CHARACTERS = 32_768
"""Most characters of a question and its answer."""
DEPTH = 4

_HASH_ORDER = "its questions depend on the hash seed of the process or on a shared random state, so nobody can rebuild them"
_EXECUTES = "ReasoningGYM scores it by executing the answer, and no safe scorer exists here"
UNREPRODUCIBLE = frozenset(
    {
        "codeio",
        "isomorphic_strings",
        "knight_swap",
        "list_functions",
        "polynomial_multiplication",
        "ransom_note",
        "word_ladder",
    }
)
REFUSED: dict[str, str] = {
    **dict.fromkeys(UNREPRODUCIBLE, _HASH_ORDER),
    **dict.fromkeys(("countdown", "intermediate_integration", "puzzle24", "simple_integration"), _EXECUTES),
    "composite": "it nests other datasets; list those instead",
    "pool_matrix": "it takes seeds below 2**32 only, and nodes draw from a wider range",
}


class TaskRefused(ValueError):
    """A task or question that cannot be used; the message is one sentence that names the field and the fix."""


@functools.cache
def datasets() -> dict[str, tuple[Any, Any]]:
    """ReasoningGYM's own registry: name -> (dataset class, configuration class).

    Imported late: it takes more than a second, and most commands build no question.
    """
    from reasoning_gym.code.contrib.bfit.Compiler import Optimizer
    from reasoning_gym.factory import DATASETS

    # Every bf question would print a dot.
    vars(Optimizer)["print"] = lambda *args, **kwargs: None
    known: dict[str, tuple[Any, Any]] = DATASETS
    return known


def check_task(task: str, settings: dict[str, Any]) -> None:
    """Refuse an unknown or refused task, and settings of an unknown name or wrong type.

    Raises:
        TaskRefused: names the field and the fix.
    """
    if task not in datasets():
        raise TaskRefused(f"task {task[:80]!r} is unknown{nearest(task, datasets())}")
    if reason := REFUSED.get(task):
        raise TaskRefused(f"task '{task}' cannot be used: {reason}; choose another task")
    known = _defaults(task)
    for name, value in settings.items():
        if name not in known:
            raise TaskRefused(f"setting {name[:80]!r} of task '{task}' is unknown or fixed{nearest(name, known)}")
        _check_value(f"setting '{name}' of task '{task}'", value, 0)
        wanted = type(known[name])
        if wanted is float and type(value) is int:
            continue
        if wanted in (bool, int, float, str) and type(value) is not wanted:
            raise TaskRefused(f"setting '{name}' of task '{task}' must be of type {wanted.__name__}")
    if len(msgspec.json.encode(settings)) > SETTINGS_BYTES:
        raise TaskRefused(f"settings of task '{task}' are over {SETTINGS_BYTES} bytes as JSON; shorten them")


def _check_value(where: str, value: Any, depth: int) -> None:
    if depth > DEPTH:
        raise TaskRefused(f"{where} is nested more than {DEPTH} deep; flatten it")
    if isinstance(value, list | tuple):
        for part in value:
            _check_value(where, part, depth + 1)
    elif isinstance(value, dict):
        for key, part in value.items():
            if not isinstance(key, str):
                raise TaskRefused(f"{where} must have text keys, as JSON has")
            _check_value(where, key, depth + 1)
            _check_value(where, part, depth + 1)
    elif isinstance(value, str):
        if not value.isascii() and any("\ud800" <= c <= "\udfff" for c in value):
            raise TaskRefused(f"{where} is not valid text; remove the lone surrogates")
    elif isinstance(value, float):
        if value - value != 0:
            raise TaskRefused(f"{where} must be a finite number")
    elif isinstance(value, int):
        if not -(2**63) <= value < 2**63:
            raise TaskRefused(f"{where} must fit 64 bits")
    elif value is not None:
        raise TaskRefused(f"{where} must be a JSON value")


def nearest(name: str, valid: Iterable[str]) -> str:
    """End of a sentence that suggests the valid name most like this one; "" when none is like it."""
    close = difflib.get_close_matches(name[:80], list(valid), n=1, cutoff=0.5)
    return f"; did you mean '{close[0]}'?" if close else ""


def look_up_anew() -> None:
    """Forget the settings of all tasks: one has been defined, or defined otherwise."""
    _defaults.cache_clear()


@functools.cache
def _defaults(task: str) -> dict[str, Any]:
    """Settings of a dataset with their defaults; files are left out, since a message could name any path."""
    fields = dataclasses.fields(datasets()[task][1])
    return {f.name: f.default for f in fields if f.name not in ("seed", "size") and not f.name.endswith("_file")}
