"""The scorers for tasks of one's own: what counts as right, and that nothing hostile does harm."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import settings as effort
from hypothesis import strategies as st

from common.task_entries import LETTERS, OwnEntry, letter_of, number_of, read_entry
from verifiers.answers import accuracy_of

CHOICES = ["a dog", "Paris", "42", "none of these"]


def entry(scorer: str, answer: str, **more: object) -> OwnEntry:
    return read_entry({"question": "?", "answer": answer, **more}, scorer, scored=False)


def right(made: OwnEntry, answer: str) -> bool:
    return accuracy_of(made, answer, None) == 1.0


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("12", 12),
        ("+12", 12),
        ("-0.50", Fraction(-1, 2)),
        (".5", Fraction(1, 2)),
        ("7.", 7),
        ("1,234,567.5", Fraction("1234567.5")),
        ("3/4", Fraction(3, 4)),
        ("-3 / 4", Fraction(-3, 4)),
        ("0.5/1e1", Fraction(1, 20)),
        ("1e3", 1000),
        ("2.5E-3", Fraction(1, 400)),
    ],
)
def test_numbers_are_read_as_people_write_them(text: str, number: Fraction) -> None:
    assert number_of(text) == number


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "1,23",
        "12,3456",
        "1/0",
        "1/2/3",
        "50%",
        "NaN",
        "inf",
        "-",
        ".",
        "1e9999",
        "1_000",
        "٣",
        "0x10",
        "1 2",
        "9**9",
    ],
)
def test_what_is_no_number_is_none(text: str) -> None:
    assert number_of(text) is None


@given(st.decimals(allow_nan=False, allow_infinity=False, min_value=Decimal("-1e30"), max_value=Decimal("1e30"), places=6))
def test_any_way_to_write_a_number_is_the_same_number(value: Decimal) -> None:
    exact = Fraction(value)
    assert number_of(f"{value:f}") == number_of(f"{value:,f}") == number_of(f"{value:.40e}") == exact
    assert number_of(f"{exact.numerator}/{exact.denominator}") == exact
    made = entry("numeric", f"{value:f}")
    assert right(made, f" {value:.40e}\n")
    assert not right(made, f"{value + abs(value) / 1000 + 1:f}")


def test_near_numbers_pass_and_whole_ones_must_be_equal() -> None:
    third = entry("numeric", "1/3")
    assert right(third, "0.3333333") and not right(third, "0.3333")
    large = entry("numeric", "12,345,678")
    assert right(large, "12345678") and right(large, "12345678.0")
    assert not right(large, "12345679")
    assert right(entry("numeric", "0"), "0.0") and not right(entry("numeric", "0"), "0.0000001")


def test_exact_means_equal_text() -> None:
    made = entry("exact", " Paris ")
    assert right(made, "\nParis ")
    for wrong in ("paris", "Paris.", "Paris Paris", "Pa ris"):
        assert not right(made, wrong)


@pytest.mark.parametrize(
    "answer", ["B", "b", "(b)", "B.", "B)", "[B]", "b:", "Paris", " PARIS ", "B) Paris", "(b) paris", "B. Paris"]
)
@pytest.mark.parametrize("stated", ["B", "(b)", "Paris"])
def test_a_choice_is_a_letter_or_its_text(stated: str, answer: str) -> None:
    assert right(entry("choice", stated, choices=CHOICES), answer)


@pytest.mark.parametrize("answer", ["A", "a dog", "B or A", "AB", "Paris 42", "B) a dog", "A) Paris", "E", "", "b dog"])
def test_another_choice_or_two_of_them_is_wrong(answer: str) -> None:
    assert not right(entry("choice", "B", choices=CHOICES), answer)


@given(st.lists(st.text(min_size=2, max_size=8).filter(lambda t: len(t.strip()) > 1), min_size=2, max_size=26), st.data())
def test_exactly_one_letter_of_a_choice_is_right(texts: list[str], data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(texts) - 1))
    try:
        made = entry("choice", LETTERS[place], choices=texts)
    except ValueError:
        return  # alike, or read as letters: refused when the file is read
    assert [right(made, letter) for letter in LETTERS[: len(texts)]] == [i == place for i in range(len(texts))]
    assert right(made, texts[place])
    assert made.text.count("\n") >= len(texts) and letter_of(made.answer or "") == LETTERS[place]


@pytest.mark.parametrize(
    ("stated", "answer"),
    [
        ("1/2", r"\frac{1}{2}"),
        ("1/2", "$0.5$"),
        (r"2\sqrt{2}", r"\sqrt{8}"),
        ("x^2+2x+1", "(x+1)^2"),
        (r"\{1, 2\}", r"\{2, 1\}"),
        ("3", "x = 3"),
        (r"\pi", r"$\pi$"),
    ],
)
def test_math_knows_equal_expressions(stated: str, answer: str) -> None:
    assert right(entry("math", stated), answer)


@pytest.mark.parametrize("answer", ["2/3", "x", "1 or 2", r"\frac{1}", "", "\ud800", "__import__('os').abort()", "1, 1/2"])
def test_math_knows_unequal_ones(answer: str) -> None:
    assert not right(entry("math", "1/2"), answer)


SIGNS = st.sampled_from([*"0123456789./,-+eE()[]{}AbB: \n%$\\x\x00\ud800٣", "NaN", "inf", "9**9", "1e999", "Paris"])


@given(st.sampled_from(["exact", "numeric", "choice"]), st.lists(SIGNS, max_size=60).map("".join))
@effort(max_examples=400, deadline=None)
def test_scorers_raise_on_nothing(scorer: str, answer: str) -> None:
    made = entry(scorer, "2" if scorer != "choice" else "B", **({"choices": CHOICES} if scorer == "choice" else {}))
    assert accuracy_of(made, answer, None) in (0.0, 1.0)


@pytest.mark.parametrize(("given_", "earned"), [(1, 1.0), (0.25, 0.25), (True, 1.0), (False, 0.0)])
def test_a_score_function_gives_a_share(given_: float, earned: float) -> None:
    assert accuracy_of(entry("exact", "x"), "y", lambda answer, raw: given_) == earned


@pytest.mark.parametrize("wrong", [1.5, -0.1, float("nan"), float("inf"), None, "1"])
def test_whatever_else_a_score_function_gives_is_an_error(wrong: object) -> None:
    with pytest.raises(ValueError, match="from 0 to 1"):
        accuracy_of(entry("exact", "x"), "y", lambda answer, raw: wrong)  # type: ignore[arg-type, return-value]
