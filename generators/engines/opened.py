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

from common.adapters import Adapter, tensor_names
from common.chat import load_tokenizer, stop_ids
from common.messages import Version
from generators.engines.base import PolicyUnusable
from generators.engines.shapes import Shapes


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
        except (OSError, ValueError, RuntimeError, ImportError, SafetensorError) as error:
            reason = " ".join(str(error).split())
            raise PolicyUnusable(f"the model {name} cannot be loaded here: {reason}") from error
        self.model: Any = loaded.to(device).eval()
        self._shapes = Shapes.of(name, self.model)
        self.stops: set[int] = stop_ids(self.tokenizer, self.model.generation_config)
        # Adapters act as hooks on the layers they adapt; whether the layers below still hold the base model's weights.
        self._hooks: list[Any] = []
        self.version = Version(0, 0)
        self._holds_base = True
        self._base: dict[str, Tensor] | None = None

    def load_policy(self, weights: Path, version: Version) -> None:
        """Take the file's weights, or its adapters on top of the base model, once all names and shapes agree.

        Raises PolicyUnusable otherwise, with the policy before it still whole.
        """
        adapters = self._shapes.adapters_in(weights, version)
        tensors = load_file(weights)
        if adapters is None:
            self._drop_adapters()
            self._holds_base = False
            self._copy(tensors)
        else:
            self._take_adapters(*adapters, tensors)
        self.version = version

    def _take_adapters(self, adapter: Adapter, names: list[str], tensors: dict[str, Tensor]) -> None:
        """Unmerged, as the learner computes them: a small change would be lost in the rounding of 16-bit weights."""
        self._restore_base()
        self._drop_adapters()
        for name in names:
            a, b = (tensors[tensor].to(self._device, self._dtype) for tensor in tensor_names(name))
            self._hooks.append(self.model.get_submodule(name).register_forward_hook(_Adapted(a, b, adapter.scale)))

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
