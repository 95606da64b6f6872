"""The starter model's tokenizer: byte-level, one token per digit, and one token per fixed sentence of its tasks.

Guarantees: any text in Unicode's composed form can be encoded and comes back unchanged; the constant parts of prompts
and answers (whatever stands between the digits) are single tokens, so that a prompt of the starter tasks takes 12 to 25
tokens; the same exchanges give the same tokenizer; the saved folder is an ordinary one with a ChatML-style template.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from tokenizers import AddedToken, pre_tokenizers
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

_SEPARATORS = (" ", "\n")


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
    tokenizer = Qwen2Tokenizer(
        vocab={character: i for i, character in enumerate(alphabet)},
        merges=[],
        eos_token=END,
        pad_token=PAD,
        unk_token=PAD,
        extra_special_tokens=[START],
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    spaced = [space + digit for space in _SEPARATORS for digit in "0123456789"]
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in (OPEN, CLOSE, *spaced, *folded)])
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _pieces(question: str, answer: str) -> set[str]:
    """The wording between the numbers, cut where control tokens and answer tags will stand."""
    pieces = {f"system\n{SYSTEM_PROMPT}", "assistant\n"}
    for text in (f"user\n{question}", answer):
        pieces.update(piece for piece in re.split(r"\d+", text) if piece)
    return pieces
