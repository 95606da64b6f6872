"""The figures of an evaluation against their definitions."""

from __future__ import annotations

from itertools import combinations
from math import sqrt
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from learners.scores import Answered, pass_at, rate, summarize

marks = st.sampled_from([0.0, 1.0])


def test_wilson_intervals_of_the_literature() -> None:
    # Newcombe 1998, table I: 81 of 263, 15 of 148, 0 of 20, 1 of 29.
    for right, of, low, high in (
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ):
        found = rate([1.0] * right + [0.0] * (of - right))
        assert found["rate"] == pytest.approx(right / of)
        assert (found["low"], found["high"]) == (pytest.approx(low, abs=1e-4), pytest.approx(high, abs=1e-4))


@given(st.lists(st.floats(0, 1), min_size=1, max_size=50), st.floats(1, 64))
def test_an_interval_holds_its_mean_and_stays_within_bounds(values: list[float], drawn: float) -> None:
    found = rate(values, drawn)
    assert 0.0 <= found["low"] <= found["rate"] <= found["high"] <= 1.0


@given(st.lists(st.lists(marks, min_size=4, max_size=4), min_size=2, max_size=30))
def test_means_over_completions_never_widen_and_never_count_more_than_all_completions(groups: list[list[float]]) -> None:
    means = [fmean(group) for group in groups]
    of_means, of_all = rate(means, 4), rate([mark for group in groups for mark in group])
    as_marks = rate(means)
    width = of_means["high"] - of_means["low"]
    assert width <= as_marks["high"] - as_marks["low"] + 1e-12
    if 0 < fmean(means) < 1 and len(set(means)) > 1:
        assert width >= of_all["high"] - of_all["low"] - 1e-12


@given(st.lists(marks, min_size=1, max_size=9), st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer(accuracies: list[float], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(accuracies)))
    subsets = list(combinations(accuracies, k))
    assert pass_at(k, accuracies) == pytest.approx(sum(max(subset) == 1.0 for subset in subsets) / len(subsets))


def test_a_partial_credit_is_no_pass() -> None:
    assert pass_at(1, [0.1, 0.1]) == 0.0


def test_a_summary_by_hand() -> None:
    answered = [
        Answered("gcd", 1.0, (1.0, 0.0, 1.0)),
        Answered("gcd", 0.0, (0.0, 0.0, 0.0)),
        Answered("bits", 1.0, (1.0, 1.0, 1.0)),
    ]
    figures = summarize(answered)
    assert figures["questions"] == 3
    assert figures["completions"] == 3
    assert figures["reward"] == pytest.approx(5 / 9)
    assert figures["standard_error"] == pytest.approx(sqrt(((2 / 3 - 5 / 9) ** 2 + (5 / 9) ** 2 + (4 / 9) ** 2) / 2 / 3))
    assert figures["greedy"]["rate"] == pytest.approx(2 / 3)
    assert {k: part["rate"] for k, part in figures["pass_at"].items()} == pytest.approx({"1": 5 / 9, "2": 2 / 3, "3": 2 / 3})
    assert figures["by_task"]["gcd"]["reward"] == pytest.approx(1 / 3)
    assert figures["by_task"]["gcd"]["greedy"]["rate"] == 0.5
    assert figures["by_task"]["bits"]["questions"] == 1
