"""What the pods are told: commands that parse, settings that load, an account each, and where the policies are."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import typer
import yaml

from common.policies import served_address
from common.server import ServerRefused, connect
from common.settings import Settings, load
from grapevine.cli import app
from tests.manifests import (
    K8S,
    NAMESPACES,
    OVERLAYS,
    POD_IP,
    Cluster,
    Workload,
    each_container,
    every_overlay,
    rendered,
    settings_of,
)

RUN_FILES = sorted((K8S / "overlays").rglob("run.yaml"))


@pytest.fixture(autouse=True)
def nobody_elses_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("GRAPEVINE_", "REDIS_")):
            monkeypatch.delenv(name)


def in_the_pod(
    monkeypatch: pytest.MonkeyPatch, folder: Path, cluster: Cluster, workload: Workload, pod_name: str
) -> Settings:
    """The settings as a pod loads them, from its file and its variables; these stay set."""
    (container,) = workload.containers
    words = cluster.arguments(workload, container, pod_name)
    file = folder / "run.yaml"
    file.write_text(cluster.file(workload, container, words[words.index("--settings") + 1]))
    for name, value in cluster.environment(workload, container, pod_name).items():
        if name.startswith(("GRAPEVINE_", "REDIS_")):
            monkeypatch.setenv(name, value)
    return load(file)


def ours(overlay: str) -> Iterator[Workload]:
    """Workloads of our own code."""
    return (workload for workload in rendered(overlay).workloads if workload.role != "redis")


# --- commands, settings ---


@every_overlay
def test_every_command_is_one(overlay: str) -> None:
    group = typer.main.get_command(app)
    cluster = rendered(overlay)
    for workload, container in each_container(cluster):
        if workload.role == "redis":
            continue
        for pod_name in workload.pod_names():
            words = cluster.arguments(workload, container, pod_name)
            context = group.commands[words[0]].make_context(words[0], words[1:])  # type: ignore[attr-defined]
            given = context.params
            assert given["name"] == pod_name, workload
            assert given["port"] == str(workload.ports["metrics"]) == "9100", workload
            assert given["bind"] == "0.0.0.0", workload
            if workload.role == "control":
                assert words[0] == "control", workload
            else:
                assert (words[0], given["role"]) == ("worker", workload.role), workload
                # A pod that ends is started again, and its policy is still wanted by evaluations.
                assert given["stay"] == (workload.role == "learner"), workload


@every_overlay
def test_every_pod_loads_its_settings(overlay: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = rendered(overlay)
    for workload in ours(overlay):
        pod_name = workload.pod_names()[0]
        with monkeypatch.context() as patch:
            settings = in_the_pod(patch, tmp_path, cluster, workload, pod_name)
        (container,) = workload.containers
        variables = cluster.environment(workload, container, pod_name)
        assert settings.redis_url == variables["REDIS_URL"], workload
        assert settings.folder == Path("/srv/grapevine/runs"), workload
        assert variables["GRAPEVINE_LOG"] == "json", workload
        # Policies come from learners and from control workers; verifiers and the exporter have no business with them.
        fetches = workload.role in ("learner", "generator", "control")
        assert (settings.policies_token is not None) == fetches, workload
        assert settings.serves_policies == (workload.role in ("learner", "control")), workload
        if workload.role == "control":
            assert served_address(settings, pod_name) == f"http://{POD_IP}:{workload.ports['policies']}"


@every_overlay
def test_every_pod_has_the_account_of_its_role(overlay: str) -> None:
    cluster = rendered(overlay)
    for workload in ours(overlay):
        (container,) = workload.containers
        variables = cluster.environment(workload, container, workload.pod_names()[0])
        url = urlsplit(variables["REDIS_URL"])
        site = workload.namespace.removeprefix("grapevine").removeprefix("-")
        assert url.username == (f"{site}-{workload.role}" if site else workload.role), workload
        assert url.password == cluster.generated("Secret", workload.namespace, "passwords")[workload.role], workload
        references = [one["valueFrom"].get("secretKeyRef") for one in container["env"] if "valueFrom" in one]
        known = {reference["key"] for reference in references if reference}
        assert known <= {workload.role, "policies"}, f"{workload} knows the passwords of others"


@every_overlay
def test_the_learners_are_the_nodes_of_the_settings(overlay: str, tmp_path: Path) -> None:
    cluster = rendered(overlay)
    for namespace in NAMESPACES[overlay]:
        settings = settings_of(cluster, namespace, tmp_path)
        assert cluster.of_role("learner", namespace).pod_names() == settings.node_names(), namespace


@every_overlay
def test_generators_find_the_policies_of_every_node(overlay: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = rendered(overlay)
    for namespace in NAMESPACES[overlay]:
        learner = cluster.of_role("learner", namespace)
        service = cluster.get("Service", namespace, learner.object["spec"]["serviceName"])
        assert service["spec"]["clusterIP"] == "None", "else pods would have no names"
        assert service["spec"]["publishNotReadyAddresses"] is True
        for pod_name in learner.pod_names():
            with monkeypatch.context() as patch:
                address = urlsplit(served_address(in_the_pod(patch, tmp_path, cluster, learner, pod_name), pod_name) or "")
            assert address.hostname == f"{pod_name}.{service['metadata']['name']}", learner
            assert address.port in [port["port"] for port in service["spec"]["ports"]], learner


def test_all_sites_of_a_run_agree_on_it(tmp_path: Path) -> None:
    cluster = rendered("multi-site")
    found = [settings_of(cluster, namespace, tmp_path) for namespace in NAMESPACES["multi-site"]]
    assert len({(one.run, one.seed, one.shards, one.swarm) for one in found}) == 1
    assert len({one.site for one in found}) == len(found)
    names = [name for one in found for name in one.node_names()]
    assert len(set(names)) == len(names)
    assert all(name.startswith(f"{one.site}-") for one in found for name in one.node_names())


@pytest.mark.parametrize("path", RUN_FILES, ids=lambda path: str(path.parent.relative_to(K8S)))
def test_the_files_of_settings_hold_no_secret_and_load_by_themselves(path: Path) -> None:
    settings = load(path)
    assert settings.redis_url is None and settings.policies_token is None and settings.policies_url is None


# --- published passwords ---


@every_overlay
def test_published_passwords_are_taken_on_a_laptop_only(
    overlay: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = rendered(overlay)
    for workload in ours(overlay):
        with monkeypatch.context() as patch:
            settings = in_the_pod(patch, tmp_path, cluster, workload, workload.pod_names()[0])
            assert settings.redis_url is not None
            if overlay == "kind":
                assert connect(settings.redis_url).connection_pool.connection_kwargs["password"].startswith("published-")
            else:
                with pytest.raises(ServerRefused, match="grapevine cluster init"):
                    connect(settings.redis_url)


def test_only_the_laptops_overlay_mentions_published_passwords() -> None:
    variable = "GRAPEVINE_PUBLISHED_PASSWORDS"
    found = [path.relative_to(K8S) for path in K8S.rglob("*") if path.is_file() and variable in path.read_text()]
    assert found == [Path("overlays/kind/kustomization.yaml")]


def test_every_overlay_is_tested() -> None:
    folders = [path.parent for path in (K8S / "overlays").rglob("kustomization.yaml")]
    tops = {folder.name for folder in folders if folder.parent == K8S / "overlays"}
    assert tops == set(OVERLAYS)
    for folder in folders:
        found = yaml.safe_load((folder / "kustomization.yaml").read_text())
        assert found["kind"] == "Kustomization", folder
