"""Tasks of one's own: wrong ones are named before a run starts, right ones are asked, sent and scored like any other."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from reasoning_gym.factory import DATASETS

from common.own_tasks import CHECKSUM, Definition, source_of
from common.settings import Settings, SettingsError, load
from common.tasks import Question, TaskRefused, TaskSpec, build, define, draw, is_held_out, resolve_tasks
from verifiers.child import Limits
from verifiers.sandbox import Sandbox

SUMS = '''
def addition(rng, digits=1):
    a, b = (rng.randrange(10 ** digits) for _ in range(2))
    return {"question": f"{a} + {b}?", "answer": str(a + b), "metadata": {"sum": a + b}}

def near(answer, entry):
    """Lets an answer hang, lie or raise, if it asks for that."""
    while answer == "hang":
        pass
    if answer == "lie":
        return 7.0
    return max(0.0, 1.0 - abs(int(answer) - entry["metadata"]["sum"]) / 10)
'''


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """Definitions and search paths are the process's own: leave neither behind."""
    known, paths = dict(DATASETS), list(sys.path)
    yield
    DATASETS.clear()
    DATASETS.update(known)
    sys.path[:] = paths


def lines(folder: Path, *entries: Any, name: str = "asked.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(f"{entry if isinstance(entry, str) else json.dumps(entry)}\n" for entry in entries))
    return path


def questions(count: int, **more: Any) -> list[dict[str, Any]]:
    return [{"question": f"number {i}?", "answer": i, **more} for i in range(count)]


def answered(*answers: Any) -> list[str]:
    return [f"<answer>{answer}</answer>" for answer in answers]


def configured(folder: Path, own_tasks: dict[str, Any], tasks: list[Any]) -> Settings:
    path = folder / "settings.yaml"
    path.write_text(json.dumps({"nodes": 1, "node": {"tasks": tasks}, "own_tasks": own_tasks}))
    return load(path)


def test_a_file_is_asked_and_scored_like_any_task(tmp_path: Path) -> None:
    lines(
        tmp_path,
        *questions(40, scorer="numeric"),
        {"question": "Capital of France?", "choices": ["Rome", "Paris"], "answer": "Paris", "scorer": "choice"},
        {"question": "Half?", "answer": r"\frac{1}{2}", "scorer": "math"},
        {"question": "Ten cents?", "answer": 0.10},
    )
    settings = configured(tmp_path, {"mine": {"file": "asked.jsonl"}}, ["mine", "gcd"])
    specs = resolve_tasks(settings.for_node("node-0").tasks)
    assert [spec.name for spec in specs] == ["mine", "gcd"]
    drawn = [draw(specs[:1], 0, number, held_out=False) for number in range(400)]
    items = {build(question).text: build(question) for question in drawn}
    assert len(items) >= 38 and not any(map(is_held_out, items))
    assert is_held_out(build(draw(specs[:1], 2**61, 0, held_out=True)).text)
    own = settings.own_tasks["mine"]
    sandbox = Sandbox(own_tasks=[own.definition("mine")])
    for wanted, right, wrong in [
        ("number 7?", "7.0", "8"),
        ("Capital of France?\nA) Rome\nB) Paris", "(b)", "Rome"),
        ("Half?", "0.5", "1/3"),
        ("Ten cents?", "0.1", "0.10000"),
    ]:
        if wanted not in items:
            assert is_held_out(wanted)
            continue
        # What the sandbox gets is what a message would hold.
        question = items[wanted].question
        verdict = sandbox.score(
            Question(question.task, dict(question.settings), question.seed, 0), answered(right, wrong), 100
        )
        assert [c.accuracy for c in verdict.components] == [1.0, 0.0], wanted
        assert verdict.text == wanted and verdict.faults == [None, None]
    sandbox.close()


def test_a_function_is_asked_and_its_own_scores_count(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SUMS)
    own = {"function": "mine.py:addition", "score": "mine.py:near", "settings": {"digits": 2}}
    settings = configured(tmp_path, {"sums": own}, ["sums", {"name": "sums", "settings": {"digits": 1}}])
    two, one = resolve_tasks(settings.for_node("node-0").tasks)
    assert max(len(build(draw((one,), 0, n, False)).answer) for n in range(50)) < 3
    assert max(len(build(draw((two,), 0, n, False)).answer) for n in range(50)) == 3
    # The settings file of the workers says all, wherever it lies and whoever reads it.
    copy = tmp_path / "elsewhere" / "settings.json"
    copy.parent.mkdir()
    copy.write_text(settings.model_dump_json(exclude={"redis_url"}))
    again = load(copy)
    assert again.own_tasks == settings.own_tasks
    sandbox = Sandbox(Limits(answer=0.1), [again.own_tasks["sums"].definition("sums")])
    for spec in (one, two):
        question = draw((spec,), 0, 0, held_out=False)
        total = int(build(question).answer)
        verdict = sandbox.score(question, answered(total, total + 5, "hang", "lie", "many", total), 100)
        assert [c.accuracy for c in verdict.components] == [1.0, 0.5, 0.0, 0.0, 0.0, 1.0]
        assert verdict.faults == [None, None, "timeout", "scorer", "scorer", None]
    sandbox.close()


HOSTILE = [
    "9^{9^{9}}",
    "10^{10^{10}}",
    "999999!",
    "(" * 1000 + "1" + ")" * 1000,
    "{" * 2000,
    r"\frac{" * 300,
    "NaN",
    "1e999999999",
]
HOSTILE += ["\ud800", r"\infty", "9**9**9", "__import__('os').abort()", "(x+y+z)^{200}", r"\sum_{n=1}^{10^9} n^{n}"]


@pytest.mark.parametrize("scorer", ["math", "numeric", "exact"])
def test_hostile_answers_cost_only_themselves(tmp_path: Path, scorer: str) -> None:
    lines(tmp_path, *questions(30))
    definition = Definition("hostile", file="asked.jsonl", scorer=scorer, folder=str(tmp_path))
    define(definition)
    question = draw(resolve_tasks(["hostile"]), 0, 0, held_out=False)
    right = build(question).answer
    sandbox = Sandbox(Limits(answer=0.1, group=20.0), [definition])
    verdict = sandbox.score(question, answered(right, *HOSTILE, right), 10_000)
    sandbox.close()
    assert [c.accuracy for c in verdict.components] == [1.0, *[0.0] * len(HOSTILE), 1.0]
    assert (verdict.faults[0], verdict.faults[-1]) == (None, None)
    assert scorer == "math" or verdict.faults == [None] * len(verdict.faults)


def test_a_question_of_another_definition_is_refused(tmp_path: Path) -> None:
    here = Definition("mine", file=str(lines(tmp_path, *questions(30))))
    there = Definition("mine", file=str(lines(tmp_path, *questions(31), name="other.jsonl")))
    define(there)
    question = draw(resolve_tasks(["mine"]), 0, 0, held_out=False)
    bare = Question("mine", {}, question.seed, 0)
    assert define(here) != define(there)
    define(here)
    sandbox = Sandbox(own_tasks=[here])
    for ask in (build, lambda q: sandbox.score(q, [], 10)):
        for refused in (question, bare):
            with pytest.raises(TaskRefused, match="'mine' is defined otherwise here"):
                ask(refused)
    assert sandbox.host_pid is None  # refused before any process was asked
    define(there)
    with pytest.raises(TaskRefused, match="defined otherwise"):
        sandbox.score(question, [], 10)
    sandbox.close()


def test_no_message_names_a_path(tmp_path: Path) -> None:
    define(Definition("mine", file=str(lines(tmp_path, *questions(30)))))
    (spec,) = resolve_tasks(["mine"])
    assert list(spec.settings) == [CHECKSUM]
    for setting in ("file", "function", "folder", "score", "scorer"):
        with pytest.raises(TaskRefused, match="unknown or fixed"):
            build(Question("mine", {**spec.settings, setting: "/etc/passwd"}, 1, 0))


def test_the_same_again_is_harmless_and_another_replaces_it(tmp_path: Path) -> None:
    first = Definition("mine", file=str(lines(tmp_path, *questions(30))))
    assert define(first) == define(first)
    spec = resolve_tasks(["mine"])
    (tmp_path / "mine.py").write_text(SUMS)
    define(Definition("mine", function="mine.py:addition", folder=str(tmp_path), settings={"digits": 1}))
    assert "+" in build(draw(resolve_tasks(["mine"]), 0, 0, False)).text
    assert resolve_tasks([TaskSpec("mine", {"digits": 2})])[0].settings["digits"] == 2
    with pytest.raises(TaskRefused, match="defined otherwise"):
        draw(spec, 0, 0, False)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 2: not JSON"),
        ("[1]", "line 2: an object"),
        ({"question": "?", "anwser": 1}, "did you mean 'answer'"),
        ({"question": "?"}, "field answer is missing"),
        ({"answer": 1}, "field question is missing"),
        ({"question": 3, "answer": 1}, "field question must be text"),
        ({"question": "?", "answer": True}, "field answer must be text or a number"),
        ({"question": "?", "answer": " "}, "field answer is empty"),
        ({"question": "?", "answer": 1, "scorer": "numerical"}, "did you mean 'numeric'"),
        ({"question": "?", "answer": "x", "scorer": "numeric"}, "no number"),
        ('{"question": "?", "answer": NaN}', "NaN is no JSON number"),
        ({"question": "?" * 40_000, "answer": 1}, "over 32768 characters"),
        ({"question": "\ud800", "answer": 1}, "lone surrogates"),
        ({"question": "number 0?", "answer": 7}, "asks the same as line 1 with another answer"),
        ({"question": "?", "answer": "A", "scorer": "choice"}, "field choices must list"),
        ({"question": "?", "answer": "C", "scorer": "choice", "choices": ["x", "y"]}, "neither a choice's letter"),
        ({"question": "?", "answer": "x", "scorer": "choice", "choices": ["x", "X "]}, "same text twice"),
        ({"question": "?", "answer": "A", "scorer": "choice", "choices": ["B", "A"]}, "letter of another choice"),
        ({"question": "?", "answer": "x", "choices": ["x", "y"]}, "for scorer choice only"),
    ],
)
def test_a_wrong_line_is_named_with_its_field(tmp_path: Path, line: Any, words: str) -> None:
    lines(tmp_path, {"question": "number 0?", "answer": 0}, line)
    with pytest.raises(SettingsError, match=r"own_tasks\.mine: .*asked\.jsonl line 2") as raised:
        configured(tmp_path, {"mine": {"file": "asked.jsonl"}}, ["mine"])
    assert words in str(raised.value)


BAD = """
import random, itertools
count = itertools.count()

def counts(rng): return {"question": f"{next(count)}?", "answer": "1"}
def shared(rng): return {"question": f"{random.random()}?", "answer": "1"}
def raises(rng): raise KeyError("gone")
def wrong(rng): return {"question": "?"}
def hashed(rng): return {"question": " ".join({f"word {rng.random()}" for _ in range(9)}), "answer": "1"}
number = 3
"""


@pytest.mark.parametrize(
    ("own", "words"),
    [
        ({}, "either a file or a function"),
        ({"file": "a.jsonl", "function": "a:b"}, "either a file or a function"),
        ({"file": "none.jsonl"}, "cannot be read"),
        ({"file": "empty.jsonl"}, "holds no questions"),
        ({"file": "empty.jsonl", "settings": {"a": 1}}, "a file has none"),
        ({"function": "bad"}, "module:function"),
        ({"function": "bad.py:none"}, "no function 'none'"),
        ({"function": "bad.py:number"}, "no function 'number'"),
        ({"function": "gone.py:f"}, "gone.py cannot be imported"),
        ({"function": "gone_module_of_mine:f"}, "cannot be imported: ModuleNotFoundError"),
        ({"function": "broken.py:f"}, "SyntaxError"),
        ({"function": "bad.py:counts"}, "two questions of one seed"),
        ({"function": "bad.py:shared"}, "shared random module"),
        ({"function": "bad.py:raises"}, "gone"),
        ({"function": "bad.py:wrong"}, "field answer is missing"),
        ({"function": "bad.py:raises", "settings": {"seed": 1}}, "'seed' cannot name an argument"),
        ({"function": "bad.py:wrong", "settings": {"digits": 1}}, "unexpected keyword"),
        ({"function": "bad.py:wrong", "score": "bad.py:none"}, "score: bad.py has no function"),
    ],
)
def test_a_wrong_definition_is_one_sentence_at_start_up(tmp_path: Path, own: dict[str, Any], words: str) -> None:
    (tmp_path / "bad.py").write_text(BAD)
    (tmp_path / "broken.py").write_text("def f(:")
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(SettingsError, match=r"own_tasks\.mine") as raised:
        configured(tmp_path, {"mine": own}, ["mine"])
    assert words in str(raised.value)
    assert source_of("mine") is None


@pytest.mark.parametrize(("name", "words"), [("gcd", "ReasoningGYM has a dataset"), ("starter", "there is a preset")])
def test_names_of_others_are_taken(tmp_path: Path, name: str, words: str) -> None:
    lines(tmp_path, *questions(30))
    with pytest.raises(SettingsError, match=words):
        configured(tmp_path, {name: {"file": "asked.jsonl"}}, ["gcd"])


def test_a_file_without_held_out_lines_says_how_to_go_on(tmp_path: Path) -> None:
    kept = [entry for entry in questions(30) if not is_held_out(entry["question"])]
    define(Definition("mine", file=str(lines(tmp_path, *kept))))
    with pytest.raises(TaskRefused, match=f"0 of the {len(kept)} lines .* add lines"):
        draw(resolve_tasks(["mine"]), 0, 0, held_out=True)


def test_what_depends_on_the_process_is_found_where_it_is_scored(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text(BAD)
    definition = Definition("mine", function="bad.py:hashed", folder=str(tmp_path))
    checksum = define(definition)
    sandbox = Sandbox(own_tasks=[Definition("mine", function="bad.py:hashed", folder=str(tmp_path), checksum=checksum)])
    with pytest.raises(SettingsError, match="makes other questions here"):
        sandbox.score(draw(resolve_tasks(["mine"]), 0, 0, False), [], 10)


def test_a_changed_file_is_found_when_a_worker_starts(tmp_path: Path) -> None:
    lines(tmp_path, *questions(30))
    settings = configured(tmp_path, {"mine": {"file": "asked.jsonl"}}, ["mine"])
    copy = tmp_path / "settings.json"
    copy.write_text(settings.model_dump_json(exclude={"redis_url"}))
    lines(tmp_path, *questions(31))
    with pytest.raises(SettingsError, match="changed since"):
        load(copy)


def test_names_of_this_project_win_over_files_of_the_same_name(tmp_path: Path) -> None:
    import common

    (tmp_path / "common.py").write_text("raise RuntimeError('taken')")
    (tmp_path / "mine.py").write_text("import common.tasks\n" + SUMS)
    define(Definition("mine", function="mine:addition", folder=str(tmp_path)))
    sys.modules.pop("mine")
    assert sys.path.index(str(tmp_path)) > 0 and "common.py" not in str(common.__file__)
