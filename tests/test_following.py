"""How a generator keeps at its target's policy: announced on a real server, read from real files, while it answers."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from common import metrics
from common.directory import Directory, Policy
from common.ledger import Ledger
from common.messages import Version
from common.policies import sha256
from common.run import open_run
from common.settings import Settings
from generators.engines.base import answer_all
from generators.engines.paced import PacedEngine
from generators.following import MOST_FETCHES, Following
from grapevine.server import EmbeddedServer
from tests.engines import KINDS, opener
from tests.test_engine import request


class Announcer:
    """Says on a server which policy `node-0` has."""

    def __init__(self, server: EmbeddedServer, run: str, model: Path) -> None:
        settings = Settings.model_validate({"run": run, "redis_url": server.url})
        self.ledger: Ledger
        self.directory: Directory
        self.ledger, self.directory = open_run(settings)
        self._model = str(model)

    def __call__(self, file: Path, step: int, checksum: str | None = None) -> Version:
        version = Version(1, step)
        policy = Policy(version, str(file), checksum or sha256(file), self._model)
        self.ledger.redis.set(self.ledger.keys.policy("node-0"), self.directory.announcement(policy))
        return version


def refused(reason: str) -> float:
    value: Any = metrics.policies_refused.labels(reason)._value.get()
    return float(value)


@pytest.mark.parametrize("kind", KINDS)
def test_a_bad_policy_leaves_the_old_one_serving_and_is_counted(
    kind: str, server: EmbeddedServer, tiny_model: Path, tmp_path: Path
) -> None:
    announce = Announcer(server, f"bad-{kind}", tiny_model)
    weights = load_file(tiny_model / "model.safetensors")
    save_file({name: tensor + 0.01 for name, tensor in weights.items()}, tmp_path / "good.st")
    save_file({name: torch.zeros(3) for name in weights}, tmp_path / "shape.st")
    whole = (tmp_path / "good.st").read_bytes()
    (tmp_path / "half.st").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "changed.st").write_bytes(whole[:-4] + b"\0\0\0\1")
    with opener(kind) as open_engine:
        engine = open_engine(tiny_model)
        following = Following(engine, announce.directory, tmp_path / "cache")
        assert following.follow("node-0") is None, "nothing is announced yet"
        good = announce(tmp_path / "good.st", 1)
        assert following.follow("node-0") == good
        before = [completion.logprobs for completion in answer_all(engine, [request(0)])[0]]
        bad = [
            ("checksum", "changed.st", sha256(tmp_path / "good.st")),
            ("checksum", "half.st", sha256(tmp_path / "good.st")),
            ("missing", "nowhere.st", "0" * 64),
            ("shape", "shape.st", None),
            ("shape", "half.st", None),
        ]
        for step, (reason, name, checksum) in enumerate(bad, 2):
            counted = refused(reason)
            announce(tmp_path / name, step, checksum)
            assert following.follow("node-0") == good
            assert refused(reason) == counted + 1
            assert following.follow("node-0") == good
            assert refused(reason) == counted + 1, "it is not tried again at once"
        (group,) = answer_all(engine, [request(0)])
        assert [completion.logprobs for completion in group] == before
        assert group[0].spans[0].version == good
        better = announce(tmp_path / "good.st", 9)
        assert following.follow("node-0") == better
    assert not list((tmp_path / "cache").iterdir())


def test_a_policy_is_fetched_beside_what_is_in_flight(server: EmbeddedServer, tiny_model: Path, tmp_path: Path) -> None:
    announce = Announcer(server, "beside", tiny_model)
    file = tiny_model / "model.safetensors"
    engine = PacedEngine()
    following = Following(engine, announce.directory, tmp_path / "cache")
    first = announce(file, 1)
    assert following.follow("node-0") == first, "nothing is in flight: it is taken at once"
    engine.submit(request(0))
    second = announce(file, 2)
    assert following.follow("node-0") == first
    following._fetching["node-0"][1].result()
    assert following.follow("node-0") == second
    # One that is overtaken on its way is forgotten; one that fails on its way is refused.
    announce(file, 3)
    assert following.follow("node-0") == second
    following._fetching["node-0"][1].result()
    announce(file, 4, checksum="0" * 64)
    assert following.follow("node-0") == second
    counted = refused("checksum")
    assert following._fetching["node-0"][1].exception() is not None
    assert following.follow("node-0") == second
    assert refused("checksum") == counted + 1
    engine.step()
    fifth = announce(file, 5)
    assert following.follow("node-0") == fifth
    assert not list((tmp_path / "cache").iterdir())


def test_another_node_waits_until_what_is_in_flight_is_answered(
    server: EmbeddedServer, tiny_model: Path, tmp_path: Path
) -> None:
    announce = Announcer(server, "another", tiny_model)
    file = tiny_model / "model.safetensors"
    engine = PacedEngine()
    following = Following(engine, announce.directory, tmp_path / "cache")
    ours = announce(file, 1)
    assert following.follow("node-0") == ours
    engine.submit(request(0))
    redis, keys = announce.ledger.redis, announce.ledger.keys
    redis.set(keys.policy("node-1"), redis.get(keys.policy("node-0")))
    assert following.follow("node-1") is None
    assert following.serving("node-0") == ours
    engine.step()
    assert following.follow("node-1") == ours
    assert following.serving("node-0") is None


def test_a_learner_that_hangs_keeps_no_generator_from_others(server: EmbeddedServer, tmp_path: Path) -> None:
    announce = Announcer(server, "hanging", tmp_path)
    (tmp_path / "good.st").write_bytes(b"weights")
    version = announce(tmp_path / "good.st", 1)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections and never answers
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/node-1/000001-000000001.safetensors"
        hanging = Policy(Version(1, 1), url, "0" * 64, str(tmp_path))
        announce.ledger.redis.set(announce.ledger.keys.policy("node-1"), announce.directory.announcement(hanging))
        following = Following(PacedEngine(), announce.directory, tmp_path / "cache", "a token of this site")
        assert following.follow("node-1") is None
        assert following.follow("node-0") == version
        assert following.follow("node-1") is None
        _, fetching = following._fetching["node-1"]
        assert not fetching.done(), "it was served while the other was still waited for"


def test_an_address_that_refuses_is_asked_less_and_less(
    server: EmbeddedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    announce = Announcer(server, "refusing", tmp_path)
    monkeypatch.setattr("generators.following.FETCH_AGAIN_SECONDS", 0.01)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    policy = Policy(Version(1, 1), f"http://127.0.0.1:{port}/x", "0" * 64, str(tmp_path))
    announce.ledger.redis.set(announce.ledger.keys.policy("node-1"), announce.directory.announcement(policy))
    following = Following(PacedEngine(), announce.directory, tmp_path / "cache")
    pauses = []
    while len(pauses) < 4:
        before = following._tries.get("node-1", 0)
        assert following.follow("node-1") is None
        if following._tries.get("node-1", 0) > before:
            pauses.append(0.01 * 2**before)
            assert following._failed["node-1"][1] <= time.monotonic() + pauses[-1]
    assert pauses == [0.01, 0.02, 0.04, 0.08]
    assert "refused" in (following.refusal("node-1") or "")


def test_fetches_for_nodes_that_are_gone_make_room(
    server: EmbeddedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    announce = Announcer(server, "gone", tmp_path)
    monkeypatch.setattr("generators.following.MOMENT_SECONDS", 0.0)  # nothing is through when it is first looked at
    folder = tmp_path / "served" / "policies"
    folder.mkdir(parents=True)
    (folder / "x").write_bytes(b"weights")
    with served(folder.parent) as url:
        following = Following(PacedEngine(), announce.directory, tmp_path / "cache")
        policy = Policy(Version(1, 1), f"{url}/policies/x", sha256(folder / "x"), str(tmp_path))
        for number in range(3 * MOST_FETCHES):
            target = f"eval-node-{number}"
            announce.ledger.redis.set(announce.ledger.keys.policy(target), announce.directory.announcement(policy))
            following.follow(target)
            assert target in following._fetching
            following._fetching[target][1].result()
        assert following.follow(target) == policy.version
        assert len(list((tmp_path / "cache").iterdir())) < MOST_FETCHES


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """A folder over HTTP."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    threading.Thread(target=http.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{http.server_port}"
    http.shutdown()
    http.server_close()
