"""Scorers for tasks of one's own: exact, numeric, math, choice.

What counts as right (outer whitespace never counts; completions are bounded before they come here):

- exact: equal text, case and all.
- numeric: the same number within a millionth of the right one; where both are written as whole numbers, the same number.
- math: the same mathematical object (equivalent expressions, fractions, sets, intervals), as the library math-verify
  judges it. It hands text to sympy, through a LaTeX grammar and never as Python; it can be slow and it can hang, so it
  belongs where it can be killed.
- choice: the letter, in brackets or with a dot or without; the choice's text; or the letter with the text.

The first two and the last raise nothing, take time linear in the answer's length, and compute with bounded numbers.
"""

from __future__ import annotations

import functools
import logging
import math
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from common.own_tasks import ScoreFunction
from common.task_entries import LETTERS, OwnEntry, letter_of, number_of, plain

TOLERANCE = Fraction(1, 10**6)

_LETTER_AND_TEXT = re.compile(r"[(\[]?([A-Za-z])[)\].:]+\s+(.*)", re.DOTALL)
_WHOLE = re.compile(r"[+-]?[0-9,]+")


def accuracy_of(entry: OwnEntry, answer: str, score: ScoreFunction | None) -> float:
    """How right an answer is, from 0 to 1: by the entry's scorer, or by a function of one's own.

    Raises:
        Exception: whatever math-verify or the function raises; ValueError when the function gives no share of 1.
    """
    if score is None:
        return float(SCORERS[entry.scorer](entry, answer.strip()))
    given = score(answer, entry.raw)
    if isinstance(given, bool):
        return float(given)
    if not isinstance(given, int | float) or not math.isfinite(given) or not 0.0 <= given <= 1.0:
        raise ValueError("a score function must return a number from 0 to 1")
    return float(given)


def prepare(scorer: str) -> None:
    """Import what a scorer needs and warm it up, so that this does not count as time of the first answer."""
    if scorer == "math":
        _math_library()


def _exact(entry: OwnEntry, answer: str) -> bool:
    return answer == entry.answer


def _numeric(entry: OwnEntry, answer: str) -> bool:
    given, right = number_of(answer), number_of(entry.answer or "")
    if given is None or right is None:
        return False
    if _WHOLE.fullmatch(answer) and _WHOLE.fullmatch(entry.answer or ""):
        return given == right
    return abs(given - right) <= TOLERANCE * abs(right)


def _math(entry: OwnEntry, answer: str) -> bool:
    if answer == entry.answer:
        return True
    try:
        answer.encode()
    except UnicodeEncodeError:
        return False
    read, same = _math_library()
    right, given = read(entry.answer or ""), read(answer)
    return bool(right and given) and bool(same(right, given))


def _choice(entry: OwnEntry, answer: str) -> bool:
    right = entry.answer or ""
    text = plain(entry.choices[LETTERS.index(right)])
    if plain(answer) == text or letter_of(answer) == right:
        return True
    match = _LETTER_AND_TEXT.fullmatch(answer)
    return match is not None and match.group(1).upper() == right and plain(match.group(2)) == text


@functools.cache
def _math_library() -> tuple[Callable[[str], list[Any]], Callable[[list[Any], list[Any]], bool]]:
    """Reading and comparing, warm. Late, since sympy takes a while and only these tasks need it."""
    from math_verify import LatexExtractionConfig, parse, verify

    # Its own time limits use SIGALRM; without them it warns that somebody else must bound the time, which the sandbox does.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    # LaTeX alone: its reader of plain expressions goes through sympy's, which evaluates Python.
    targets = [LatexExtractionConfig(boxed_match_priority=0)]

    def read(text: str) -> list[Any]:
        # The whole answer, not the last number that occurs in it.
        boxed = f"\\boxed{{{text.removeprefix('$').removesuffix('$')}}}"
        return list(parse(boxed, targets, fallback_mode="no_fallback", parsing_timeout=None))

    def same(right: list[Any], given: list[Any]) -> bool:
        return bool(verify(right, given, timeout_seconds=None))

    for first, second in (
        ("x^2+2x+1", "(x+1)^2"),
        (r"\frac{1}{2}", "0.5"),
        (r"\sqrt{8}", r"2\sqrt{2}"),
        (r"\{1,2\}", "(1,2)"),
    ):
        same(read(first), read(second))
    return read, same


SCORERS: dict[str, Callable[[OwnEntry, str], bool]] = {
    "exact": _exact,
    "numeric": _numeric,
    "math": _math,
    "choice": _choice,
}
