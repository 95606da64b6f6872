"""The manifests hold together: each object is one that its API takes, and whatever one names, another is."""

from __future__ import annotations

import functools
import json
import re
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from tests.manifests import (
    CLUSTER_WIDE,
    NAMESPACES,
    ROOT,
    Cluster,
    Object,
    Workload,
    each_container,
    every_overlay,
    full_name,
    rendered,
)

KUBERNETES = "1.34"
# Kinds of operators, which Kubernetes has no schema for.
FOREIGN = {
    "ScaledObject": "keda.sh/v1alpha1",
    "TriggerAuthentication": "keda.sh/v1alpha1",
    "PodMonitor": "monitoring.coreos.com/v1",
    "PrometheusRule": "monitoring.coreos.com/v1",
}
# In which part of the Dockerfile a role is at home; learners generate too.
IMAGES = {
    "learner": {"grapevine/learner"},
    "generator": {"grapevine/generator", "grapevine/learner"},
    "verifier": {"grapevine/verifier"},
    "exporter": {"grapevine/verifier"},
    "control": {"grapevine/control"},
    "redis": {"valkey/valkey"},
}


# --- each object by itself ---


@every_overlay
def test_every_object_is_one_that_its_api_takes(overlay: str) -> None:
    assert_valid(rendered(overlay))


def assert_valid(cluster: Cluster) -> None:
    """Every object has fields that its kind knows, and values of their types."""
    for one in cluster.objects:
        if one["kind"] in FOREIGN:
            assert one["apiVersion"] == FOREIGN[one["kind"]], full_name(one)
        else:
            fault = _fault(json.dumps(one))
            assert fault is None, f"{full_name(one)}: {fault}"


@functools.cache
def _fault(text: str) -> str | None:
    """What is wrong with an object, as JSON; overlays have many in common."""
    import kubernetes_validate  # not in every environment that collects these tests

    try:
        kubernetes_validate.validate(json.loads(text), KUBERNETES, strict=True)
    except kubernetes_validate.ValidationError as error:
        return f"{'.'.join(map(str, error.path))}: {error.message}"
    return None


@every_overlay
def test_every_object_has_a_name_of_its_own_in_a_namespace_that_exists(overlay: str) -> None:
    cluster = rendered(overlay)
    times = Counter(full_name(one) for one in cluster.objects)
    assert not [name for name, number in times.items() if number > 1]
    namespaces = {one["metadata"]["name"]: one for one in cluster.all("Namespace")}
    assert sorted(namespaces) == sorted(NAMESPACES[overlay])
    for one in cluster.objects:
        namespace = one["metadata"].get("namespace")
        assert (namespace is None) if one["kind"] in CLUSTER_WIDE else (namespace in namespaces), full_name(one)
    for one in namespaces.values():
        assert one["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted", full_name(one)


@every_overlay
def test_every_object_says_what_it_is_part_of(overlay: str) -> None:
    for one in rendered(overlay).objects:
        assert one["metadata"].get("labels", {}).get("app.kubernetes.io/part-of") == "grapevine", full_name(one)


# --- selectors ---


@every_overlay
def test_workloads_own_their_pods_and_no_others(overlay: str) -> None:
    cluster = rendered(overlay)
    for workload in cluster.workloads:
        selector = workload.object["spec"]["selector"]
        assert cluster.selected(workload.namespace, selector) == [workload], f"{workload} selects others or not itself"
        assert workload.object["metadata"]["labels"].items() <= workload.labels.items(), workload
        for spread in workload.pod.get("topologySpreadConstraints", ()):
            assert cluster.selected(workload.namespace, spread["labelSelector"]) == [workload], f"{workload}: {spread}"


@every_overlay
def test_services_and_disruption_budgets_mean_the_workload_of_their_name(overlay: str) -> None:
    cluster = rendered(overlay)
    for one in cluster.all("Service", "PodDisruptionBudget"):
        selector = one["spec"]["selector"]
        selector = {"matchLabels": selector} if one["kind"] == "Service" else selector
        (workload,) = cluster.selected(one["metadata"]["namespace"], selector)
        assert workload.name == one["metadata"]["name"], f"{full_name(one)} means {workload}"


@every_overlay
def test_network_policies_name_pods_and_ports_that_exist(overlay: str) -> None:
    cluster = rendered(overlay)
    for policy in cluster.all("NetworkPolicy"):
        namespace, spec = policy["metadata"]["namespace"], policy["spec"]
        means = cluster.selected(namespace, spec["podSelector"])
        assert means, full_name(policy)
        for way, peers in (("ingress", "from"), ("egress", "to")):
            for rule in spec.get(way, ()):
                others = [workload for peer in rule[peers] for workload in _own_pods(cluster, namespace, peer, policy)]
                for port in rule["ports"]:
                    for workload in means if way == "ingress" else others:
                        known = isinstance(port["port"], int) or port["port"] in workload.ports
                        assert known, f"{full_name(policy)}: {workload} has no port {port['port']}"


def _own_pods(cluster: Cluster, namespace: str, peer: Object, policy: Object) -> list[Workload]:
    """Those of this namespace that a peer means: some, unless it means another namespace or addresses outside."""
    if set(peer) != {"podSelector"}:
        assert peer.get("namespaceSelector") or peer.get("ipBlock"), f"{full_name(policy)}: {peer} means everyone"
        return []
    found = cluster.selected(namespace, peer["podSelector"])
    assert found, f"{full_name(policy)}: {peer} means nobody"
    return found


@every_overlay
def test_the_monitor_finds_every_port_with_metrics(overlay: str) -> None:
    cluster = rendered(overlay)
    assert bool(cluster.all("PodMonitor")) == (overlay == "gpu")
    for monitor in cluster.all("PodMonitor"):
        assert set(monitor["spec"]) == {"selector", "podMetricsEndpoints"}, "no namespaceSelector: its own namespace"
        selected = cluster.selected(monitor["metadata"]["namespace"], monitor["spec"]["selector"])
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        assert endpoint["path"] == "/metrics"
        assert endpoint["port"] == "metrics"
        found = [workload for workload in selected if endpoint["port"] in workload.ports]
        assert found == [workload for workload in cluster.workloads if workload.role != "redis"]


# --- references ---


@every_overlay
def test_volumes_exist_and_are_mounted_once(overlay: str) -> None:
    for workload, container in each_container(rendered(overlay)):
        there = [volume["name"] for volume in workload.pod["volumes"]] + workload.claims
        assert len(set(there)) == len(there), workload
        mounted = [mount["name"] for mount in container["volumeMounts"]]
        assert sorted(mounted) == sorted(there), f"{workload} has volumes {there} and mounts {mounted}"
        places = [mount["mountPath"] for mount in container["volumeMounts"]]
        assert len(set(places)) == len(places), workload


@every_overlay
def test_config_maps_and_secrets_are_there_with_their_keys_and_none_is_left_over(overlay: str) -> None:
    cluster = rendered(overlay)
    used = set()
    for user, namespace, kind, name, keys in _wanted(cluster):
        data = cluster.data(kind, namespace, name, user)
        assert set(keys) <= set(data), f"{user} wants {keys} of {kind} {name}, which has {list(data)}"
        assert re.search(r"-[a-z0-9]{10}$", name), f"{kind} {name}: without a hash pods would not notice a change"
        used.add((kind, namespace, name))
    for one in cluster.all("ConfigMap", "Secret"):
        metadata = one["metadata"]
        if metadata.get("labels", {}).get("grafana_dashboard") == "1":
            continue  # found by its label
        assert (one["kind"], metadata["namespace"], metadata["name"]) in used, f"nobody uses {full_name(one)}"


def _wanted(cluster: Cluster) -> Iterator[tuple[object, str, str, str, list[str]]]:
    """Who wants a ConfigMap or a Secret: namespace, kind, name and keys of it."""
    for workload, container in each_container(cluster):
        namespace = workload.namespace
        for volume in workload.pod["volumes"]:
            for kind, where, name in (("ConfigMap", "configMap", "name"), ("Secret", "secret", "secretName")):
                if where in volume:
                    source = volume[where]
                    yield workload, namespace, kind, source[name], [item["key"] for item in source.get("items", ())]
        for source in container.get("envFrom", ()):
            yield workload, namespace, "ConfigMap", source["configMapRef"]["name"], []
        for variable in container.get("env", ()):
            for kind, where in (("ConfigMap", "configMapKeyRef"), ("Secret", "secretKeyRef")):
                if where in variable.get("valueFrom", {}):
                    reference = variable["valueFrom"][where]
                    yield workload, namespace, kind, reference["name"], [reference["key"]]
    for one in cluster.all("TriggerAuthentication"):
        for reference in one["spec"]["secretTargetRef"]:
            yield full_name(one), one["metadata"]["namespace"], "Secret", reference["name"], [reference["key"]]


@every_overlay
def test_accounts_priorities_and_services_that_workloads_name_exist(overlay: str) -> None:
    cluster = rendered(overlay)
    for workload in cluster.workloads:
        cluster.get("ServiceAccount", workload.namespace, workload.pod["serviceAccountName"], workload)
        cluster.get("PriorityClass", None, workload.pod["priorityClassName"], workload)
        if workload.kind == "StatefulSet":
            service = cluster.get("Service", workload.namespace, workload.object["spec"]["serviceName"], workload)
            assert cluster.selected(workload.namespace, {"matchLabels": service["spec"]["selector"]}) == [workload]
    accounts = [(workload.namespace, workload.pod["serviceAccountName"]) for workload in cluster.workloads]
    assert len(set(accounts)) == len(accounts), "each role has an account of its own"
    assert {one["metadata"]["name"] for one in cluster.all("ServiceAccount")} == {name for _, name in accounts}


@every_overlay
def test_ports_that_services_and_probes_name_exist(overlay: str) -> None:
    cluster = rendered(overlay)
    for service in cluster.all("Service"):
        for workload in cluster.selected(service["metadata"]["namespace"], {"matchLabels": service["spec"]["selector"]}):
            for port in service["spec"]["ports"]:
                target = workload.ports.get(port["targetPort"])
                assert target is not None, f"{full_name(service)}: {workload} has no port {port['targetPort']}"
                # Who reaches a pod by its name instead of the Service's address finds the same.
                assert target == port["port"], full_name(service)
    for workload, container in each_container(cluster):
        names = [port["name"] for port in container["ports"]]
        assert len(set(names)) == len(names), workload
        for probe in _probes(container):
            assert set(probe) & {"httpGet", "exec"}, f"{workload}: {probe}"
            if "httpGet" in probe:
                assert probe["httpGet"]["port"] in names, f"{workload}: {probe}"


def _probes(container: Mapping[str, Any]) -> list[Object]:
    return [container[name] for name in ("startupProbe", "livenessProbe", "readinessProbe") if name in container]


@every_overlay
def test_variables_are_defined_before_they_are_used(overlay: str) -> None:
    """Kubernetes leaves `$(NAME)` as it stands where NAME comes later or never."""
    cluster = rendered(overlay)
    for workload, container in each_container(cluster):
        names = [one["name"] for one in container.get("env", ())]
        assert len(set(names)) == len(names), workload
        for pod_name in workload.pod_names():
            found = [*cluster.environment(workload, container, pod_name).values()]
            found += [*cluster.arguments(workload, container, pod_name), *container.get("command", ())]
            assert not [text for text in found if "$(" in text], workload


# --- images ---


@every_overlay
def test_every_role_has_its_image_in_the_version_that_this_is(overlay: str) -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    dockerfile = (ROOT / "Dockerfile").read_text()
    for workload, container in each_container(rendered(overlay)):
        name, _, tag = container["image"].rpartition(":")
        assert name in IMAGES[workload.role], f"{workload}: {container['image']}"
        assert tag and tag != "latest", f"{workload}: {container['image']}"
        assert container.get("imagePullPolicy") is None, "IfNotPresent, since the tag is not `latest`"
        if name.startswith("grapevine/"):
            assert tag in (version, f"{version}-cuda"), f"{workload}: {container['image']}"
            assert ("nvidia.com/gpu" in container["resources"]["limits"]) == tag.endswith("-cuda"), workload
            assert re.search(rf"^FROM \S+ AS {name.removeprefix('grapevine/')}$", dockerfile, re.MULTILINE), name
            assert "command" not in container, f"{workload}: the image's entry point is grapevine"
