"""The manifests run: every container with its own arguments, variables, volumes, user and probes, on one machine.

Models that would have to be fetched are replaced by the starter, and runs are made shorter, as a folder on top of an overlay
may do; all else is as rendered.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import redis
import yaml

from common.clock import ServerClock
from common.keys import Keys
from common.ledger import Ledger
from common.server import connect
from common.settings import load
from grapevine.cluster.accounts import acl_file
from grapevine.cluster.own import init, read_passwords, scope_of, valid_passwords
from grapevine.control.queue import Jobs
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
    done = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [one for one in yaml.safe_load_all(done.stdout) if one]


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
    (server,) = cluster.of("redis")
    client = connect(f"redis://admin:{password}@{server.address}:6379/0")
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


def with_server(folder: Path, scratch: Path) -> Path:
    """A folder of a site whose server is elsewhere, with that server beside it, as its keeper would set it up."""
    tree = yaml.safe_load((folder / "kustomization.yaml").read_text())
    settings = load(folder / "run.yaml")
    bare, beside = scratch / "bare", scratch / "server"
    bare.mkdir()
    beside.mkdir()
    component = os.path.relpath(pods.ROOT / "k8s" / "components" / "redis", bare)
    # The component's patches are for workloads that are not here.
    (bare / "kustomization.yaml").write_text(yaml.safe_dump({"components": [component]}))
    (beside / "users.acl").write_text(acl_file(scope_of(settings), *valid_passwords(folder)))
    accounts = {"name": "redis-users", "behavior": "replace", "files": ["users.acl"]}
    (beside / "kustomization.yaml").write_text(
        yaml.safe_dump({"namespace": tree["namespace"], "resources": ["../bare"], "secretGenerator": [accounts]})
    )
    tree["resources"].append(os.path.relpath(beside, folder))
    tree["configMapGenerator"].append(
        {"name": "cluster", "behavior": "merge", "literals": ["REDIS_SCHEME=redis", "REDIS_PLACE=redis:6379"]}
    )
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(tree))
    return folder


def drained(cluster: Cluster) -> None:
    """Every container starts, becomes ready, and ends in good order within its grace period when it is told to."""
    cluster.start()
    cluster.ready()
    cluster.until(lambda: min(rounds(cluster).values()) >= 1, "first rounds")
    workers = [pod for pod in cluster.pods if pod.component != "redis"]
    assert all(pod.codes == [] for pod in workers), cluster.words()
    for group in (workers, cluster.of("redis")):
        for pod in group:
            pod.wanted = False
            assert pod.process is not None
            pod.process.send_signal(signal.SIGTERM)
        assert cluster.gone(group) == [0] * len(group), cluster.words()


def fewer(cluster: Cluster, nodes: int) -> None:
    """One node in place of eight: each further one has the same container."""
    cluster.workload(cluster.nodes)["spec"]["replicas"] = nodes


def test_every_container_of_the_gpu_overlay(tmp_path: Path, starters: Path) -> None:
    folder = own_folder(OVERLAYS / "gpu", tmp_path / "mine", node={"rounds": 100, "mix": {"own": 2, "swarm": 2}})
    with cluster_of(folder, tmp_path / "cluster", starters) as cluster:
        fewer(cluster, 2)
        components = {pods.component_of(one) for one in cluster.objects if one["kind"] in pods.WORKLOADS}
        assert components == {"learner", "generator", "verifier", "control", "exporter", "redis"}
        drained(cluster)


def test_every_container_of_a_site_on_a_server_elsewhere(tmp_path: Path, starters: Path) -> None:
    folder = own_folder(
        OVERLAYS / "multi-site" / "east", tmp_path / "mine", node={"rounds": 100, "mix": {"own": 2, "swarm": 2}}
    )
    with cluster_of(with_server(folder, tmp_path), tmp_path / "cluster", starters) as cluster:
        drained(cluster)


@pytest.mark.skipif(shutil.which("redis-server") is None, reason="no redis-server here: the embedded server knows no TLS")
@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl here to make a certificate with")
def test_every_container_with_tls(tmp_path: Path, starters: Path) -> None:
    folder = own_folder(OVERLAYS / "kind", tmp_path / "mine", node={"rounds": 100, "mix": {"own": 2, "swarm": 2}})
    certificate(folder)
    tree = yaml.safe_load((folder / "kustomization.yaml").read_text())
    tree["components"] = [os.path.relpath(pods.ROOT / "k8s" / "components" / "tls", folder)]
    tree["secretGenerator"].append({"name": "redis-tls", "files": ["tls.crt", "tls.key", "ca.crt"]})
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(tree))
    with cluster_of(folder, tmp_path / "cluster", starters) as cluster:
        fewer(cluster, 1)
        drained(cluster)


def certificate(folder: Path) -> None:
    """An authority of one's own, and a certificate for the name `redis`."""
    common = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    commands = (
        ["req", "-x509", *common, "-keyout", "ca.key", "-out", "ca.crt", "-subj", "/CN=authority"],
        ["req", *common[:-2], "-keyout", "tls.key", "-out", "tls.csr", "-subj", "/CN=redis"],
        ["x509", "-req", "-in", "tls.csr", "-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2",
         "-out", "tls.crt", "-extfile", "names"],
    )  # fmt: skip
    (folder / "names").write_text("subjectAltName=DNS:redis\n")
    for command in commands:
        subprocess.run(["openssl", *command], cwd=folder, check=True, capture_output=True)


def test_a_complete_node_stays_and_is_evaluated_by_a_control_worker(tmp_path: Path, starters: Path) -> None:
    folder = own_folder(OVERLAYS / "kind", tmp_path / "mine", node={"rounds": 3, "mix": {"own": 2, "swarm": 2}})
    with cluster_of(folder, tmp_path / "cluster", starters) as cluster:
        fewer(cluster, 2)
        cluster.start()
        cluster.ready()
        cluster.until(lambda: min(rounds(cluster).values()) == 3, "all rounds")
        ledger = ledger_of(cluster, folder)
        jobs = Jobs("swarm", ledger.redis)
        id = jobs.add("evaluate", {"node": "node-1", "questions": 4, "completions": 2}, retries=0)
        assert id is not None
        (row,) = cluster.until(lambda: [one for one in jobs.rows() if one.status in ("finished", "failed")], "evaluation")
        assert row.status == "finished", row.reason
        assert row.result["round"] == 3
        id = jobs.add("export", {"node": "node-0"}, retries=0)
        cluster.until(lambda: {one.status for one in jobs.rows()} <= {"finished", "failed"}, "export")
        exported = next(one for one in jobs.rows() if one.id == id)
        assert exported.status == "finished", exported.reason
        (control,) = cluster.of("control")
        assert {"config.json", "model.safetensors"} <= set(said(control, "ls", exported.result["folder"]).split())
        # What docs/operations.md tells people to ask a learner's pod.
        learner = cluster.of("learner")[0]
        said(learner, "grapevine", "export", "swarm", "node-0", "/tmp/model")
        assert "model.safetensors" in said(learner, "ls", "/tmp/model")
        assert json.loads(said(learner, "grapevine", "report", "swarm", "--json"))["own_reward_all"] is not None
        # The server comes back without its memory: whoever is complete says again what its policy is.
        ledger.redis.delete(ledger.keys.policy("node-1"))
        (server,) = cluster.of("redis")
        assert server.process is not None
        server.process.kill()
        server.process.wait()
        cluster.until(lambda: announced(cluster, folder), "announcement after the server's restart")
        assert all(pod.process is not None and pod.process.poll() is None for pod in cluster.of("learner"))


def said(pod: Pod, *command: str) -> str:
    """What a command in a pod prints."""
    done = subprocess.run(pod.inside(list(command)), capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout


def announced(cluster: Cluster, folder: Path) -> bool:
    try:
        ledger = ledger_of(cluster, folder)
        return ledger.redis.get(ledger.keys.policy("node-1")) is not None
    except redis.ConnectionError:
        return False
