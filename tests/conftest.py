"""What the tests share: a real embedded server, a real tiny model."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

from grapevine.server import EmbeddedServer


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    """A server for the session; tests keep apart by their run's name."""
    server = EmbeddedServer(tmp_path_factory.mktemp("server"))
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen2 model folder with random weights and tied embeddings, about 60,000 parameters."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny-model"), tied=True)


@pytest.fixture(scope="session")
def learnt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that answers rightly now and then: of one that never does, every metric file would be the same."""
    from grapevine.starter.model import make_starter

    return make_starter(tmp_path_factory.mktemp("learnt") / "starter", steps=250, width=64, progress=False)


def make_tiny_model(folder: Path, tied: bool) -> Path:
    """Random weights, large enough that next-token distributions are far from uniform."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from common.tasks import PRESETS, build, draw
    from grapevine.starter.tokenizer import build_tokenizer

    items = [build(draw(PRESETS["starter"], 0, number, held_out=False)) for number in range(64)]
    tokenizer = build_tokenizer([(item.text, item.answer) for item in items])
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=512, tie_word_embeddings=tied, initializer_range=0.2,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
