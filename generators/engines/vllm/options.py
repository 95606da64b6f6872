"""How vLLM is started: its environment, and which of its options are ours to decide."""

from __future__ import annotations

import os
from dataclasses import fields
from typing import Any

from common.settings import SettingsError

BACKEND = "safetensors"
# What vLLM's own defaults would do badly here; whoever sets them means it.
ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    # On CPU: threads as OMP_NUM_THREADS says, several generators beside one another, no compiler needed.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
DEFAULTS: dict[str, Any] = {
    "disable_log_stats": True,
    "max_model_len": -1,  # as long as the model allows and memory holds
    # A step's tokens are all of one version only if no step is under way while the policy changes.
    "async_scheduling": False,
}
DEFAULTS_ON_CPU: dict[str, Any] = {
    "enforce_eager": True,
    "block_size": 32,
    "kv_cache_memory_bytes": 2**30,
    # A seeded request whose prompt is cut into chunks fails here: "CPU Generator does not use offset" (vLLM 0.32).
    "enable_chunked_prefill": False,
}
OURS = (
    "model",
    "tokenizer",
    "dtype",
    "logprobs_mode",
    "weight_transfer_config",
    "enable_lora",
    "max_loras",
    "max_lora_rank",
)


def prepare(device: str) -> None:
    """Before vLLM is imported, which is when it reads its environment. Raises SettingsError."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine is stepped, and its policy changed, in this process
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if device.startswith("cuda:"):
        os.environ.setdefault("CUDA_VISIBLE_DEVICES", device.removeprefix("cuda:"))
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    if device != "auto" and device.startswith("cuda") == current_platform.is_cpu():
        raise SettingsError(f"setting generators.device: this build of vLLM does not run on {device}")


def check_options(options: dict[str, Any]) -> None:
    """Raises SettingsError for an option that vLLM does not have, or that is decided here."""
    from vllm.engine.arg_utils import EngineArgs

    known = {field.name for field in fields(EngineArgs)}
    for name in options:
        if name in OURS:
            raise SettingsError(f"setting generators.engine_options: {name} is decided by grapevine; leave it out")
        if name not in known:
            raise SettingsError(f"setting generators.engine_options: vLLM's EngineArgs have no {name}")


def engine_arguments(model: str, dtype: str, options: dict[str, Any], lora_rank: int) -> Any:
    """vLLM's EngineArgs: our defaults, the user's options over them, and what only we decide. `lora_rank` 0: no adapters."""
    from vllm.config.weight_transfer import WeightTransferConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform

    plan: dict[str, Any] = {
        **DEFAULTS,
        **(DEFAULTS_ON_CPU if current_platform.is_cpu() else {}),
        **options,
        "model": model,
        "dtype": dtype,
        "logprobs_mode": "processed_logprobs",
        "weight_transfer_config": WeightTransferConfig(backend=BACKEND),
    }
    if lora_rank:
        plan |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": lora_rank}
    return EngineArgs(**plan)
