"""`grapevine export`: a node's policy as an ordinary model folder.

Guarantees: the folder holds exactly the weights of the version named in its model card (their checksum was verified where
one was announced); it is loaded by transformers without any code of ours; it appears whole or not at all, and nothing that
lies there is overwritten.
"""

from __future__ import annotations

import difflib
import os
import shutil
import tempfile
import uuid
from pathlib import Path
from typing import Any

import msgspec
from pydantic import ValidationError

from common.adapters import Adapter, AdapterUnfit, adapted_layers, adapter_of, tensor_names
from common.directory import Policy
from common.messages import Version
from common.policies import BadPolicy, fetch, sha256
from common.settings import Settings, SettingsError
from grapevine.model_card import model_card
from grapevine.report.folder import run_tree
from learners.checkpoint import STATE_FILE, WEIGHTS_FILE, LearnerState

ATTEMPTS = 5


def run_settings(folder: Path, run: str) -> Settings:
    """The settings that a run was started with. Raises SettingsError when there is no such run, or its file is damaged."""
    path = folder / run / "settings.json"
    if not path.exists():
        runs = [other.parent.name for other in folder.glob("*/settings.json")]
        raise SettingsError(f"{folder / run} holds no run that `grapevine up` started{_near(run, runs)}")
    # What the file says of its place was true when it was written; the folder may have been moved since.
    try:
        return Settings.model_validate({**run_tree(folder / run), "folder": folder, "run": run})
    except ValidationError:
        raise SettingsError(f"{path} was not written by this release; `grapevine up` writes it anew") from None


def parse_version(text: str) -> Version:
    """`1.150` as a version. Raises SettingsError."""
    incarnation, _, step = text.partition(".")
    if not (incarnation.isdecimal() and step.isdecimal()):
        raise SettingsError(f"{text} is no policy version; write it as incarnation.step, for example 1.150")
    return Version(int(incarnation), int(step))


def check_node(settings: Settings, node: str) -> None:
    """Raises SettingsError when the run has no such node."""
    names = settings.node_names()
    if node not in names:
        raise SettingsError(f"run {settings.run} has no node {node}{_near(node, names)}")


def has_checkpoints(settings: Settings, node: str) -> bool:
    """Whether the node keeps its checkpoints here, and not on another machine."""
    return any((settings.run_folder / "nodes" / node / "checkpoints").glob("*-*"))


def find_policy(settings: Settings, node: str, version: Version | None) -> Policy:
    """A node's policy in the run's folder: the newest checkpoint, or a version that is still kept. Raises SettingsError."""
    check_node(settings, node)
    model = settings.for_node(node).model
    for folder in sorted((settings.run_folder / "nodes" / node / "checkpoints").glob("*-*"), reverse=True):
        try:
            state = msgspec.json.decode((folder / STATE_FILE).read_bytes(), type=LearnerState)
        except (OSError, ValueError):
            continue  # being written, or removed by its learner just now; the one before will do
        if version in (None, state.version) and WEIGHTS_FILE in state.checksums:
            return Policy(state.version, str((folder / WEIGHTS_FILE).resolve()), state.checksums[WEIGHTS_FILE], model)
    if version is not None:
        path = settings.run_folder / "policies" / node / f"{version.incarnation:06d}-{version.step:09d}.safetensors"
        if path.exists():
            return Policy(version, str(path.resolve()), sha256(path), model)
        raise SettingsError(f"version {version} of {node} is not kept any more; kept are {_kept(settings, node)}")
    raise SettingsError(f"node {node} has no checkpoint yet; it has one after its first round")


def export_model(
    settings: Settings, node: str, target: Path, version: Version | None = None, announced: Policy | None = None
) -> dict[str, Any]:
    """Write the policy of a node, the newest without `version`, as a model folder; says what was written.

    `announced` is a policy to write instead, where the node's folder is on another machine.
    Weights are float32, as the learner holds them; adapters are merged into those of the base model. Raises SettingsError:
    an unknown node or version, a target that is not empty, a base model that cannot be loaded.
    """
    check_node(settings, node)
    target = target.absolute()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise SettingsError(f"{target} is not empty; choose another folder")
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.part")
    try:
        with tempfile.TemporaryDirectory(prefix="grapevine-export-") as scratch:
            policy, weights = _fetched(settings, node, version, announced, Path(scratch))
            _write_model(policy, weights, aside)
        (aside / "README.md").write_text(model_card(settings, node, policy))
        for path in aside.iterdir():
            path.chmod(0o644)  # the weights are written for their owner alone, and a model folder is to be passed on
        os.replace(aside, target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return {"node": node, "version": str(policy.version), "model": policy.model, "folder": str(target)}


def _fetched(
    settings: Settings, node: str, version: Version | None, announced: Policy | None, scratch: Path
) -> tuple[Policy, Path]:
    """A verified copy of the weights. A learner that goes on removes old ones: then the next newest is taken."""
    for attempt in range(ATTEMPTS):
        policy = announced or find_policy(settings, node, version)
        try:
            return policy, fetch(policy, scratch, settings.policies_token)
        except BadPolicy as error:
            if error.reason != "missing" or attempt == ATTEMPTS - 1:
                raise SettingsError(f"{error}; name another version with --version") from None
    raise AssertionError("unreachable")


def _write_model(policy: Policy, weights: Path, folder: Path) -> None:
    """Base model, tokenizer and generation settings with the policy's weights."""
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(policy.model, dtype=torch.float32)
        tokenizer: Any = AutoTokenizer.from_pretrained(policy.model)
    except (OSError, ValueError) as error:
        raise SettingsError(f"the base model {policy.model} cannot be loaded: {' '.join(str(error).split())}") from None
    tensors = load_file(weights)
    try:
        adapter = adapter_of(weights)
        if adapter is not None:
            _merge(model, adapter, tensors)
            tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    except AdapterUnfit as error:
        raise SettingsError(f"policy {policy.version} does not fit its base model {policy.model}: {error}") from None
    # Tied tensors are one parameter with one name, here as in the policy's file; saving writes both ends again.
    parameters = dict(model.named_parameters())
    odd = sorted(tensors.keys() ^ parameters.keys()) or [n for n, p in parameters.items() if p.shape != tensors[n].shape]
    if odd:
        raise SettingsError(f"policy {policy.version} does not fit its base model {policy.model}: {', '.join(odd[:3])}")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[name])
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _merge(model: Any, adapter: Adapter, tensors: dict[str, Any]) -> None:
    """Add what the adapters stand for to the weights of the layers they adapt. Raises AdapterUnfit, with nothing changed."""
    import torch

    layers = {name: module.weight for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    names = adapted_layers(adapter, found, {name: tuple(weight.shape) for name, weight in layers.items()})
    with torch.no_grad():
        for name in names:
            a, b = (tensors[tensor] for tensor in tensor_names(name))
            layers[name] += adapter.scale * (b @ a)


def _kept(settings: Settings, node: str) -> str:
    """Versions that can be exported, the newest last."""
    names = [path.stem for path in (settings.run_folder / "policies" / node).glob("*.safetensors")]
    versions = sorted(Version(*(int(part) for part in name.split("-"))) for name in names)
    return ", ".join(str(version) for version in versions) or "none"


def _near(name: str, names: list[str]) -> str:
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    if near:
        return f"; did you mean {near[0]}?"
    return f"; there are {', '.join(sorted(names)[:8])}" if names else ""
