"""Control jobs with real worker processes, really killed: nothing is lost, nothing is pickled, nothing is left behind."""

from __future__ import annotations

import json
import os
import pickle
import signal
import socket
import sys
import threading
import time
import urllib.request
import zlib
from base64 import b64decode
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from rq.job import Callback, Job
from rq.serializers import JSONSerializer, PickleSerializer
from typer.testing import CliRunner

from common.settings import Settings, SettingsError
from common.tasks import Question, build, is_held_out
from grapevine.cli import app
from grapevine.control.care import PUT_BACK
from grapevine.control.queue import ControlJob, Jobs, quick_client
from grapevine.control.schedule import Schedule
from grapevine.control.worker import control
from grapevine.server import EmbeddedServer
from learners.journal import read
from tests.chaos.workers import CoinScorer
from tests.site import Site
from verifiers.sandbox import GroupVerdict

RUNS = count()
PATIENCE = 60.0


class HeldOutScorer(CoinScorer):
    """Knows held-out questions, as the real one does."""

    def score(self, question: Question, texts: list[str], max_characters: int) -> GroupVerdict:
        """As the coin says."""
        verdict = super().score(question, texts, max_characters)
        return msgspec.structs.replace(verdict, held_out=is_held_out(build(question).text))


def site(folder: Path, url: str, run: str) -> Site:
    """A site that scores evaluations too."""
    site = Site(folder / "runs", url, run)
    site.verifier._scorer = HeldOutScorer()
    return site


class Run:
    """A site whose generator and verifier answer only while they are let, and control workers beside it."""

    def __init__(self, folder: Path, url: str) -> None:
        self.url = url
        self.site = site(folder, url, f"control-{next(RUNS)}")
        self.settings: Settings = self.site.settings.model_copy(update={"redeliver_seconds": 3.0})
        self.file = folder / "settings.json"
        self.file.write_text(self.settings.model_dump_json(exclude={"redis_url"}))
        self.jobs = Jobs(self.settings.run, quick_client(url))
        self.workers: dict[str, psutil.Popen] = {}
        self._log = folder / "control.log"
        self._answering = threading.Event()
        self._over = threading.Event()
        self._pool = threading.Thread(target=self._answer, daemon=True)
        self._pool.start()

    def _answer(self) -> None:
        while not self._over.is_set():
            if self._answering.wait(0.1):
                self.site.generate()
                self.site.verify()
                self._over.wait(0.02)

    def answer(self) -> None:
        """Let the pool work from now on."""
        self._answering.set()

    def start(self, name: str, *flags: str) -> psutil.Popen:
        """A control worker."""
        with self._log.open("ab") as log:
            self.workers[name] = psutil.Popen(
                [sys.executable, "-m", "grapevine", "control", "--settings", str(self.file), "--name", name, *flags],
                env={**os.environ, "REDIS_URL": self.url},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        return self.workers[name]

    def put(self, kind: str, arguments: dict[str, Any], retries: int) -> str:
        """A job; its id."""
        id = self.jobs.add(kind, arguments, retries)
        assert id is not None
        return id

    def until(self, condition: Callable[[], Any], what: str) -> Any:
        """Wait for it; what it gave."""
        deadline = time.monotonic() + PATIENCE
        while not (found := condition()):
            assert self._pool.is_alive()
            assert time.monotonic() < deadline, (
                f"no {what}: {[r.as_dict() for r in self.jobs.rows()]}\n{self._log.read_text()}"
            )
            time.sleep(0.05)
        return found

    def waits_for_answers(self, id: str, tries: int) -> None:
        """The job has placed its orders in this try."""

        def placed() -> bool:
            meta = self.jobs.fetch(id).meta
            return meta.get("tries") == tries and "progress" in meta

        self.until(placed, f"orders in try {tries}")

    def over(self, id: str) -> dict[str, Any]:
        """The job as it ended."""
        return self.until(
            lambda: next((r for r in self.jobs.rows() if r.id == id and _ended(r.status)), None), f"end of {id}"
        ).as_dict()

    def left_behind(self) -> list[str]:
        """Targets and policy copies of evaluations."""
        targets = [name for name in self.site.directory.targets("local") if name.startswith("eval-")]
        return targets + [path.name for path in (self.settings.run_folder / "policies").glob("eval-*")]

    def close(self) -> None:
        self._over.set()
        self._pool.join()
        for worker in self.workers.values():
            if worker.poll() is None:
                worker.kill()
                worker.wait()


def _ended(status: str) -> bool:
    return status in ("finished", "failed", "stopped", "canceled")


@contextmanager
def running(folder: Path, url: str) -> Iterator[Run]:
    run = Run(folder, url)
    try:
        yield run
    finally:
        run.close()


@pytest.fixture
def run(server: EmbeddedServer, tmp_path: Path) -> Iterator[Run]:
    with running(tmp_path, server.url) as run:
        yield run


def horse(worker: psutil.Popen) -> psutil.Process:
    """The process that does the worker's job."""
    (child,) = worker.children()
    return child


ASKED = {"node": "node-0", "questions": 4, "completions": 2}


def test_an_evaluation_survives_the_death_of_its_process_and_of_its_worker(run: Run) -> None:
    id = run.put("evaluate", ASKED, retries=2)
    first = run.start("control-0")
    run.waits_for_answers(id, 1)
    horse(first).send_signal(signal.SIGKILL)

    run.waits_for_answers(id, 2)
    assert run.jobs.row(run.jobs.fetch(id)).reason == "its process was ended by signal 9"
    pinned = run.jobs.fetch(id).meta["policy"]
    orphan = horse(first)
    first.kill()
    first.wait()
    orphan.wait(10)  # a job that went on without its worker would be done twice

    run.start("control-1")
    run.waits_for_answers(id, 3)
    meta = run.jobs.fetch(id).meta
    assert meta["reason"] == "its worker died"
    assert meta["policy"] == pinned, "every try evaluates the policy that the first one found"
    assert [name for name in run.left_behind() if name.startswith("eval-control")] == [meta["target"]]

    run.answer()
    ended = run.over(id)
    assert (ended["status"], ended["tries"], ended["worker"]) == ("finished", 3, "control-1")
    (line,) = read(run.settings.run_folder / "evaluations.jsonl")
    assert line == ended["result"]
    assert (line["questions"], line["completions"], line["version"], line["node"]) == (4, 2, "1.0", "node-0")
    assert run.left_behind() == []
    assert run.site.refused("raw") == {}


def test_jobs_that_fail_that_are_cancelled_and_that_are_put_back(run: Run, tmp_path: Path) -> None:
    commands = [run.settings.run, "--redis-url", run.url]
    unknown = run.put("evaluate", {"node": "node-7"}, retries=3)
    report = run.put("report", {}, retries=0)
    told = tmp_path / "told"
    foreign = [
        Job.create(
            "os.system", (f"touch {told}",), connection=run.jobs.client, serializer=serializer, timeout=60,
            on_success=Callback("os.abort"), on_failure=Callback("os.abort"), origin=run.jobs.queue.name,
        )
        for serializer in (JSONSerializer, PickleSerializer)
    ]  # fmt: skip
    for job in foreign:
        run.jobs.queue.enqueue_job(job)
    evaluation = run.put("evaluate", ASKED, retries=0)
    unwanted = run.put("report", {}, retries=0)
    port = free_port()
    worker = run.start("control-0", "--port", str(port))

    # A running job and a waiting one are cancelled; the running one leaves nothing behind.
    run.waits_for_answers(evaluation, 1)
    for job in (unwanted, evaluation):
        result = CliRunner().invoke(app, ["jobs", "cancel", commands[0], job, *commands[1:]])
        assert result.exit_code == 0, result
    assert (run.over(unwanted)["status"], run.over(evaluation)["status"]) == ("canceled", "stopped")
    run.until(lambda: run.left_behind() == [], "clean place")

    page = Path(run.over(report)["result"]["page"])
    assert run.settings.run in page.read_text()
    row = run.over(unknown)
    assert (row["status"], row["tries"]) == ("failed", 1), "what was asked wrongly is not asked again"
    assert row["reason"] == f"run {run.settings.run} has no node node-7; did you mean node-1?"
    for one in foreign:
        refused = ControlJob.found(one.id, run.jobs.client)
        assert refused.is_failed and refused.meta["reason"].startswith("no control job; there are evaluate,")
    assert not told.exists()
    listed = json.loads(CliRunner().invoke(app, ["jobs", "list", *commands, "--json"]).output)
    assert {row["id"]: row["reason"] for row in listed if row["id"] in (evaluation, unwanted)} == {
        evaluation: "cancelled",
        unwanted: "cancelled",
    }
    table = CliRunner().invoke(app, ["jobs", "list", *commands], env={"COLUMNS": "200"}).output
    assert "did you mean node-1?" in table

    def scraped() -> bool:
        page = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5).read().decode()
        whose = f'role="control",run="{run.settings.run}"'
        wanted = (
            f'grapevine_jobs{{{whose},status="failed"}} 4.0',
            f'grapevine_job_failures_total{{kind="evaluate",{whose}}} 2.0',
            f'grapevine_job_failures_total{{kind="?",{whose}}} 2.0',
        )
        return all(line in page for line in wanted)

    run.until(scraped, "metrics")

    # Asked again by hand it runs once more, and goes back into the queue when its worker is told to stop.
    with pytest.raises(SettingsError, match="is finished; only one that failed"):
        run.jobs.retry(report)
    run.jobs.retry(evaluation)
    run.waits_for_answers(evaluation, 2)
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(30) == 0
    row = run.jobs.row(run.jobs.fetch(evaluation)).as_dict()
    assert (row["status"], row["tries"], row["reason"]) == ("queued", 1, "put back: its worker was told to stop")
    for one in foreign:
        ControlJob.found(one.id, run.jobs.client).delete()
    check_that_nothing_is_pickled(run)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_server_that_restarts_costs_no_job(tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path / "server")
    server.start()
    with running(tmp_path, server.url) as run:
        id = run.put("evaluate", ASKED, retries=0)
        worker = run.start("control-0")
        run.waits_for_answers(id, 1)
        working = horse(worker)
        run.jobs.client.execute_command("WAITAOF", 1, 0, 5000)  # on disk, or the killed server would not know it
        assert server.process is not None
        server.process.kill()
        server.process.wait()
        server.start()
        run.site = site(tmp_path, server.url, run.settings.run)
        run.answer()
        ended = run.over(id)
        assert (ended["status"], ended["tries"]) == ("finished", 1), ended
        working.wait(10)
    server.stop()


def test_one_evaluation_per_occasion_however_many_workers_look(run: Run) -> None:
    learner = run.site.learners[0]
    settings = run.settings.model_copy(
        update={"control": run.settings.control.model_copy(update={"evaluate_rounds": 2, "evaluate_minutes": 600.0})}
    )
    schedules = [Schedule(settings, run.jobs, run.site.directory) for _ in range(3)]

    def names() -> list[str]:
        for schedule in schedules:
            schedule.look()
        return sorted(row.id for row in run.jobs.rows() if "-r" in row.id)

    assert names() == []
    run.site.learn(rounds=3)
    assert names() == ["evaluate-node-0-r2", "evaluate-node-1-r2"]
    run.site.learn(rounds=2)
    schedules.append(Schedule(settings, run.jobs, run.site.directory))
    assert names() == ["evaluate-node-0-r2", "evaluate-node-0-r4", "evaluate-node-1-r2", "evaluate-node-1-r4"]
    assert learner.facts()["round"] == 5
    timed = [row.arguments for row in run.jobs.rows() if "-t" in row.id]
    assert sorted(one["node"] for one in timed) == ["node-0", "node-1"]


def check_that_nothing_is_pickled(run: Run) -> None:
    """Every value that rq has on the server."""
    client = run.jobs.client
    hashes = [key for key in client.keys("rq:job:*") if run.settings.run.encode() in key and client.type(key) == b"hash"]
    assert len(hashes) == len(run.jobs.rows())
    for key in hashes:
        fields = client.hgetall(key)
        function, instance, args, kwargs = json.loads(zlib.decompress(fields[b"data"]))
        assert function.startswith("grapevine.control.work.") and instance is None and args == []
        assert isinstance(kwargs, dict)
        json.loads(fields[b"meta"])
    for value in values(client):
        for inside in (value, decoded(value)):
            assert not inside.startswith(b"\x80"), value
    assert decoded(zlib.compress(pickle.dumps({}))).startswith(b"\x80"), "a pickle would have been seen"


def values(client: Any) -> Iterator[bytes]:
    """Every value under rq's keys."""
    for key in client.scan_iter(match="rq:*"):
        kind = client.type(key)
        if kind == b"hash":
            yield from client.hvals(key)
        elif kind == b"string":
            yield client.get(key)
        elif kind == b"list":
            yield from client.lrange(key, 0, -1)
        elif kind == b"set":
            yield from client.smembers(key)
        elif kind == b"zset":
            yield from client.zrange(key, 0, -1)
        elif kind == b"stream":
            for _, fields in client.xrange(key):
                yield from fields.values()


def decoded(value: bytes) -> bytes:
    """What rq packed: base64, zlib, or both."""
    for unpack in (lambda data: b64decode(data, validate=True), zlib.decompress):
        try:
            value = unpack(value)
        except (ValueError, zlib.error):
            continue
    return value


def test_a_job_that_began_after_all_is_not_put_back(run: Run) -> None:
    queue, client = run.jobs.queue, run.jobs.client
    client.lpush(queue.intermediate_queue_key, "taken")
    for expected in (1, 0):
        assert client.eval(PUT_BACK, 2, queue.intermediate_queue_key, queue.key, "taken") == expected
    assert client.lrange(queue.key, 0, -1) == [b"taken"]
    client.delete(queue.key)


def test_two_runs_on_one_server_do_not_meet(run: Run) -> None:
    other = Jobs(run.settings.run + ".b", quick_client(run.url))
    assert run.jobs.add("report", {}, 0, name="report-once") == "report-once"
    assert run.jobs.add("report", {}, 0, name="report-once") is None
    assert other.add("report", {}, 0, name="report-once") == "report-once"
    other.forget()
    assert [row.id for row in run.jobs.rows()] == ["report-once"]
    assert other.rows() == []


def test_a_worker_that_cannot_work_says_why(run: Run) -> None:
    with pytest.raises(SettingsError, match="set redis_url, or REDIS_URL"):
        control(Settings(), "control-0", 0)
    for name, reason in (("node-1", "a node has that name"), ("Control", "up to 40 of a-z")):
        with pytest.raises(SettingsError, match=reason):
            control(run.settings, name, 0)
