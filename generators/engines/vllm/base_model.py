"""What is known of a base model without vLLM, and how its files and its adapters are handed to vLLM."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from common.adapters import Adapter
from common.chat import load_tokenizer, stop_ids
from generators.engines.base import PolicyUnusable
from generators.engines.shapes import Shapes


class BaseModel:
    """A model of which all is known but its weights, so that one that cannot be served costs nobody its place."""

    def __init__(self, name: str) -> None:
        self.name = name
        try:
            from transformers import GenerationConfig

            self.tokenizer: Any = load_tokenizer(name)
            self.shapes = Shapes.read(name)
            try:
                generation: Any = GenerationConfig.from_pretrained(name)
            except OSError:
                generation = None  # not every model has one
        except (OSError, ValueError, RuntimeError, ImportError, SafetensorError) as error:
            reason = " ".join(str(error).split())
            raise PolicyUnusable(f"the model {name} cannot be loaded here: {reason}") from error
        self.stops = stop_ids(self.tokenizer, generation)


def write_as_peft(adapter: Adapter, layers: list[str], weights: Path, folder: Path) -> None:
    """The adapters as vLLM reads them."""
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": adapter.base,
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "target_modules": sorted({layer.rpartition(".")[2] for layer in layers}),
        "bias": "none",
        "task_type": "CAUSAL_LM",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    shutil.copyfile(weights, folder / "adapter_model.safetensors")


def checkpoint_files(model: str) -> list[Path]:
    """The safetensors files of a base model. Raises PolicyUnusable when it has none."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    folder = Path(model)
    if not folder.is_dir():
        try:
            folder = Path(snapshot_download(model, allow_patterns=["*.safetensors"]))
        except (OSError, HfHubHTTPError, LocalEntryNotFoundError) as error:
            raise PolicyUnusable(f"the weights of {model} cannot be fetched again: {error}") from error
    files = sorted(path for path in folder.glob("*.safetensors") if not path.name.startswith("adapter_"))
    if not files:
        raise PolicyUnusable(f"the model {model} has no safetensors files to return to")
    return files
