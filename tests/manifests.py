"""The manifests as a cluster gets them: rendered by kustomize, with what a pod would find in its variables and files."""

from __future__ import annotations

import base64
import functools
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from common.settings import Settings, load

ROOT = Path(__file__).parents[1]
K8S = ROOT / "k8s"
NAMESPACES = {
    "kind": ("grapevine",),
    "gpu": ("grapevine",),
    "multi-site": ("grapevine-east", "grapevine-west"),
}
OVERLAYS = tuple(NAMESPACES)
every_overlay = pytest.mark.parametrize("overlay", OVERLAYS)

WORKLOADS = ("Deployment", "StatefulSet", "DaemonSet", "Job", "CronJob", "Pod", "ReplicaSet")
CLUSTER_WIDE = ("Namespace", "PriorityClass")
POD_IP = "10.244.0.7"
UNITS = {"": 1, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
COMPONENT = "app.kubernetes.io/component"

Object = dict[str, Any]


def full_name(one: Object) -> str:
    """How messages call an object."""
    metadata = one["metadata"]
    return f"{one['kind']} {metadata.get('namespace', '')}/{metadata['name']}"


def quantity(text: str | int) -> float:
    """What a quantity such as `500m` or `2Gi` comes to."""
    match = re.fullmatch(r"([\d.]+)([A-Za-z]*)", str(text))
    assert match is not None, f"{text} is no quantity"
    return float(match.group(1)) * UNITS[match.group(2)]


def matches(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Whether a label selector takes these labels; an empty one takes all."""
    assert set(selector) <= {"matchLabels", "matchExpressions"}, selector
    if any(labels.get(key) != value for key, value in selector.get("matchLabels", {}).items()):
        return False
    for one in selector.get("matchExpressions", ()):
        value, values = labels.get(one["key"]), one.get("values", ())
        fits = {
            "In": value in values,
            "NotIn": value not in values,
            "Exists": value is not None,
            "DoesNotExist": value is None,
        }
        if not fits[one["operator"]]:
            return False
    return True


def expanded(text: str, variables: Mapping[str, str], where: str) -> str:
    """`$(NAME)` as a kubelet replaces it. A name without a value, which it would leave as it stands, is an error here."""

    def value(match: re.Match[str]) -> str:
        if match.group(0) == "$$":
            return "$"
        assert match.group(1) in variables, f"{where}: {match.group(0)} has no value there"
        return variables[match.group(1)]

    return re.sub(r"\$\$|\$\(([\w.-]+)\)", value, text)


@dataclass(frozen=True, repr=False)
class Workload:
    """A Deployment or StatefulSet, seen by its pods."""

    object: Object

    @property
    def name(self) -> str:
        return str(self.object["metadata"]["name"])

    @property
    def namespace(self) -> str:
        return str(self.object["metadata"]["namespace"])

    @property
    def kind(self) -> str:
        return str(self.object["kind"])

    @property
    def replicas(self) -> int | None:
        return self.object["spec"].get("replicas")  # type: ignore[no-any-return]

    @property
    def labels(self) -> dict[str, str]:
        """Of its pods."""
        return dict(self.object["spec"]["template"]["metadata"]["labels"])

    @property
    def role(self) -> str:
        """learner, generator, verifier, control, exporter or redis."""
        return self.labels[COMPONENT]

    @property
    def pod(self) -> Object:
        """The pods' spec."""
        return self.object["spec"]["template"]["spec"]  # type: ignore[no-any-return]

    @property
    def containers(self) -> list[Object]:
        return [*self.pod.get("initContainers", ()), *self.pod["containers"]]

    @property
    def claims(self) -> list[str]:
        """Volumes that each pod has of its own."""
        return [claim["metadata"]["name"] for claim in self.object["spec"].get("volumeClaimTemplates", ())]

    @property
    def ports(self) -> dict[str, int]:
        """Of its pods, by name."""
        return {one["name"]: one["containerPort"] for container in self.containers for one in container.get("ports", ())}

    def pod_names(self) -> list[str]:
        """Of a StatefulSet all, of a Deployment one such as it could have."""
        if self.kind == "StatefulSet":
            return [f"{self.name}-{ordinal}" for ordinal in range(self.replicas or 0)]
        return [f"{self.name}-7c9d6bdf5c-x2k4z"]

    def __repr__(self) -> str:
        return full_name(self.object)


class Cluster:
    """All objects of a rendered folder."""

    def __init__(self, objects: list[Object]) -> None:
        self.objects = objects
        found = [Workload(one) for one in objects if one["kind"] in WORKLOADS]
        self.workloads = sorted(found, key=str)

    def all(self, *kinds: str) -> list[Object]:
        return [one for one in self.objects if one["kind"] in kinds]

    def find(self, kind: str, namespace: str | None, name: str) -> Object | None:
        for one in self.all(kind):
            if one["metadata"]["name"] == name and one["metadata"].get("namespace") == namespace:
                return one
        return None

    def get(self, kind: str, namespace: str | None, name: str, wanted_by: object = "a test") -> Object:
        found = self.find(kind, namespace, name)
        assert found is not None, f"{wanted_by} wants the {kind} {name}, which is not in {namespace}"
        return found

    def selected(self, namespace: str, selector: Mapping[str, Any]) -> list[Workload]:
        """Workloads in a namespace whose pods a selector takes."""
        return [one for one in self.workloads if one.namespace == namespace and matches(selector, one.labels)]

    def of_role(self, role: str, namespace: str | None = None) -> Workload:
        """The only workload of a role, in a namespace where there are several."""
        (found,) = [one for one in self.workloads if one.role == role and namespace in (None, one.namespace)]
        return found

    def data(self, kind: str, namespace: str, name: str, wanted_by: object = "a test") -> dict[str, str]:
        """What a ConfigMap or a Secret holds, as text."""
        one = self.get(kind, namespace, name, wanted_by)
        if kind == "ConfigMap":
            assert "binaryData" not in one, full_name(one)
            return dict(one.get("data") or {})
        return {key: base64.b64decode(value).decode() for key, value in (one.get("data") or {}).items()}

    def generated(self, kind: str, namespace: str, name: str) -> dict[str, str]:
        """What the ConfigMap or Secret holds that kustomize made under this name, a prefix before and a hash after it."""
        pattern = re.compile(rf"(\w+-)?{re.escape(name)}-[a-z0-9]{{10}}")
        (found,) = [
            one["metadata"]["name"]
            for one in self.all(kind)
            if one["metadata"]["namespace"] == namespace and pattern.fullmatch(one["metadata"]["name"])
        ]
        return self.data(kind, namespace, found)

    def environment(self, workload: Workload, container: Object, pod_name: str) -> dict[str, str]:
        """A container's variables, put together in a kubelet's order."""
        where = f"{workload} {container['name']}"
        found: dict[str, str] = {}
        for source in container.get("envFrom", ()):
            assert set(source) == {"configMapRef"}, f"{where}: envFrom {source}"
            found |= self.data("ConfigMap", workload.namespace, source["configMapRef"]["name"], where)
        services = self._service_variables(workload)
        for one in container.get("env", ()):
            known = services | found
            found[one["name"]] = (
                self._value_from(one["valueFrom"], workload, pod_name, where)
                if "valueFrom" in one
                else expanded(one.get("value", ""), known, f"{where}, variable {one['name']}")
            )
        return services | found

    def _value_from(self, source: Object, workload: Workload, pod_name: str, where: str) -> str:
        ((way, reference),) = source.items()
        if way == "fieldRef":
            fields = {"metadata.name": pod_name, "metadata.namespace": workload.namespace, "status.podIP": POD_IP}
            assert reference["fieldPath"] in fields, f"{where}: {reference}"
            return fields[reference["fieldPath"]]
        kind = {"secretKeyRef": "Secret", "configMapKeyRef": "ConfigMap"}[way]
        data = self.data(kind, workload.namespace, reference["name"], where)
        assert reference["key"] in data, f"{where}: {kind} {reference['name']} has no key {reference['key']}"
        return data[reference["key"]]

    def _service_variables(self, workload: Workload) -> dict[str, str]:
        """What Kubernetes tells pods of the Services beside them; of headless ones nothing."""
        if not workload.pod.get("enableServiceLinks", True):
            return {}
        found = {}
        for service in self.all("Service"):
            if service["metadata"]["namespace"] == workload.namespace and service["spec"].get("clusterIP") != "None":
                name = service["metadata"]["name"].upper().replace("-", "_")
                found[f"{name}_SERVICE_HOST"] = self.service_address(service)
                found[f"{name}_SERVICE_PORT"] = str(service["spec"]["ports"][0]["port"])
        return found

    def service_address(self, service: Object) -> str:
        """An address such as a cluster would give."""
        return f"10.96.0.{10 + self.all('Service').index(service)}"

    def arguments(self, workload: Workload, container: Object, pod_name: str) -> list[str]:
        """The words that the image's entry point gets."""
        variables = self.environment(workload, container, pod_name)
        return [expanded(word, variables, f"{workload}, args") for word in container.get("args", ())]

    def file(self, workload: Workload, container: Object, path: str) -> str:
        """A file that a ConfigMap or a Secret puts into a container."""
        for mount in sorted(container["volumeMounts"], key=lambda one: -len(one["mountPath"])):
            rest = path.removeprefix(mount["mountPath"] + "/")
            if rest == path:
                continue
            (volume,) = [one for one in workload.pod["volumes"] if one["name"] == mount["name"]]
            if "configMap" in volume:
                source, data = volume["configMap"], self.data("ConfigMap", workload.namespace, volume["configMap"]["name"])
            else:
                source, data = volume["secret"], self.data("Secret", workload.namespace, volume["secret"]["secretName"])
            if "items" in source:
                data = {one["path"]: data[one["key"]] for one in source["items"]}
            assert rest in data, f"{workload} finds no {path} in {source}"
            return data[rest]
        raise AssertionError(f"{workload} mounts nothing at {path}")


def rendered_folder(folder: Path) -> Cluster:
    """A folder as `kubectl apply -k` would apply it; kustomize has nothing to complain of."""
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl is not installed")
    done = subprocess.run([kubectl, "kustomize", str(folder)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, f"{folder}: {done.stderr}"
    assert done.stderr == "", f"{folder}: {done.stderr}"
    return Cluster([one for one in yaml.load_all(done.stdout, yaml.CSafeLoader) if one is not None])


@functools.cache
def rendered(overlay: str) -> Cluster:
    """An overlay by its name."""
    return rendered_folder(K8S / "overlays" / overlay)


def settings_of(cluster: Cluster, namespace: str, folder: Path) -> Settings:
    """The settings of a namespace's run as the ConfigMap has them."""
    file = folder / f"{namespace}.yaml"
    file.write_text(cluster.generated("ConfigMap", namespace, "run")["run.yaml"])
    return load(file)


def each_container(cluster: Cluster) -> Iterator[tuple[Workload, Object]]:
    """Every container with its workload."""
    for workload in cluster.workloads:
        for container in workload.containers:
            yield workload, container


def strings(value: Any) -> Iterator[str]:
    """All texts in an object, however deep."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from strings(one)
    elif isinstance(value, list):
        for one in value:
            yield from strings(one)
