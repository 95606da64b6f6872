"""The starter model's warm-up: a short supervised training on right and nearly right answers.

Guarantees: only training questions are shown; prompts and completions are those of any model (`common.chat`); one seed
gives one model, and the caller's torch is left as it was.

Two choices make short runs worth watching. The model is small (0.28 M parameters rather than 1 M): skill comes with the
number of updates, and this size takes three times as many in the same time. And the warm-up is sloppy: each digit of an
answer is wrong with some chance. Like a model trained on the open web the starter then knows more than it reliably
says, which is what reinforcement learning can draw out; it is no proof that a run teaches new skills from nothing.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from rich.progress import Progress
from torch.nn import functional
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from common.chat import completion_ids, prompt_ids
from common.tasks import TaskRefused, TaskSpec, build, draw, seed_base_of
from grapevine.starter.tokenizer import CLOSE, OPEN

QUESTIONS = 4000
BATCH = 48
LEARNING_RATE = 2e-3
RISE = 20  # steps until the learning rate is at its height
HEAD = 32  # the smallest head that common inference engines support
CONTEXT = 2048

Exchange = tuple[str, str, str]
"""Task, question, answer."""
Row = tuple[list[int], list[int]]
"""Tokens of the prompt and of the completion."""


def exchanges_of(tasks: tuple[TaskSpec, ...], seed: int, shares: Mapping[str, float] | None = None) -> list[Exchange]:
    """Training questions with their right answers; tasks without a known answer cannot be warmed up on.

    `shares`: by task name, how much of them is of it; without it, all tasks alike. Raises ValueError when they do not fit.
    """
    base = seed_base_of(seed, "starter-warm-up", held_out=False)
    chosen = [tasks] * QUESTIONS if shares is None else _chosen(tasks, shares, seed)
    items = [build(draw(among, base, number, held_out=False)) for number, among in enumerate(chosen)]
    exchanges = [(item.question.task, item.text, item.answer) for item in items if item.answer]
    if not exchanges:
        raise TaskRefused("tasks: none of them states an answer to warm up on; name another task")
    return exchanges


def _chosen(tasks: tuple[TaskSpec, ...], shares: Mapping[str, float], seed: int) -> list[tuple[TaskSpec]]:
    """The task of every question, by chance and as often as its share says."""
    names = [spec.name for spec in tasks]
    if sorted(names) != sorted(shares) or min(shares.values()) < 0 or sum(shares.values()) <= 0:
        raise ValueError(
            f"shares must give each of the tasks {', '.join(names)} a number from 0 on, not all 0; they are {dict(shares)}"
        )
    weights = [shares[name] for name in names]
    return [(spec,) for spec in random.Random(f"{seed} shares").choices(tasks, weights, k=QUESTIONS)]


def warm_up(
    tokenizer: Qwen2Tokenizer,
    exchanges: list[Exchange],
    seed: int,
    steps: int,
    width: int,
    layers: int,
    sloppy: float,
    progress: bool,
) -> Qwen2ForCausalLM:
    """A new model, trained for `steps` updates; the arguments are those of `make_starter`."""
    digits = _digits(exchanges)
    # Rendered once: a question comes up many times.
    prompts = {text: prompt_ids(tokenizer, text) for _, text, _ in exchanges}
    with _quiet_torch(seed), Progress(disable=not progress, transient=True) as bars:
        model = _model(tokenizer, width, layers)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.98), weight_decay=0.01)
        bar = bars.add_task("Warming up the starter model", total=steps)
        rng = random.Random(seed)
        for step in range(steps):
            rows = [
                (prompts[text], _completion(tokenizer, _sloppy(answer, digits[task], sloppy, rng)))
                for task, text, answer in rng.choices(exchanges, k=BATCH)
            ]
            for group in optimizer.param_groups:
                group["lr"] = LEARNING_RATE * _schedule(step, steps)
            _supervised_step(model, optimizer, rows, int(tokenizer.pad_token_id))
            bars.advance(bar)
    return model


@contextmanager
def _quiet_torch(seed: int) -> Iterator[None]:
    """A seeded torch on one thread; the caller's random state and threads come back afterwards.

    One thread: matrices this small gain little from a second one, lose much where the cores are busy, and sum up alike.
    """
    threads = torch.get_num_threads()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)


def _digits(exchanges: list[Exchange]) -> dict[str, list[str]]:
    """By task: every digit that its answers use."""
    seen: dict[str, set[str]] = {}
    for task, _, answer in exchanges:
        seen.setdefault(task, set()).update(character for character in answer if character in "0123456789")
    return {task: sorted(digits) for task, digits in seen.items()}


def _sloppy(answer: str, digits: list[str], chance: float, rng: random.Random) -> str:
    """The answer with some digits replaced by any of `digits`, so that a wrong one still looks like an answer."""
    return "".join(rng.choice(digits) if c in digits and rng.random() < chance else c for c in answer)


def _model(tokenizer: Qwen2Tokenizer, width: int, layers: int) -> Qwen2ForCausalLM:
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=width * 8 // 3 // HEAD * HEAD,
        num_hidden_layers=layers,
        num_attention_heads=width // HEAD,
        num_key_value_heads=width // HEAD,
        max_position_embeddings=CONTEXT,
        # Tied weights save little with so small a vocabulary, and go stale in some engines when policies are swapped.
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen2ForCausalLM(config)


def _completion(tokenizer: Qwen2Tokenizer, answer: str) -> list[int]:
    return completion_ids(tokenizer, f"{OPEN}{answer}{CLOSE}", finished=True)


def _schedule(step: int, steps: int) -> float:
    return min(1.0, (step + 1) / RISE) * max(0.05, 0.5 * (1 + math.cos(math.pi * step / steps)))


def _supervised_step(
    model: Qwen2ForCausalLM,
    optimizer: torch.optim.Optimizer,
    rows: list[Row],
    pad: int,
) -> None:
    rows.sort(key=lambda row: len(row[0]) + len(row[1]))
    tokens = sum(len(completion) for _, completion in rows)
    optimizer.zero_grad()
    # Two halves, short and long rows apart, spare a quarter of the padding.
    for part in (rows[: len(rows) // 2], rows[len(rows) // 2 :]):
        length = max(len(prompt) + len(completion) for prompt, completion in part)
        ids = torch.full((len(part), length), pad)
        targets = torch.full((len(part), length), -100)
        for i, (prompt, completion) in enumerate(part):
            end = len(prompt) + len(completion)
            ids[i, :end] = torch.tensor(prompt + completion)
            targets[i, len(prompt) : end] = ids[i, len(prompt) : end]
        # Padding stands to the right, where causal attention never looks.
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
        loss = functional.cross_entropy(logits.flatten(0, 1), targets[:, 1:].flatten(), reduction="sum") / tokens
        torch.autograd.backward(loss)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
