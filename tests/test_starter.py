"""The starter model: an ordinary folder, made once, the same for a seed, never shown a held-out question."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from common import chat
from common.tasks import PRESETS, build, draw, is_held_out, seed_base_of
from grapevine.starter import warmup as starter_warmup
from grapevine.starter.model import make_starter

STEPS = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_starter(tmp_path_factory.mktemp("models") / "starter", steps=STEPS, progress=False)


def test_the_folder_loads_as_any_other_and_generates(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert sum(p.numel() for p in model.parameters()) < 1_500_000
    assert len(tokenizer) == model.config.vocab_size
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    prompt = torch.tensor([chat.prompt_ids(tokenizer, "How many 1 bits are there?")])
    assert model.generate(prompt, max_new_tokens=2).shape[1] > prompt.shape[1]


def test_prompts_and_right_answers_are_short(folder: Path) -> None:
    tokenizer = chat.load_tokenizer(str(folder))
    base = seed_base_of(0, "anybody", held_out=False)
    for number in range(40):
        item = build(draw(PRESETS["starter"], base, number, held_out=number % 2 == 1))
        assert 10 <= len(chat.prompt_ids(tokenizer, item.text)) <= 26
        answer = f"<answer>{item.answer}</answer>"
        ids = chat.completion_ids(tokenizer, answer, finished=True)
        assert len(ids) <= 13
        assert chat.decode(tokenizer, ids) == answer


def test_the_loaded_tokenizer_keeps_control_tokens_out_of_text(folder: Path) -> None:
    tokenizer = chat.load_tokenizer(str(folder))
    text = "a<|im_end|>b<|im_start|>system\n<|endoftext|> 4  5\r\n"
    ids = chat.completion_ids(tokenizer, text, finished=False)
    assert not set(ids) & set(tokenizer.all_special_ids)
    assert chat.decode(tokenizer, ids) == text


def test_a_complete_folder_is_used_again_and_another_recipe_replaces_it(tmp_path: Path) -> None:
    place = make_starter(tmp_path / "starter", steps=1, progress=False)
    first = (place / "model.safetensors").stat().st_mtime_ns
    make_starter(place, steps=1, progress=False)
    assert (place / "model.safetensors").stat().st_mtime_ns == first
    make_starter(place, steps=1, seed=1, progress=False)
    assert (place / "model.safetensors").stat().st_mtime_ns != first
    assert [path.name for path in tmp_path.iterdir()] == ["starter"]


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(FileExistsError, match="no starter model"):
        make_starter(tmp_path, steps=1, progress=False)
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_one_seed_gives_one_model_and_moves_no_random_state(folder: Path, tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    again = make_starter(tmp_path / "again", steps=STEPS, progress=False)
    assert torch.equal(torch.rand(3), expected)
    assert torch.get_num_threads() == threads
    other = make_starter(tmp_path / "other", steps=STEPS, seed=1, progress=False)
    for name in ("model.safetensors", "tokenizer.json"):
        assert (again / name).read_bytes() == (folder / name).read_bytes()
    assert (other / "model.safetensors").read_bytes() != (folder / "model.safetensors").read_bytes()


def test_no_held_out_question_is_shown() -> None:
    exchanges = starter_warmup.exchanges_of(PRESETS["starter"], seed=0)
    assert {task for task, _, _ in exchanges} == {spec.name for spec in PRESETS["starter"]}
    assert not any(is_held_out(question) for _, question, _ in exchanges)


def test_sloppy_answers_keep_their_shape() -> None:
    rng = random.Random(0)
    assert starter_warmup._sloppy("1 0\n2 1", ["0", "1", "2"], 0.0, rng) == "1 0\n2 1"
    changed = starter_warmup._sloppy("1 1\n1 1", ["1", "2"], 1.0, rng)
    assert len(changed) == 7 and set(changed) <= set("12 \n") and changed[1::2] == " \n "
    assert starter_warmup._sloppy("True", [], 1.0, rng) == "True"


def test_width_must_fit_the_heads(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="multiple of 32"):
        make_starter(tmp_path / "starter", width=100, progress=False)
