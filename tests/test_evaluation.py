"""`grapevine eval` against a plain loop over transformers, and which questions an evaluation asks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from common.messages import Version
from common.settings import Settings, SettingsError
from common.tasks import PRESETS, TaskSpec, build, is_held_out
from generators.engines.base import PolicyUnusable
from generators.engines.transformers import TransformersEngine
from grapevine.evaluate import evaluate_model
from learners.evaluation import distinct_questions

QUESTIONS = 200
# Wide enough settings for two hundred different held-out questions.
TASKS = [
    {"name": "binary_matrix", "settings": {"min_n": 3, "max_n": 4}},
    {"name": "gcd", "settings": {"min_numbers": 2, "max_numbers": 2, "min_value": 1, "max_value": 60}},
    {"name": "fraction_simplification", "settings": {"min_value": 1, "max_value": 40, "min_factor": 2, "max_factor": 9}},
]


def evaluate(model: Path, tmp_path: Path) -> tuple[dict[str, object], list[dict[str, object]]]:
    """`grapevine eval` in a process of its own: its figures and its answers."""
    answers = tmp_path / "answers.jsonl"
    config = tmp_path / "eval.json"
    # Batches that a verifier takes in several steps.
    tree = {"node": {"tasks": TASKS, "sampling": {"max_new_tokens": 24}}, "generators": {"batch_orders": 48}}
    config.write_text(json.dumps(tree))
    clean = {key: value for key, value in os.environ.items() if not key.startswith("GRAPEVINE_") and key != "REDIS_URL"}
    command = [sys.executable, "-m", "grapevine", "eval", str(model), "--config", str(config), "--answers", str(answers)]
    run = subprocess.run(
        [*command, "--questions", str(QUESTIONS), "--completions", "2", "--json"],
        env={**clean, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout), [json.loads(line) for line in answers.read_text().splitlines()]


def test_greedy_answers_are_those_of_a_plain_loop(learnt: Path, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from common.chat import SYSTEM_PROMPT
    from verifiers.scoring import score

    figures, answers = evaluate(learnt, tmp_path)
    tokenizer, model = AutoTokenizer.from_pretrained(learnt), AutoModelForCausalLM.from_pretrained(learnt)
    questions = distinct_questions(tuple(TaskSpec(t["name"], t["settings"]) for t in TASKS), 0, QUESTIONS)  # type: ignore[arg-type]
    said, right = [], []
    for question in questions:
        item = build(question)
        turns = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": item.text}]
        prompt = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        with torch.no_grad():
            ids = model.generate(**prompt, do_sample=False, max_new_tokens=24)[0, prompt["input_ids"].shape[1] :]
        said.append(tokenizer.decode(ids[ids != tokenizer.eos_token_id]))
        right.append(score(item, said[-1], 24 * 16).accuracy)
    assert len(answers) == QUESTIONS
    assert [answer["question"] for answer in answers] == [build(question).text for question in questions]
    assert [answer["greedy"]["text"] for answer in answers] == said  # type: ignore[index]
    assert [answer["greedy"]["accuracy"] for answer in answers] == right  # type: ignore[index]
    assert figures["greedy"]["rate"] == pytest.approx(sum(right) / len(right))  # type: ignore[index]
    assert 0.1 < sum(right) / len(right) < 0.9, "a model that is always right or always wrong would show little"


def test_questions_are_distinct_and_held_out_and_the_same_for_all() -> None:
    questions = distinct_questions(PRESETS["starter"], 7, 40)
    texts = [build(question).text for question in questions]
    assert len(set(texts)) == len(texts) == 40
    assert all(is_held_out(text) for text in texts)
    assert {question.task for question in questions} == {spec.name for spec in PRESETS["starter"]}
    assert distinct_questions(PRESETS["starter"], 7, 40) == questions
    assert distinct_questions(PRESETS["starter"], 8, 40) != questions


def test_a_small_task_gives_what_it_has() -> None:
    questions = distinct_questions((TaskSpec("count_bits", {"min_n": 1, "max_n": 63}),), 0, 50)
    held_out = [n for n in range(1, 64) if is_held_out(build(questions[0]).text.replace(*_numbers(questions[0], n)))]
    assert len(questions) == len(held_out)


def _numbers(question: object, other: int) -> tuple[str, str]:
    number = build(question).entry["metadata"]["number"]  # type: ignore[arg-type]
    return f"number {number}", f"number {other}"


def test_a_model_that_its_engine_refuses_is_one_sentence_and_no_endless_wait(
    learnt: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refusing(TransformersEngine):
        def load_policy(self, weights: Path, version: Version) -> None:
            raise PolicyUnusable("its attention heads are too narrow here")

    settings = Settings(folder=tmp_path, run="refused")
    monkeypatch.setattr("grapevine.evaluate.make_engine", lambda _: Refusing("cpu", "float32", 1))
    with pytest.raises(SettingsError, match="cannot be evaluated: its attention heads are too narrow here"):
        evaluate_model(settings, str(learnt), "starter", questions=2, completions=1)
