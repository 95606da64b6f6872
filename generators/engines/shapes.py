"""What a model's policies look like, whichever engine takes them on.

Guarantees: a policy file is found fit as a whole or refused with one sentence, from its header alone, before any engine is
touched.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from common.adapters import Adapter, AdapterUnfit, Shape, adapted_layers, adapter_of
from common.messages import Version
from generators.engines.base import PolicyUnusable


@dataclass(frozen=True)
class Shapes:
    """Names and shapes of a model's parameters, and of the weights [outputs, inputs] of its linear layers."""

    model: str
    parameters: dict[str, Shape]
    layers: dict[str, Shape]

    @classmethod
    def of(cls, name: str, model: torch.nn.Module) -> Shapes:
        """Those of a model of transformers, which may be without weights. Tied parameters count once."""
        parameters = {key: tuple(parameter.shape) for key, parameter in model.named_parameters()}
        layers = {
            key: tuple(module.weight.shape) for key, module in model.named_modules() if isinstance(module, torch.nn.Linear)
        }
        return cls(name, parameters, layers)

    @classmethod
    def read(cls, name: str) -> Shapes:
        """Those of a hub id or folder, from its configuration. Raises OSError or ValueError."""
        from transformers import AutoConfig, AutoModelForCausalLM

        config: Any = AutoConfig.from_pretrained(name)
        models: Any = AutoModelForCausalLM
        with torch.device("meta"):
            return cls.of(name, models.from_config(config))

    def adapters_in(self, weights: Path, version: Version) -> tuple[Adapter, list[str]] | None:
        """The adapters of a policy file and the layers they are for; None when it holds all of the model's weights.

        Raises PolicyUnusable when it is neither.
        """
        try:
            adapter = adapter_of(weights)
            with safe_open(weights, framework="numpy") as file:
                found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
            if adapter is not None:
                return adapter, adapted_layers(adapter, found, self.layers)
        except AdapterUnfit as error:
            raise PolicyUnusable(f"policy {version} and model {self.model}: {error}") from None
        except (SafetensorError, OSError, ValueError) as error:
            raise PolicyUnusable(f"policy {version} is not readable as safetensors: {error}") from None
        if found.keys() != self.parameters.keys():
            odd = sorted(found.keys() ^ self.parameters.keys())[:3]
            raise PolicyUnusable(f"policy {version} and model {self.model} differ in {', '.join(odd)}")
        for name, shape in self.parameters.items():
            if found[name] != shape:
                raise PolicyUnusable(f"policy {version}: {name} is {found[name]}, not {shape}")
        return None
