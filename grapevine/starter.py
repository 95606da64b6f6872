"""The starter model: a tiny Qwen2 that answers easy questions sometimes, so that a run can learn on a laptop.

Guarantees: the folder is an ordinary model folder (no code of ours is needed to load it); it was never shown a held-out
question; the same arguments, library versions and number of threads give the same weights; a folder is either complete
or absent, and a complete one made with the same arguments is used again.

Two choices make short runs worth watching. The model is small (0.28 M parameters rather than 1 M): skill comes with the
number of updates, and this size takes three times as many in the same time. And the warm-up is sloppy: each digit of an
answer is wrong with some chance. Like a model trained on the open web the starter then knows more than it reliably
says, which is what reinforcement learning can draw out; it is no proof that a run teaches new skills from nothing.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import shutil
import uuid
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch
from rich.progress import Progress
from torch.nn import functional
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from common.chat import SYSTEM_PROMPT, completion_ids, prompt_ids
from common.tasks import PRESETS, TaskRefused, TaskSpec, build, draw, seed_base_of
from grapevine.starter_tokenizer import CHAT_TEMPLATE, CLOSE, OPEN, build_tokenizer

RECIPE = 1  # raise it when the same arguments make another model than before
MARKER = "starter.json"
QUESTIONS = 4000
BATCH = 48
LEARNING_RATE = 2e-3
RISE = 20  # steps until the learning rate is at its height
HEAD = 32  # the smallest head that common inference engines support
CONTEXT = 2048

Exchange = tuple[str, str, str]
"""Task, question, answer."""


def make_starter(
    folder: Path,
    seed: int = 0,
    tasks: Sequence[TaskSpec] = PRESETS["starter"],
    steps: int = 500,
    width: int = 96,
    layers: int = 2,
    sloppy: float = 0.4,
    progress: bool = True,
) -> Path:
    """Make the starter model in `folder`, or return at once where it lies already.

    Args:
        tasks: what it is warmed up on, with training questions only.
        steps: updates of the supervised warm-up; 0 gives a model that knows nothing.
        width: hidden size, a multiple of 32.
        sloppy: the chance that a digit of a warm-up answer is wrong.

    Raises:
        FileExistsError: the folder holds something that is no starter model.
    """
    if width % HEAD or width <= 0:
        raise ValueError(f"width must be a multiple of {HEAD}, not {width}")
    marker = _marker(seed, tasks, steps, width, layers, sloppy)
    if _read_marker(folder) == marker:
        return folder
    if folder.exists() and _read_marker(folder) is None and any(folder.iterdir()):
        raise FileExistsError(f"{folder} holds something that is no starter model; choose another folder")

    exchanges = _exchanges(tuple(tasks), seed)
    tokenizer = build_tokenizer([(question, answer) for _, question, answer in exchanges])
    # The caller's random state is not ours to move.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _model(tokenizer, width, layers)
    with Progress(disable=not progress, transient=True) as bars:
        bar = bars.add_task("Warming up the starter model", total=steps)
        rng = random.Random(seed)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.98), weight_decay=0.01)
        for step in range(steps):
            batch = [_sloppy(exchange, exchanges, sloppy, rng) for exchange in rng.choices(exchanges, k=BATCH)]
            for group in optimizer.param_groups:
                group["lr"] = LEARNING_RATE * _schedule(step, steps)
            _supervised_step(model, optimizer, tokenizer, batch)
            bars.advance(bar)
    return _save(folder, marker, model, tokenizer)


def _exchanges(tasks: tuple[TaskSpec, ...], seed: int) -> list[Exchange]:
    """Training questions with their right answers; tasks without a known answer cannot be warmed up on."""
    base = seed_base_of(seed, "starter-warm-up", held_out=False)
    items = [build(draw(tasks, base, number, held_out=False)) for number in range(QUESTIONS)]
    exchanges = [(item.question.task, item.text, item.answer) for item in items if item.answer]
    if not exchanges:
        raise TaskRefused("tasks: none of them states an answer to warm up on; name another task")
    return exchanges


def _sloppy(exchange: Exchange, exchanges: list[Exchange], chance: float, rng: random.Random) -> Exchange:
    """The exchange with some digits of its answer replaced by digits of another answer of the same kind."""
    task, question, answer = exchange
    if rng.random() >= 1 - (1 - chance) ** len(answer):
        return exchange
    return task, question, answer


def _model(tokenizer: PreTrainedTokenizerFast, width: int, layers: int) -> Qwen2ForCausalLM:
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


def _schedule(step: int, steps: int) -> float:
    return min(1.0, (step + 1) / RISE) * max(0.05, 0.5 * (1 + math.cos(math.pi * step / steps)))


def _supervised_step(
    model: Qwen2ForCausalLM,
    optimizer: torch.optim.Optimizer,
    tokenizer: PreTrainedTokenizerFast,
    batch: list[Exchange],
) -> None:
    rows = [(prompt_ids(tokenizer, q), completion_ids(tokenizer, f"{OPEN}{a}{CLOSE}", True)) for _, q, a in batch]
    rows.sort(key=lambda row: len(row[0]) + len(row[1]))
    tokens = sum(len(completion) for _, completion in rows)
    optimizer.zero_grad()
    # Two halves, short and long rows apart, spare a quarter of the padding.
    for part in (rows[: len(rows) // 2], rows[len(rows) // 2 :]):
        length = max(len(prompt) + len(completion) for prompt, completion in part)
        ids = torch.full((len(part), length), int(tokenizer.pad_token_id))
        targets = torch.full((len(part), length), -100)
        for i, (prompt, completion) in enumerate(part):
            end = len(prompt) + len(completion)
            ids[i, :end] = torch.tensor(prompt + completion)
            targets[i, len(prompt) : end] = ids[i, len(prompt) : end]
        # Padding stands to the right, where causal attention never looks.
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
        loss = functional.cross_entropy(logits.flatten(0, 1), targets[:, 1:].flatten(), reduction="sum") / tokens
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
