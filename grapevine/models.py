"""What a model folder must hold, found out without loading its weights.

Guarantees: only the headers of the weight files are read, and the model that `config.json` describes is built without
memory for its numbers, so the check costs a second for any size; what a library says about a broken file becomes one
sentence that names the folder and the fix. Weights that are missing are refused: loading would make them up at random.
"""

from __future__ import annotations

import json
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.sections import UpdateSettings
from common.settings import SettingsError

INDEX = "model.safetensors.index.json"
LONGEST_HEADER = 100 * 2**20
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True)
class ModelFacts:
    """What a model is: its class, its number of parameters (tied ones once), and whether it brings a chat template."""

    architecture: str
    parameters: int
    has_template: bool


def examine_model(model: str) -> ModelFacts:
    """Check a folder, or a hub id as far as it is on this disk. Raises SettingsError with one sentence."""
    folder = Path(model)
    if folder.is_absolute() or folder.exists() or model.startswith(("./", "../", "~")):
        _check_files(model, folder)
    from common.chat import prompt_ids

    tokenizer = _loaded(model, "tokenizer")
    described = _described(model, _loaded(model, "configuration"))
    if folder.is_dir():
        _compare(model, described, _headers(model, folder))
    vocabulary = described.get_input_embeddings().num_embeddings
    # A tokenizer may know a few tokens more than its model (of pictures, say), as long as text does not use them.
    highest = max(*prompt_ids(tokenizer, "What is 2 + 2?"), tokenizer.eos_token_id)
    if highest >= vocabulary:
        raise SettingsError(
            f"the tokenizer of {model} uses token {highest} but its model knows {vocabulary}; "
            f"they belong to different models: use the tokenizer files that came with the weights"
        )
    parameters = sum(parameter.numel() for parameter in described.parameters())
    return ModelFacts(type(described).__name__, parameters, bool(tokenizer.chat_template))


def _check_files(model: str, folder: Path) -> None:
    """What a person gets wrong first: the path itself."""
    if not folder.is_dir():
        what = "is a file, not a folder" if folder.exists() else "does not exist"
        raise SettingsError(f"the model folder {model} {what}; correct node.model, or give a hub id such as owner/name")
    config = folder / "config.json"
    if not config.exists():
        raise SettingsError(f"{model} is no model folder: it has no config.json; correct node.model")
    try:
        json.loads(config.read_text())
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise SettingsError(f"{config} is not valid JSON ({error}); fetch the model again") from None
    if not list(folder.glob("*.safetensors")):
        raise SettingsError(f"{model} holds no weights (*.safetensors); fetch the model again, or convert it")


def _loaded(model: str, part: str) -> Any:
    from transformers import AutoConfig

    from common.chat import load_tokenizer

    try:
        return load_tokenizer(model) if part == "tokenizer" else AutoConfig.from_pretrained(model)
    except Exception as error:  # whatever a library makes of a stranger's files
        raise SettingsError(
            f"the {part} of {model} cannot be read: {_line(error)}; fetch the model again, or choose another"
        ) from error


def _described(model: str, config: Any) -> Any:
    """The model that a configuration describes, without memory for its numbers."""
    import torch
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    except Exception as error:
        raise SettingsError(
            f"config.json of {model} describes no causal language model: {_line(error)}; choose another model"
        ) from error


def _headers(model: str, folder: Path) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor in a folder's weight files (https://huggingface.co/docs/safetensors: 8 bytes of
    length, then JSON)."""
    index = folder / INDEX
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    if index.exists() and "model.safetensors" not in names:
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise SettingsError(f"{index} is damaged; fetch the model again") from None
    elif "model.safetensors" in names:
        names = ["model.safetensors"]
    shapes: dict[str, tuple[int, ...]] = {}
    for name in names:
        path = folder / name
        try:
            with path.open("rb") as file:
                (length,) = struct.unpack("<Q", file.read(8))
                if length > LONGEST_HEADER:
                    raise ValueError("its header is too long")
                header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
            if path.stat().st_size != 8 + length + end:
                raise ValueError(f"it has {path.stat().st_size} bytes and should have {8 + length + end}")
            shapes |= {tensor: tuple(entry["shape"]) for tensor, entry in header.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
            raise SettingsError(f"the weights {path} are damaged or cut short ({_line(error)}); fetch them again") from None
    return shapes


def _compare(model: str, described: Any, found: dict[str, tuple[int, ...]]) -> None:
    """Weights against `config.json`: shapes that differ, layers that are missing or more than it knows."""
    aliases: dict[int, list[str]] = {}
    expected: dict[str, Any] = {}
    for name, parameter in described.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(parameter), []).append(name)
        expected[name] = parameter
    for name, shape in found.items():
        if name in expected and tuple(expected[name].shape) != shape:
            raise SettingsError(
                f"the weights of {model} do not fit its config.json: {name} is {_shape(shape)} in the file and "
                f"{_shape(tuple(expected[name].shape))} by the configuration; use the two that belong together"
            )
    missing = [names[0] for names in aliases.values() if not any(name in found for name in names)]
    ignored = getattr(described, "_keys_to_ignore_on_load_unexpected", None) or []
    unknown = [n for n in found if n not in expected and not any(re.search(pattern, n) for pattern in ignored)]
    kinds = {_NUMBER.sub("#", name) for name in expected}
    layers = [name for name in unknown if _NUMBER.sub("#", name) in kinds]
    # With names of another kind among them the loader converts, and what is missing here is made from those.
    if missing and (len(layers) == len(unknown)):
        what = f"{len(missing)} of the tensors that its config.json describes are missing, {missing[0]} among them"
    elif layers:
        what = f"{len(layers)} tensors are more than its config.json describes, {layers[0]} among them"
    else:
        return
    raise SettingsError(f"the weights of {model} do not fit its config.json: {what}; use the two that belong together")


def size(facts: ModelFacts) -> str:
    """A number of parameters for people."""
    millions = facts.parameters / 1e6
    return f"{millions / 1e3:.1f} billion" if millions >= 1000 else f"{millions:.1f} million"


def bytes_to_train(facts: ModelFacts, update: UpdateSettings) -> int:
    """Memory of a learner without activations: weights, gradient and the two moments of AdamW, four bytes each.

    With adapters the base model's weights alone, next to which theirs are little; a divergence from the model that training
    began with takes another copy of all weights.
    """
    if update.lora.rank:
        return (2 if update.dtype == "bfloat16" else 4) * facts.parameters
    return (20 if update.kl else 16) * facts.parameters


def _shape(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "a single number"


def _line(error: Exception) -> str:
    text = " ".join(str(error).split()).rstrip(".")
    return (text if len(text) <= 300 else f"{text[:300]}...") or type(error).__name__
