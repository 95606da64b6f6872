"""The one place where questions become prompt tokens and completions become text, for every model and both roles.

Guarantees: the generator and the learner see the same prompt tokens for the same question and model; text that came from
elsewhere is encoded as plain characters, so a completion that spells a control token never ends or opens a turn; a
finished completion always ends in the end-of-sequence token, so that this token is trained.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SYSTEM_PROMPT = (
    "Answer the question. Think step by step first if that is useful. "
    "Put the final answer, and nothing else, between <answer> and </answer>."
)


def load_tokenizer(model: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model folder or hub name.

    Raises:
        ValueError: the tokenizer names no end-of-sequence token, without which no completion could be finished, or
            it knows no text at all.
    """
    # Imported late: it takes seconds, and the pure functions below do not need it.
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    if tokenizer.eos_token_id is None:
        raise ValueError(f"the tokenizer of {model} has no end-of-sequence token")
    if not tokenizer.encode("2"):
        # What transformers makes of a folder whose tokenizer files are missing: no vocabulary, and no complaint.
        raise ValueError(f"the tokenizer of {model} knows no text; its files are missing or damaged")
    return tokenizer


def prompt_ids(tokenizer: PreTrainedTokenizerBase, question_text: str) -> list[int]:
    """The tokens before the completion: system prompt, question and the opening of the assistant's turn."""
    if not tokenizer.chat_template:
        return list(tokenizer.encode(f"{SYSTEM_PROMPT}\n\nQuestion: {question_text}\nAnswer:\n"))
    rendered = _render(tokenizer, question_text)
    # The template writes the control tokens itself; letting the tokenizer add its own would double a leading BOS.
    return list(tokenizer.encode(rendered, add_special_tokens=False))


def completion_ids(tokenizer: PreTrainedTokenizerBase, text: str, finished: bool) -> list[int]:
    """Encode somebody's completion for this tokenizer, closed by the end token when it was finished."""
    ids = list(tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True))
    # Tokenizers that ignore `split_special_tokens` exist; whatever control token is left over was spelled, not meant.
    control = set(tokenizer.all_special_ids)
    ids = [token for token in ids if token not in control]
    if finished:
        ids.append(_end_id(tokenizer))
    return ids


def decode(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], stops: Collection[int] | None = None) -> str:
    """The text of a completion without the token(s) that ended it.

    Control tokens in the middle stay visible: hiding them would let an answer pass that its author did not write.

    Args:
        stops: every token that ends a completion (see `stop_ids`); by default end-of-sequence and padding.
    """
    ends = stop_ids(tokenizer) | {tokenizer.pad_token_id} if stops is None else set(stops)
    end = len(ids)
    while end and ids[end - 1] in ends:
        end -= 1
    return str(tokenizer.decode(list(ids[:end]), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def stop_ids(tokenizer: PreTrainedTokenizerBase, generation_config: Any = None) -> set[int]:
    """Every token that ends a completion: the tokenizer's own end token and those of the model's generation settings."""
    declared = getattr(generation_config, "eos_token_id", None)
    extra = [declared] if isinstance(declared, int) else list(declared or [])
    return {_end_id(tokenizer), *extra}


def _end_id(tokenizer: PreTrainedTokenizerBase) -> int:
    end = tokenizer.eos_token_id
    if not isinstance(end, int):
        raise ValueError("the tokenizer has no end-of-sequence token")
    return end


def _render(tokenizer: PreTrainedTokenizerBase, question_text: str) -> str:
    from jinja2 import TemplateError

    turns = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": question_text}]
    try:
        return str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))
    except TemplateError:
        # Some templates refuse a system turn; the instruction then opens the user's turn.
        turns = [{"role": "user", "content": f"{SYSTEM_PROMPT}\n\n{question_text}"}]
        return str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))
