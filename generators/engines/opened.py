"""A model that the transformers engine has in memory, and the policies it takes on.

Guarantees: a policy's weights or adapters are taken all or none; adapters leave the weights of the base model as they are.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import linear
from transformers import AutoModelForCausalLM

from common.adapters import Adapter, AdapterUnfit, adapted_layers, adapter_of, tensor_names
from common.chat import load_tokenizer, stop_ids
from common.messages import Version
from generators.engines.base import PolicyUnusable


class OpenedModel:
    """A base model with its tokenizer, under whatever policy was loaded last."""

    def __init__(self, name: str, device: torch.device, dtype: torch.dtype) -> None:
        """`name` is a hub id or folder. Raises PolicyUnusable when it cannot be loaded here."""
        self._name = name
        self._device = device
        self._dtype = dtype
        try:
            self.tokenizer: Any = load_tokenizer(name)
            loaded: Any = AutoModelForCausalLM.from_pretrained(name, dtype=dtype)
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            reason = " ".join(str(error).split())
            raise PolicyUnusable(f"the model {name} cannot be loaded here: {reason}") from error
        self.model: Any = loaded.to(device).eval()
        self.stops: set[int] = stop_ids(self.tokenizer, self.model.generation_config)
        # Adapters act as hooks on the layers they adapt; whether the layers below still hold the base model's weights.
        self._hooks: list[Any] = []
        self._holds_base = True
        self._base: dict[str, Tensor] | None = None

    def load_policy(self, weights: Path, version: Version) -> None:
        """Take the file's weights, or its adapters on top of the base model, once all names and shapes agree.

        Raises PolicyUnusable otherwise, with the policy before it still whole.
        """
        try:
            adapter, tensors = adapter_of(weights), load_file(weights)
        except AdapterUnfit as error:
            raise PolicyUnusable(f"policy {version}: {error}") from None
        except (SafetensorError, OSError, ValueError) as error:
            raise PolicyUnusable(f"policy {version} is not readable as safetensors: {error}") from None
        if adapter is None:
            self._take_weights(tensors, version)
        else:
            self._take_adapters(adapter, tensors, version)

    def _take_weights(self, tensors: dict[str, Tensor], version: Version) -> None:
        parameters = dict(self.model.named_parameters())
        if tensors.keys() != parameters.keys():
            odd = sorted(tensors.keys() ^ parameters.keys())[:3]
            raise PolicyUnusable(f"policy {version} and model {self._name} differ in {', '.join(odd)}")
        for name, parameter in parameters.items():
            if tensors[name].shape != parameter.shape:
                raise PolicyUnusable(
                    f"policy {version}: {name} is {tuple(tensors[name].shape)}, not {tuple(parameter.shape)}"
                )
        self._drop_adapters()
        self._holds_base = False
        self._copy(tensors)

    def _take_adapters(self, adapter: Adapter, tensors: dict[str, Tensor], version: Version) -> None:
        """Unmerged, as the learner computes them: a small change would be lost in the rounding of 16-bit weights."""
        layers = {name: module for name, module in self.model.named_modules() if isinstance(module, torch.nn.Linear)}
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        try:
            names = adapted_layers(adapter, shapes, {name: tuple(layer.weight.shape) for name, layer in layers.items()})
        except AdapterUnfit as error:
            raise PolicyUnusable(f"policy {version} and model {self._name}: {error}") from None
        self._restore_base()
        self._drop_adapters()
        for name in names:
            a, b = (tensors[tensor].to(self._device, self._dtype) for tensor in tensor_names(name))
            self._hooks.append(layers[name].register_forward_hook(_Adapted(a, b, adapter.scale)))

    def _restore_base(self) -> None:
        """The base model's own weights, where another policy's took their place. Raises PolicyUnusable."""
        if self._holds_base:
            return
        if self._base is None:
            # Kept from now on: nodes that train all weights and nodes that train adapters share this engine.
            try:
                again: Any = AutoModelForCausalLM.from_pretrained(str(self._name), dtype=self._dtype)
            except (OSError, ValueError, RuntimeError, SafetensorError) as error:
                reason = " ".join(str(error).split())
                raise PolicyUnusable(f"the model {self._name} cannot be loaded again: {reason}") from error
            self._base = {name: parameter.detach() for name, parameter in again.named_parameters()}
        self._copy(self._base)
        self._holds_base = True

    @torch.no_grad()
    def _copy(self, tensors: dict[str, Tensor]) -> None:
        for name, parameter in self.model.named_parameters():
            parameter.copy_(tensors[name])

    def _drop_adapters(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


class _Adapted:
    """A forward hook that adds an adapter's share to its layer's output: scale x B A x."""

    def __init__(self, a: Tensor, b: Tensor, scale: float) -> None:
        self._a, self._b, self._scale = a, b, scale

    def __call__(self, layer: torch.nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return output + linear(linear(inputs[0], self._a), self._b) * self._scale
