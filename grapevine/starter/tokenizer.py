"""The tokenizers of the two starter models: byte-level, one token per digit, and otherwise as unlike as can be.

`starter` has one token per fixed sentence of its tasks, whatever stands between the digits, so that a prompt takes 12 to
25 tokens; its template is in ChatML style. `starter-wide` has learned words from the same questions (byte-pair encoding),
so that a prompt takes 17 to 80 tokens; its template has control tokens of its own and leaves the system's turn out.

Guarantees: any text in Unicode's composed form can be encoded and comes back unchanged; right answers to the starter tasks
take at most 13 tokens; the same exchanges give the same tokenizer; the saved folder is an ordinary one.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken, pre_tokenizers, trainers
from transformers import Qwen2Tokenizer

from common.chat import SYSTEM_PROMPT

START, END, PAD = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
OPEN, CLOSE = "<answer>", "</answer>"

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)

WIDE_USER, WIDE_REPLY, WIDE_END, WIDE_PAD = "<|user|>", "<|reply|>", "<|end|>", "<|pad|>"
WIDE_TEMPLATE = (
    "{%- for message in messages if message['role'] != 'system' -%}"
    "{{ ('<|user|>' if message['role'] == 'user' else '<|reply|>') + message['content'] + '<|end|>' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|reply|>' }}{%- endif -%}"
)

_SPACED = [space + digit for space in (" ", "\n") for digit in "0123456789"]


def build_tokenizer(exchanges: Sequence[tuple[str, str]], rarest: float = 0.01) -> Qwen2Tokenizer:
    """Build the tokenizer for tasks that look like these (question, answer) pairs.

    Args:
        exchanges: samples of all tasks; only their wording matters, not their numbers.
        rarest: a piece of wording gets its own token if it occurs in at least this share of the samples.
    """
    counts = Counter(piece for question, answer in exchanges for piece in _pieces(question, answer))
    folded = sorted(piece for piece, n in counts.items() if n >= rarest * len(exchanges) and len(piece) > 1)

    # Qwen2's own class, since transformers reads any folder of a Qwen2 model with it, whatever the folder says.
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = _qwen2({character: i for i, character in enumerate(alphabet)}, [], END, PAD, [START])
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in (OPEN, CLOSE, *_SPACED, *folded)])
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def build_wide_tokenizer(exchanges: Sequence[tuple[str, str]], words: int = 640) -> Qwen2Tokenizer:
    """Build the tokenizer of the wide starter: bytes, and byte pairs learned from these (question, answer) pairs.

    Args:
        words: size of the vocabulary before control tokens, answer tags and spaced digits.
    """
    bytes_alone = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    # Trained behind the same pre-tokenizer, so that every learned pair can occur.
    model = _qwen2(bytes_alone, [], WIDE_END, WIDE_PAD, []).backend_tokenizer
    trainer = trainers.BpeTrainer(vocab_size=words, initial_alphabet=list(bytes_alone), show_progress=False)
    model.train_from_iterator((question for question, _ in exchanges), trainer)
    learned = json.loads(model.to_str())["model"]
    vocab = {piece: number for piece, number in learned["vocab"].items() if not piece.startswith("<|")}
    merges = [(first, second) for first, second in learned["merges"]]
    tokenizer = _qwen2(
        {piece: i for i, piece in enumerate(sorted(vocab, key=vocab.__getitem__))},
        merges,
        WIDE_END,
        WIDE_PAD,
        [WIDE_USER, WIDE_REPLY],
    )
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in (OPEN, CLOSE, *_SPACED)])
    tokenizer.chat_template = WIDE_TEMPLATE
    return tokenizer


def _qwen2(vocab: dict[str, int], merges: list[Any], end: str, pad: str, control: list[str]) -> Qwen2Tokenizer:
    return Qwen2Tokenizer(
        vocab=vocab,
        merges=merges,
        eos_token=end,
        pad_token=pad,
        unk_token=pad,
        extra_special_tokens=control,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def _pieces(question: str, answer: str) -> set[str]:
    """The wording between the numbers, cut where control tokens and answer tags will stand."""
    pieces = {f"system\n{SYSTEM_PROMPT}", "assistant\n"}
    for text in (f"user\n{question}", answer):
        pieces.update(piece for piece in re.split(r"\d+", text) if piece)
    return pieces
