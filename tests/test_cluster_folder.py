"""A cluster of one's own: the folder that `grapevine cluster init` makes, its passwords, and the component `tls` on top."""

from __future__ import annotations

import functools
import hashlib
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from common.server import connect
from common.settings import SettingsError, load
from grapevine.cli import app
from grapevine.cluster.accounts import ROLES, Scope, acl_file
from tests.manifests import K8S, Cluster, Object, rendered, rendered_folder, settings_of
from tests.test_manifests import assert_valid
from tests.test_manifests_network import expected, possible

OVERLAYS = ("kind", "gpu", "multi-site/east")
WITH_SERVER = ("kind", "gpu")
PUBLISHED = dict(line.split("=", 1) for line in (K8S / "base/published/passwords.env").read_text().splitlines())
every_overlay = pytest.mark.parametrize("overlay", OVERLAYS)


def grapevine(*words: str | Path) -> str:
    """What a command prints. Raises what it raises."""
    done = CliRunner().invoke(app, ["cluster", *map(str, words)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the folders are that all tests share."""
    return tmp_path_factory.mktemp("clusters")


def made(overlay: str, place: Path) -> Path:
    """A cluster's folder as `grapevine cluster init` left it: only to be read."""
    folder = place / overlay.replace("/", " ")
    if not folder.exists():
        grapevine("init", K8S / "overlays" / overlay, folder)
    return folder


def copied(overlay: str, place: Path, tmp_path: Path) -> Path:
    """The same, to be changed: beside it, since it says where the overlay is from there."""
    return Path(shutil.copytree(made(overlay, place), place / tmp_path.name))


@functools.cache
def cluster_of(folder: Path) -> Cluster:
    """A folder that does not change, rendered."""
    return rendered_folder(folder)


def passwords_of(folder: Path) -> dict[str, str]:
    return dict(line.split("=", 1) for line in (folder / "passwords.env").read_text().splitlines())


def namespace_of(cluster: Cluster) -> str:
    (one,) = cluster.all("Namespace")
    return str(one["metadata"]["name"])


def accepted(folder: Path, cluster: Cluster) -> dict[str, tuple[set[str], str]]:
    """Of each account the digests of the passwords that its server takes, and its other rules.

    A server elsewhere takes what its keeper was told.
    """
    if any(workload.role == "redis" for workload in cluster.workloads):
        lines = cluster.generated("Secret", namespace_of(cluster), "redis-users")["users.acl"].splitlines()
    else:
        lines = grapevine("accounts", folder).splitlines()
    found = {}
    for line in lines:
        _, name, *rules = line.split(" ")
        digests = {rule.removeprefix("#") for rule in rules if rule.startswith("#")}
        found[name] = digests, " ".join(rule for rule in rules if not rule.startswith("#"))
    return found


def digest(password: str) -> str:
    return hashlib.sha256(password.encode()).hexdigest()


def without_passwords(cluster: Cluster) -> list[Object]:
    """All objects, names without the hashes of what they hold, and Secrets without what they hold."""
    names = {one["metadata"]["name"] for one in cluster.all("ConfigMap", "Secret")}
    shorter = {name: re.sub(r"-[a-z0-9]{10}$", "", name) for name in names}

    def renamed(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: renamed(one) for key, one in value.items()}
        if isinstance(value, list):
            return [renamed(one) for one in value]
        return shorter.get(value, value) if isinstance(value, str) else value

    found = [renamed(one) for one in cluster.objects]
    for one in found:
        if one["kind"] == "Secret":
            one["data"] = sorted(one["data"])
    return sorted(found, key=lambda one: (one["kind"], str(one["metadata"].get("namespace")), one["metadata"]["name"]))


# --- what is published ---


def test_the_published_accounts_have_the_published_passwords() -> None:
    assert set(PUBLISHED) == {"admin", *ROLES, "policies"}
    assert all(password.startswith("published-") for password in PUBLISHED.values())
    text = (K8S / "components/redis/users.acl").read_text()
    assert text == acl_file(Scope("swarm"), PUBLISHED), "grapevine.cluster.accounts has changed: write users.acl anew"


@pytest.mark.parametrize("overlay", WITH_SERVER)
def test_the_servers_accounts_are_those_of_the_run(overlay: str, tmp_path: Path) -> None:
    cluster = rendered(overlay)
    settings = settings_of(cluster, "grapevine", tmp_path)
    assert settings.site == "local"
    found = cluster.generated("Secret", "grapevine", "redis-users")["users.acl"]
    assert found == acl_file(Scope(settings.run), cluster.generated("Secret", "grapevine", "passwords"))


# --- grapevine cluster init ---


@every_overlay
def test_a_folder_of_ones_own_is_the_overlay_with_other_passwords(overlay: str, place: Path) -> None:
    folder = made(overlay, place)
    own, base = cluster_of(folder), cluster_of(K8S / "overlays" / overlay)
    assert without_passwords(own) == without_passwords(base)
    found = own.generated("Secret", namespace_of(own), "passwords")
    assert found == passwords_of(folder)
    assert set(found) == set(PUBLISHED)
    assert len(set(found.values())) == len(found)
    for password in found.values():
        assert re.fullmatch(r"[\w-]{20,}", password), "random, and good in an address as it stands"
        assert not password.startswith("published-")


@every_overlay
def test_its_pods_use_its_passwords_and_its_server_takes_them(
    overlay: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GRAPEVINE_PUBLISHED_PASSWORDS", raising=False)
    folder = made(overlay, place)
    cluster, passwords = cluster_of(folder), passwords_of(folder)
    server = accepted(folder, cluster)
    for workload in cluster.workloads:
        if workload.role == "redis":
            continue
        (container,) = workload.containers
        variables = cluster.environment(workload, container, workload.pod_names()[0])
        given = connect(variables["REDIS_URL"]).connection_pool.connection_kwargs
        assert given["password"] == passwords[workload.role], workload
        assert server[given["username"]][0] == {digest(given["password"])}, workload


@every_overlay
def test_settings_that_are_changed_reach_the_pods(overlay: str, place: Path, tmp_path: Path) -> None:
    before, folder = cluster_of(made(overlay, place)), copied(overlay, place, tmp_path)
    text, times = re.subn(r"rounds: \d+", "rounds: 77", (folder / "run.yaml").read_text(), count=1)
    assert times == 1
    (folder / "run.yaml").write_text(text)
    after = rendered_folder(folder)
    assert settings_of(after, namespace_of(after), tmp_path).node.rounds == 77
    for old, new in zip(before.workloads, after.workloads, strict=True):
        if new.role != "redis":
            (container,) = new.containers
            assert after.file(new, container, "/etc/grapevine/run.yaml") == text, new
        # Pods are replaced when the name of what they mount is another.
        assert (old.pod == new.pod) == (new.role == "redis"), new


@every_overlay
def test_passwords_are_for_their_owner_alone(overlay: str, place: Path, tmp_path: Path) -> None:
    folder = copied(overlay, place, tmp_path)
    grapevine("passwords", folder)
    kept = {path.name for path in folder.iterdir()} - {"kustomization.yaml", "run.yaml", ".gitignore"}
    assert "passwords.env" in kept
    assert {path.name: oct(path.stat().st_mode & 0o777) for path in folder.iterdir() if path.name in kept} == dict.fromkeys(
        kept, "0o600"
    )
    assert kept <= set((folder / ".gitignore").read_text().split())
    for path in folder.iterdir():
        if path.name not in kept:
            assert not [one for one in passwords_of(folder).values() if one in path.read_text()], path


def test_a_folder_with_something_in_it_is_left_alone(place: Path) -> None:
    folder = made("kind", place)
    before = {path: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(SettingsError, match="is not empty") as caught:
        grapevine("init", K8S / "overlays/kind", folder)
    assert "\n" not in str(caught.value)
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize("overlay", ["base", "components/redis", "overlays/multi-site", "overlays/none"])
def test_what_is_no_overlay_is_refused(overlay: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="is no overlay") as caught:
        grapevine("init", K8S / overlay, tmp_path / "mine")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "mine").exists()


# --- grapevine cluster passwords, accounts ---


@every_overlay
def test_old_passwords_stay_good_until_the_next_time(overlay: str, place: Path, tmp_path: Path) -> None:
    folder = copied(overlay, place, tmp_path)
    rules = {name: rest for name, (_, rest) in accepted(folder, cluster_of(made(overlay, place))).items()}
    sets = [passwords_of(folder)]
    for _ in range(2):
        grapevine("passwords", folder)
        sets.append(passwords_of(folder))
        cluster = rendered_folder(folder)
        found = accepted(folder, cluster)
        assert {name: rest for name, (_, rest) in found.items()} == rules
        for name, (digests, _) in found.items():
            role = name.removeprefix("east-") if overlay == "multi-site/east" else name
            if role in ("default", "health"):
                assert not digests
                continue
            assert digests == {digest(one[role]) for one in sets[-2:]}, name
        assert cluster.generated("Secret", namespace_of(cluster), "passwords") == sets[-1]
    assert len({one["learner"] for one in sets}) == len(sets)


def test_the_keeper_of_a_server_elsewhere_gets_the_sites_accounts_and_no_more(place: Path) -> None:
    folder = made("multi-site/east", place)
    found = accepted(folder, cluster_of(folder))
    assert set(found) == {f"east-{role}" for role in ROLES}
    settings = load(folder / "run.yaml")
    for name, (digests, rules) in found.items():
        assert digests == {digest(passwords_of(folder)[name.removeprefix("east-")])}
        assert "+@all" not in rules.partition("(")[0], name
        patterns = [word for word in rules.replace("(", "").split() if word.startswith(("~", "%R~"))]
        allowed = (f"gv:{{{settings.run}", "rq:")
        assert all(re.sub("^(~|%R~)", "", word).startswith(allowed) for word in patterns), name


@pytest.mark.parametrize("command", ["passwords", "accounts"])
def test_a_folder_without_a_cluster_is_refused(command: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError) as caught:
        grapevine(command, tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


# --- the component `tls` ---

CERTIFICATE = {"tls.crt": "certificate", "tls.key": "key", "ca.crt": "authority"}


def with_tls(overlay: str, place: Path) -> Cluster:
    """An overlay with TLS on top, and the Secret that is one's own to make."""
    folder = place / f"{overlay} with tls"
    folder.mkdir(exist_ok=True)

    def relative(path: str) -> str:
        return os.path.relpath((K8S / path).resolve(), folder.resolve())

    kustomization: Mapping[str, Any] = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": "grapevine",
        "resources": [relative(f"overlays/{overlay}")],
        "components": [relative("components/tls")],
        "secretGenerator": [{"name": "redis-tls", "literals": [f"{key}={text}" for key, text in CERTIFICATE.items()]}],
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    return cluster_of(folder)


@pytest.mark.parametrize("overlay", WITH_SERVER)
def test_with_tls_every_client_asks_for_it_and_knows_the_authority(
    overlay: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRAPEVINE_PUBLISHED_PASSWORDS", "allowed")
    cluster = with_tls(overlay, place)
    assert_valid(cluster)
    for workload in cluster.workloads:
        if workload.role == "redis":
            continue
        (container,) = workload.containers
        variables = cluster.environment(workload, container, workload.pod_names()[0])
        password = PUBLISHED[workload.role]
        assert variables["REDIS_URL"] == (
            f"rediss://{workload.role}:{password}@redis:6379/0?ssl_ca_certs=/etc/redis-tls/ca.crt"
        ), workload
        given = connect(variables["REDIS_URL"]).connection_pool.connection_kwargs
        assert cluster.file(workload, container, given["ssl_ca_certs"]) == "authority", workload
        assert not [name for name in variables if name.startswith("REDIS_SERVICE")], workload
        (volume,) = [one for one in workload.pod["volumes"] if one["name"] == "redis-tls"]
        assert [item["key"] for item in volume["secret"]["items"]] == ["ca.crt"], f"{workload} has no use for the key"


@pytest.mark.parametrize("overlay", WITH_SERVER)
def test_with_tls_the_server_has_its_certificate_and_is_else_the_same(overlay: str, place: Path) -> None:
    cluster = with_tls(overlay, place)
    server = cluster.of_role("redis")
    (container,) = server.containers
    facts = _facts(cluster.file(server, container, "/etc/valkey/valkey.conf"))
    for name, key in (("tls-cert-file", "tls.crt"), ("tls-key-file", "tls.key"), ("tls-ca-cert-file", "ca.crt")):
        assert cluster.file(server, container, facts[name]) == CERTIFICATE[key]
    assert (facts["port"], facts["tls-port"], facts["tls-auth-clients"]) == ("0", str(server.ports["redis"]), "no")
    before = rendered(overlay)
    (as_before,) = before.of_role("redis").containers
    without = _facts(before.file(before.of_role("redis"), as_before, "/etc/valkey/valkey.conf"))
    assert {name: text for name, text in facts.items() if "tls" not in name} == without | {"port": "0"}
    for name in ("startupProbe", "livenessProbe", "readinessProbe"):
        own, old = container[name]["exec"]["command"], as_before[name]["exec"]["command"]
        assert own == [*old[:-1], old[-1].replace("valkey-cli ", "valkey-cli --tls --insecure ")], name


def _facts(text: str) -> dict[str, str]:
    lines = [line.split(" ", 1) for line in text.splitlines() if line and not line.startswith("#")]
    return {name: value for name, value in lines}


@pytest.mark.parametrize("overlay", WITH_SERVER)
def test_with_tls_verifiers_may_look_up_names_besides(overlay: str, place: Path) -> None:
    more = {("grapevine/verifier", "dns", "53"), ("grapevine/verifier", "dns", "53/UDP")}
    assert possible(with_tls(overlay, place)) == expected(overlay) | more
