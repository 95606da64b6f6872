"""Questions of one's own, one at a time or as a JSONL file of them, and what is wrong with one that cannot be used.

Guarantees: what passes is a question that can be asked, sent and scored; whatever does not is named by line and field,
before a run starts; no number is read by evaluating text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from common.task_settings import TEXT_CHARACTERS, nearest

SCORERS = ("exact", "numeric", "math", "choice")
FIELDS = ("question", "answer", "choices", "scorer", "metadata")
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"

# Bounded digits and exponents: Python's own numbers would compute 10 ** 999999999 on request.
_WHOLE = r"(?:[0-9]{1,3}(?:,[0-9]{3}){1,20}|[0-9]{1,100})"
_NUMBER = re.compile(rf"([+-]?)(?:({_WHOLE})(?:\.([0-9]{{0,100}}))?|\.([0-9]{{1,100}}))(?:[eE]([+-]?[0-9]{{1,3}}))?")
_LABEL = re.compile(r"[(\[]?([A-Za-z])[)\].:]?")


@dataclass(frozen=True)
class OwnEntry:
    """A question ready to be asked. `answer` is None only where a score function of one's own does without it."""

    text: str
    answer: str | None
    scorer: str
    choices: tuple[str, ...]
    raw: dict[str, Any]
    """As the line or the function gave it, for a score function of one's own."""


def read_lines(path: Path, scorer: str, scored: bool) -> tuple[OwnEntry, ...]:
    """All questions of a JSONL file. `scorer` is that of lines without one; `scored`: a function of one's own scores.

    Raises:
        ValueError: one sentence that names the file, and line and field where there is one.
    """
    try:
        text = path.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    entries: list[OwnEntry] = []
    asked: dict[str, tuple[int, str | None]] = {}
    # Not splitlines: a JSON text may hold separators that only Python takes for ends of lines.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line, parse_float=_Written, parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} line {number}: not JSON ({error}); write one object on each line") from None
        try:
            entry = read_entry(value, scorer, scored)
        except ValueError as error:
            raise ValueError(f"{path} line {number}: {error}") from None
        before, answer = asked.setdefault(entry.text, (number, entry.answer))
        if answer != entry.answer:
            raise ValueError(f"{path} line {number}: asks the same as line {before} with another answer; keep one")
        entries.append(entry)
    if not entries:
        raise ValueError(f"{path} holds no questions; write one JSON object with question and answer on each line")
    return tuple(entries)


def read_entry(value: Any, scorer: str, scored: bool) -> OwnEntry:
    """One question from what a line or a function gave.

    Raises:
        ValueError: one sentence that names the field.
    """
    if not isinstance(value, dict):
        raise ValueError(f"an object with question and answer is wanted, not {type(value).__name__}")
    for field in value:
        if field not in FIELDS:
            hint = nearest(str(field), FIELDS) or "; put further facts into metadata"
            raise ValueError(f"field {str(field)[:80]!r} is unknown{hint}")
    scorer = value.get("scorer") or scorer
    if scorer not in SCORERS:
        raise ValueError(f"field scorer: {str(scorer)[:80]!r} is unknown{nearest(str(scorer), SCORERS)}")
    if not isinstance(value.get("metadata", {}), dict):
        raise ValueError("field metadata must be an object")
    question = _text("question", value)
    choices: tuple[str, ...] = ()
    # A score function of one's own may do without a right answer.
    answer = None if scored and value.get("answer") is None else _text("answer", value)
    if (not scored and scorer == "choice") or value.get("choices") is not None:
        choices = _choices(value.get("choices"))
        question += "".join(f"\n{letter}) {choice}" for letter, choice in zip(LETTERS, choices, strict=False))
        if answer is not None and not scored:
            answer = _letter_of(answer, choices)
    if not scored and choices and scorer != "choice":
        raise ValueError("field choices is for scorer choice only; set the scorer")
    if not scored and scorer == "numeric" and number_of(answer or "") is None:
        raise ValueError(f"field answer: {str(answer)[:80]!r} is no number; write it as 12, 0.5, 3/4 or 1e-3")
    if len(question) + len(answer or "") > TEXT_CHARACTERS:
        raise ValueError(f"field question: with its answer over {TEXT_CHARACTERS} characters; shorten it")
    return OwnEntry(question, answer, scorer, choices, value)


def number_of(text: str) -> Fraction | None:
    """The number that a text is: decimal, scientific, with commas as thousands, or a fraction of two such; None if none."""
    above, slash, below = text.partition("/")
    first, second = _decimal(above.strip()), _decimal(below.strip()) if slash else Fraction(1)
    return first / second if first is not None and second else None


def letter_of(text: str) -> str | None:
    """The letter that a text is, in brackets or not, with a dot or colon or not; None if it is more than a letter."""
    match = _LABEL.fullmatch(text.strip())
    return match.group(1).upper() if match else None


def plain(text: str) -> str:
    """A choice's text as compared: blind to case and spacing."""
    return " ".join(text.casefold().split())


def _decimal(text: str) -> Fraction | None:
    match = _NUMBER.fullmatch(text)
    if not match:
        return None
    sign, whole, places, bare, exponent = match.groups()
    digits = (whole or "").replace(",", "") + (places or "") + (bare or "")
    scale = int(exponent or 0) - len(places or bare or "")
    return int(sign + digits) * Fraction(10) ** scale


def _text(field: str, value: dict[str, Any]) -> str:
    found = value.get(field)
    if found is None:
        raise ValueError(f"field {field} is missing")
    if field == "answer" and isinstance(found, int | float) and not isinstance(found, bool):
        found = str(found)
    if not isinstance(found, str):
        raise ValueError(f"field {field} must be text{' or a number' if field == 'answer' else ''}")
    if not found.strip():
        raise ValueError(f"field {field} is empty")
    if any("\ud800" <= c <= "\udfff" for c in found):
        raise ValueError(f"field {field} is not valid text; remove the lone surrogates")
    return found if field == "question" else found.strip()


def _choices(found: Any) -> tuple[str, ...]:
    if not isinstance(found, list | tuple) or not 2 <= len(found) <= len(LETTERS):
        raise ValueError(f"field choices must list 2 to {len(LETTERS)} texts")
    choices = tuple(_text("choices", {"choices": choice}) for choice in found)
    if len({plain(choice) for choice in choices}) < len(choices):
        raise ValueError("field choices holds the same text twice")
    for place, choice in enumerate(choices):
        letter = letter_of(choice)
        if letter and letter != LETTERS[place] and letter in LETTERS[: len(choices)]:
            raise ValueError(f"field choices: {choice!r} reads as the letter of another choice; reword it or move it")
    return choices


def _letter_of(answer: str, choices: Sequence[str]) -> str:
    texts = [plain(choice) for choice in choices]
    if plain(answer) in texts:
        return LETTERS[texts.index(plain(answer))]
    letter = letter_of(answer)
    if letter and letter in LETTERS[: len(choices)]:
        return letter
    raise ValueError(f"field answer: {answer[:80]!r} is neither a choice's letter nor its text")


class _Written(float):
    """A JSON number that remembers how it was written: an answer of 0.10 stays 0.10."""

    def __new__(cls, text: str) -> _Written:
        self = super().__new__(cls, text)
        self.text = text
        return self

    text: str

    def __str__(self) -> str:
        return self.text


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")
