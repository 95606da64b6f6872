"""Right answers score 1, wrong ones 0, as in ReasoningGYM, and no answer is executed."""

import random

import pytest
from hypothesis import given
from hypothesis import settings as effort
from hypothesis import strategies as st

from common.tasks import PRESETS, Item, Question, build, draw
from verifiers.scoring import Components, accuracy, read, score

NINE = PRESETS["paper9"]
ALL = NINE + PRESETS["starter"]


def items(task: str, count: int = 50) -> list[Item]:
    spec = next(spec for spec in ALL if spec.name == task)
    return [build(draw((spec,), 2**40, number, False)) for number in range(count)]


def names() -> list[str]:
    return sorted({spec.name for spec in ALL})


@pytest.mark.parametrize("task", names())
def test_gold_answers_score_one_and_wrong_ones_nought(task: str) -> None:
    for item in items(task):
        theirs = float(item.dataset.score_answer(item.answer, item.entry))
        # ReasoningGYM has no better conclusion to offer for some logic questions, and marks its own down.
        assert theirs == 1.0 or task == "propositional_logic"
        assert accuracy(item, item.answer) == (1.0 if theirs == 1.0 else 0.0), item.text
        assert accuracy(item, f"  {item.answer}\n") == accuracy(item, item.answer)
        wrongs = [
            "",
            "0 0 7 7",
            "-987654321",
            "none",
            "Z",
            f"the answer is {item.answer}",
            f"{item.answer} {item.answer}",
        ]
        for wrong in wrongs:
            assert accuracy(item, wrong) == 0.0, (wrong, item.answer)
    assert sum(accuracy(item, item.answer) for item in items(task)) >= 49


def test_logic_gold_that_scores_below_one_is_rare() -> None:
    golds = [accuracy(item, item.answer) for item in items("propositional_logic", 300)]
    assert sum(golds) >= 0.95 * len(golds)


def test_arithmetic_takes_no_answer_that_contains_the_right_one() -> None:
    item = build(Question("basic_arithmetic", {}, 3, 0))
    assert item.dataset.score_answer(f"{item.answer} or 5", item.entry) > 0
    assert accuracy(item, f"{item.answer} or 5") == 0.0


def test_binary_matrix_reads_grids() -> None:
    item = build(Question("binary_matrix", {"min_n": 3, "max_n": 3}, 4, 0))
    rows = [line.split() for line in item.answer.splitlines()]
    assert accuracy(item, "\r\n".join("  ".join(row) + " " for row in rows)) == 1.0
    assert accuracy(item, str([[int(cell) for cell in row] for row in rows])) == 0.1
    assert accuracy(item, str([[float(cell) for cell in row] for row in rows])) == 0.0
    assert accuracy(item, " ".join(cell for row in rows for cell in row)) == 0.0
    assert accuracy(item, "[" * 4000) == 0.0


def test_fractions_may_be_written_in_any_style_but_must_be_reduced() -> None:
    item = build(Question("fraction_simplification", {}, 4, 0))
    facts = item.entry["metadata"]
    a, b = facts["simplified_numerator"], facts["simplified_denominator"]
    for right in (f"{a}/{b}", f"{a} / {b}", f"${a}/{b}$", rf"\frac{{{a}}}{{{b}}}", rf"$\dfrac {{ {a} }}{{{b}}}$"):
        assert accuracy(item, right) == 1.0, right
    for wrong in (f"{a * 2}/{b * 2}", f"{b}/{a + 1}", f"{a}/{b}/1", f"{a}", rf"\frac{{{a}}}{{{b}}} or so"):
        assert accuracy(item, wrong) == 0.0, wrong


def test_decimals_are_right_within_the_last_place() -> None:
    item = build(Question("decimal_arithmetic", {"max_num_decimal_places": 3}, 4, 0))
    right = float(item.answer)
    assert accuracy(item, f"{right + 0.0005:.6f}") == 1.0
    assert accuracy(item, f"{right + 0.0021:.6f}") == 0.0
    for hostile in ("1e999999999", "NaN", "Infinity", "1_0", "٣", "1e99", "." * 400):
        assert accuracy(item, hostile) == 0.0


def test_calendar_answers_by_kind() -> None:
    seen = set()
    for item in items("calendar_arithmetic", 120):
        if item.answer.lstrip("-").isdigit():
            seen.add("number")
            assert accuracy(item, f"{int(item.answer):+d}") == 1.0
            assert accuracy(item, str(int(item.answer) + 1)) == 0.0
        elif item.answer in ("Yes", "No"):
            seen.add("yes or no")
            assert accuracy(item, item.answer.upper()) == 1.0
        else:
            seen.add("weekday")
            assert accuracy(item, item.answer.lower()) == 0.0
    assert seen == {"number", "yes or no", "weekday"}


def formula(rng: random.Random, depth: int) -> str:
    kind = rng.randrange(6) if depth else 5
    if kind == 5:
        return rng.choice("PQR")
    if kind == 4:
        return "\u00ac" + formula(rng, depth - 1)
    inner = f"{formula(rng, depth - 1)} {rng.choice('∧∨→↔')} {formula(rng, depth - 1)}"  # noqa: RUF001
    return inner if rng.random() < 0.3 else f"({inner})"


@given(st.integers(), st.integers(0, 10**6))
@effort(max_examples=300, deadline=None)
def test_logic_agrees_with_reasoning_gym(number: int, seed: int) -> None:
    item = build(Question("propositional_logic", {"min_vars": 3}, seed, 0))
    answer = formula(random.Random(number), 4)
    theirs = item.dataset.score_answer(answer, item.entry)
    assert accuracy(item, answer) == (1.0 if theirs == 1.0 else 0.0), answer


@pytest.mark.parametrize(
    "answer", ["\u00ac" * 3000 + "P", "(" * 3000, "P" * 4000, "(" * 70 + "P" + ")" * 70, "P \u2227", ")"]
)
def test_malformed_formulas_score_nought(answer: str) -> None:
    assert all(accuracy(item, answer) == 0.0 for item in items("propositional_logic", 10))


def test_tasks_whose_own_scorer_would_evaluate_the_answer() -> None:
    for task in ("string_insertion", "spiral_matrix", "n_queens"):
        item = build(Question(task, {}, 9, 0))
        assert accuracy(item, item.answer) == 1.0
        assert accuracy(item, "__import__('os').abort()") == 0.0


def test_tasks_left_to_reasoning_gym_get_full_marks_or_none() -> None:
    item = build(Question("chain_sum", {}, 9, 0))
    assert accuracy(item, item.answer) == 1.0
    assert item.dataset.score_answer(f"about {item.answer}", item.entry) > 0
    assert accuracy(item, f"about {item.answer}") == 0.0


@pytest.mark.parametrize(
    ("text", "answer", "form"),
    [
        ("<answer>4</answer>", "4", 1.0),
        ("thinking\n<answer>\n 4 \n</answer>\n ", "4", 1.0),
        ("<answer></answer>", "", 1.0),
        ("<answer>4</answer> because", "4", 0.0),
        ("<answer>4</answer><answer>5</answer>", "5", 0.0),
        ("<answer>4</answer><answer>5", "4", 0.0),
        ("<answer>3<answer>4</answer>", "4", 0.0),
        ("<answer>4</answer></answer>", "4", 0.0),
        ("<ANSWER>4</ANSWER>", None, 0.0),
        ("4", None, 0.0),
        ("", None, 0.0),
        ("</answer>4<answer>", None, 0.0),
        ("<answer>" + "4" * 5000 + "</answer>", None, 1.0),
    ],
)
def test_reading_a_completion(text: str, answer: str | None, form: float) -> None:
    assert read(text, 100)[:2] == (answer, form)


def test_length_is_the_share_of_the_budget_left() -> None:
    item = build(Question("gcd", {}, 9, 0))
    text = f"<answer>{item.answer}</answer>"
    assert score(item, text, 4 * len(text)) == Components(1.0, 1.0, 0.75)
    assert score(item, text, len(text)).length == 0.0
    assert score(item, text * 2, len(text)) == Components(1.0, 0.0, 0.0)
    assert score(item, "", 100) == Components(0.0, 0.0, 1.0)
    assert score(item, "", 0).length == 0.0


ALPHABET = st.sampled_from([*"0123456789./-+eE()[]{}, \n$\\PQR\u00ac\u2227\u2228\u2192\u2194\x00\ud800", "frac", "Yes"])


@given(st.sampled_from(names()), st.lists(ALPHABET, max_size=40).map("".join))
@effort(max_examples=500, deadline=None)
def test_our_scorers_raise_on_nothing(task: str, answer: str) -> None:
    for item in items(task, 2):
        assert 0.0 <= accuracy(item, answer) <= 1.0
