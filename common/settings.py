"""Everything a user can set, in one tree: from a YAML file, the environment, and `--set` flags (later ones win).

Guarantees: an unknown key or a wrong value is one sentence that names the key and what would be right; the same file serves
a laptop and a cluster, since each role reads only its own part.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, EnvSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict
from pydantic_settings import SettingsError as UnreadableVariable

from common.addresses import LOOPBACK, listen_address
from common.sections import (
    ControlSettings,
    GeneratorSettings,
    NamePattern,
    NodeSettings,
    OwnTaskSettings,
    SinkSettings,
    SwarmSettings,
    VerifierSettings,
)
from common.settings_checks import contradiction, unknown_variable
from common.settings_tree import MOST_NODES, branch_of, with_named_nodes, without_empty
from common.settings_tree import SettingsError as SettingsError  # noqa: PLC0414 - importers find it here
from common.settings_tree import merged as merged  # noqa: PLC0414
from common.tasks import TaskRefused, define, draw, resolve_tasks
from common.yaml_text import BadYaml, parse

DEFAULT_NODES = 4
# What no file of a run may hold; worker processes get it from their environment.
SECRETS = frozenset({"redis_url", "policies_token"})


class Settings(BaseSettings):
    """A whole run."""

    model_config = SettingsConfigDict(
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        env_prefix="GRAPEVINE_",
        env_nested_delimiter="__",
    )

    run: NamePattern = Field("swarm", description="name of the run and of its folder")
    seed: int = Field(0, ge=0, lt=2**31, description="decides questions and draws")
    site: NamePattern = Field("local", description="nodes of one site share its generators and trust one another")
    folder: Path = Field(Path("runs"), description="where runs keep their files")
    redis_url: str | None = Field(
        None, description="`redis://user:password@host:port/0`, `rediss://` for TLS; without it `up` starts a server"
    )
    listen: str = Field(
        LOOPBACK, description="where the server that `up` starts is reached: an address of this machine, or address:port"
    )
    shards: int = Field(1, ge=1, le=1024, description="parts that the nodes' streams are spread over")
    redeliver_seconds: float = Field(15.0, gt=0, description="a worker silent for so long loses its entries to others")
    policies_url: str | None = Field(
        None,
        description="fsspec URL for policy files; `http://{node}.host:9101`: every learner serves its own there; default: a "
        "folder of the run",
    )
    policies_token: str | None = Field(
        None,
        min_length=16,
        description="opens policies that learners serve over HTTP, the same for all workers of a site; while it is being "
        "replaced, the new one and the old one with a comma between them",
    )
    node: NodeSettings = NodeSettings()
    nodes: int | dict[NamePattern, dict[str, Any] | None] = Field(DEFAULT_NODES, description="how many, or a name per node")
    generators: GeneratorSettings = GeneratorSettings()
    verifiers: VerifierSettings = VerifierSettings()
    swarm: SwarmSettings = SwarmSettings()
    control: ControlSettings = ControlSettings()
    sinks: SinkSettings = SinkSettings()
    own_tasks: dict[NamePattern, OwnTaskSettings] = Field({}, description="tasks of one's own, to be named in `tasks`")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Files, environment and flags arrive merged as arguments (see `load`)."""
        return (init_settings,)

    @model_validator(mode="before")
    @classmethod
    def _empty_is_default(cls, tree: Any) -> Any:
        return without_empty(tree, cls)

    @field_validator("listen")
    @classmethod
    def _an_address(cls, value: str) -> str:
        listen_address(value)
        return value

    @field_validator("nodes")
    @classmethod
    def _some_nodes(cls, value: int | dict[str, Any]) -> int | dict[str, Any]:
        number = value if isinstance(value, int) else len(value)
        if number < 1:
            raise ValueError("a run needs at least one node")
        if number > MOST_NODES:
            raise ValueError(f"a run has at most {MOST_NODES} nodes")
        if not isinstance(value, int) and any(name.startswith("eval-") for name in value):
            raise ValueError("a node's name must not start with eval-, as those of evaluations do")
        return value

    @model_validator(mode="after")
    def _nodes_resolve(self) -> Settings:
        for name in self._unlike_names():
            try:
                self.for_node(name)
            except ValidationError as error:
                raise SettingsError(_sentence(error, ["nodes", name])) from None
        return self

    def node_names(self) -> list[str]:
        """The nodes' names, in order."""
        return [f"node-{i}" for i in range(self.nodes)] if isinstance(self.nodes, int) else list(self.nodes)

    def _unlike_names(self) -> list[str]:
        """Names that stand for all: nodes that are given by their number are alike."""
        return self.node_names()[:1] if isinstance(self.nodes, int) else self.node_names()

    def for_node(self, name: str) -> NodeSettings:
        """A node's settings: the section `node` with the node's own on top."""
        own = {} if isinstance(self.nodes, int) else self.nodes.get(name) or {}
        return NodeSettings.model_validate(merged(self.node.model_dump(), own))

    def with_models(self, folders: Mapping[str, str]) -> Settings:
        """The same with models that `folders` names replaced by their folders."""
        nodes = self.nodes
        if not isinstance(nodes, int):
            nodes = {
                name: {**own, "model": folders[own["model"]]} if own and own.get("model") in folders else own
                for name, own in nodes.items()
            }
        node = self.node.model_copy(update={"model": folders.get(self.node.model, self.node.model)})
        return self.model_copy(update={"node": node, "nodes": nodes})

    @property
    def serves_policies(self) -> bool:
        """Whether learners hand out policies themselves, over HTTP."""
        return self.policies_url is not None and self.policies_url.startswith(("http://", "https://"))

    @property
    def run_folder(self) -> Path:
        """Where this run keeps its files."""
        return self.folder / self.run


def load(path: Path | None, flags: list[str] | None = None) -> Settings:
    """Settings from a YAML file, the environment (GRAPEVINE_NODE__MIX__OWN=8, REDIS_URL) and flags (`node.mix.own=8`).

    Raises SettingsError.
    """
    return from_tree(read_tree(path, flags), path)


def read_tree(path: Path | None, flags: list[str] | None = None, joins: bool = False) -> dict[str, Any]:
    """What file, environment and flags set, nothing else and not checked yet. Raises SettingsError.

    `joins`: the nodes are another machine's, so any may be named.
    """
    tree: dict[str, Any] = {}
    if path is not None:
        try:
            tree = parse(path.read_text()) or {}
        except FileNotFoundError:
            raise SettingsError(f"{path} does not exist; `grapevine init {path}` writes one to start from") from None
        except (OSError, UnicodeDecodeError, BadYaml) as error:
            raise SettingsError(f"{path} cannot be read as YAML: {' '.join(str(error).split())}") from None
        if not isinstance(tree, dict):
            raise SettingsError(f"{path} must hold settings as `key: value`, not a {type(tree).__name__}")
    if wrong := unknown_variable(os.environ, Settings.model_fields):
        raise SettingsError(wrong)
    # Only what the environment names: a model would bring the defaults of its other fields along.
    try:
        variables = EnvSettingsSource(Settings)()
    except UnreadableVariable as error:
        raise SettingsError(f"the environment's GRAPEVINE_ variables: {error}; lists are written as JSON") from None
    if not joins and any(name.upper().startswith("GRAPEVINE_NODES__") for name in os.environ):
        tree = with_named_nodes(tree, variables, DEFAULT_NODES)
    tree = merged(tree, variables)
    if os.environ.get("REDIS_URL") and not os.environ.get("GRAPEVINE_REDIS_URL"):
        tree["redis_url"] = os.environ["REDIS_URL"]
    for flag in flags or []:
        branch = branch_of(flag)
        if not joins and flag.startswith("nodes."):
            tree = with_named_nodes(tree, branch, DEFAULT_NODES)
        tree = merged(tree, branch)
    odd = [key for key in tree if not isinstance(key, str)]
    if odd:
        raise SettingsError(f"unknown setting {odd[0]}; the names of settings are words")
    return tree


def from_tree(tree: dict[str, Any], path: Path | None) -> Settings:
    """The settings that a tree comes to, checked; `path` is the file it came from. Raises SettingsError."""
    try:
        settings = Settings(**tree)
    except ValidationError as error:
        raise SettingsError(_sentence(error)) from None
    except RecursionError:
        raise SettingsError(f"{path or 'a setting'} is nested too deeply") from None
    if wrong := contradiction(settings):
        raise SettingsError(wrong)
    settings = _define_tasks(settings, path.absolute().parent if path is not None else Path.cwd())
    _check_tasks(settings)
    return settings


def _define_tasks(settings: Settings, folder: Path) -> Settings:
    """Make tasks of one's own known to this process; their paths become absolute, so that workers find them too."""
    defined: dict[str, OwnTaskSettings] = {}
    for name, own in settings.own_tasks.items():
        start = folder / (own.folder or "")
        file = start / own.file if own.file is not None else None
        task = own.model_copy(update={"folder": start, "file": file})
        try:
            checksum = define(task.definition(name))
        except TaskRefused as error:
            raise SettingsError(str(error)) from None
        defined[name] = task.model_copy(update={"checksum": checksum})
    return settings.model_copy(update={"own_tasks": defined})


def _check_tasks(settings: Settings) -> None:
    """Resolve every node's tasks now: a misspelt one should not wait for a worker to trip over it."""
    checked: list[tuple[str | list[Any], bool]] = []
    for name in settings._unlike_names():
        node = settings.for_node(name)
        evaluates = node.evaluate.questions > 0 and node.learner == "train"
        if (node.tasks, evaluates) in checked:
            continue
        try:
            for spec in resolve_tasks(node.tasks):
                if evaluates:
                    draw((spec,), 0, 0, held_out=True)
        except TaskRefused as error:
            raise SettingsError(f"{name}: {error}") from None
        checked.append((node.tasks, evaluates))


def _sentence(error: ValidationError, inside: list[str] | None = None) -> str:
    """The first thing wrong, in one sentence. `inside`: where the validated part stands in the whole tree."""
    errors = error.errors()
    if errors[0]["loc"][:1] == ("nodes",) and errors[0]["loc"] != ("nodes",):
        return _nodes_sentence(errors[0].get("input"), errors[-1])
    first = errors[0]
    path = [str(part) for part in first["loc"]]
    where = [*(inside or []), *path]
    key = ".".join(where) or "settings"
    if first["type"] == "extra_forbidden":
        near = difflib.get_close_matches(path[-1], _names(path[:-1], NodeSettings if inside else Settings), n=1)
        hint = f"; did you mean {'.'.join([*where[:-1], near[0]])}?" if near else ""
        return f"unknown setting {key}{hint}"
    if path[-1:] == ["[key]"] and first["type"] == "literal_error":
        return f"setting {'.'.join(where[:-2])}: {_shown(first.get('input'))} is none of {first['ctx']['expected']}"
    if path[-1:] == ["[key]"]:
        return f"setting {where[0]}: {_shown(first.get('input'))} cannot be a name; up to 40 of a-z, 0-9, '.' and '-'"
    text = first["msg"].removeprefix("Value error, ").replace("a valid tuple", "a list")
    got = "" if where[:1] and where[0] in SECRETS else f" (got {_shown(first.get('input'))})"
    return f"setting {key}: {text[0].lower()}{text[1:]}{got}"


def _nodes_sentence(given: Any, last: Any) -> str:
    """What is wrong with `nodes`, of which pydantic tells one story per type it could have had."""
    if not isinstance(given, dict):
        return f"setting nodes: a number of nodes, or a name with settings per node (got {_shown(given)})"
    if "[key]" in last["loc"]:
        return f"setting nodes: {_shown(last.get('input'))} cannot name a node; up to 40 of a-z, 0-9, '.' and '-'"
    got = _shown(last.get("input"))
    return f"setting nodes.{last['loc'][2]}: settings of this node as `key: value`, or nothing (got {got})"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:199]}…"


def _names(path: list[str], top: type[BaseModel]) -> list[str]:
    model: Any = top
    for part in path:
        field = model.model_fields.get(part)
        model = field.annotation if field is not None else None
        if not (isinstance(model, type) and issubclass(model, BaseModel)):
            return []
    return list(model.model_fields)
