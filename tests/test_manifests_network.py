"""Who reaches whom: the network policies, evaluated for every two pods, for others in the cluster and for those outside."""

from __future__ import annotations

import functools
import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from redis.connection import parse_url

from tests.manifests import NAMESPACES, Cluster, every_overlay, full_name, matches, rendered

# A connection is tried on each of these, whether anyone listens there or not.
PORTS = {("TCP", port) for port in (22, 53, 80, 443, 6379, 6380, 6443, 8080, 9100, 9101, 26379)} | {
    ("UDP", 53),
    ("UDP", 9100),
}
WORKERS = ("learner", "generator", "verifier", "control")
FETCHING = ("generator", "control")
SERVING = ("learner", "control")


@dataclass(frozen=True)
class Place:
    """Where a connection begins or ends. `role` is what the tests call it."""

    role: str
    address: str
    namespace: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict, hash=False)
    ports: Mapping[str, int] = field(default_factory=dict, hash=False)

    @property
    def name(self) -> str:
        """The same role in another namespace is another place."""
        return f"{self.namespace}/{self.role}" if (self.namespace or "").startswith("grapevine") else self.role


ELSEWHERE = (
    Place("dns", "10.244.9.1", "kube-system", {"k8s-app": "kube-dns"}),
    Place("system", "10.244.9.2", "kube-system", {"k8s-app": "metrics-server"}),
    Place("prometheus", "10.244.9.3", "monitoring", {"app.kubernetes.io/name": "prometheus"}),
    Place("keda", "10.244.9.4", "keda", {"app": "keda-operator"}),
    # Labels are anyone's to choose; a namespace is not.
    Place("stranger", "10.244.9.5", "default", {"k8s-app": "kube-dns", "grapevine/redis-client": "true"}),
    Place("api", "10.96.0.1"),
    Place("cloud", "169.254.169.254"),
    Place("house", "192.168.1.10"),
    Place("internet", "203.0.113.7"),
)


def places(cluster: Cluster) -> list[Place]:
    """A pod of each workload, one without any label in each of our namespaces, and everyone else."""
    found = [
        Place(workload.role, f"10.244.1.{number}", workload.namespace, workload.labels, workload.ports)
        for number, workload in enumerate(cluster.workloads)
    ]
    found += [Place("unlabelled", "10.244.2.1", one["metadata"]["name"]) for one in cluster.all("Namespace")]
    return [*found, *ELSEWHERE]


def admits(cluster: Cluster, way: str, subject: Place, other: Place, target: Place, protocol: str, port: int) -> bool:
    """Whether the policies of `subject` let a connection to `target`'s port go this way (Ingress or Egress)."""
    mine = [
        policy["spec"]
        for policy in cluster.all("NetworkPolicy")
        if policy["metadata"]["namespace"] == subject.namespace and matches(policy["spec"]["podSelector"], subject.labels)
    ]
    mine = [spec for spec in mine if way in spec["policyTypes"]]
    rules = [rule for spec in mine for rule in spec.get(way.lower(), ())]
    return not mine or any(
        any(_means(peer, subject, other, cluster) for peer in rule["from" if way == "Ingress" else "to"])
        and any(_opens(one, target, protocol, port) for one in rule["ports"])
        for rule in rules
    )


def _means(peer: Mapping[str, Any], subject: Place, other: Place, cluster: Cluster) -> bool:
    if "ipBlock" in peer:
        address, block = ipaddress.ip_address(other.address), peer["ipBlock"]
        inside = address in ipaddress.ip_network(block["cidr"])
        return inside and not any(address in ipaddress.ip_network(cidr) for cidr in block.get("except", ()))
    if other.namespace is None:
        return False
    if "namespaceSelector" in peer:
        namespace = {"kubernetes.io/metadata.name": other.namespace}
        own = cluster.find("Namespace", None, other.namespace)
        namespace |= own["metadata"].get("labels", {}) if own else {}
        if not matches(peer["namespaceSelector"], namespace):
            return False
    elif other.namespace != subject.namespace:
        return False
    return matches(peer.get("podSelector", {}), other.labels)


def _opens(rule: Mapping[str, Any], target: Place, protocol: str, port: int) -> bool:
    assert set(rule) == {"protocol", "port"}, rule
    number = target.ports.get(rule["port"]) if isinstance(rule["port"], str) else rule["port"]
    return (rule["protocol"], number) == (protocol, port)


@functools.cache
def connections(overlay: str) -> set[tuple[str, str, str]]:
    """All that are possible and begin or end at a pod of ours: from, to, `port` or `port/UDP`."""
    return possible(rendered(overlay))


def possible(cluster: Cluster) -> set[tuple[str, str, str]]:
    """The same of any cluster."""
    found = set()
    everyone = places(cluster)
    ours = [one for one in everyone if cluster.find("Namespace", None, one.namespace or "")]
    for source in everyone:
        for target in everyone:
            if source not in ours and target not in ours:
                continue
            for protocol, port in PORTS:
                leaves = admits(cluster, "Egress", source, target, target, protocol, port)
                if leaves and admits(cluster, "Ingress", target, source, target, protocol, port):
                    found.add((source.name, target.name, str(port) if protocol == "TCP" else f"{port}/{protocol}"))
    return found


def expected(overlay: str) -> set[tuple[str, str, str]]:
    """What has to be possible, and therefore all that may be."""
    found = set()
    for ns in NAMESPACES[overlay]:
        roles = [*WORKERS, "exporter"] if overlay == "gpu" else WORKERS
        found |= {(f"{ns}/{one}", f"{ns}/{other}", "9101") for one in FETCHING for other in SERVING}
        if overlay == "multi-site":
            # The server is somewhere else; until an overlay of one's own says where, it may be anywhere.
            found |= {(f"{ns}/{one}", place.name, port) for one in roles for place in ELSEWHERE for port in ("6379", "6380")}
        else:
            found |= {(f"{ns}/{one}", f"{ns}/redis", "6379") for one in roles}
        asking = [one for one in roles if one != "verifier" or overlay == "multi-site"]
        found |= {(f"{ns}/{one}", "dns", port) for one in asking for port in ("53", "53/UDP")}
        if overlay == "gpu":
            found |= {("prometheus", f"{ns}/{one}", "9100") for one in roles}
            found |= {("keda", f"{ns}/redis", "6379")}
            found |= {(f"{ns}/{one}", "internet", "443") for one in ("learner", "generator", "control")}
    return found


@every_overlay
def test_who_reaches_whom_is_what_has_to_be_and_nothing_else(overlay: str) -> None:
    found, wanted = connections(overlay), expected(overlay)
    assert not found - wanted, f"should not be possible: {sorted(found - wanted)}"
    assert not wanted - found, f"has to be possible: {sorted(wanted - found)}"


@pytest.mark.parametrize("overlay", ["kind", "gpu"])
def test_verifiers_reach_the_server_and_nothing_else(overlay: str) -> None:
    """Not even a name server: what a verifier reads was written by strangers."""
    found = {(target, port) for source, target, port in connections(overlay) if source == "grapevine/verifier"}
    assert found == {("grapevine/redis", "6379")}


@every_overlay
def test_nothing_is_open_that_no_policy_names(overlay: str) -> None:
    cluster = rendered(overlay)
    for namespace in NAMESPACES[overlay]:
        policy = cluster.get("NetworkPolicy", namespace, _prefixed(namespace, "default-deny"))
        assert policy["spec"] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}, full_name(policy)
        assert not [one for one in connections(overlay) if f"{namespace}/unlabelled" in one]
    for policy in cluster.all("NetworkPolicy"):
        spec = policy["spec"]
        ways = {way for way in ("Ingress", "Egress") if way.lower() in spec}
        assert ways == set(spec["policyTypes"]) or not ways, full_name(policy)
        for rule in [*spec.get("ingress", ()), *spec.get("egress", ())]:
            assert rule.get("ports") and (rule.get("from") or rule.get("to")), f"{full_name(policy)} opens all"


def _prefixed(namespace: str, name: str) -> str:
    site = namespace.removeprefix("grapevine").removeprefix("-")
    return f"{site}-{name}" if site else name


def test_sites_reach_one_another_through_the_server_only() -> None:
    between = [
        (source, target)
        for source, target, _ in connections("multi-site")
        if {source.split("/")[0], target.split("/")[0]} == set(NAMESPACES["multi-site"])
    ]
    assert not between


@every_overlay
def test_everyone_reaches_the_server_that_its_address_names(overlay: str) -> None:
    cluster = rendered(overlay)
    for workload in cluster.workloads:
        if workload.role == "redis":
            continue
        (container,) = workload.containers
        url = cluster.environment(workload, container, workload.pod_names()[0])["REDIS_URL"]
        host, port = parse_url(url)["host"], str(parse_url(url)["port"])
        name = f"{workload.namespace}/{workload.role}"
        if overlay == "multi-site":
            assert "." in host, f"{workload}: {host} is a name within the cluster"
            assert (name, "internet", port) in connections(overlay), f"{workload}: {url}"
            assert (name, "dns", "53/UDP") in connections(overlay), f"{workload}: {host}"
            continue
        service = cluster.get("Service", workload.namespace, "redis", workload)
        by_name = (name, "dns", "53/UDP") in connections(overlay)
        assert host == ("redis" if by_name else cluster.service_address(service)), f"{workload}: {url}"
        assert port in [str(one["port"]) for one in service["spec"]["ports"]], f"{workload}: {url}"
        assert (name, f"{workload.namespace}/redis", port) in connections(overlay), f"{workload}: {url}"


@every_overlay
def test_a_label_on_the_pod_makes_a_client_of_the_server(overlay: str) -> None:
    for workload in rendered(overlay).workloads:
        assert (workload.labels.get("grapevine/redis-client") == "true") == (workload.role != "redis"), workload
