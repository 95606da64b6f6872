"""Invitations without a server: what they say, what a machine makes of them, and which contradictions it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st

from common.addresses import is_loopback, is_wildcard, listen_address, outward_addresses
from common.ledger import Ledger
from common.run import open_run
from common.settings import Settings, SettingsError, load
from grapevine.joining import guests
from grapevine.joining.guests import guest_account, invitation_url, split_url
from grapevine.joining.invitation import FORMAT, Facts, facts_of, publish, read_facts
from grapevine.joining.join import settings_of
from grapevine.running.supervisor import Supervisor
from grapevine.server import EmbeddedServer


def facts(tmp_path: Path, *flags: str) -> Facts:
    return facts_of(load(None, [f"folder={tmp_path}", "run=demo", *flags]))


def test_what_is_published_names_no_path_and_no_code(tmp_path: Path) -> None:
    (tmp_path / "questions.jsonl").write_text('{"question": "1 + 1?", "answer": "2"}\n')
    own = [f"own_tasks.sums.file={tmp_path / 'questions.jsonl'}", f"node.model={tmp_path / 'model'}"]
    text = msgspec.json.encode(facts(tmp_path, *own, "policies_url=/somewhere", "redis_url=redis://:secret@h/0"))
    for word in (str(tmp_path), "somewhere", "secret", "questions.jsonl"):
        assert word.encode() not in text
    assert facts(tmp_path, *own).own_tasks == ["sums"]


@pytest.mark.parametrize(
    ("model", "published"),
    [
        ("starter", "starter"),
        ("Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-0.5B"),
        ("/models/mine", None),
        ("./mine", None),
        ("~/m", None),
    ],
)
def test_a_folder_of_the_host_is_no_models_name(tmp_path: Path, model: str, published: str | None) -> None:
    found = facts(tmp_path, f"node.model={model}")
    assert found.model == published
    if published is None:
        with pytest.raises(SettingsError, match=r"--set node\.model="):
            settings_of(found, {}, "laptop", None)
    assert settings_of(found, {"node": {"model": "my/own"}}, "laptop", None).for_node("laptop").model == "my/own"


def test_a_machine_takes_the_runs_facts_and_adds_its_own(tmp_path: Path) -> None:
    run = facts(tmp_path, "seed=7", "shards=3", "node.rounds=12", "node.mix.own=9", "swarm.quota=5", "swarm.max_age=77")
    tree = {
        "node": {"mix": {"swarm": 1}},
        "generators": {"replicas": 4},
        "nodes": {"laptop": {"rounds": 99}, "node-0": None},
    }
    settings = settings_of(run, tree, "laptop", None)
    assert (settings.run, settings.seed, settings.shards, settings.site) == ("demo", 7, 3, "laptop")
    assert (settings.swarm.quota, settings.swarm.max_age) == (5, 77)
    assert settings.node_names() == ["laptop"]
    node = settings.for_node("laptop")
    assert (node.rounds, node.mix.own, node.mix.swarm, node.model) == (99, 9, 1, "starter")
    assert (settings.generators.replicas, settings.verifiers.replicas) == (4, 1)


def test_the_hosts_own_file_serves_a_guest_too(tmp_path: Path) -> None:
    """What only a host has is left out: its nodes, its server, its control jobs."""
    tree = {"run": "demo", "nodes": 4, "listen": "0.0.0.0", "control": {"replicas": 2}, "redis_url": "redis://elsewhere/0"}
    settings = settings_of(facts(tmp_path, "nodes=4"), tree, "laptop", None)
    assert (settings.control.replicas, settings.redis_url, settings.node_names()) == (0, None, ["laptop"])


@pytest.mark.parametrize(
    ("tree", "names"),
    [
        ({"run": "other"}, "setting run=other"),
        ({"seed": 1}, "setting seed=1"),
        ({"shards": 2}, "setting shards=2"),
        ({"site": "lab"}, "setting site=lab"),
        ({"swarm": {"quota": 9}}, "setting swarm.quota=9"),
        ({"swarm": {"max_age": 9}}, "setting swarm.max_age=9"),
        ({"node": {"round": 1}}, "did you mean node.rounds?"),
        ({"node": 3}, "setting node"),
    ],
)
def test_contradictions_are_refused(tmp_path: Path, tree: dict[str, Any], names: str) -> None:
    with pytest.raises(SettingsError) as caught:
        settings_of(facts(tmp_path), tree, "laptop", None)
    assert names in str(caught.value)


def test_a_name_that_cannot_be_one(tmp_path: Path) -> None:
    for name in ("Laptop", "a b", "../x", "", "eval-x"):
        with pytest.raises(SettingsError):
            settings_of(facts(tmp_path), {}, name, None)


def test_tasks_that_stay_on_the_host_are_named(tmp_path: Path) -> None:
    (tmp_path / "questions.jsonl").write_text('{"question": "1 + 1?", "answer": "2"}\n')
    own = f"own_tasks.sums.file={tmp_path / 'questions.jsonl'}"
    run = msgspec.structs.replace(
        facts(tmp_path, own, "node.tasks=[sums]", "node.evaluate.questions=0"), own_tasks=["sums-of-the-host"]
    )
    run = msgspec.structs.replace(run, node={**run.node, "tasks": ["sums-of-the-host"]})
    with pytest.raises(SettingsError, match="code does not travel"):
        settings_of(run, {}, "laptop", None)
    assert settings_of(run, {"node": {"tasks": "starter"}}, "laptop", None).for_node("laptop").tasks == "starter"


@pytest.fixture
def ledger(server: EmbeddedServer, tmp_path: Path) -> Ledger:
    return open_run(Settings(run="demo", redis_url=server.url, folder=tmp_path))[0]


def test_facts_come_back_as_they_were_published(ledger: Ledger, tmp_path: Path) -> None:
    ledger.redis.delete(ledger.keys.invitation())
    assert read_facts(ledger) is None
    run = facts(tmp_path)
    publish(ledger, run)
    assert read_facts(ledger) == run
    assert facts(tmp_path).begun == run.begun, "the same beginning, however often it is started"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"schema": 99}, "install the same release on both"),
        ({"schema": 0}, "install the same release on both"),
        ({"shards": 0}, "cannot be read"),
        ({"begun": "../../x"}, "cannot be read"),
        ({"nodes": "abc"}, "cannot be read"),
        ({"more": 1}, "cannot be read"),
        ({"version": "1\x1b[2J"}, "cannot be read: it holds control characters"),
        ({"own_tasks": ["a\nb"]}, "cannot be read: it holds control characters"),
        ({"a\x1b[2Jb": 1}, r"cannot be read: .*a\\x1b"),
        ({"node": {"rounds": 1, "unheard_of": 2}}, "not those of this release"),
    ],
)
def test_facts_that_cannot_be_used_are_refused(ledger: Ledger, tmp_path: Path, change: dict[str, Any], says: str) -> None:
    tree = {**msgspec.to_builtins(facts(tmp_path)), **change}
    ledger.redis.set(ledger.keys.invitation(), msgspec.json.encode({"format": FORMAT, "facts": tree}))
    with pytest.raises(SettingsError, match=says):
        settings_of(read_facts(ledger) or facts(tmp_path), {}, "laptop", None)


@pytest.mark.parametrize("data", [b"", b"\xff", b"[]", b'{"format": 99, "facts": {"x": 1}}', b'{"format": 1, "facts": 3}'])
def test_noise_in_place_of_facts(ledger: Ledger, data: bytes) -> None:
    ledger.redis.set(ledger.keys.invitation(), data)
    with pytest.raises(SettingsError):
        read_facts(ledger)


def test_an_account_outlives_the_server(tmp_path: Path) -> None:
    """A server that starts again knows its guests: their account is in its configuration, the password is not."""
    server = EmbeddedServer(tmp_path / "server")
    user, password, _ = guest_account("demo", tmp_path / "server" / "guest.json")
    assert guest_account("demo", tmp_path / "server" / "guest.json")[:2] == (user, password)
    assert (tmp_path / "server" / "guest.json").stat().st_mode & 0o777 == 0o600
    server.start()
    try:
        url, run = split_url(invitation_url(server.url, user, password, None, "demo"))
        ledger, _ = open_run(Settings(run=run, redis_url=url, folder=tmp_path))
        publish(ledger, facts(tmp_path))
        assert read_facts(ledger) is not None
    finally:
        server.stop()
    assert password not in (tmp_path / "server" / "server.conf").read_text()


def test_a_revoked_account_does_not_come_back_with_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = EmbeddedServer(tmp_path / "server")
    server.start()
    settings = Settings(run="demo", redis_url=server.url, folder=tmp_path)
    monkeypatch.setattr(guests, "_hosted", lambda *_: (settings, True))
    monkeypatch.setattr(guests, "_account_file", lambda _: tmp_path / "server" / "guest.json")
    user, _, rules = guest_account("demo", tmp_path / "server" / "guest.json")
    try:
        guests.admit(open_run(settings)[0].redis, user, rules, own_server=True)
        assert guests.revoke("demo", tmp_path, None) == ("demo", True)
        assert not (tmp_path / "server" / "guest.json").exists()
        assert guests.revoke("demo", tmp_path, None) == ("demo", False)
        # Killed between the two steps: what is left of the account ends with the server.
        guest_account("demo", tmp_path / "server" / "guest.json")
        guests.admit(open_run(settings)[0].redis, user, rules, own_server=True)
        away = redis.ConnectionError("killed here")
        execute = redis.Redis.execute_command
        monkeypatch.setattr(
            redis.Redis, "execute_command",
            lambda self, *args, **more: (_ for _ in ()).throw(away) if "DELUSER" in args else execute(self, *args, **more),
        )  # fmt: skip
        with pytest.raises(redis.ConnectionError, match="killed here"):
            guests.revoke("demo", tmp_path, None)
        server.stop()
        server.start()
        assert user not in (tmp_path / "server" / "server.conf").read_text()
    finally:
        server.stop()


@given(
    st.sampled_from(
        ["10.0.0.5", "10.0.0.5:6400", "gpu-1.example.org", "gpu-1.example.org:6400", "::1", "[2001:db8::1]:6400", None]
    ),
    st.from_regex(r"[a-z0-9]([a-z0-9.-]{0,38}[a-z0-9])?", fullmatch=True),
    st.text(alphabet="abcXYZ019-_", min_size=1),
)
def test_a_url_comes_apart_as_it_was_put_together(address: str | None, run: str, password: str) -> None:
    url = invitation_url("rediss://:secret@host:7000/2?ssl_ca_certs=/ca.pem", "guest-x", password, address, run)
    server, name = split_url(f" '{url}'\n")
    assert name == run
    assert "secret" not in url
    assert server.startswith(f"rediss://guest-x:{password}@")
    assert server.endswith("/2?ssl_ca_certs=%2Fca.pem")
    port = "6400" if address and address.endswith(":6400") else "7000"
    assert server.partition("@")[2].partition("/")[0].endswith(f":{port}")


@pytest.mark.parametrize(
    "text", ["", "demo", "http://h/0?run=demo", "redis://h:1/0", "redis:///0?run=a", "redis://h:99999/0?run=a"]
)
def test_what_is_no_invitation(text: str) -> None:
    with pytest.raises(SettingsError, match="no invitation"):
        split_url(text)


def test_addresses() -> None:
    assert listen_address("0.0.0.0") == ("0.0.0.0", None)
    assert listen_address("10.0.0.5:6400") == ("10.0.0.5", 6400)
    assert listen_address("::") == ("::", None)
    assert listen_address("[::]:6400") == ("::", 6400)
    for text in ("", "here", "10.0.0.5:0", "10.0.0.5:65536", "10.0.0.5:x", "1.2.3", "[::"):
        with pytest.raises(ValueError, match="an address of this machine"):
            listen_address(text)
    assert not [address for address in outward_addresses() if is_loopback(address) or is_wildcard(address)]


def test_an_address_that_is_not_ours_or_a_port_in_use(tmp_path: Path, server: EmbeddedServer) -> None:
    with pytest.raises(SettingsError, match=r"this machine has no address 203\.0\.113\.1"):
        EmbeddedServer(tmp_path / "a", "203.0.113.1")
    port = server.url.rpartition(":")[2].partition("/")[0]
    with pytest.raises(SettingsError, match=f"port {port} of 127.0.0.1 is in use"):
        EmbeddedServer(tmp_path / "b", f"127.0.0.1:{port}")


def test_workers_of_sites_on_one_server_have_names_of_their_own(tmp_path: Path) -> None:
    here, there = (Supervisor(Settings(folder=tmp_path, site=site, nodes=1), tmp_path) for site in ("local", "laptop"))
    assert {"generator-0", "verifier-0"} <= {child.name for child in here.children}
    assert {"laptop-generator-0", "laptop-verifier-0"} <= {child.name for child in there.children}
