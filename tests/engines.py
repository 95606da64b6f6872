"""Both engines under one name, so that one suite holds for both."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest

from generators.engines.base import Engine

Opener = Callable[[Path], Engine]

needs_vllm = [
    pytest.mark.vllm,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed; `make test-vllm` runs these"),
]
KINDS = [pytest.param("transformers"), pytest.param("vllm", marks=needs_vllm)]
# A batch of the tests' sizes and no more, so that many engines fit beside one another.
SMALL = {"kv_cache_memory_bytes": 2**25}


@contextmanager
def opener(kind: str, dtype: str = "float32", models_kept: int = 1) -> Iterator[Opener]:
    """Opens engines of one kind on the CPU, and closes them. Of vLLM's there can be one at a time."""
    opened: list[Engine] = []

    def open_engine(model: Path) -> Engine:
        engine: Engine
        if kind == "vllm":
            from generators.engines.vllm.engine import VllmEngine

            engine = VllmEngine("cpu", dtype, SMALL)
        else:
            from generators.engines.transformers import TransformersEngine

            engine = TransformersEngine("cpu", dtype, models_kept)
        opened.append(engine)
        engine.open_model(str(model))
        return engine

    yield open_engine
    for engine in opened:
        engine.close()
