"""The manifests run: every container with its own arguments, variables, volumes, user and probes, on one machine.

Models that would have to be fetched are replaced by the starter, and runs are made shorter, as a folder on top of an overlay
may do; all else is as rendered.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import yaml

from common.clock import ServerClock
from common.keys import Keys
from common.ledger import Ledger
from common.server import connect
from common.settings import load
from grapevine.cluster.own import init, read_passwords
from learners.journal import read
from tests import pods
from tests.pods import Cluster, Pod

OVERLAYS = pods.ROOT / "k8s" / "overlays"
REASON = pods.missing()
pytestmark = [
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
    pytest.mark.slow,
    pytest.mark.timeout(600),
]
SMALL: dict[str, Any] = {
    "model": "starter", "tasks": "starter", "group_size": 4, "sampling": {"max_new_tokens": 8}, "checkpoint_every": 1,
    "evaluate": {"questions": 4, "completions": 1, "every": 0},
}  # fmt: skip


@pytest.fixture(scope="module")
def starters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where images have the starter model, readable by everyone."""
    from grapevine.starter.model import starter_folder

    folder = tmp_path_factory.mktemp("image") / "cache"
    shutil.copytree(starter_folder("starter"), folder / "starter")
    for path in folder.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return folder


def own_folder(overlay: Path, folder: Path, **changes: Any) -> Path:
    """A cluster's folder on top of an overlay, made as a user makes it, with a smaller run."""
    init(overlay, folder)
    tree = yaml.safe_load((folder / "run.yaml").read_text())
    tree["node"] = {**tree["node"], **SMALL, **changes.pop("node", {})}
    tree["generators"] = {**tree.get("generators", {}), "engine": "transformers", "engine_options": {}, "drain_seconds": 5.0}
    (folder / "run.yaml").write_text(yaml.safe_dump({**tree, "redeliver_seconds": 5.0, **changes}))
    return folder


def rendered(folder: Path) -> list[dict[str, Any]]:
    text = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True, check=True).stdout
    return [one for one in yaml.safe_load_all(text) if one]


@contextmanager
def cluster_of(folder: Path, scratch: Path, starters: Path) -> Iterator[Cluster]:
    cluster = Cluster(rendered(folder), scratch, starters)
    try:
        yield cluster
    finally:
        cluster.stop()


def ledger_of(cluster: Cluster, folder: Path) -> Ledger:
    """A person's look at the server: the account `admin`, from outside the pods."""
    settings = load(folder / "run.yaml")
    password = quote(read_passwords(folder / "passwords.env")["admin"])
    (redis,) = cluster.of("redis")
    client = connect(f"redis://admin:{password}@{redis.address}:6379/0")
    return Ledger(client, Keys(settings.run, settings.shards), ServerClock(client), settings.site)


def journal(cluster: Cluster, pod: Pod) -> list[dict[str, Any]]:
    """A node's rounds, from its volume."""
    return read(cluster.folder / "claims" / f"runs-{pod.name}" / "swarm" / "nodes" / pod.name / "rounds.jsonl")


def rounds(cluster: Cluster) -> dict[str, int]:
    """How far every node has come."""
    return {pod.name: len(journal(cluster, pod)) for pod in cluster.of("learner")}


def test_a_swarm_trains_and_its_generators_go_from_one_to_four_and_back(tmp_path: Path, starters: Path) -> None:
    folder = own_folder(OVERLAYS / "kind", tmp_path / "mine", node={"rounds": 400, "mix": {"own": 4, "swarm": 4}})
    with cluster_of(folder, tmp_path / "cluster", starters) as cluster:
        cluster.workload("generators")["spec"]["replicas"] = 1
        cluster.start()
        replicas = {
            one["metadata"]["name"]: one["spec"]["replicas"] for one in cluster.objects if one["kind"] in pods.WORKLOADS
        }
        assert replicas == {"node": 4, "generators": 1, "verifiers": 1, "control": 1, "redis": 1}
        assert len(cluster.pods) == sum(replicas.values())
        cluster.ready()
        ledger = ledger_of(cluster, folder)
        cluster.until(lambda: min(rounds(cluster).values()) >= 2, "rounds with one generator")

        cluster.scale("generators", 4)
        cluster.ready(cluster.of("generator"))
        answered = {pod.name: 0.0 for pod in cluster.of("generator")}

        def all_answer() -> bool:
            for pod in cluster.of("generator"):
                lines = [line for line in pod.metrics().splitlines() if line.startswith("grapevine_groups_answered_total{")]
                answered[pod.name] = sum(float(line.rpartition(" ")[2]) for line in lines)
            return min(answered.values()) > 0

        cluster.until(all_answer, "answers of all four generators")
        before = rounds(cluster)
        leaving = cluster.scale("generators", 1)
        assert cluster.gone(leaving) == [0, 0, 0], "each drains within its grace period"
        cluster.until(lambda: all(rounds(cluster)[node] >= before[node] + 2 for node in before), "rounds after scaling down")

        for node in before:
            books = ledger.books(node)
            assert books.lost == 0
            assert books.trained > 0
        swarm_groups = [len(line["swarm_ids"]) for pod in cluster.of("learner") for line in journal(cluster, pod)]
        assert sum(swarm_groups) > 0, "they learn from one another"
        assert sum(ledger.counts().get(f"started:{role}", 0) for role in ("learner", "verifier")) == 5
        assert all(pod.codes == [] for pod in cluster.pods), "nobody had to be started again"
