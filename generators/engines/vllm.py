"""The vLLM engine: continuous batching, on GPU or CPU, with the policy changed under what is in flight.

Guarantees: requests join and leave the batch at any token; every token's log-probability is recorded as sampled and its
policy version with it; after a change of policy nothing computed by the old one is used any more, so that every token's
log-probability is that of a plain forward pass of the version it is marked with; a policy is taken all or none.

vLLM runs in this process, which makes every call between two of its steps atomic. The weights come through its own
weight-transfer protocol (`generators.engines.vllm_weights`).
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import structlog
from safetensors import SafetensorError

from common.adapters import Adapter
from common.chat import decode, load_tokenizer, prompt_ids, stop_ids
from common.messages import Completion, Span, Version
from generators.engines.base import PolicyUnusable, Request, RequestUnfit
from generators.engines.shapes import Shapes

log = structlog.get_logger()

# What vLLM's own defaults would do badly here; whoever sets them means it.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
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
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
ADAPTER_NAME, ADAPTER_ID = "policy", 1


class VllmEngine:
    """One model in vLLM, under whatever policy was loaded last. One engine per process; not thread-safe."""

    def __init__(self, device: str = "auto", dtype: str = "float32", options: dict[str, Any] | None = None) -> None:
        """`options` are passed on to vLLM's EngineArgs.

        Raises SettingsError for those that it does not have, or that are decided here.
        """
        _prepare(device)
        _check_options(options or {})
        self._dtype = dtype
        self._options = options or {}
        self._found: Any = None
        self._engine: Any = None
        self._requests: dict[str, Request] = {}
        self._done: list[Any] = []
        self._versions: dict[str, Version] = {}
        self._holds_base = True
        self._lora_rank = 0
        self._adapter: Any = None
        self._scratch = Path(tempfile.mkdtemp(prefix="grapevine-adapter-"))

    @property
    def in_flight(self) -> int:
        """Requests not answered yet."""
        return len(self._requests)

    def open_model(self, model: str) -> None:
        """Load a hub id or folder, in place of the one before; does nothing when it is that one.

        Raises PolicyUnusable when it cannot be loaded here.
        """
        if self._found is not None and self._found.name == model:
            return
        found = _Found(model)
        self._shut()
        self._found, self._lora_rank = found, 0
        self._open()

    def close(self) -> None:
        """Free the memory."""
        self._shut()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _shut(self) -> None:
        if self._engine is not None:
            self._engine.engine_core.shutdown()
        self._engine = self._found = self._adapter = None
        self._holds_base = True
        gc.collect()

    def _open(self) -> None:
        from vllm.config.weight_transfer import WeightTransferConfig
        from vllm.engine.arg_utils import EngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.llm_engine import LLMEngine

        from generators.engines.vllm_weights import BACKEND, register

        register()
        plan: dict[str, Any] = {
            **DEFAULTS,
            **(DEFAULTS_ON_CPU if current_platform.is_cpu() else {}),
            **self._options,
            "model": self._found.name,
            "dtype": self._dtype,
            "logprobs_mode": "processed_logprobs",
            "weight_transfer_config": WeightTransferConfig(backend=BACKEND),
        }
        if self._lora_rank:
            plan |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": self._lora_rank}
        try:
            self._engine = LLMEngine.from_engine_args(EngineArgs(**plan))
            self._engine.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": {}})
            self._try()
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            reason, name = " ".join(str(error).split()), self._found.name
            self._shut()
            raise PolicyUnusable(f"vLLM cannot serve the model {name}: {reason}") from error
        self._say(Version(0, 0))

    def _try(self) -> None:
        """One token: some models load and only then turn out to be none that vLLM can compute here."""
        from vllm import SamplingParams

        self._engine.add_request("first", {"prompt_token_ids": [0]}, SamplingParams(max_tokens=1, detokenize=False))
        while self._engine.has_unfinished_requests():
            self._engine.step()

    # --- policies ---

    def load_policy(self, weights: Path, version: Version) -> None:
        """Take the file's weights, or its adapters on top of the base model; what is in flight goes on with them.

        Raises PolicyUnusable when they do not fit, with the policy before them still serving.
        """
        adapters: tuple[Adapter, list[str]] | None = self._found.shapes.adapters_in(weights, version)
        before = self._adapter
        if adapters is None:
            self._change(lambda: self._take_weights([weights]), version)
            self._adapter, self._holds_base = None, False
        else:
            self._take_adapters(*adapters, weights, version)
        if (before is None) != (self._adapter is None):
            self._begin_again()  # vLLM cannot give a request adapters, or take them away, while it is under way

    def _take_adapters(self, adapter: Adapter, layers: list[str], weights: Path, version: Version) -> None:
        from vllm.lora.request import LoRARequest

        if adapter.rank > LORA_RANKS[-1]:
            raise PolicyUnusable(f"policy {version}: vLLM takes adapters of rank {LORA_RANKS[-1]} at most")
        base = [] if self._holds_base else _checkpoint_files(self._found.name)
        _write_as_peft(adapter, layers, weights, self._scratch)
        if adapter.rank > self._lora_rank:
            self._reopen_for(adapter.rank)
        folder = str(self._scratch)
        newest = LoRARequest(ADAPTER_NAME, ADAPTER_ID, folder, load_inplace=True)

        def change() -> None:
            try:
                self._engine.add_lora(newest)
            except ValueError as error:
                raise PolicyUnusable(f"policy {version}: vLLM refuses its adapters: {error}") from error
            if not self._holds_base:
                self._take_weights(base)  # which drops all adapters
                self._holds_base = True
                self._engine.add_lora(newest)

        self._change(change, version)
        self._adapter = LoRARequest(ADAPTER_NAME, ADAPTER_ID, folder)

    def _reopen_for(self, rank: int) -> None:
        """vLLM must know of adapters, and their rank, when it opens a model."""
        log.info("opening the model again, for adapters", model=self._found.name, rank=rank)
        found = self._found
        self._shut()
        self._found, self._lora_rank = found, next(size for size in LORA_RANKS if size >= rank)
        self._open()

    def _change(self, load: Callable[[], None], version: Version) -> None:
        """Between two steps: nothing moves, the weights change, and all that the old ones computed is forgotten.

        What is in flight is computed again from its first token; that costs a prefill and makes it exact.
        """
        core = self._engine.engine_core.engine_core
        while getattr(core, "batch_queue", None):
            self._done += self._engine.step()
        core.pause_scheduler("keep", True)
        try:
            load()
            self._say(version)
        finally:
            core.resume_scheduler()

    def _take_weights(self, paths: list[Path]) -> None:
        self._engine.collective_rpc("start_weight_update")
        self._engine.collective_rpc("update_weights", kwargs={"update_info": {"paths": [str(path) for path in paths]}})
        self._engine.collective_rpc("finish_weight_update")

    def _say(self, version: Version) -> None:
        self._versions[str(version)] = version
        self._engine.set_weight_version(str(version))

    # --- requests ---

    def submit(self, request: Request) -> None:
        """Let a request join the batch. Raises RequestUnfit when it is longer than the model's context."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling = request.sampling
        prompt = prompt_ids(self._found.tokenizer, request.question)
        longest = self._engine.model_config.max_model_len
        if len(prompt) + sampling.max_new_tokens > longest:
            raise RequestUnfit(
                f"a prompt of {len(prompt)} tokens and {sampling.max_new_tokens} new ones exceed the {longest} of the model"
            )
        params = SamplingParams(
            # The likeliest completion is one, however often it is asked for; vLLM refuses to draw it several times.
            n=1 if sampling.temperature == 0.0 else request.completions,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            max_tokens=sampling.max_new_tokens,
            stop_token_ids=sorted(self._found.stops),
            ignore_eos=True,
            seed=request.seed % 2**62,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        self._engine.add_request(request.id, {"prompt_token_ids": prompt}, params, lora_request=self._adapter)
        self._requests[request.id] = request

    def step(self) -> list[tuple[str, list[Completion]]]:
        """One token for each completion in the batch; the requests that this completed."""
        if not self._requests:
            return []
        outputs, self._done = [*self._done, *self._engine.step()], []
        answered = []
        for output in outputs:
            request = self._requests.pop(output.request_id, None) if output.finished else None
            if request is not None:
                drawn = [self._completion(one) for one in output.outputs]
                answered.append((request.id, drawn * (request.completions // len(drawn))))
        if not self._requests:
            current = self._engine.get_weight_version()
            self._versions = {current: self._versions[current]}
        return answered

    def cancel(self, ids: list[str]) -> None:
        """Take requests out of the batch."""
        known = [id for id in ids if self._requests.pop(id, None) is not None]
        if known:
            self._engine.abort_request(known)

    def _begin_again(self) -> None:
        again = list(self._requests.values())
        self.cancel(list(self._requests))
        for request in again:
            self.submit(request)

    def _completion(self, output: Any) -> Completion:
        ids = np.array(output.token_ids, dtype="<i4")
        found = output.logprobs
        logprobs = np.array([found.logprobs[start] for start in found.start_indices], dtype="<f4")
        return Completion(
            text=decode(self._found.tokenizer, ids.tolist(), self._found.stops),
            token_ids=ids.tobytes(),
            logprobs=logprobs.tobytes(),
            tokens=len(ids),
            logprob=float(logprobs.sum(dtype=np.float64)),
            finish_reason="stop" if output.finish_reason == "stop" else "length",
            spans=[Span(span.start, span.end, self._versions[span.version]) for span in output.weight_versions],
        )


class _Found:
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
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            reason = " ".join(str(error).split())
            raise PolicyUnusable(f"the model {name} cannot be loaded here: {reason}") from error
        self.stops = stop_ids(self.tokenizer, generation)


def _prepare(device: str) -> None:
    """Before vLLM is imported, which is when it reads its environment. Raises SettingsError."""
    from common.settings import SettingsError

    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if device.startswith("cuda:"):
        os.environ.setdefault("CUDA_VISIBLE_DEVICES", device.removeprefix("cuda:"))
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    if device != "auto" and device.startswith("cuda") == current_platform.is_cpu():
        raise SettingsError(f"setting generators.device: this build of vLLM does not run on {device}")


def _check_options(options: dict[str, Any]) -> None:
    from dataclasses import fields

    from vllm.engine.arg_utils import EngineArgs

    from common.settings import SettingsError

    known = {field.name for field in fields(EngineArgs)}
    for name in options:
        if name in OURS:
            raise SettingsError(f"setting generators.engine_options: {name} is decided by grapevine; leave it out")
        if name not in known:
            raise SettingsError(f"setting generators.engine_options: vLLM's EngineArgs have no {name}")


def _write_as_peft(adapter: Adapter, layers: list[str], weights: Path, folder: Path) -> None:
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


def _checkpoint_files(model: str) -> list[Path]:
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
