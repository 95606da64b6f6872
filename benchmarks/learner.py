"""How fast and how lean an update is, against TRL's GRPOTrainer: same model, same completions, same loss, one run.

    python -m benchmarks.learner [--json FILE]

Measured is optimisation alone: forward pass, loss, backward pass and optimizer step on given completions. Ours is
`PolicyTrainer.update` as a learner calls it (encoding of the questions included), TRL's is one optimizer step of its own
`train()` loop, with the method that generates and scores replaced by one that hands over the given completions,
padded as TRL pads them. One optimizer step per batch: neither side computes log-probabilities of the old policy apart. The
sides take turns within one process, memory is measured in a process of each side's own. On a GPU the same command uses it.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

# Before torch is imported: it reads them once.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.utils import logging as transformers_logging

from common.chat import load_tokenizer, prompt_ids
from common.sections import NodeSettings
from common.tasks import PRESETS, build, draw
from grapevine.starter.tokenizer import build_tokenizer
from learners.mix import Sample
from learners.update import PolicyTrainer

PAIRS = 9
LENGTHS = Path(__file__).parent / "data" / "ragged_lengths.json"
# Head and embedding a quarter of the weights, as in Qwen2.5-0.5B.
SPEED_MODEL = {"vocabulary": 4096, "width": 256, "layers": 4}
# The vocabulary of Qwen2.5 under next to no layers: what the logits cost.
MEMORY_MODEL = {"vocabulary": 151_936, "width": 64, "layers": 2}
LEARNING_RATE = 1e-6


@dataclass
class Case:
    """Groups as (prompt tokens, completion tokens of each), and the least ratio to TRL that is aimed at."""

    name: str
    groups: list[tuple[int, list[int]]]
    target: float | None

    @property
    def lengths(self) -> list[int]:
        return [length for _, group in self.groups for length in group]


def speed_cases() -> list[Case]:
    """Equal lengths with and without shared prompts, the lengths of a recorded run and of a long-tailed draw."""
    ragged = json.loads(LENGTHS.read_text())
    return [
        Case("equal", [(48, [96] * 8)] * 4, 1.0),
        Case("equal, no prompt twice", [(48, [96])] * 32, None),
        Case("ragged, recorded", ragged["recorded"]["groups"], 1.5),
        Case("ragged, long-tailed", ragged["long_tailed"]["groups"], 1.5),
    ]


MEMORY_CASE = Case("memory", [(64, [256] * 8)] * 2, None)


# --- the same for both sides ---


def make_model(folder: Path, vocabulary: int, width: int, layers: int) -> Path:
    """A Qwen2 model with random weights and tied embeddings, and the starter's tokenizer."""
    items = [build(draw(PRESETS["starter"], 0, number, held_out=False)) for number in range(64)]
    tokenizer = build_tokenizer([(item.text, item.answer) for item in items])
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=11 * width // 4, num_hidden_layers=layers,
        num_attention_heads=width // 32, num_key_value_heads=max(1, width // 128), max_position_embeddings=1024,
        tie_word_embeddings=True, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_samples(folder: Path, case: Case) -> list[Sample]:
    """Completions of random tokens to random questions, of the case's lengths; advantages of both signs, none zero."""
    tokenizer = load_tokenizer(str(folder))
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    random, numbers = Random(0), np.random.default_rng(0)
    samples = []
    for prompt, lengths in case.groups:
        question = ""
        while len(prompt_ids(tokenizer, question)) < prompt:
            question += str(random.randrange(10))
        for length in lengths:
            ids = numbers.integers(0, vocabulary, length).astype("<i4").tobytes()
            advantage = random.choice((-1, 1)) * random.uniform(0.5, 1.5)
            samples.append(Sample(question, "", True, advantage, ids, None))
    return samples


def synchronise() -> None:
    """Wait for the GPU, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def timed(step: Callable[[], object]) -> float:
    """Seconds of one call."""
    synchronise()
    started = time.perf_counter()
    step()
    synchronise()
    return time.perf_counter() - started


# --- ours ---


def our_trainer(folder: Path, longest: int) -> PolicyTrainer:
    """With default settings, but for the learning rate."""
    tree = {"sampling": {"max_new_tokens": longest}, "update": {"learning_rate": LEARNING_RATE}}
    return PolicyTrainer(str(folder), NodeSettings.model_validate(tree))


def as_sampled(trainer: PolicyTrainer, samples: list[Sample]) -> list[Sample]:
    """The samples with the log-probabilities that a generator with the same weights would have recorded."""
    with torch.no_grad():
        values = [trainer.logprobs([trainer.encode(sample)])[0][0] for sample in samples]
    return [
        replace(sample, logprobs=row.cpu().numpy().astype("<f4").tobytes())
        for sample, row in zip(samples, values, strict=True)
    ]


# --- theirs ---


def no_reward(*_: Any, **__: Any) -> list[float | None]:
    """TRL wants one, and never calls it here."""
    return []


def their_trainer(
    folder: Path, samples: Sequence[Sample], per_device: int, steps: int, recompute: bool = False, callback: Any = None
) -> Any:
    """TRL's trainer over the samples as one generation batch per optimizer step, everything else as it comes.

    Not as it comes: float32 in place of bfloat16, no second computation of activations (`recompute`), as on our side, a
    constant learning rate, no reports.
    """
    # Named in full, as the package loads its parts late.
    from datasets import Dataset  # type: ignore[import-untyped]
    from transformers import AutoModelForCausalLM, PrinterCallback
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    tokenizer = load_tokenizer(str(folder))
    prompts = [torch.tensor(prompt_ids(tokenizer, sample.question)) for sample in samples]
    completions = [torch.from_numpy(np.frombuffer(sample.token_ids or b"", "<i4").astype(np.int64)) for sample in samples]

    def padded(rows: list[torch.Tensor], side: str) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_side=side)

    tokens = sum(map(len, completions))
    given = {
        "prompt_ids": padded(prompts, "left"),
        "prompt_mask": padded([torch.ones_like(row) for row in prompts], "left"),
        "completion_ids": padded(completions, "right"),
        "completion_mask": padded([torch.ones_like(row) for row in completions], "right"),
        "advantages": torch.tensor([sample.advantage for sample in samples]),
        "num_items_in_batch": torch.tensor(tokens),
    }

    class GivenTrainer(GRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> dict[str, torch.Tensor]:
            return {name: tensor.to(self.accelerator.device) for name, tensor in given.items()}

    arguments = GRPOConfig(
        output_dir=str(folder / "trl"), report_to=[], disable_tqdm=True, save_strategy="no", logging_steps=1, seed=0,
        bf16=False, activation_checkpointing=recompute, learning_rate=LEARNING_RATE, lr_scheduler_type="constant",
        loss_type="dapo", epsilon=0.2, epsilon_high=0.28, beta=0.0, num_generations=8, temperature=1.0,
        max_completion_length=max(map(len, completions)), per_device_train_batch_size=per_device,
        gradient_accumulation_steps=len(samples) // per_device, max_steps=steps, use_cpu=not torch.cuda.is_available(),
    )  # fmt: skip
    trainer = GivenTrainer(
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), reward_funcs=no_reward, args=arguments,
        train_dataset=Dataset.from_dict({"prompt": ["a"] * 64}), processing_class=tokenizer,
        callbacks=[] if callback is None else [callback],
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    return trainer


def their_steps(
    folder: Path,
    samples: Sequence[Sample],
    per_device: int,
    steps: int,
    between: Callable[[int, bool], None] = lambda step, before: None,
) -> tuple[list[float], float]:
    """Seconds of each optimizer step, and the first one's gradient norm. `between(step, before it)` runs outside of them."""
    from transformers import TrainerCallback

    seconds: list[float] = []

    class Clock(TrainerCallback):
        started = 0.0

        def on_step_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            between(state.global_step, True)
            synchronise()
            self.started = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            synchronise()
            seconds.append(time.perf_counter() - self.started)
            between(state.global_step - 1, False)

    trainer = their_trainer(folder, samples, per_device, steps, callback=Clock())
    trainer.train()
    return seconds, float(trainer.state.log_history[0]["grad_norm"])


def fastest_per_device(folder: Path, samples: Sequence[Sample]) -> int:
    """TRL's batch per forward pass is the user's to choose: 8 is its default, larger ones may be faster."""
    candidates = sorted({size for size in (8, 32, len(samples)) if len(samples) % size == 0})
    return min(candidates, key=lambda size: min(their_steps(folder, samples, size, 2)[0]))


# --- speed ---


def compare_speed(folder: Path, case: Case, pairs: int) -> dict[str, Any]:
    """Completion tokens per second of both sides, in turns, after one step each that does not count."""
    samples = make_samples(folder, case)
    per_device = fastest_per_device(folder, samples)
    trainer = our_trainer(folder, max(case.lengths))
    own = as_sampled(trainer, samples)
    ours: list[float] = []
    figures: list[dict[str, float]] = []

    def our_turn(step: int, before: bool) -> None:
        # Who goes first alternates.
        if before == (step % 2 == 0):
            ours.append(timed(lambda: figures.append(trainer.update(own, []))))

    theirs, their_norm = their_steps(folder, samples, per_device, pairs + 1, our_turn)
    our_norm = figures[0]["grad_norm"]
    if abs(our_norm - their_norm) > 1e-3 * their_norm:
        raise SystemExit(f"{case.name}: the sides do not compute the same: gradient norms {our_norm} and {their_norm}")
    tokens = sum(case.lengths)
    ratios = sorted(other / own for own, other in zip(ours[1:], theirs[1:], strict=True))
    return {
        "case": case.name,
        "completions": len(samples),
        "tokens": tokens,
        "longest": max(case.lengths),
        "trl_batch": per_device,
        "ours": tokens / median(ours[1:]),
        "trl": tokens / median(theirs[1:]),
        "ratio": median(ratios),
        "lowest": ratios[0],
        "highest": ratios[-1],
        "target": case.target,
        "seconds_ours": ours[1:],
        "seconds_trl": theirs[1:],
    }


# --- memory ---


def resident(field: str) -> float:
    """VmRSS (now) or VmHWM (the most since the last reset) of this process, in MiB."""
    found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found
    return int(found[1]) / 1024


def peak_of(step: Callable[[], object]) -> float:
    """MiB that a call takes at its highest above what was held before it: of the GPU, or resident in this process."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    # Memory freed since the model was read goes back, or the update would use it unseen.
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    held = resident("VmRSS")
    step()
    return resident("VmHWM") - held


def measure_memory(side: str, folder: Path) -> float:
    """The peak of the first update of one side, to be called in a process of its own."""
    samples = make_samples(folder, MEMORY_CASE)
    if side == "ours":
        trainer = our_trainer(folder, max(MEMORY_CASE.lengths))
        return peak_of(lambda: trainer.update(samples, []))
    return peak_of(their_trainer(folder, samples, 8, 1, recompute=side == "trl_recompute").train)


def compare_memory(folder: Path) -> dict[str, float]:
    """MiB by side."""
    found = {}
    for side in ("ours", "trl", "trl_recompute"):
        command = [sys.executable, "-m", "benchmarks.learner", "--memory", side, str(folder)]
        found[side] = float(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.split()[-1])
    return found


# --- the report ---


def print_report(report: dict[str, Any]) -> None:
    versions = report["versions"]
    print(
        f"{report['machine']}, {report['threads']} thread(s), float32; torch {versions['torch']}, TRL {versions['trl']}\n"
        f"both: AdamW, learning rate {LEARNING_RATE}, one optimizer step per batch, GRPO with clip 0.2 and 0.28, token "
        "mean, no KL, activations computed once\n"
        "ours: default settings; TRL: its defaults, per-device batch the fastest of 8 (its default), 32 and all, the rest "
        "accumulated"
    )
    if report["speed"]:
        print(
            f"model: {SPEED_MODEL}\nratio: median and range over {report['pairs']} pairs, taken in turns; the gradient "
            "norms of the first step agree to 1e-3\n\n"
            f"{'completions':<24}{'n':>5}{'tokens':>8}{'longest':>9}{'ours tok/s':>12}{'TRL tok/s':>11}{'batch':>7}"
            f"{'ratio':>7}{'range':>13}{'target':>9}"
        )
    for row in report["speed"]:
        span = f"{row['lowest']:.2f}..{row['highest']:.2f}"
        target = "" if row["target"] is None else f">= {row['target']}"
        print(
            f"{row['case']:<24}{row['completions']:>5}{row['tokens']:>8}{row['longest']:>9}{row['ours']:>12,.0f}"
            f"{row['trl']:>11,.0f}{row['trl_batch']:>7}{row['ratio']:>7.2f}{span:>13}{target:>9}"
        )
    if memory := report["memory"]:
        print(
            "\npeak memory of the first update above the model's, gradients and optimizer state included\n"
            f"model: {MEMORY_MODEL}; {len(MEMORY_CASE.lengths)} completions of {max(MEMORY_CASE.lengths)} tokens, "
            "TRL's per-device batch 8\n"
            f"ours {memory['ours']:,.0f} MiB, TRL {memory['trl']:,.0f} MiB, TRL computing activations twice (its default) "
            f"{memory['trl_recompute']:,.0f} MiB; ours / TRL {memory['ours'] / memory['trl']:.2f}, target <= 0.5"
        )


def main() -> None:
    """Print the tables; with `--json`, write all figures to a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--pairs", type=int, default=PAIRS, help="timed steps of each side")
    parser.add_argument("--only", default="", help="cases whose name begins so: `equal`, `ragged`, `memory`")
    parser.add_argument("--memory", nargs=2, metavar=("SIDE", "MODEL"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    if options.memory:
        print(measure_memory(options.memory[0], Path(options.memory[1])))
        return
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    report: dict[str, Any] = {
        "machine": gpu or "CPU",
        "threads": torch.get_num_threads(),
        "versions": {"torch": torch.__version__, "trl": version("trl")},
        "pairs": options.pairs,
        "models": {"speed": SPEED_MODEL, "memory": MEMORY_MODEL},
        "cases": [asdict(case) for case in speed_cases()],
        "speed": [],
        "memory": {},
    }
    with tempfile.TemporaryDirectory() as name:
        folder = make_model(Path(name) / "speed", **SPEED_MODEL)
        for case in speed_cases():
            if case.name.startswith(options.only):
                report["speed"].append(compare_speed(folder, case, options.pairs))
        if "memory".startswith(options.only):
            report["memory"] = compare_memory(make_model(Path(name) / "memory", **MEMORY_MODEL))
    print_report(report)
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
