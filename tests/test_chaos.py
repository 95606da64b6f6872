"""A short turn of the chaos test; `make chaos` is the long one."""

from __future__ import annotations

from pathlib import Path
from random import Random

from tests.chaos.__main__ import run


def test_nothing_is_lost_under_fire(tmp_path: Path) -> None:
    assert run(tmp_path, faults=30, nodes=2, chance=Random(4)) == []
