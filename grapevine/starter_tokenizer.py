"""The starter model's tokenizer: byte-level, one token per digit, and one token per fixed sentence of its tasks.

Guarantees: any text can be encoded and comes back unchanged; the constant parts of prompts and answers (whatever stands
between the digits) are single tokens, so that a question costs 15 to 25 tokens on a CPU; the same exchanges give the
same tokenizer; the saved folder is an ordinary one with a ChatML-style template.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from common.chat import SYSTEM_PROMPT

START, END, PAD = "<|im_start|>", "<|im_end|>", "<|pad|>"
OPEN, CLOSE = "<answer>", "</answer>"

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)

_SEPARATORS = (" ", "\n")


def build_tokenizer(exchanges: Sequence[tuple[str, str]], rarest: float = 0.01) -> PreTrainedTokenizerFast:
    """Build the tokenizer for tasks that look like these (question, answer) pairs.

    Args:
        exchanges: samples of all tasks; only their wording matters, not their numbers.
        rarest: a piece of wording gets its own token if it occurs in at least this share of the samples.
    """
    counts = Counter(piece for question, answer in exchanges for piece in _pieces(question, answer))
    folded = sorted(piece for piece, n in counts.items() if n >= rarest * len(exchanges) and len(piece) > 1)

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    spaced = [(_bytes(space), digit) for space in _SEPARATORS for digit in "0123456789"]
    vocabulary = alphabet + [space + digit for space, digit in spaced]
    core = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(vocabulary)}, merges=spaced))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in (START, END, PAD)])
    core.add_tokens([AddedToken(token, special=False, normalized=False) for token in (OPEN, CLOSE, *folded)])

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=END,
        pad_token=PAD,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _pieces(question: str, answer: str) -> set[str]:
    """The wording between the numbers, cut where control tokens and answer tags will stand."""
    pieces = {f"system\n{SYSTEM_PROMPT}", "assistant\n"}
    for text in (f"user\n{question}", answer):
        pieces.update(piece for piece in re.split(r"\d+", text) if piece)
    return pieces


def _bytes(text: str) -> str:
    """The visible stand-ins that byte-level tokenizers use for these bytes."""
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)[0][0]
