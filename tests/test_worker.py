"""The loop under every role: a server that comes and goes, bugs that must show, signals, heartbeats, health over HTTP."""

from __future__ import annotations

import http.client
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import redis

from common import worker as worker_module
from common.directory import Directory
from common.ledger import Ledger
from common.run import open_run
from common.settings import Settings
from common.worker import BUG_EXIT_CODE, Loop, serve_health
from grapevine import cli
from grapevine.server import EmbeddedServer

REPOSITORY = Path(__file__).parents[1]
RUNS = count()
Heart = Callable[[], tuple[Ledger, Directory]]


class Scripted:
    """A worker that does what its test says, and writes down what was called."""

    role = "generator"
    name = "g"

    def __init__(self, step: Callable[[], bool], rejoin: Callable[[], object] = lambda: None) -> None:
        self._step, self._rejoin = step, rejoin
        self.calls: list[str] = []
        self.entries: list[tuple[str, str]] = []
        self.beaten = threading.Event()

    def rejoin(self) -> None:
        self.calls.append("rejoin")
        self._rejoin()

    def step(self) -> bool:
        self.calls.append("step")
        return self._step()

    def drain(self) -> None:
        self.calls.append("drain")

    def facts(self) -> dict[str, Any]:
        return {"answered": 3}

    def in_hand(self) -> tuple[str, list[tuple[str, str]]]:
        # Asked for after the beat was written; at the second call the first round of the heartbeat is complete.
        if "asked" in self.calls:
            self.beaten.set()
        self.calls.append("asked")
        return "readers", self.entries


@pytest.fixture(autouse=True)
def signals_restored() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def heart(server: EmbeddedServer) -> Heart:
    settings = Settings(run=f"worker-{next(RUNS)}", redis_url=server.url)
    return lambda: open_run(settings)


@contextmanager
def health_of(loop: Loop) -> Iterator[Callable[[str], tuple[int, str]]]:
    """Serves a loop's health; what comes is a function from path to status and text."""
    http_server = serve_health(loop, "worker", 0, stalled_after=600)

    def get(path: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", http_server.server_address[1], timeout=10)
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read().decode()

    yield get
    http_server.shutdown()
    http_server.server_close()


def test_a_server_away_and_back_means_joining_again(tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path / "server")
    server.start()
    settings = Settings(run="away", redis_url=server.url)
    client = open_run(settings)[0].redis
    worked: list[int] = []

    def step() -> bool:
        client.incr("worked")
        worked.append(len(worker.calls))
        if len(worked) == 1:
            server.stop()
        return len(worked) < 4

    def rejoin() -> None:
        if worker.calls.count("rejoin") == 3:
            server.start()
        client.ping()

    worker = Scripted(step, rejoin)
    loop = Loop(worker, lambda: open_run(settings))
    try:
        loop.run()
    finally:
        server.stop()
    # One connected step and one that failed; a failed join; one refused since the server is another one now; then work.
    calls = [call for call in worker.calls if call != "asked"]  # that is the heartbeat's thread, in between
    assert calls == ["rejoin", "step", "step", *["rejoin"] * 3, "step", "step", "step", "drain"]
    assert len(worked) == 4
    assert loop.joined


# A refused command counts as a bug: the server answered, and would give the same answer for ever.
@pytest.mark.parametrize("error", [ZeroDivisionError, redis.ResponseError])
def test_a_bug_ends_the_loop(heart: Heart, error: type[Exception]) -> None:
    def step() -> bool:
        raise error("a bug")

    worker = Scripted(step)
    loop = Loop(worker, heart)
    with pytest.raises(error):
        loop.run()
    loop.stop()
    assert [call for call in worker.calls if call != "asked"] == ["rejoin", "step"]


def test_a_bug_in_the_heartbeat_ends_the_loop_too(heart: Heart, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "HEARTBEAT_SECONDS", 0.01)
    failed = threading.Event()

    class Wrong(Scripted):
        def facts(self) -> dict[str, Any]:
            failed.set()
            raise ZeroDivisionError("a bug")

    with pytest.raises(ZeroDivisionError):
        Loop(Wrong(lambda: failed.wait(60)), heart).run()


def test_a_bug_is_exit_code_70(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def app() -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(cli, "app", app)
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == BUG_EXIT_CODE == 70
    assert "Traceback" in capsys.readouterr().err


def test_heartbeats_show_the_worker_and_keep_what_is_in_hand(heart: Heart, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "HEARTBEAT_SECONDS", 0.01)
    ledger, directory = heart()
    stream = ledger.raw(0)
    ledger.redis.xgroup_create(stream, "readers", mkstream=True)
    id = ledger.redis.xadd(stream, {"m": b"x"}).decode()
    ledger.redis.xreadgroup("readers", "another", {stream: ">"})
    seen: list[Any] = []

    def step() -> bool:
        assert worker.beaten.wait(60)
        seen.extend(directory.workers())
        return False

    worker = Scripted(step)
    worker.entries = [(stream, id)]
    Loop(worker, heart).run()
    assert [(beat.role, beat.name, beat.facts) for beat in seen] == [("generator", "g", {"answered": 3})]
    assert ledger.redis.xpending_range(stream, "readers", "-", "+", 1)[0]["consumer"] == b"g"
    assert directory.workers() == [], "who leaves in good order says so"


PROCESS = """
import sys
from common.run import open_run
from common.settings import Settings
from common.worker import Loop
from tests.test_worker import Scripted

class Process(Scripted):
    def drain(self) -> None:
        print("drained", flush=True)

def step() -> bool:
    print("step begins", flush=True)
    print("step ends after", sys.stdin.readline().strip(), flush=True)
    return True

Loop(Process(step), lambda: open_run(Settings(run="process", redis_url=sys.argv[1]))).run()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_the_step_end_and_drains(server: EmbeddedServer, number: signal.Signals) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", PROCESS, server.url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        cwd=REPOSITORY, env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == "step begins\n"
    process.send_signal(number)
    rest, _ = process.communicate("the signal\n", timeout=60)
    assert rest == "step ends after the signal\ndrained\n"
    assert process.returncode == 0


def test_health_readiness_and_metrics(heart: Heart) -> None:
    loop = Loop(Scripted(lambda: False), heart)
    with health_of(loop) as get:
        assert (get("/healthz")[0], get("/readyz")[0]) == (200, 503), "waiting for the server is no illness"
        loop.joined = True
        assert (get("/healthz")[0], get("/readyz")[0]) == (200, 200)
        loop.last_step -= 601
        assert get("/healthz") == (503, "stalled\n")
        status, text = get("/metrics")
        assert status == 200
        assert "grapevine_reconnects_total" in text
        assert get("/")[0] == 404


def test_a_long_absence_of_the_server_is_not_held_against_the_worker(heart: Heart) -> None:
    found: list[int] = []

    def step() -> bool:
        if worker.calls.count("rejoin") == 1:
            loop.last_step -= 10_000  # so long was the server away
            raise redis.ConnectionError("away")
        found.append(get("/healthz")[0])
        return False

    worker = Scripted(step)
    loop = Loop(worker, heart)
    with health_of(loop) as get:
        loop.run()
    assert found == [200]


def test_who_is_told_to_end_while_it_is_still_loading_ends(tmp_path: Path) -> None:
    # As a container's first process, for which the kernel's own answer to SIGTERM is to do nothing.
    command = [sys.executable, "-m", "grapevine", "worker", "learner", "node-0", "--set", f"folder={tmp_path}"]
    environment = {**os.environ, "REDIS_URL": "redis://127.0.0.1:1/0", "GRAPEVINE_CACHE": str(tmp_path)}
    process = subprocess.Popen(command, env=environment, cwd=REPOSITORY, stderr=subprocess.PIPE)
    status = Path(f"/proc/{process.pid}/status")
    while process.poll() is None and not _catches(status.read_text(), signal.SIGTERM):
        pass
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM


def _catches(status: str, number: int) -> bool:
    mask = next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(mask, 16) >> (number - 1) & 1)
