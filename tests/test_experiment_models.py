"""Models made for a study: of the right tasks, readable across specialists, made once for a seed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from common import chat
from common.tasks import PRESETS, build, draw
from grapevine.experiment.models import folder_of, is_made, made
from grapevine.experiment.study import StarterArguments
from grapevine.starter import warmup
from grapevine.starter.cache import MARKER
from grapevine.starter.model import make_starter

TASKS = PRESETS["starter"]
GCD, BITS = (next(spec for spec in TASKS if spec.name == name) for name in ("gcd", "count_bits"))


def test_shares_are_how_much_of_the_warm_up_is_of_each_task() -> None:
    exchanges = warmup.exchanges_of((GCD, BITS), 0, {"gcd": 0.9, "count_bits": 0.1})
    counts = Counter(task for task, _, _ in exchanges)
    assert counts["gcd"] / len(exchanges) == pytest.approx(0.9, abs=0.03)
    assert counts.keys() == {"gcd", "count_bits"}
    for shares in (
        {"gcd": 1.0},
        {"gcd": 1.0, "bits": 1.0},
        {"gcd": 0.0, "count_bits": 0.0},
        {"gcd": 2.0, "count_bits": -1.0},
    ):
        with pytest.raises(ValueError, match="each of the tasks gcd, count_bits a number"):
            warmup.exchanges_of((GCD, BITS), 0, shares)


def test_specialists_with_one_vocabulary_read_each_others_questions(tmp_path: Path) -> None:
    experts = [
        make_starter(tmp_path / spec.name, steps=0, width=32, layers=1, tasks=[spec], vocabulary=TASKS, progress=False)
        for spec in (GCD, BITS)
    ]
    alone = make_starter(tmp_path / "alone", steps=0, width=32, layers=1, tasks=[GCD], progress=False)
    files = [(folder / "tokenizer.json").read_bytes() for folder in (*experts, alone)]
    assert files[0] == files[1] != files[2]
    question = build(draw((BITS,), 0, 0, held_out=False)).text
    lengths = [len(chat.prompt_ids(chat.load_tokenizer(str(folder)), question)) for folder in (experts[0], alone)]
    assert lengths[0] < 30 < lengths[1]


def test_models_made_before_these_arguments_stay_good(tmp_path: Path) -> None:
    folder = make_starter(tmp_path / "model", steps=0, width=32, layers=1, progress=False)
    marker = (folder / MARKER).read_text()
    assert "shares" not in marker and "vocabulary" not in marker


def test_a_model_is_made_once_for_a_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPEVINE_CACHE", str(tmp_path))
    small = StarterArguments(steps=0, width=32, layers=1)
    assert not is_made(small, 1)
    folder = made("small", small, 1)
    assert is_made(small, 1) and folder == folder_of(small, 1)
    time = (folder / "model.safetensors").stat().st_mtime_ns
    assert made("another-name", small, 1) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == time
    assert len({folder, folder_of(small, 2), folder_of(StarterArguments(steps=0, width=32, layers=2), 1)}) == 3
