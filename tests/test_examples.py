"""The example settings load, and every task they name makes a question."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from reasoning_gym.factory import DATASETS

from common.settings import load
from common.tasks import build, draw, is_held_out, resolve_tasks, seed_base_of

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
# Those of experiments are studies, which have a test of their own.
FILES = sorted([*CONFIGS.glob("*.yaml"), *CONFIGS.glob("examples/*.yaml")])


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    known = dict(DATASETS)
    yield
    DATASETS.clear()
    DATASETS.update(known)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_examples_load_and_ask(path: Path) -> None:
    settings = load(path)
    for name in settings.node_names():
        for spec in resolve_tasks(settings.for_node(name).tasks):
            for held_out in (False, True):
                question = draw((spec,), seed_base_of(settings.seed, name, held_out), 0, held_out)
                assert is_held_out(build(question).text) == held_out


def test_the_examples_are_short() -> None:
    examples = [path for path in FILES if path.parent.name == "examples"]
    assert len(examples) >= 4
    for path in [*examples, *examples[0].parent.glob("*.py")]:
        assert len(path.read_text().splitlines()) < 30, path.name
