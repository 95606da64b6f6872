"""A run on two machines, here two folders and two loopback addresses: invite, join, train on one another's groups, part."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis
import yaml
from rich.console import Console

from common.directory import NameTaken
from common.server import PasswordRefused, ServerRefused, connect
from common.settings import SettingsError
from grapevine.joining.guests import invite, revoke, split_url
from grapevine.joining.join import join
from learners.journal import read

GRAPEVINE = [sys.executable, "-m", "grapevine"]
PATIENCE = 90.0
HERE, THERE = "127.0.0.1", "127.0.0.2"


def environment() -> dict[str, str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("GRAPEVINE_") and key != "REDIS_URL"}
    return {**clean, "OMP_NUM_THREADS": "1"}


class Machine:
    """A folder to work in, and the commands given there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        log = (self.folder / f"out-{len(self.processes)}").open("w")
        process = subprocess.Popen(
            [*GRAPEVINE, *arguments], cwd=self.folder, env=environment(), stdout=log, stderr=log, text=True
        )
        self.processes.append(process)
        return process

    def call(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*GRAPEVINE, *arguments], cwd=self.folder, env=environment(), capture_output=True, text=True, timeout=PATIENCE
        )

    def invite(self) -> str:
        """The URL that `grapevine invite` prints, without the seconds that a process of its own takes to start."""
        (url,) = invite("duo", self.folder / "runs", None, THERE).urls
        return url

    def refusal(self, url: str, node: str = "laptop", *flags: str, fresh: bool = False) -> str:
        """The sentence with which `grapevine join` ends here."""
        settings = [f"folder={self.folder / 'runs'}", *flags]
        with pytest.raises((SettingsError, ServerRefused, NameTaken)) as caught:
            join(url, node, None, settings, None, None, fresh, Console(file=io.StringIO()))
        return str(caught.value)

    def words(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("out-*")))

    def rounds(self, node: str) -> list[dict[str, Any]]:
        return read(self.folder / "runs" / "duo" / "nodes" / node / "rounds.jsonl")

    def end(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()


def until(condition: Callable[[], Any], what: str, *machines: Machine) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"no {what}: " + "\n".join(machine.words() for machine in machines)
        time.sleep(0.02)


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[tuple[Machine, Machine]]:
    host, guest = Machine(tmp_path / "host"), Machine(tmp_path / "guest")
    yield host, guest
    guest.end()
    host.end()


def config(machine: Machine, model: Path, rounds: int, **more: Any) -> str:
    node = {
        "model": str(model), "rounds": rounds, "group_size": 4, "sampling": {"max_new_tokens": 8},
        "mix": {"own": 2, "swarm": 2, "tags": ["failed", "hard", "mixed", "easy"]},
        "reward": {"accuracy": 1.0, "length": 1.0}, "evaluate": {"questions": 0},
    }  # fmt: skip
    tree = {"run": "duo", "nodes": 1, "node": node, "generators": {"replicas": 1}, "verifiers": {"replicas": 1}, **more}
    (machine.folder / "duo.yaml").write_text(yaml.safe_dump(tree))
    return "duo.yaml"


def held(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """Its generators, brought to a stand."""
    children = psutil.Process(process.pid).children()
    stopped = [child for child in children if "worker generator" in " ".join(child.cmdline())]
    for child in stopped:
        child.suspend()
    return stopped


def test_two_machines_train_on_one_another(machines: tuple[Machine, Machine], tiny_model: Path) -> None:
    host, guest = machines
    up = host.start("up", config(host, tiny_model, 30), "--listen", THERE)
    until(lambda: host.rounds("node-0") or up.poll() is not None, "first round of the host", host)
    # The host stays where it is while everything that can go wrong is tried.
    hosts = held(up)

    with pytest.raises(SettingsError, match="can be reached from this machine only"):
        invite("duo", host.folder / "runs", None, None)
    done = host.call("invite", "--address", THERE)
    assert done.returncode == 0, done.stderr
    words = shlex.split(done.stdout)
    assert words[:2] == ["grapevine", "join"]
    assert "password" in done.stderr
    assert "nothing is encrypted" in done.stderr
    url = words[2]
    assert url.startswith("redis://guest-duo:")
    assert re.search(rf"@{THERE}:\d+/0\?run=duo$", url)
    assert host.invite() == url, "asking again gives the same one"
    insider = connect(split_url(url)[0])
    assert insider.ping()
    assert revoke("duo", host.folder / "runs", None) == ("duo", True)
    for _ in range(2):  # the connection is cut, and no other takes its place
        with pytest.raises((redis.ConnectionError, PasswordRefused)):
            insider.ping()
    assert "does not take this invitation" in guest.refusal(url)
    revoked, url = url, host.invite()
    assert url != revoked

    model = f"node.model={tiny_model}"
    assert "--set node.model=" in guest.refusal(url), "a folder of the host means nothing here"
    assert "has a node node-0 on its host" in guest.refusal(url, "node-0", model)
    assert "did you mean duo?" in guest.refusal(url.replace("run=duo", "run=dou"))
    assert "does not take this invitation" in guest.refusal(url.replace("guest-duo:", "guest-duo:x"))
    assert "setting shards=2 cannot be had" in guest.refusal(url, "laptop", model, "shards=2")
    assert "is no invitation" in guest.refusal(url.partition("?")[0])
    assert not (guest.folder / "runs").exists(), "what is refused leaves nothing behind"
    assert_a_guest_is_kept_in_bounds(url)

    command = ["join", url, "--node", "laptop", "--set", model, "--set", "node.rounds=30"]
    joined = guest.start(*command)
    until(lambda: len(guest.rounds("laptop")) >= 2 or joined.poll() is not None, "rounds of the guest", guest)
    still = held(joined)
    assert "knows a node laptop already" in host.refusal(url, "laptop", model, f"folder={host.folder / 'other'}")
    assert "is in use by another process" in guest.refusal(url, "tablet", model)
    for child in still:
        child.resume()
    joined.send_signal(signal.SIGINT)
    assert joined.wait(PATIENCE) == 130, guest.words()
    reached = guest.rounds("laptop")
    assert len(reached) < 30
    assert "knows a node laptop already" in guest.refusal(url, "laptop", model, fresh=True)

    joined = guest.start(*command)
    until(lambda: len(guest.rounds("laptop")) > len(reached) or joined.poll() is not None, "more rounds", guest)
    assert guest.rounds("laptop")[: len(reached)] == reached
    guests = held(joined)
    for child in hosts:
        child.resume()
    # The host has nothing left to do while the guest is in the midst of it: the server must wait.
    until(lambda: "the server stays up for laptop, which is still training" in host.words(), "word of the host", host)
    assert up.poll() is None
    for child in guests:
        child.resume()
    assert joined.wait(PATIENCE) == 0, guest.words()
    assert up.wait(PATIENCE) == 0, host.words()

    for machine, node in ((host, "node-0"), (guest, "laptop")):
        assert [line["round"] for line in machine.rounds(node)] == list(range(1, 31))
    assert any(id.startswith("laptop/") for line in host.rounds("node-0") for id in line["swarm_ids"])
    assert any(id.startswith("node-0/") for line in guest.rounds("laptop") for id in line["swarm_ids"])
    ledger = json.loads((host.folder / "runs" / "duo" / "ledger.json").read_text())
    assert not [name for name in ledger["counts"] if name.startswith("refused:")]
    assert ledger["books"]["node-0"]["lost"] == 0
    assert not (host.folder / "runs" / "duo" / "nodes" / "laptop").exists()
    assert "does not answer" in guest.refusal(url, "laptop", model), "the run is over and its server gone"
    with pytest.raises(SettingsError, match="is not up"):
        invite("duo", host.folder / "runs", None, THERE)


def assert_a_guest_is_kept_in_bounds(url: str) -> None:
    server_url, _ = split_url(url)
    client = connect(server_url)
    forbidden: list[tuple[Any, ...]] = [
        ("HSET", "gv:{other}:identities", "a", "b"), ("GET", "gv:{duo-2}:invitation"), ("SET", "rq:job", "x"),
        ("XRANGE", "gv:{duo2:0}:raw:local", "-", "+"),
        ("FLUSHALL",), ("FLUSHDB",), ("CONFIG", "GET", "*"), ("KEYS", "*"), ("SCAN", "0"),
        ("ACL", "LIST"), ("CLIENT", "LIST"), ("CLIENT", "KILL", "TYPE", "normal"), ("SHUTDOWN",),
        ("EVAL", "return 1", "0"), ("FUNCTION", "FLUSH"), ("SCRIPT", "FLUSH"), ("REPLICAOF", "127.0.0.1", "1"), ("MONITOR",),
        ("SUBSCRIBE", "x"), ("PUBLISH", "x", "y"), ("SAVE",), ("SWAPDB", "0", "1"), ("RANDOMKEY",),
    ]  # fmt: skip
    for command in forbidden:
        with pytest.raises(redis.exceptions.NoPermissionError):
            client.execute_command(*command)
    # Nor does a script give what the account has not.
    digest = client.script_load("return redis.call('SET', 'gv:{other}:x', 'y')")
    with pytest.raises(redis.ResponseError, match="No permissions to access a key"):
        client.evalsha(digest, 0)
    client.close()
