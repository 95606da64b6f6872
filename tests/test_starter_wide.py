"""The second starter model: another tokenizer and template, made and named like the first."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from common import chat
from common.settings import Settings
from common.tasks import PRESETS, build, draw, seed_base_of
from grapevine.running.local import with_models
from grapevine.starter import model as starter_model
from grapevine.starter.model import STARTERS, make_starter


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_starter(tmp_path_factory.mktemp("models") / "wide", steps=1, width=128, tokenizer="words", progress=False)


def test_prompts_are_words_and_answers_as_short_as_the_other_starters(folder: Path) -> None:
    tokenizer = chat.load_tokenizer(str(folder))
    base = seed_base_of(0, "anybody", held_out=False)
    for number in range(40):
        item = build(draw(PRESETS["starter"], base, number, held_out=number % 2 == 1))
        prompt = chat.prompt_ids(tokenizer, item.text)
        assert 17 <= len(prompt) <= 80
        assert tokenizer.decode(prompt) == f"<|user|>{item.text}<|end|><|reply|>"
        ids = chat.completion_ids(tokenizer, f"<answer>{item.answer}</answer>", finished=True)
        assert len(ids) <= 13
        assert chat.decode(tokenizer, ids) == f"<answer>{item.answer}</answer>"


def test_the_two_tokenizers_share_text_and_nothing_else(folder: Path, tmp_path: Path) -> None:
    wide = chat.load_tokenizer(str(folder))
    slim = chat.load_tokenizer(str(make_starter(tmp_path / "slim", steps=1, progress=False)))
    text = "Simplify <|end|> the fraction 2/8<|im_end|>\r\n\x00 é 日本"
    encoded = [chat.completion_ids(tokenizer, text, finished=False) for tokenizer in (wide, slim)]
    assert encoded[0] != encoded[1]
    for tokenizer, ids in zip((wide, slim), encoded, strict=True):
        assert not set(ids) & set(tokenizer.all_special_ids)
        assert chat.decode(tokenizer, ids) == text
    assert not set(wide.all_special_tokens) & set(slim.all_special_tokens)


def test_it_is_an_ordinary_folder_made_once(folder: Path, tmp_path: Path) -> None:
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = chat.load_tokenizer(str(folder))
    assert len(tokenizer) == loaded.config.vocab_size
    assert loaded.generation_config.eos_token_id == tokenizer.eos_token_id
    again = make_starter(tmp_path / "again", steps=1, width=128, tokenizer="words", progress=False)
    for name in ("model.safetensors", "tokenizer.json"):
        assert (again / name).read_bytes() == (folder / name).read_bytes()
    made = (again / "model.safetensors").stat().st_mtime_ns
    make_starter(again, steps=1, width=128, tokenizer="words", progress=False)
    assert (again / "model.safetensors").stat().st_mtime_ns == made


def test_both_names_become_folders_of_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quick = {name: partial(make, steps=1, progress=False) for name, make in STARTERS.items()}
    monkeypatch.setattr(starter_model, "STARTERS", quick)
    monkeypatch.setenv("GRAPEVINE_CACHE", str(tmp_path))
    nodes = {"a": {}, "b": {"model": "starter-wide"}, "c": {"model": "/my/own"}, "d": None}
    resolved = with_models(Settings(nodes=nodes))
    models = {name: resolved.for_node(name).model for name in resolved.node_names()}
    cache = tmp_path.resolve()
    wanted = {"a": cache / "starter", "b": cache / "starter-wide", "c": "/my/own", "d": cache / "starter"}
    assert models == {name: str(folder) for name, folder in wanted.items()}
    only = with_models(Settings(nodes=1, node={"model": "/my/own"}))  # type: ignore[arg-type]
    assert only.node.model == "/my/own"
