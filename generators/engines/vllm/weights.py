"""How vLLM takes on a policy: a backend of its weight-transfer protocol that reads safetensors files.

vLLM loads it in each of its processes through the entry point `vllm.general_plugins`. The files were checked before
(`generators.engines.shapes`): after `start_weight_update` there is no way back.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform

from generators.engines.vllm.options import BACKEND


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Nothing has to be agreed on."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Files that hold all of the model's weights together, under the names that its checkpoint has."""

    paths: list[str]


class SafetensorsTransfer(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Weights out of files that every worker can read."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Nothing to connect."""

    def start_weight_update(self) -> None:
        """Weights come as in a checkpoint, so each layer is rebuilt as when it was loaded."""
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Load all files."""
        self.model.load_weights(_tensors(update_info.paths))

    def finish_weight_update(self) -> None:
        """Each layer takes its new weights."""
        finalize_layerwise_reload(self.model, self.model_config)
        if self.model_config.hf_config.tie_word_embeddings and current_platform.is_cpu():
            self._rebuild_tied_head()

    def _rebuild_tied_head(self) -> None:
        """On CPU the head keeps a packed copy of the embeddings that reloading leaves as it was (vLLM 0.32)."""
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

        embeddings = next(module for module in self.model.modules() if type(module) is VocabParallelEmbedding)
        for head in [module for module in self.model.modules() if isinstance(module, ParallelLMHead)]:
            head.weight = embeddings.weight
            dispatch_cpu_unquantized_gemm(head, remove_weight=False)

    def shutdown(self) -> None:
        """Nothing to let go."""


def _tensors(paths: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
    for path in paths:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                yield name, file.get_tensor(name)


def register() -> None:
    """Make the backend known to vLLM in this process; any number of times."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, SafetensorsTransfer)
