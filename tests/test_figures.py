"""A node's journal as Prometheus sees it: counts that go on over restarts, and labels that stay few."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from prometheus_client import REGISTRY
from prometheus_client.parser import text_string_to_metric_families

from common import metrics
from common.messages import REASONS
from learners.journal import Journal

ROOT = Path(__file__).parents[1]


def value(name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(f"grapevine_{name}", labels)


def record(round: int, authors: tuple[str, ...] = ("node-b",), **others: Any) -> dict[str, Any]:
    return {
        "round": round, "own_reward": 0.5, "own_group_rewards": [0.25, 0.75, 1.0], "own_tasks": ["gcd", "gcd", "sums"],
        "own_ids": [1, 2, 3], "own_tags": ["hard", "mixed", "solved"], "informative_share": 2 / 3, "staleness": 1.5,
        "swarm_ids": [f"{author}/7" for author in authors], "swarm_tags": ["easy"] * len(authors), "swarm_missing": 1,
        "tokens_own": 10, "tokens_swarm": 4, "loss": -0.1, "grad_norm": 0.3, "skipped": 1, "rolled_back": 1, **others,
    }  # fmt: skip


def test_counts_go_on_after_a_restart(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "counting", 0)
    assert value("tokens_trained_total", node="counting", origin="own") == 0.0
    for round in (1, 2, 3):
        journal.round(record(round))
    for counter in (metrics.tokens_trained, metrics.groups_used, metrics.swarm_missing, metrics.rollbacks):
        counter.clear()
    # It comes back from the checkpoint of round 2; round 3 is trained again.
    journal = Journal(tmp_path, "counting", 2)
    assert value("tokens_trained_total", node="counting", origin="own") == 20
    journal.round(record(3, own_reward=0.75))
    assert value("round", node="counting") == 3
    assert value("own_reward", node="counting") == 0.75
    assert value("task_reward", node="counting", task="gcd") == 0.5
    assert value("task_reward", node="counting", task="sums") == 1.0
    assert value("tokens_trained_total", node="counting", origin="swarm") == 12
    assert value("groups_used_total", node="counting", author="node-b", tag="easy") == 3
    assert value("groups_used_total", node="counting", author="counting", tag="solved") == 3
    assert value("swarm_missing_total", node="counting") == 3
    assert value("updates_skipped_total", node="counting") is not None
    assert value("rollbacks_total", node="counting") == 3


def test_a_large_swarm_makes_no_more_series_than_a_middling_one(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "crowd", 0)
    for round in range(1, 11):
        journal.round(record(round, tuple(f"author-{round}-{i}" for i in range(100))))
    page = metrics.page("run", "learner").decode()
    used = [
        sample
        for family in text_string_to_metric_families(page)
        if family.name == "grapevine_groups_used"
        for sample in family.samples
        if sample.name.endswith("_total") and sample.labels["node"] == "crowd"
    ]
    authors = {sample.labels["author"] for sample in used}
    assert len(authors) == metrics.AUTHORS_NAMED + 2, "those named, the others, and the node itself"
    assert sum(sample.value for sample in used if sample.labels["author"] != "crowd") == 1000
    assert {(sample.labels["run"], sample.labels["role"]) for sample in used} == {("run", "learner")}


def test_evaluations_share_a_label() -> None:
    assert metrics.node_label("node-0") == "node-0"
    assert metrics.node_label("eval-node-0-50") == metrics.node_label("eval-control-1-abc") == metrics.EVALUATION


def test_every_reason_to_refuse_is_known() -> None:
    raised = set()
    for folder in ("common", "generators", "verifiers", "learners"):
        for path in (ROOT / folder).rglob("*.py"):
            raised |= set(re.findall(r'Refused\(\s*"([a-z_]+)"', path.read_text()))
    for path in (ROOT / "common" / "lua").glob("*.lua"):
        raised |= set(re.findall(r"quarantine\(id, '([a-z_]+)'", path.read_text()))
    assert raised
    assert raised | {"newer_schema"} == set(REASONS)
