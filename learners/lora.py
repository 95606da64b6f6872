"""Low-rank adapters (LoRA, arXiv 2106.09685) for the learner: put in by PEFT, trained, saved and switched off.

Guarantees: the first policy is the base model, since B begins at zero; A is the same in every process; the base weights
are never changed nor trained.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import Parameter

from common.adapters import Adapter, tensor_names
from common.sections import LoraSettings
from common.settings import SettingsError

NAME = "default"
SEED = 0


def add_adapters(model: Any, settings: LoraSettings, base: str) -> tuple[Adapter, dict[str, Parameter]]:
    """Put adapters into the model, in place; the rest of it is frozen.

    Returns what they are, and the parameters to train by their names in a policy's file. Adapters are float32, whatever
    the base is. Raises SettingsError when no layer is named as one of the targets.
    """
    from peft import LoraConfig, inject_adapter_in_model

    linear = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    layers = [name for name in linear if any(name == target or name.endswith(f".{target}") for target in settings.targets)]
    if not layers:
        there = ", ".join(sorted({name.rpartition(".")[2] for name in linear})) or "none"
        raise SettingsError(
            f"setting node.update.lora.targets: {', '.join(settings.targets) or 'an empty list'} names no linear layer "
            f"of {base}; it has {there}"
        )
    tied = model.get_output_embeddings()
    if tied is not None and tied.weight is model.get_input_embeddings().weight:
        shared = [layer for layer in layers if model.get_submodule(layer) is tied]
        if shared:
            raise SettingsError(
                f"setting node.update.lora.targets: {shared[0]} of {base} shares its weights with the embeddings and "
                f"cannot have an adapter of its own; leave it out"
            )
    # A is drawn at random: the same numbers in every process, and nobody else's random numbers are touched.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        config: Any = LoraConfig(r=settings.rank, target_modules=layers, lora_dropout=0.0)
        config.lora_alpha = settings.alpha  # any number, whatever its annotation says
        inject_adapter_in_model(config, model, NAME)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    trained: dict[str, Parameter] = {}
    modules = dict(model.named_modules())
    for layer in layers:
        for name, part in zip(tensor_names(layer), (modules[layer].lora_A, modules[layer].lora_B), strict=True):
            matrix = part[NAME].float()
            trained[name] = matrix.weight.requires_grad_(True)
    return Adapter(settings.rank, settings.alpha, tuple(settings.targets), base), trained


@contextmanager
def adapters_off(model: Any) -> Iterator[None]:
    """Within, the model is its base."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)
