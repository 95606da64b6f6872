"""Reward components of one completion. No text of a completion is ever executed or evaluated, nor handed to sympy; the
one exception are tasks of one's own whose scorer is `math` (see `verifiers.answers`).

Accuracy is 1 for a right answer and 0 otherwise: ReasoningGYM's partial credits reward writing anything at all, naming
every candidate, or an answer that merely contains the right one. Two exceptions: a right binary matrix in list notation
gets 0.1, as in ReasoningGYM, since it is earned; a score function of one's own gives what it gives.

What counts as right, by task (outer whitespace never counts):

- arc_1d, basic_arithmetic, base_conversion, bf, and every task for which ReasoningGYM compares with one answer: equal
  text. So too string_insertion and spiral_matrix, whose own scorers would evaluate the answer as Python.
- binary_matrix: the same numbers in the same rows.
- calendar_arithmetic: the same whole number, weekday as spelled, yes or no in any case.
- decimal_arithmetic: within one unit of the last decimal place of the settings.
- fraction_simplification: numerator and denominator of the reduced fraction, as a/b or LaTeX.
- propositional_logic: follows from the premises (truth table) and is neither a tautology nor a single variable.
- n_queens: one of the listed boards.
- tasks of one's own: as their scorer or score function says.
- every other task that is not refused: full marks from ReasoningGYM's own scorer. These may be slow, grow or raise;
  `accuracy` must therefore run where it can be killed (see the sandbox).
"""

import json
import re
from collections.abc import Callable
from decimal import Context, Decimal

from common.own_tasks import source_of
from common.tasks import TEXT_CHARACTERS, Components, Item
from verifiers.answers import accuracy_of

__all__ = ["Components", "accuracy", "read", "score"]

ANSWER_CHARACTERS = 4096
FORMULA_TOKENS = 512
FORMULA_DEPTH = 60

_TAG = re.compile(r"</?answer>")
_WHOLE = re.compile(r"[+-]?[0-9]{1,18}")
_DECIMAL = re.compile(r"[+-]?(?:[0-9]{1,40}(?:\.[0-9]{0,40})?|\.[0-9]{1,40})(?:[eE][+-]?[0-9]{1,2})?")
_FRACTION = re.compile(
    r"\$?\s*(?:([0-9]{1,30})\s*/\s*([0-9]{1,30})|\\d?frac\s*\{\s*([0-9]{1,30})\s*\}\s*\{\s*([0-9]{1,30})\s*\})\s*\$?"
)
# Signs of propositional logic, from loose to tight; escaped, since "or" looks like a letter.
BINARY = "\u2194\u2192\u2228\u2227"
NOT = "\u00ac"
_TOKEN = re.compile(rf"\s*([A-Z]|[{BINARY}{NOT}()])")


def score(item: Item, completion_text: str, max_characters: int) -> Components:
    """All components of one completion, in this process.

    `length` is the share of the budget of `max_characters` left unused.

    Raises:
        Exception: whatever ReasoningGYM's scorer, math-verify or a score function of one's own raises; never for the
            tasks with a scorer of ours.
    """
    answer, form, length = read(completion_text, max_characters)
    return Components(accuracy(item, answer), form, length)


def read(text: str, max_characters: int) -> tuple[str | None, float, float]:
    """Answer, format and length of a completion, in time linear in its length.

    The answer is the content of the last `<answer>` that is closed before another opens, None without one or when over
    4,096 characters. Format is 1 when the text holds one such pair, no further tag, and only whitespace after it.
    """
    tags = list(_TAG.finditer(text))
    length = 1.0 - min(1.0, len(text) / max_characters) if max_characters > 0 else 0.0
    for first, second in zip(reversed(tags[:-1]), reversed(tags[1:]), strict=True):
        if first.group() == "<answer>" and second.group() == "</answer>":
            alone = len(tags) == 2 and not text[second.end() :].strip()
            answer = text[first.end() : second.start()].strip()
            return answer if len(answer) <= ANSWER_CHARACTERS else None, float(alone), length
    return None, 0.0, length


def accuracy(item: Item, answer: str | None) -> float:
    """How right an answer is, from 0 to 1, by the rules above.

    Raises:
        Exception: whatever ReasoningGYM's scorer, math-verify or a score function of one's own raises; never for the
            tasks with a scorer of ours.
    """
    answer = (answer or "").strip()
    if not answer or len(answer) > ANSWER_CHARACTERS:
        return 0.0
    source = source_of(item.question.task)
    if source is not None:
        return accuracy_of(item.entry["entry"], answer, source.score)
    scorer = SCORERS.get(item.question.task)
    if scorer is None:
        from reasoning_gym.dataset import ProceduralDataset

        compares = type(item.dataset).score_answer is ProceduralDataset.score_answer
        scorer = _same if compares else _library
    return scorer(item, answer)


def _same(item: Item, answer: str) -> float:
    return float(answer == item.answer.strip())


def _library(item: Item, answer: str) -> float:
    return float(item.dataset.score_answer(answer, item.entry) >= 1.0)


def _grid(item: Item, answer: str) -> float:
    right = [line.split() for line in item.answer.splitlines()]
    if [line.split() for line in answer.splitlines()] == right:
        return 1.0
    try:
        rows = json.loads(answer)
    except (ValueError, RecursionError):
        return 0.0
    wanted = [[int(cell) for cell in row] for row in right]
    # Comparing the written form keeps True and 1.0 from passing for 1.
    return 0.1 if isinstance(rows, list) and json.dumps(rows) == json.dumps(wanted) else 0.0


def _calendar(item: Item, answer: str) -> float:
    if _WHOLE.fullmatch(item.answer):
        return float(bool(_WHOLE.fullmatch(answer)) and int(answer) == int(item.answer))
    if item.answer.lower() in ("yes", "no"):
        return float(answer.lower() == item.answer.lower())
    return _same(item, answer)


def _decimal(item: Item, answer: str) -> float:
    if not _DECIMAL.fullmatch(answer):
        return 0.0
    # Our own context: building a decimal question leaves its precision behind, and it may be less than the places.
    context = Context(prec=300)
    step = Decimal(1).scaleb(-item.dataset.config.max_num_decimal_places, context)
    return float(abs(context.subtract(Decimal(answer), Decimal(item.answer))) <= step)


def _fraction(item: Item, answer: str) -> float:
    match = _FRACTION.fullmatch(answer)
    if not match:
        return 0.0
    above, below = (int(part) for part in match.groups() if part is not None)
    facts = item.entry["metadata"]
    return float(above == facts["simplified_numerator"] and below == facts["simplified_denominator"])


def _listed(item: Item, answer: str) -> float:
    return float(answer in [board.strip() for board in item.entry["metadata"]["valid_answers"]])


def _logic(item: Item, answer: str) -> float:
    facts = item.entry["metadata"]
    formula = _Formula(facts["variables"])
    try:
        conclusion = formula.read(answer, FORMULA_TOKENS)
    except ValueError:
        return 0.0
    premises = formula.every
    for premise in facts["premises"]:
        premises &= formula.read(premise, TEXT_CHARACTERS)
    trivial = conclusion == formula.every or not any(sign in answer for sign in BINARY + NOT)
    return float(premises & ~conclusion == 0 and not trivial)


class _Formula:
    """Reads formulas into truth-table columns: bit i of an integer is the value under assignment i.

    Loose to tight: iff, implies, or, and, not; each groups to the left, as ReasoningGYM reads them.
    """

    def __init__(self, variables: list[str]) -> None:
        self.every = (1 << (1 << len(variables))) - 1
        self.columns = {name: self._column(place) for place, name in enumerate(variables)}

    def _column(self, place: int) -> int:
        # The bits that differ from their neighbour 2**place further on: all ones divided by 2**(2**place) + 1.
        return self.every // ((1 << (1 << place)) + 1) << (1 << place)

    def read(self, text: str, most_tokens: int) -> int:
        """Truth table of a formula. Raises ValueError when it is malformed, too long or too deep."""
        self.tokens: list[str] = []
        end = len(text.rstrip())
        place = 0
        while place < end:
            match = _TOKEN.match(text, place)
            if not match or len(self.tokens) == most_tokens:
                raise ValueError("not a formula, or too long")
            self.tokens.append(match.group(1))
            place = match.end()
        self.tokens.reverse()
        table = self._binary(0, 0)
        if self.tokens:
            raise ValueError("text after the formula")
        return table

    def _binary(self, level: int, depth: int) -> int:
        if level == len(BINARY):
            return self._unary(depth)
        left = self._binary(level + 1, depth)
        while self.tokens and self.tokens[-1] == BINARY[level]:
            self.tokens.pop()
            right = self._binary(level + 1, depth)
            left = (
                self.every & ~(left ^ right),
                self.every & ~left | right,
                left | right,
                left & right,
            )[level]
        return left

    def _unary(self, depth: int) -> int:
        negative = False
        while self.tokens and self.tokens[-1] == NOT:
            self.tokens.pop()
            negative = not negative
        if not self.tokens or depth > FORMULA_DEPTH:
            raise ValueError("formula ends early or is too deep")
        token = self.tokens.pop()
        if token == "(":
            table = self._binary(0, depth + 1)
            if not self.tokens or self.tokens.pop() != ")":
                raise ValueError("bracket not closed")
        elif token in self.columns:
            table = self.columns[token]
        else:
            raise ValueError("unknown variable")
        return self.every & ~table if negative else table


SCORERS: dict[str, Callable[[Item, str], float]] = {
    "binary_matrix": _grid,
    "calendar_arithmetic": _calendar,
    "decimal_arithmetic": _decimal,
    "fraction_simplification": _fraction,
    "n_queens": _listed,
    "propositional_logic": _logic,
    "spiral_matrix": _same,
    "string_insertion": _same,
}
