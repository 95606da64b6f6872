"""Policy files that hold low-rank adapters (LoRA, arXiv 2106.09685) in place of all weights: what both roles agree on.

A policy file with adapters is a safetensors file whose metadata says so and whose tensors are named as in PEFT's own
adapter files. Guarantees: a file is either recognised whole, every adapter fitting a layer of the model, or refused with
one sentence; nothing here needs PEFT or torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import msgspec

# One key, as safetensors writes several in no fixed order and one seed shall give one file.
METADATA_KEY = "grapevine_lora"
_PREFIX = "base_model.model."

Shape = tuple[int, ...]


class AdapterUnfit(ValueError):
    """The adapters in a file do not belong to the model at hand."""


class Adapter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a file's adapters are: a layer's output grows by alpha / rank x B A x."""

    rank: Annotated[int, msgspec.Meta(ge=1)]
    alpha: Annotated[float, msgspec.Meta(gt=0)]
    targets: tuple[str, ...]
    base: str

    @property
    def scale(self) -> float:
        """What the product of the two matrices is multiplied by."""
        return self.alpha / self.rank

    def metadata(self) -> dict[str, str]:
        """For the file's header."""
        return {METADATA_KEY: msgspec.json.encode(self).decode()}


def adapter_of(weights: Path) -> Adapter | None:
    """What the file's header says of adapters, None for a file of all weights.

    Raises AdapterUnfit when it says something that cannot be understood, OSError or SafetensorError when it is no
    safetensors file.
    """
    from safetensors import safe_open

    with safe_open(weights, framework="numpy") as file:
        said = (file.metadata() or {}).get(METADATA_KEY)
    if said is None:
        return None
    try:
        return msgspec.json.decode(said, type=Adapter)
    except msgspec.DecodeError as error:
        raise AdapterUnfit(f"its description of adapters is damaged: {error}") from None


def tensor_names(layer: str) -> tuple[str, str]:
    """The names of the two matrices of a layer's adapter: A [rank, inputs] and B [outputs, rank]."""
    return f"{_PREFIX}{layer}.lora_A.weight", f"{_PREFIX}{layer}.lora_B.weight"


def adapted_layers(adapter: Adapter, found: Mapping[str, Shape], layers: Mapping[str, Shape]) -> list[str]:
    """The layers that the tensors `found` in a file adapt, by name.

    Args:
        found: name and shape of every tensor in the file.
        layers: name and weight shape [outputs, inputs] of every linear layer of the model.

    Raises:
        AdapterUnfit: a layer that the model has not, half an adapter, another shape or rank, nothing at all.
    """
    names = sorted({name.removeprefix(_PREFIX).rpartition(".lora_")[0] for name in found})
    if not names:
        raise AdapterUnfit("it holds no adapters")
    for name in names:
        if name not in layers or name.rpartition(".")[2] not in {target.rpartition(".")[2] for target in adapter.targets}:
            raise AdapterUnfit(f"it adapts {name or 'something'}, which is no layer to be adapted here")
        outputs, inputs = layers[name]
        expected = dict(zip(tensor_names(name), [(adapter.rank, inputs), (outputs, adapter.rank)], strict=True))
        for tensor, shape in expected.items():
            if tensor not in found:
                raise AdapterUnfit(f"{tensor} is missing")
            if tuple(found[tensor]) != shape:
                raise AdapterUnfit(f"{tensor} is {tuple(found[tensor])}, not {shape}")
    extra = set(found) - {tensor for name in names for tensor in tensor_names(name)}
    if extra:
        raise AdapterUnfit(f"it holds {min(extra)}, which is no part of an adapter")
    return names
