"""A whole swarm in processes whose generators run vLLM."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from learners.journal import read
from tests.engines import needs_vllm

pytestmark = needs_vllm


@pytest.mark.slow
@pytest.mark.parametrize("lora", [{}, {"rank": 8, "alpha": 16.0}], ids=["weights", "adapters"])
def test_a_swarm_trains_on_what_vllm_wrote(learnt: Path, tmp_path: Path, lora: dict[str, float]) -> None:
    tree = {
        "run": "vllm", "folder": str(tmp_path), "nodes": 2,
        "node": {
            "model": str(learnt), "rounds": 6, "group_size": 8, "ahead": 1, "sampling": {"max_new_tokens": 16},
            "mix": {"own": 4, "swarm": 2, "tags": ["failed", "hard", "mixed", "easy", "solved"]},
            "reward": {"accuracy": 1.0, "length": 1.0}, "evaluate": {"questions": 0}, "update": {"lora": lora},
        },
        "generators": {"replicas": 1, "engine": "vllm", "engine_options": {"kv_cache_memory_bytes": 2**26}},
    }  # fmt: skip
    (tmp_path / "vllm.yaml").write_text(yaml.safe_dump(tree))
    clean = {key: value for key, value in os.environ.items() if not key.startswith("GRAPEVINE_") and key != "REDIS_URL"}
    done = subprocess.run(
        [sys.executable, "-m", "grapevine", "up", str(tmp_path / "vllm.yaml")],
        env={**clean, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    for node in ("node-0", "node-1"):
        rounds = read(tmp_path / "vllm" / "nodes" / node / "rounds.jsonl")
        assert [line["round"] for line in rounds] == list(range(1, 7))
        assert all(line["grad_norm"] > 0 and line["skipped"] == 0 for line in rounds)
        # The learner says the same of every token: generators have the newest policy, and record what they sample.
        assert all(line["staleness"] == 0 and line["sampler_gap"] < 1e-4 for line in rounds)
