"""The starter models: tiny Qwen2 models that answer easy questions sometimes, so that a run can learn on a laptop.

There are two, `starter` and `starter-wide`, of other sizes and with other tokenizers, so that swarms of unlike models can
be tried. Guarantees: the folder is an ordinary model folder (no code of ours is needed to load it); the model was never
shown a held-out question; the same arguments and library versions give the same weights; a folder is either complete or
absent, and a complete one made with the same arguments is used again.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import msgspec
from transformers import Qwen2ForCausalLM, Qwen2Tokenizer
from transformers.utils import logging

from common.chat import SYSTEM_PROMPT
from common.tasks import PRESETS, TaskSpec
from grapevine.starter.cache import MARKER, cache_folder
from grapevine.starter.tokenizer import CHAT_TEMPLATE, WIDE_TEMPLATE, build_tokenizer, build_wide_tokenizer
from grapevine.starter.warmup import HEAD, exchanges_of, warm_up

RECIPE = 2  # raise it when the same arguments make another model than before
Tokens = Literal["sentences", "words"]


def make_starter(
    folder: Path,
    seed: int = 0,
    tasks: Sequence[TaskSpec] = PRESETS["starter"],
    steps: int = 500,
    width: int = 96,
    layers: int = 2,
    sloppy: float = 0.4,
    tokenizer: Tokens = "sentences",
    progress: bool = True,
    shares: Mapping[str, float] | None = None,
    vocabulary: Sequence[TaskSpec] | None = None,
) -> Path:
    """Make a starter model in `folder`, or return at once where it lies already.

    Args:
        tasks: what it is warmed up on, with training questions only.
        steps: updates of the supervised warm-up; 0 gives a model that knows nothing.
        width: hidden size, a multiple of 32.
        sloppy: the chance that a digit of a warm-up answer is wrong.
        tokenizer: what its tokens are (see `grapevine.starter.tokenizer`).
        shares: by task name, how much of the warm-up is of it; without it, all tasks alike.
        vocabulary: the tasks whose questions its tokenizer is built from; without it, `tasks`. A specialist that is to read
            the questions of others needs theirs too.

    Raises:
        ValueError: a width that cannot be, or shares that do not name every task.
        FileExistsError: the folder holds something that is no starter model.
    """
    if width % HEAD or width <= 0:
        raise ValueError(f"width must be a multiple of {HEAD}, not {width}")
    folder = folder.resolve()
    marker = _marker(seed, tasks, steps, width, layers, sloppy, tokenizer, shares, vocabulary)
    if _same(_read_marker(folder), marker):
        return folder
    if folder.exists() and _read_marker(folder) is None and any(folder.iterdir()):
        raise FileExistsError(f"{folder} holds something that is no starter model; choose another folder")

    exchanges = exchanges_of(tuple(tasks), seed, shares)
    worded = exchanges if vocabulary is None else exchanges_of(tuple(vocabulary), seed)
    build = build_tokenizer if tokenizer == "sentences" else build_wide_tokenizer
    encoder = build([(question, answer) for _, question, answer in worded])
    model = warm_up(encoder, exchanges, seed, steps, width, layers, sloppy, progress)
    return _save(folder, marker, model, encoder)


def _marker(
    seed: int,
    tasks: Sequence[TaskSpec],
    steps: int,
    width: int,
    layers: int,
    sloppy: float,
    tokenizer: Tokens,
    shares: Mapping[str, float] | None,
    vocabulary: Sequence[TaskSpec] | None,
) -> dict[str, object]:
    arguments: dict[str, object] = {"seed": seed, "steps": steps, "width": width, "layers": layers, "sloppy": sloppy}
    arguments["tokenizer"] = tokenizer
    arguments["tasks"] = msgspec.to_builtins(tuple(tasks))
    # Only where they are given: models that were made before there was such an argument stay good.
    if shares is not None:
        arguments["shares"] = dict(shares)
    if vocabulary is not None:
        arguments["vocabulary"] = msgspec.to_builtins(tuple(vocabulary))
    made_of = [RECIPE, SYSTEM_PROMPT, CHAT_TEMPLATE, WIDE_TEMPLATE, arguments]
    return {"arguments": arguments, "hash": hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()}


def _read_marker(folder: Path) -> dict[str, object] | None:
    try:
        marker = json.loads((folder / MARKER).read_text())
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError):
        return None
    return marker if isinstance(marker, dict) else None


def _same(found: dict[str, object] | None, wanted: dict[str, object]) -> bool:
    return found is not None and found.get("hash") == wanted["hash"]


def _save(folder: Path, marker: dict[str, object], model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer) -> Path:
    """Write the folder aside, then rename it. Where another process was faster with the same one, that one stays."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = folder.with_name(f".{folder.name}-{uuid.uuid4().hex}")
    try:
        # Engines read the end tokens here rather than in the tokenizer.
        model.generation_config.eos_token_id = tokenizer.eos_token_id
        model.generation_config.pad_token_id = tokenizer.pad_token_id
        bars = logging.is_progress_bar_enabled()
        # One file, written in a blink: no bar for that.
        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        model.save_pretrained(aside)
        if bars:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]
        tokenizer.save_pretrained(aside)
        (aside / MARKER).write_text(json.dumps(marker, indent=1, sort_keys=True))
        if folder.exists() and not _same(_read_marker(folder), marker):
            outdated = folder.with_name(f".{folder.name}-{uuid.uuid4().hex}")
            os.replace(folder, outdated)
            shutil.rmtree(outdated)
        try:
            os.replace(aside, folder)
        except OSError:
            if not _same(_read_marker(folder), marker):
                raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return folder


def starter_folder(name: str = "starter") -> Path:
    """A starter model in the user's cache (GRAPEVINE_CACHE, else ~/.cache/grapevine), made when it is not there.

    Args:
        name: one of STARTERS.
    """
    return STARTERS[name](cache_folder() / name).resolve()


STARTERS: dict[str, Callable[[Path], Path]] = {
    "starter": make_starter,
    # Longer prompts and a larger model: fewer steps take as long, and with less noise they teach as much.
    "starter-wide": partial(make_starter, width=128, layers=2, steps=200, sloppy=0.3, tokenizer="words"),
}
