"""Questions are the same everywhere, refusals are sentences, draws are apart by node and by side."""

import json
import os
import subprocess
import sys
import unicodedata
from decimal import getcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import settings as effort
from hypothesis import strategies as st
from reasoning_gym.factory import DATASETS

from common.tasks import (
    PRESETS,
    REFUSED,
    UNREPRODUCIBLE,
    Question,
    TaskRefused,
    TaskSpec,
    build,
    check,
    draw,
    is_held_out,
    resolve_tasks,
    seed_base_of,
)

NINE = PRESETS["paper9"]
ROOT = Path(__file__).resolve().parents[1]

DIGEST_OF_ITEMS = """
import hashlib, sys
sys.path.insert(0, sys.argv[1])
from common.tasks import PRESETS, Question, build
digest = hashlib.sha256()
order = PRESETS["paper9"] if sys.argv[2] == "forward" else PRESETS["paper9"][::-1]
items = {}
for spec in order:
    for index in (0, 7):
        item = build(Question(spec.name, spec.settings, 2**61 + 5, index))
        items[f"{spec.name} {index}"] = (item.text, item.answer)
print(hashlib.sha256(repr(sorted(items.items())).encode()).hexdigest(), "torch" in sys.modules)
"""


def question(task: str, seed: int = 1, index: int = 0, **settings: Any) -> Question:
    return Question(task, settings, seed, index)


def test_items_are_the_same_under_any_hash_seed_and_in_any_order() -> None:
    seen = set()
    for hash_seed, order in (("0", "forward"), ("1", "backward"), ("random", "forward")):
        run = subprocess.run(
            [sys.executable, "-c", DIGEST_OF_ITEMS, str(ROOT), order],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        )
        seen.add(run.stdout)
    assert len(seen) == 1
    # Nothing else was printed, and no model library was loaded.
    assert seen.pop().split()[1:] == ["False"]


def test_building_leaves_no_trace() -> None:
    precision = getcontext().prec
    settings: dict[str, Any] = {"operators": ["+", "-"], "max_terms": 3}
    build(question("basic_arithmetic", **settings))
    build(question("decimal_arithmetic", precision=9))
    assert settings == {"operators": ["+", "-"], "max_terms": 3}
    assert getcontext().prec == precision


def test_items_have_text_and_answer() -> None:
    for spec in NINE + PRESETS["starter"]:
        item = build(Question(spec.name, spec.settings, 11, 0))
        assert item.text and item.answer, spec.name


def test_index_beyond_the_usual_size_is_its_own_question() -> None:
    # A dataset's item i is drawn with seed + i.
    assert build(question("gcd", seed=5, index=1000)).text == build(question("gcd", seed=1005)).text


@pytest.mark.parametrize(
    ("refused", "word"),
    [
        (question("binary_matrx"), "binary_matrix"),
        (question("x" * 10_000), "unknown"),
        (question("gcd", min_numbres=2), "min_numbers"),
        (question("gcd", seed=2**62), "seed"),
        (question("gcd", seed=-1), "seed"),
        (question("gcd", index=2**20), "index"),
        (question("gcd", min_value=0), "min_value"),
        (question("gcd", min_value="1"), "min_value"),
        (question("gcd", min_value=True), "min_value"),
        (question("gcd", min_value=1.5), "min_value"),
        (question("gcd", min_value=10**400), "64 bits"),
        (question("binary_matrix", p_zero=float("nan")), "finite"),
        (question("binary_matrix", p_zero=float("inf")), "finite"),
        (question("binary_matrix", p_zero=None), "p_zero"),
        (question("basic_arithmetic", operators=["+" * 5000]), "bytes"),
        (question("basic_arithmetic", operators=[[[[[["+"]]]]]]), "nested"),
        (question("basic_arithmetic", operators=[{1: "+"}]), "keys"),
        (question("basic_arithmetic", operators=["\ud800"]), "surrogates"),
        (question("basic_arithmetic", operators=["x"]), "basic_arithmetic"),
        (question("binary_matrix", min_n=200, max_n=200), "characters"),
        (question("spell_backward", data_file="../../secret"), "data_file"),
        (Question("gcd", {"size": 5}, 1, 0), "size"),
        (Question("gcd", {"seed": 5}, 1, 0), "seed"),
    ],
)
def test_refusals_name_the_field(refused: Question, word: str) -> None:
    with pytest.raises(TaskRefused, match=word) as caught:
        build(refused)
    assert len(str(caught.value)) < 600


def test_a_question_with_an_empty_answer_is_refused_and_never_drawn() -> None:
    spec = TaskSpec("base_conversion", {"min_value": 0, "max_value": 1})
    with pytest.raises(TaskRefused, match="empty answer"):
        for seed in range(20):
            build(Question(spec.name, spec.settings, seed, 0))
    assert all(build(draw((spec,), 0, number, False)).answer for number in range(20))


def test_tasks_that_cannot_be_rebuilt_or_scored_are_refused() -> None:
    asked_for = {"isomorphic_strings", "polynomial_multiplication", "ransom_note", "word_ladder"}
    assert asked_for <= UNREPRODUCIBLE <= REFUSED.keys() <= DATASETS.keys()
    for task in REFUSED:
        with pytest.raises(TaskRefused, match=task):
            check(question(task))


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(st.sampled_from([spec.name for spec in NINE]), st.dictionaries(st.text(max_size=8), JSON_VALUES), st.integers())
@effort(max_examples=300, deadline=None)
def test_checking_raises_nothing_but_refusals(task: str, settings: dict[str, Any], seed: int) -> None:
    try:
        check(Question(task, settings, seed, 0))
    except TaskRefused:
        return
    assert msgspec.json.decode(msgspec.json.encode(settings)) == settings


@given(st.text())
def test_held_out_is_blind_to_case_width_and_spacing(text: str) -> None:
    assert is_held_out(text) == is_held_out(f" {unicodedata.normalize('NFKC', text)}\n\t") == is_held_out(text)


def test_one_text_in_sixteen_is_held_out() -> None:
    assert 150 < sum(is_held_out(f"question {number}") for number in range(3200)) < 250
    assert is_held_out("What  IS\n7?") == is_held_out("what is 7?") == is_held_out("\uff37hat is 7?")
    assert is_held_out("\ud800") in (True, False)


def test_presets_and_lists_resolve() -> None:
    assert len(resolve_tasks("paper9")) == 9
    assert len(resolve_tasks("starter")) == 4
    assert resolve_tasks(["gcd", {"name": "bf", "settings": {"difficulty": 2}}]) == (
        TaskSpec("gcd"),
        TaskSpec("bf", {"difficulty": 2}),
    )


@pytest.mark.parametrize(
    ("value", "word"),
    [
        ("paper", "paper9"),
        ([], "at least one"),
        ([{"name": "gcd", "setings": {}}], "setings"),
        ([7], "name and settings"),
        (["word_ladder"], "word_ladder"),
        ([{"name": "gcd", "settings": {"max_numbers": 1}}], "max_numbers"),
    ],
)
def test_wrong_task_lists_are_refused(value: Any, word: str) -> None:
    with pytest.raises(TaskRefused, match=word):
        resolve_tasks(value)


def test_nodes_draw_from_ranges_of_their_own() -> None:
    bases = sorted(seed_base_of(7, f"node-{number}", False) for number in range(1000))
    # The last seed an order can reach lies below the next node's first.
    assert all(second - first >= 2**30 for first, second in pairwise(bases))
    held_out = {seed_base_of(7, f"node-{number}", True) for number in range(100)}
    assert len(held_out) == 1
    assert held_out.pop() >= 2**61 > bases[-1] + 2**30
    assert seed_base_of(8, "node-1", False) != seed_base_of(7, "node-1", False)


@given(st.integers(), st.text(), st.integers(0, 2**24 - 1))
@effort(max_examples=50, deadline=None)
def test_draws_are_pure_valid_and_inside_the_range(run_seed: int, node: str, number: int) -> None:
    base = seed_base_of(run_seed, node, False)
    drawn = draw(PRESETS["starter"], base, number, False)
    assert drawn == draw(PRESETS["starter"], base, number, False)
    assert base <= drawn.seed < base + 2**30
    check(drawn)
    assert not is_held_out(build(drawn).text)


def test_draws_are_mostly_distinct_use_every_task_and_keep_the_sides_apart() -> None:
    train = [build(draw(NINE, seed_base_of(1, "a", False), number, False)) for number in range(1000)]
    assert len({item.text for item in train}) > 950
    assert {item.question.task for item in train} == {spec.name for spec in NINE}
    assert not any(is_held_out(item.text) for item in train)
    held_out = [build(draw(NINE, seed_base_of(1, "a", True), number, True)) for number in range(60)]
    assert all(is_held_out(item.text) for item in held_out)
    assert len({item.text for item in held_out}) > 50
    other = [build(draw(NINE, seed_base_of(1, "b", False), number, False)).text for number in range(200)]
    assert len(set(other) & {item.text for item in train}) < 20


def test_every_starter_task_has_both_sides() -> None:
    for spec in PRESETS["starter"]:
        assert is_held_out(build(draw((spec,), seed_base_of(1, "a", True), 0, True)).text)


def test_a_task_without_a_question_on_one_side_is_refused() -> None:
    single = (TaskSpec("count_bits", {"min_n": 1, "max_n": 1}),)
    held_out = is_held_out(build(Question("count_bits", single[0].settings, 0, 0)).text)
    with pytest.raises(TaskRefused, match="count_bits"):
        draw(single, 0, 0, not held_out)
    assert draw(single, 0, 0, held_out).task == "count_bits"


def test_a_used_up_block_is_refused() -> None:
    with pytest.raises(TaskRefused, match="number"):
        draw(PRESETS["starter"], 0, 2**24, False)


def test_questions_survive_the_wire() -> None:
    for spec in NINE:
        sent = Question(spec.name, spec.settings, 2**62 - 1, 0)
        received = msgspec.json.decode(json.dumps(msgspec.to_builtins(sent)), type=Question)
        assert build(received).text == build(sent).text
