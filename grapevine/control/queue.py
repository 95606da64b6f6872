"""The control jobs of a run on rq: put, listed, tried again, cancelled.

Guarantees: everything of a job on the server is JSON, and is read as nothing else (rq's own default is pickle); a worker
runs the functions of KINDS and no other, whatever a job names; two runs on one server share no job; a job put twice under
one name is one job. rq delivers at least once: the functions bear being repeated.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import redis
from redis.backoff import ExponentialBackoff, NoBackoff
from redis.retry import Retry as Patience
from rq import Queue, Retry
from rq.command import send_stop_job_command
from rq.exceptions import DeserializationError, DuplicateJobError, NoSuchJobError
from rq.job import Job, JobStatus
from rq.serializers import JSONSerializer

from common.keys import jobs_of
from common.server import connect
from common.settings import SettingsError
from common.worker import TRANSIENT

KEPT_SECONDS = 30 * 24 * 3600


@dataclass(frozen=True)
class Kind:
    """What one kind of job may take: seconds until it is ended, and seconds to finish when its worker is asked to stop."""

    timeout: int
    grace: float = 20.0

    @staticmethod
    def function(name: str) -> str:
        """Where the job's function lies."""
        return f"grapevine.control.work.{name}"


KINDS = {
    # An evaluation is taken up where it was left: there is nothing to wait for.
    "evaluate": Kind(timeout=12 * 3600, grace=0.0),
    "export": Kind(timeout=3600),
    "prune": Kind(timeout=3600),
    "report": Kind(timeout=1800),
}

NOT_OURS = f"no control job; there are {', '.join(KINDS)}"


class ControlJob(Job):
    """A job that can be nothing but one of KINDS: names of other functions, callbacks and web hooks are not followed."""

    def __init__(self, id: str | None = None, connection: Any = None, serializer: Any = None) -> None:
        super().__init__(id, connection, JSONSerializer)

    @classmethod
    def found(cls, id: str, connection: Any) -> ControlJob:
        """A job from the server. Raises NoSuchJobError."""
        job = cls(id, connection)
        job.refresh()  # type: ignore[no-untyped-call]
        return job

    @classmethod
    def found_of(cls, ids: Iterable[str], connection: Any) -> list[ControlJob]:
        """Those of the ids that are jobs still."""
        return [job for job in cls.fetch_many(ids, connection) if isinstance(job, cls)]

    def restore(self, raw_data: Any) -> None:
        """Read from the server's hash."""
        super().restore(raw_data)
        self.webhooks = []
        self._success_callback_name = self._failure_callback_name = self._stopped_callback_name = None

    @property
    def short_id(self) -> str:
        """The id as people see it, without the run's name."""
        return self.id.partition("__")[2] or self.id

    @property
    def kind(self) -> str:
        """The job's kind, or `?` for what is none of ours, if only because it is no JSON."""
        names = {Kind.function(name): name for name in KINDS}
        try:
            return names.get(str(self.func_name), "?") if self.instance is None else "?"
        except DeserializationError:
            return "?"

    def remember(self, **facts: Any) -> None:
        """Write facts to the job's meta, where they outlast this try; None takes one away.

        What another process wrote since stays.
        """
        self.get_meta()
        self.meta.update(facts)
        self.meta = {name: value for name, value in self.meta.items() if value is not None}
        self.save_meta()  # type: ignore[no-untyped-call]

    @property
    def func(self) -> Any:
        """The function. Raises ValueError when it is none of KINDS."""
        if self.kind == "?":
            raise ValueError(NOT_OURS)
        return super().func


class ControlQueue(Queue):
    """rq's queue, JSON whoever makes it."""

    job_class = ControlJob

    def __init__(self, name: str, connection: Any = None, **options: Any) -> None:
        super().__init__(name, connection, **{**options, "serializer": JSONSerializer, "job_class": ControlJob})


def patient_client(url: str) -> redis.Redis:
    """A client for rq, which keeps no state beside the server's and so has no use for ServerChanged.

    Where the ledger's client says that the server is away, this one tries again for about a minute: rq ends its worker
    over an unanswered command, with the job it was at. A command sent twice may start a job twice, which jobs bear.
    Raises ServerRefused when the server cannot be used; one that is away now is waited for later.
    """
    probe = connect(url, socket_timeout=5.0)
    try:
        probe.ping()
    except TRANSIENT:
        pass
    finally:
        probe.close()
    patience = Patience(ExponentialBackoff(cap=2.0, base=0.05), 35)
    return redis.Redis.from_url(url, protocol=2, retry=patience, socket_timeout=30.0, socket_connect_timeout=5.0)


def quick_client(url: str) -> redis.Redis:
    """A client for a command that somebody waits for: it fails at once when the server is away."""
    return redis.Redis.from_url(url, protocol=2, retry=Patience(NoBackoff(), 0), socket_timeout=10.0)


@dataclass(frozen=True)
class Row:
    """A job as it is shown. Ages and durations in seconds; `progress` of one being done as `answered/asked`."""

    id: str
    kind: str
    arguments: dict[str, Any]
    status: str
    tries: int
    age: float
    seconds: float | None
    worker: str
    progress: str
    result: Any
    reason: str

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


class Jobs:
    """The jobs of one site of a run. Ids are shown without the run's name, which they carry on the server."""

    def __init__(self, run: str, client: redis.Redis, site: str = "local") -> None:
        self.run = run
        self.client: Any = client
        name = jobs_of(run, site)
        self.queue = ControlQueue(name, connection=client)
        self._prefix = f"{_plain(name.removeprefix('gv-'))}__"

    def add(self, kind: str, arguments: dict[str, Any], retries: int, name: str | None = None) -> str | None:
        """Put a job; its id. With a `name` only once: None when there is or was one of that name.

        Arguments are what the kind's function in `grapevine.control.work` takes, and JSON.
        """
        if kind not in KINDS:
            raise SettingsError(f"{kind} is no kind of job; there are {', '.join(KINDS)}")
        short = _plain(name or "-".join([kind, *([arguments["node"]] if "node" in arguments else []), secrets.token_hex(4)]))
        try:
            self.queue.enqueue_call(
                Kind.function(kind),
                kwargs={key: value for key, value in arguments.items() if value is not None},
                timeout=KINDS[kind].timeout,
                result_ttl=KEPT_SECONDS,
                failure_ttl=KEPT_SECONDS,
                description=kind,
                job_id=self._prefix + short,
                meta={"tries": 0, "retries": retries},
                retry=_retry(retries),
                unique=True,
            )
        except DuplicateJobError:
            return None
        return short

    def fetch(self, id: str) -> ControlJob:
        """A job by its id. Raises SettingsError when there is none."""
        try:
            return ControlJob.found(self._prefix + id.removeprefix(self._prefix), self.client)
        except (NoSuchJobError, ValueError):
            raise SettingsError(f"run {self.run} has no job {id}; `grapevine jobs list {self.run}` shows all") from None

    def rows(self) -> list[Row]:
        """All jobs, the newest first."""
        jobs = ControlJob.found_of(self._ids(), self.client)
        return [self.row(job) for job in sorted(jobs, key=lambda job: job.created_at, reverse=True)]

    def row(self, job: ControlJob) -> Row:
        """One job to show."""
        status = str(job.get_status(refresh=False).value)
        started, ended = (at.timestamp() if at is not None else None for at in (job.started_at, job.ended_at))
        running = status == "started" and started is not None
        seconds = time.time() - started if running and started else ended - started if started and ended else None
        return Row(
            id=job.short_id,
            kind=job.kind,
            arguments=dict(job.kwargs) if job.kind != "?" else {},
            status=status,
            tries=int(job.meta.get("tries", 0)),
            age=time.time() - job.created_at.timestamp(),
            seconds=seconds,
            worker=str(job.meta.get("worker", "")),
            progress=str(job.meta.get("progress", "")) if running else "",
            result=job.return_value() if status == "finished" else None,
            reason="" if status == "finished" else str(job.meta.get("reason", "")),
        )

    def counts(self) -> dict[str, int]:
        """Jobs per status; those without any are 0."""
        queue = self.queue
        registries = {
            "started": queue.started_job_registry, "scheduled": queue.scheduled_job_registry,
            "failed": queue.failed_job_registry, "finished": queue.finished_job_registry,
            "canceled": queue.canceled_job_registry,
        }  # fmt: skip
        counts = {name: registry.get_job_count(cleanup=False) for name, registry in registries.items()}
        return {"queued": queue.count, **counts}

    def retry(self, id: str) -> None:
        """Put a job that failed or was cancelled into the queue again, with all its tries. Raises SettingsError."""
        job = self.fetch(id)
        status = job.get_status()
        registries = {
            JobStatus.FAILED: self.queue.failed_job_registry, JobStatus.STOPPED: self.queue.failed_job_registry,
            JobStatus.CANCELED: self.queue.canceled_job_registry,
        }  # fmt: skip
        if status not in registries:
            raise SettingsError(f"job {id} is {status.value}; only one that failed or was cancelled can be tried again")
        retries = int(job.meta.get("retries", 0))
        job.retries_left = retries or None
        registries[status].requeue(job)

    def cancel(self, id: str) -> None:
        """Take a job out of the queue, or end it where it runs. Raises SettingsError when it is over already."""
        job = self.fetch(id)
        status = job.get_status()
        if status == JobStatus.STARTED:
            send_stop_job_command(self.client, job.id, serializer=JSONSerializer)
        elif status in (JobStatus.QUEUED, JobStatus.SCHEDULED):
            job.remember(reason="cancelled")
            job.cancel()
        else:
            raise SettingsError(f"job {id} is {status.value} already")

    def forget(self) -> None:
        """Delete all jobs of the run: it begins anew."""
        for job in ControlJob.found_of(self._ids(), self.client):
            job.delete()
        self.queue.delete(delete_jobs=True)

    def _ids(self) -> Iterable[str]:
        queue = self.queue
        ids = [*queue.job_ids, *queue.intermediate_queue.get_job_ids()]
        for registry in (
            queue.started_job_registry, queue.scheduled_job_registry, queue.failed_job_registry,
            queue.finished_job_registry, queue.canceled_job_registry,
        ):  # fmt: skip
            # Without rq's clean-up, which would take a hung job from its worker: that is the care taker's to decide.
            ids += registry.get_job_ids(cleanup=False)
        return dict.fromkeys(ids)


def _retry(retries: int) -> Retry | None:
    """Pauses of 1, 5, 25, 125 seconds, then of five minutes."""
    return Retry(max=retries, interval=[min(5**i, 300) for i in range(retries)]) if retries else None


def _plain(name: str) -> str:
    """A name in the characters that rq allows; no two names of ours become one, since none holds an underscore."""
    return name.replace(".", "_")
