"""The vLLM engine: continuous batching, on GPU or CPU, with the policy changed under what is in flight.

Guarantees: requests join and leave the batch at any token; every token's log-probability is recorded as sampled and its
policy version with it; after a change of policy nothing computed by the old one is used any more, so that every token's
log-probability is that of a plain forward pass of the version it is marked with; a policy is taken all or none.

vLLM runs in this process, which makes every call between two of its steps atomic. The weights come through its own
weight-transfer protocol (`generators.engines.vllm.weights`).
"""

from __future__ import annotations

import gc
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import structlog
from safetensors import SafetensorError

from common.adapters import Adapter
from common.chat import decode, prompt_ids
from common.messages import Completion, Span, Version
from generators.engines.base import PolicyUnusable, Request, RequestUnfit
from generators.engines.vllm.base_model import BaseModel, checkpoint_files, write_as_peft
from generators.engines.vllm.options import check_options, engine_arguments, prepare

log = structlog.get_logger()

LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
ADAPTER_NAME, ADAPTER_ID = "policy", 1


class VllmEngine:
    """One model in vLLM, under whatever policy was loaded last. One engine per process; not thread-safe."""

    def __init__(self, device: str = "auto", dtype: str = "float32", options: dict[str, Any] | None = None) -> None:
        """`options` are passed on to vLLM's EngineArgs.

        Raises SettingsError for those that it does not have, or that are decided here.
        """
        prepare(device)
        check_options(options or {})
        self._dtype = dtype
        self._options = options or {}
        self._base: Any = None
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
        if self._base is not None and self._base.name == model:
            return
        base = BaseModel(model)
        self._shut()
        self._base, self._lora_rank = base, 0
        self._open()

    def close(self) -> None:
        """Free the memory."""
        self._shut()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _shut(self) -> None:
        if self._engine is not None:
            self._engine.engine_core.shutdown()
        self._engine = self._base = self._adapter = None
        self._holds_base = True
        gc.collect()

    def _open(self) -> None:
        from vllm.v1.engine.llm_engine import LLMEngine

        from generators.engines.vllm.weights import register

        register()
        arguments = engine_arguments(self._base.name, self._dtype, self._options, self._lora_rank)
        try:
            self._engine = LLMEngine.from_engine_args(arguments)
            self._engine.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": {}})
            self._try()
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            reason, name = " ".join(str(error).split()), self._base.name
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
        adapters: tuple[Adapter, list[str]] | None = self._base.shapes.adapters_in(weights, version)
        before, engine = self._adapter, self._engine
        if adapters is None:
            self._change(lambda: self._take_weights([weights]), version)
            self._adapter, self._holds_base = None, False
        else:
            self._take_adapters(*adapters, weights, version)
        if (before is None) != (self._adapter is None) or engine is not self._engine:
            self._begin_again()  # vLLM cannot give a request adapters, or take them away, while it is under way

    def _take_adapters(self, adapter: Adapter, layers: list[str], weights: Path, version: Version) -> None:
        from vllm.lora.request import LoRARequest

        if adapter.rank > LORA_RANKS[-1]:
            raise PolicyUnusable(f"policy {version}: vLLM takes adapters of rank {LORA_RANKS[-1]} at most")
        if not self._takes_adapters():
            raise PolicyUnusable(f"policy {version}: vLLM knows no adapters for {self._base.name}")
        base = [] if self._holds_base else checkpoint_files(self._base.name)
        write_as_peft(adapter, layers, weights, self._scratch)
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

    def _takes_adapters(self) -> bool:
        from vllm.model_executor.models import ModelRegistry, supports_lora

        config = self._engine.model_config
        found, _ = ModelRegistry.resolve_model_cls(config.architectures, config)
        return bool(supports_lora(found))

    def _reopen_for(self, rank: int) -> None:
        """vLLM must know of adapters, and their rank, when it opens a model."""
        log.info("opening the model again, for adapters", model=self._base.name, rank=rank)
        base = self._base
        self._shut()
        self._base, self._lora_rank = base, next(size for size in LORA_RANKS if size >= rank)
        try:
            self._open()
        except PolicyUnusable as error:
            # The policy before is gone with the engine: whoever restarts this generator gives its orders to others.
            raise RuntimeError(f"{error} (opened again for adapters of rank {rank})") from error

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
        prompt = prompt_ids(self._base.tokenizer, request.question)
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
            stop_token_ids=sorted(self._base.stops),
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
            text=decode(self._base.tokenizer, ids.tolist(), self._base.stops),
            token_ids=ids.tobytes(),
            logprobs=logprobs.tobytes(),
            tokens=len(ids),
            logprob=float(logprobs.sum(dtype=np.float64)),
            finish_reason="stop" if output.finish_reason == "stop" else "length",
            spans=[Span(span.start, span.end, self._versions[span.version]) for span in output.weight_versions],
        )
