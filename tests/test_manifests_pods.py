"""What every pod is held to: the Pod Security Standard `restricted`, probes, sizes, how it ends and who may end it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from grapevine.control.queue import KINDS
from tests.manifests import (
    Cluster,
    Workload,
    each_container,
    every_overlay,
    full_name,
    quantity,
    rendered,
    settings_of,
)

VOLUMES = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}
GPU = "nvidia.com/gpu"
# What a control plane, its DNS and its network ask for themselves on a cluster of one machine.
KIND_ITSELF = {"cpu": 0.95, "memory": 0.3 * 2**30}
# Between being told to end and being killed, besides what a worker takes by design.
MARGIN_SECONDS = 15


# --- the Pod Security Standard `restricted`, rule by rule ---


@every_overlay
def test_pods_have_nothing_of_the_host(overlay: str) -> None:
    for workload, container in each_container(rendered(overlay)):
        for key in ("hostNetwork", "hostPID", "hostIPC"):
            assert not workload.pod.get(key), f"{workload}: {key}"
        for volume in workload.pod["volumes"]:
            kinds = set(volume) - {"name"}
            assert len(kinds) == 1 and kinds <= VOLUMES, f"{workload}: {volume}"
        assert not [port for port in container["ports"] if port.get("hostPort") or port.get("hostIP")], workload
        actions = [container.get(name, {}) for name in ("startupProbe", "livenessProbe", "readinessProbe")]
        actions += container.get("lifecycle", {}).values()
        assert not [one for one in actions for way in ("httpGet", "tcpSocket") if one.get(way, {}).get("host")], workload


@every_overlay
def test_pods_run_as_nobody_and_stay_so(overlay: str) -> None:
    for workload, container in each_container(rendered(overlay)):
        pod, own = workload.pod["securityContext"], container["securityContext"]
        merged = pod | own
        assert merged["runAsNonRoot"] is True, workload
        assert merged["runAsUser"] >= 999 and merged["runAsGroup"] >= 999, workload
        assert merged["seccompProfile"] == {"type": "RuntimeDefault"}, workload
        assert own["allowPrivilegeEscalation"] is False, workload
        assert own["capabilities"] == {"drop": ["ALL"]}, workload
        assert own["readOnlyRootFilesystem"] is True, workload
        for key in ("privileged", "procMount", "seLinuxOptions", "windowsOptions", "appArmorProfile", "sysctls"):
            assert not merged.get(key), f"{workload}: {key}"
        assert not [
            key for key in workload.object["spec"]["template"]["metadata"].get("annotations", ()) if "apparmor" in key
        ]
        assert "ephemeralContainers" not in workload.pod, workload


@every_overlay
def test_nobody_can_ask_the_cluster_anything(overlay: str) -> None:
    cluster = rendered(overlay)
    for workload in cluster.workloads:
        assert workload.pod["automountServiceAccountToken"] is False, workload
        assert not [volume for volume in workload.pod["volumes"] if "projected" in volume], workload
    for account in cluster.all("ServiceAccount"):
        assert account["automountServiceAccountToken"] is False, full_name(account)
    assert not cluster.all("Role", "ClusterRole", "RoleBinding", "ClusterRoleBinding")


@every_overlay
def test_only_verifiers_are_told_of_services(overlay: str) -> None:
    """A variable per Service and port is of no use to the others, and could be taken for a setting."""
    cluster = rendered(overlay)
    for workload in cluster.workloads:
        expected = workload.role == "verifier" and overlay != "multi-site"
        assert workload.pod["enableServiceLinks"] is expected, workload


# --- files ---


@every_overlay
def test_whatever_is_written_has_a_volume(overlay: str) -> None:
    cluster = rendered(overlay)
    for workload, container in each_container(cluster):
        variables = cluster.environment(workload, container, workload.pod_names()[0])
        places = {"/tmp"} | {variables[key] for key in ("GRAPEVINE_FOLDER", "HF_HOME", "HOME") if key in variables}
        if workload.role == "redis":
            places.add("/data")
        assert places <= _writable(workload, container), workload
        for mount in container["volumeMounts"]:
            assert bool(mount.get("readOnly")) == (mount["mountPath"] not in _writable(workload, container)), workload


def _writable(workload: Workload, container: Mapping[str, Any]) -> set[str]:
    names = {volume["name"] for volume in workload.pod["volumes"] if "emptyDir" in volume} | set(workload.claims)
    return {mount["mountPath"] for mount in container["volumeMounts"] if mount["name"] in names}


@every_overlay
def test_what_must_outlive_a_pod_is_on_a_volume_that_stays(overlay: str) -> None:
    for workload in rendered(overlay).workloads:
        assert (workload.kind == "StatefulSet") == (workload.role in ("learner", "redis")), workload
        if workload.kind != "StatefulSet":
            continue
        keeps = {"learner": "/srv/grapevine/runs", "redis": "/data"}[workload.role]
        (container,) = workload.containers
        assert [mount["name"] for mount in container["volumeMounts"] if mount["mountPath"] == keeps] == workload.claims
        retention = workload.object["spec"]["persistentVolumeClaimRetentionPolicy"]
        assert retention == {"whenDeleted": "Retain", "whenScaled": "Retain"}, workload
        # Its own user can write there.
        assert workload.pod["securityContext"]["fsGroup"] == workload.pod["securityContext"]["runAsGroup"], workload


# --- probes, resources ---


@every_overlay
def test_everyone_is_asked_how_it_is(overlay: str) -> None:
    for workload, container in each_container(rendered(overlay)):
        for name in ("startupProbe", "livenessProbe", "readinessProbe"):
            assert name in container, f"{workload} has no {name}"
        start, live, ready = (container[name] for name in ("startupProbe", "livenessProbe", "readinessProbe"))
        if workload.role == "redis":
            for probe in (start, live, ready):
                assert "valkey-cli" in probe["exec"]["command"][-1], workload
        else:
            paths = [probe["httpGet"]["path"] for probe in (start, live, ready)]
            assert paths == ["/healthz", "/healthz", "/readyz"], workload
        # Loading a model or an append-only file takes minutes; a busy process is not a dead one.
        assert start["periodSeconds"] * start["failureThreshold"] >= 300, workload
        assert live["periodSeconds"] * live["failureThreshold"] >= 60, workload
        assert live["timeoutSeconds"] >= 5, workload


@every_overlay
def test_everyone_says_what_it_needs(overlay: str) -> None:
    for workload, container in each_container(rendered(overlay)):
        requests, limits = container["resources"]["requests"], container["resources"]["limits"]
        assert {"cpu", "memory", "ephemeral-storage"} <= set(requests), workload
        assert {"memory", "ephemeral-storage"} <= set(limits), workload
        assert "cpu" not in limits, f"{workload}: it would be held back while CPUs idle"
        for name, limit in limits.items():
            assert 0 < quantity(requests[name]) <= quantity(limit), f"{workload}: {name}"
        in_memory = [volume["emptyDir"] for volume in workload.pod["volumes"] if "medium" in volume.get("emptyDir", {})]
        for volume in in_memory:
            assert quantity(volume["sizeLimit"]) <= quantity(limits["memory"]), f"{workload}: {volume}"


@every_overlay
def test_a_verifier_has_room_for_its_sandbox_and_the_server_for_a_second_copy(overlay: str, tmp_path: Path) -> None:
    cluster = rendered(overlay)
    for workload, container in each_container(cluster):
        limit = quantity(container["resources"]["limits"]["memory"])
        if workload.role == "verifier":
            sandbox = settings_of(cluster, workload.namespace, tmp_path).verifiers.memory_megabytes * 2**20
            assert limit >= sandbox + quantity(container["resources"]["requests"]["memory"]), workload
        elif workload.role == "redis":
            facts = [line.split() for line in cluster.file(workload, container, "/etc/valkey/valkey.conf").splitlines()]
            (most,) = [words[1] for words in facts if words[:1] == ["maxmemory"]]
            assert limit >= 2 * quantity(most.replace("gb", "Gi").replace("mb", "Mi")), workload
            for line in (
                "appendonly yes",
                "maxmemory-policy noeviction",
                "aclfile /etc/valkey-users/users.acl",
                "dir /data",
            ):
                assert line.split() in facts, f"{workload}: {line}"
            assert cluster.file(workload, container, "/etc/valkey-users/users.acl").startswith("user default off\n")


# --- ends ---


@every_overlay
def test_nobody_is_killed_before_its_work_is_handed_on(overlay: str, tmp_path: Path) -> None:
    cluster = rendered(overlay)
    for workload in cluster.workloads:
        seconds = workload.pod["terminationGracePeriodSeconds"]
        if workload.role == "generator":
            drain = settings_of(cluster, workload.namespace, tmp_path).generators.drain_seconds
            assert seconds >= drain + MARGIN_SECONDS, workload
        elif workload.role == "control":
            assert seconds >= max(kind.grace for kind in KINDS.values()) + MARGIN_SECONDS, workload
        elif workload.role == "learner":
            assert seconds >= 60, f"{workload}: a round and its checkpoint"


@every_overlay
def test_a_drained_machine_takes_few_at_a_time(overlay: str) -> None:
    cluster = rendered(overlay)
    kept = {(one["metadata"]["namespace"], one["metadata"]["name"]): one for one in cluster.all("PodDisruptionBudget")}
    for workload in cluster.workloads:
        budget = kept.pop((workload.namespace, workload.name), None)
        # The exporter is one by design and nothing waits for it: figures have a gap of seconds.
        assert (budget is None) == (workload.role == "exporter"), workload
        if budget is not None:
            # A budget that never lets go of a pod would hold up the machine's upkeep.
            assert set(budget["spec"]) == {"maxUnavailable", "selector", "unhealthyPodEvictionPolicy"}, full_name(budget)
            assert budget["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow", full_name(budget)
            assert budget["spec"]["maxUnavailable"] not in (0, "0%"), full_name(budget)
    assert not kept


@every_overlay
def test_who_comes_in_numbers_is_spread_over_machines(overlay: str) -> None:
    cluster = rendered(overlay)
    scaled = {(one["metadata"]["namespace"], one["spec"]["scaleTargetRef"]["name"]) for one in cluster.all("ScaledObject")}
    for workload in cluster.workloads:
        if (workload.replicas or 0) > 1 or (workload.namespace, workload.name) in scaled:
            keys = [one["topologyKey"] for one in workload.pod.get("topologySpreadConstraints", ())]
            assert keys == ["kubernetes.io/hostname"], workload


@every_overlay
def test_the_exporter_is_never_there_twice(overlay: str) -> None:
    for workload in rendered(overlay).workloads:
        if workload.role == "exporter":
            assert workload.replicas == 1
            assert workload.object["spec"]["strategy"] == {"type": "Recreate"}


# --- sizes ---


def requested(cluster: Cluster, name: str) -> float:
    """What all pods together ask for."""
    return sum(
        quantity(container["resources"]["requests"].get(name, 0)) * (workload.replicas or 0)
        for workload, container in each_container(cluster)
    )


def test_the_swarm_for_a_laptop_fits_one() -> None:
    cluster = rendered("kind")
    assert cluster.of_role("learner").replicas == 4
    assert requested(cluster, "cpu") + KIND_ITSELF["cpu"] <= 4
    assert requested(cluster, "memory") + KIND_ITSELF["memory"] <= 8 * 2**30
    assert requested(cluster, GPU) == 0
    storage = [
        quantity(claim["spec"]["resources"]["requests"]["storage"]) * (workload.replicas or 0)
        for workload in cluster.workloads
        for claim in workload.object["spec"].get("volumeClaimTemplates", ())
    ]
    assert sum(storage) <= 20 * 2**30


def test_on_gpus_learners_and_generators_have_one_each(tmp_path: Path) -> None:
    cluster = rendered("gpu")
    assert cluster.of_role("learner").replicas == 8
    for workload, container in each_container(cluster):
        requests, limits = container["resources"]["requests"], container["resources"]["limits"]
        expected = 1 if workload.role in ("learner", "generator") else 0
        assert (requests.get(GPU, 0), limits.get(GPU, 0)) == (expected, expected), workload
        tolerated = [one["key"] for one in workload.pod.get("tolerations", ())]
        assert tolerated == [GPU] * expected, workload


def test_on_gpus_the_settings_are_those_of_the_paper(tmp_path: Path) -> None:
    settings = settings_of(rendered("gpu"), "grapevine", tmp_path)
    node = settings.node
    assert (len(settings.node_names()), node.model) == (8, "Qwen/Qwen2.5-0.5B-Instruct")
    assert (node.mix.own, node.mix.swarm, node.group_size, node.tasks) == (4, 4, 8, "paper9")
    assert (node.update.objective, node.update.correction, node.update.kl) == ("grpo", "none", 0)
    assert (node.update.clip_low, node.update.clip_high) == (0.2, 0.28)


@every_overlay
def test_objects_are_small_enough_to_be_applied(overlay: str) -> None:
    """`kubectl apply` keeps what it applied in an annotation, which has a limit of 256 KiB."""
    for one in rendered(overlay).objects:
        assert len(json.dumps(one)) < 240 * 2**10, full_name(one)


@pytest.mark.parametrize(("text", "value"), [("500m", 0.5), ("2Gi", 2**31), ("1", 1), (3, 3), ("64Mi", 2**26)])
def test_quantities(text: str | int, value: float) -> None:
    assert quantity(text) == value
