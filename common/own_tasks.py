"""Tasks of one's own: a JSONL file of questions or a Python function that makes them, used like a ReasoningGYM dataset.

Guarantees: a message never names a path or a module, since definitions come from one's own settings alone; each question
of such a task carries a checksum of the definition, so that machines with different files under one name refuse each
other's questions instead of grading them wrongly; a function that is not a pure function of its random argument, be it in
one process or between two, is found at start-up. Defining the same again changes nothing; another definition of a name
replaces the first.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import hashlib
import importlib
import importlib.util
import json
import keyword
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from common.task_entries import SCORERS, OwnEntry, read_entry, read_lines
from common.task_settings import TaskRefused, datasets, look_up_anew

CHECKSUM = "definition"
"""The setting of a question that carries the checksum of its task's definition."""
CHECKSUM_CHARACTERS = 16
PROBED_SEEDS = 8
_FIXED = (CHECKSUM, "seed", "size")

ScoreFunction = Callable[[str, dict[str, Any]], float]


class Definition(msgspec.Struct, frozen=True):
    """What the settings say about one task: either `file`, or `function` with `settings` as its keyword arguments.

    `folder` is where relative paths start and modules are looked up, after everything else; `checksum`, when given, is
    what the definition came to where the run was started.
    """

    name: str
    file: str | None = None
    function: str | None = None
    score: str | None = None
    scorer: str = "exact"
    settings: dict[str, Any] = {}
    folder: str = ""
    checksum: str | None = None


@dataclasses.dataclass(frozen=True)
class Source:
    """A definition with everything it names loaded."""

    definition: Definition
    checksum: str
    entries: tuple[OwnEntry, ...]
    function: Callable[..., Any] | None
    score: ScoreFunction | None
    scorers: frozenset[str]
    """Scorers seen so far; a function may name others later."""

    def entry(self, seed: int, settings: dict[str, Any]) -> OwnEntry:
        """The question of a seed. Raises ValueError, or whatever the function raises."""
        if self.function is None:
            return random.Random(seed).choice(self.entries)
        return _called(self.function, seed, settings, self.definition)


def register(definition: Definition) -> str:
    """Make a task known to this process under its name; returns the checksum of its definition.

    Raises:
        TaskRefused: one sentence on what is wrong: the name, the file's line and field, the function.
    """
    where = f"own_tasks.{definition.name}"
    if definition.name in datasets() and source_of(definition.name) is None:
        raise TaskRefused(f"{where}: ReasoningGYM has a dataset of this name; choose another")
    try:
        source = _load(definition)
    except ValueError as error:
        raise TaskRefused(f"{where}: {error}") from error
    if definition.checksum not in (None, source.checksum):
        raise TaskRefused(
            f"{where}: makes other questions here than where the run was started; its files were changed since, or its "
            f"function depends on more than its random argument (the order of a set, say)"
        )
    datasets()[definition.name] = (_dataset_class(source), _config_class(definition))
    look_up_anew()
    return source.checksum


def source_of(task: str) -> Source | None:
    """The loaded definition of a task of one's own; None for any other task."""
    return getattr(datasets()[task][0], "own_source", None) if task in datasets() else None


def check_definition(task: str, settings: dict[str, Any]) -> None:
    """Refuse a question of a task that is defined otherwise here, or whose definition it does not tell.

    Raises:
        TaskRefused: names the task.
    """
    source = source_of(task)
    if source is not None and settings.get(CHECKSUM) != source.checksum:
        raise TaskRefused(f"task '{task}' is defined otherwise here; give every machine the same file and settings for it")


def _load(definition: Definition) -> Source:
    if (definition.file is None) == (definition.function is None):
        raise ValueError("name either a file or a function")
    if definition.scorer not in SCORERS:
        raise ValueError(f"scorer {definition.scorer!r} is unknown; choose one of {', '.join(SCORERS)}")
    digest = hashlib.sha256()
    score = None
    if definition.score is not None:
        score = _imported(definition.score, definition, "score", digest)
    _feed(digest, definition.scorer)
    if definition.file is not None:
        if definition.settings:
            raise ValueError("settings are the arguments of a function, and a file has none; remove them")
        path = Path(definition.folder, definition.file)
        entries = read_lines(path, definition.scorer, score is not None)
        _feed(digest, path.read_bytes())
        checksum = digest.hexdigest()[:CHECKSUM_CHARACTERS]
        return Source(definition, checksum, entries, None, score, frozenset(entry.scorer for entry in entries))
    function = _imported(definition.function or "", definition, "function", digest)
    _check_names(definition.settings)
    _feed(digest, json.dumps(definition.settings, sort_keys=True))
    entries = _probed(function, definition)
    _feed(digest, repr([(entry.text, entry.answer, entry.scorer) for entry in entries]))
    checksum = digest.hexdigest()[:CHECKSUM_CHARACTERS]
    return Source(definition, checksum, (), function, score, frozenset(entry.scorer for entry in entries))


def _probed(function: Callable[..., Any], definition: Definition) -> tuple[OwnEntry, ...]:
    """The questions of the first seeds, made twice."""
    made: list[list[OwnEntry]] = []
    for _ in range(2):
        state = random.getstate()
        try:
            made.append([_called(function, seed, definition.settings, definition) for seed in range(PROBED_SEEDS)])
        except Exception as error:
            cause = " ".join(str(error).split())[:200] or type(error).__name__
            raise ValueError(f"{definition.function} fails: {cause}") from error
        if random.getstate() != state:
            raise ValueError(f"{definition.function} draws from the shared random module; use its random argument")
    if made[0] != made[1]:
        raise ValueError(
            f"{definition.function} made two questions of one seed; it must depend on nothing but its random argument"
        )
    return tuple(made[0])


def _called(function: Callable[..., Any], seed: int, settings: dict[str, Any], definition: Definition) -> OwnEntry:
    # Its own copy: a function that changes a list it was given would not be called alike again.
    arguments = msgspec.json.decode(msgspec.json.encode(settings))
    try:
        with contextlib.redirect_stdout(sys.stderr):  # what a command prints is not its to add to
            made = function(random.Random(seed), **arguments)
    except SystemExit as error:
        raise ValueError(f"{definition.function} ends the process; raise an error instead") from error
    return read_entry(made, definition.scorer, definition.score is not None)


def _imported(name: str, definition: Definition, key: str, digest: Any) -> Callable[..., Any]:
    """The function that `module:function` or `file.py:function` names; its source enters the digest."""
    place, sign, attribute = name.rpartition(":")
    if not sign or not place or not attribute:
        raise ValueError(f"{key}: write it as module:function or file.py:function, not {name!r}")
    try:
        with contextlib.redirect_stdout(sys.stderr):
            module = _module(place, definition)
    except (Exception, SystemExit) as error:
        # The user's own code may raise anything while it is imported; all of it is for the user to mend.
        cause = " ".join(str(error).split())[:200] or type(error).__name__
        raise ValueError(f"{key}: {place} cannot be imported: {type(error).__name__}: {cause}") from error
    function = getattr(module, attribute, None)
    if not callable(function):
        raise ValueError(f"{key}: {place} has no function {attribute!r}")
    if not module.__file__:
        raise ValueError(f"{key}: {place} has no source file to tell it by; name another")
    _feed(digest, attribute)
    _feed(digest, Path(module.__file__).read_bytes())
    return function  # type: ignore[no-any-return]


def _module(place: str, definition: Definition) -> ModuleType:
    path = Path(definition.folder, place).absolute()
    file = place.endswith(".py")
    # At the end: a file of the user's that is called `common.py` must not stand in for ours.
    for folder in (definition.folder, str(path.parent) if file else "", os.getcwd()):
        if folder and folder not in sys.path:
            sys.path.append(folder)
    if not file:
        return importlib.import_module(place)
    name = f"_own_task_{hashlib.sha256(str(path).encode()).hexdigest()[:CHECKSUM_CHARACTERS]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and their like look their module up while it is still being imported.
    sys.modules[name] = module
    with contextlib.ExitStack() as undo:
        undo.callback(sys.modules.pop, name, None)
        spec.loader.exec_module(module)
        undo.pop_all()
    return module


def _check_names(settings: dict[str, Any]) -> None:
    for name in settings:
        if not name.isidentifier() or keyword.iskeyword(name) or name in _FIXED or name.endswith("_file"):
            raise ValueError(f"settings: {name!r} cannot name an argument here; rename it")


def _dataset_class(source: Source) -> type:
    """A dataset class in ReasoningGYM's sense, by whose attribute `own_source` a task of one's own is known."""
    from reasoning_gym.dataset import ProceduralDataset

    class OwnTask(ProceduralDataset):  # type: ignore[misc]
        own_source = source

        def __getitem__(self, idx: int) -> dict[str, Any]:
            settings = {name: getattr(self.config, name) for name in source.definition.settings}
            entry = source.entry(self.config.seed + idx, settings)
            return {"question": entry.text, "answer": entry.answer, "metadata": {}, "entry": entry}

    return OwnTask


def _config_class(definition: Definition) -> type:
    """A configuration class in ReasoningGYM's sense, so that the usual checks of names and types hold."""
    fields: list[tuple[str, Any, Any]] = [(CHECKSUM, str, ""), ("seed", int, 0), ("size", int, 1)]
    for name, value in definition.settings.items():
        plain = isinstance(value, bool | int | float | str) or value is None
        default = value if plain else dataclasses.field(default_factory=functools.partial(copy.deepcopy, value))
        fields.append((name, Any, default))
    return dataclasses.make_dataclass("OwnTaskConfig", fields)


def _feed(digest: Any, part: str | bytes) -> None:
    data = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
    digest.update(len(data).to_bytes(8, "big") + data)
