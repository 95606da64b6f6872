"""`grapevine control`: works off the run's control jobs.

Guarantees: a job whose process or whole worker is killed is tried again within about `redeliver_seconds`; a worker told to
stop finishes its job within the kind's grace or puts it back, without taking a try from it; no job outlives its worker.
What cannot run (the server away for minutes, a bug) ends the process, for whoever supervises it to start anew.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import structlog
from redis.backoff import NoBackoff
from redis.retry import Retry
from rq import Worker
from rq.serializers import JSONSerializer

from common import metrics
from common.files import write_whole
from common.keys import jobs_of
from common.policies import served_address, store_url
from common.policy_server import serve_policies
from common.settings import SECRETS, Settings, SettingsError
from common.worker import TRANSIENT, serve_health
from grapevine.control.care import Caretaker
from grapevine.control.queue import KINDS, NOT_OURS, ControlJob, ControlQueue, patient_client
from grapevine.running.supervisor import SETTING_VARIABLES, secret_variables

log = structlog.get_logger()

WAIT_SECONDS = 5


class ControlWorker(Worker):
    """rq's worker with processes of its own kind, and without rq's maintenance: see `care`."""

    queue_class: Any = ControlQueue
    job_class: Any = ControlJob
    max_connection_wait_time = 2.0

    def __init__(self, settings: Settings, place: str, queues: list[ControlQueue], **options: Any) -> None:
        """`place` is the name that people know the worker by; rq's own is new with every start."""
        self.settings = settings
        self.place = place
        self.current: ControlJob | None = None
        self._quiet = max(3, int(settings.redeliver_seconds))
        self._put_back: str | None = None
        self._stop_at = 0.0
        self._settings_file = Path()
        super().__init__(queues, job_monitoring_interval=max(1, self._quiet // 4), worker_ttl=WAIT_SECONDS + 15, **options)

    # --- one job ---

    def get_heartbeat_ttl(self, job: Any) -> int:
        """Seconds until a job without a sign of life counts as abandoned."""
        return self._quiet

    def prepare_execution(self, job: Any) -> Any:
        """Note the try. From here on a killed worker's job is found by its missing heartbeat."""
        job.remember(tries=int(job.meta.get("tries", 0)) + 1, worker=self.place, progress=None)
        execution = super().prepare_execution(job)
        # rq leaves this to the job's process: one that dies before would have its job in two places.
        self.queues[0].intermediate_queue.remove(job.id)
        return execution

    def fork_work_horse(self, job: Any, queue: Any) -> None:
        """A process of its own: a fork of this one, with its threads, could hang on a lock that one of them held."""
        kept = {key: value for key, value in os.environ.items() if not key.upper().startswith(SETTING_VARIABLES)}
        process = subprocess.Popen(
            [
                sys.executable, "-P", "-m", "grapevine.control.horse", str(os.getpid()), self.place,
                self.name.rpartition(".")[2], str(self._settings_file), job.id, self.execution.id if self.execution else "",
            ],
            stdin=subprocess.DEVNULL,
            process_group=0,  # rq ends the group
            env={**kept, **secret_variables(self.settings)},
        )  # fmt: skip
        self._horse_pid = process.pid
        process.returncode = 0  # rq waits for it, and Popen need not

    def execute_job(self, job: Any, queue: Any) -> None:
        """One job to its end, with its failures counted here: the job's own process is gone with its figures."""
        self.current = job
        before = self._failures()
        if job.kind == "?":
            self._refuse(job, queue)
        else:
            super().execute_job(job, queue)
        metrics.job_failures.labels(job.kind).inc(max(0, self._failures() - before))
        self.current = None

    def _refuse(self, job: Any, queue: Any) -> None:
        """Somebody else's job, or worse: no process is started for it."""
        self.prepare_execution(job)
        job.remember(reason=NOT_OURS)
        job.retries_left = None
        self.handle_job_failure(job, queue, exc_string=NOT_OURS)

    def _failures(self) -> int:
        return int(self.connection.hget(self.key, "failed_job_count") or 0)

    # --- what goes wrong ---

    def handle_exception(self, job: Any, *exc_info: Any) -> None:
        """The job raised: keep why, in one line. What was asked wrongly is not asked again."""
        job.remember(reason=reason_of(exc_info[1]))
        if isinstance(exc_info[1], SettingsError | ValueError):
            job.retries_left = None
        super().handle_exception(job, *exc_info)

    def handle_work_horse_killed(self, job: Any, retpid: int, ret_val: int, rusage: Any) -> None:
        """The job's process ended without a word."""
        ended = (
            f"signal {os.WTERMSIG(ret_val)}"
            if os.WIFSIGNALED(ret_val)
            else f"exit code {os.waitstatus_to_exitcode(ret_val)}"
        )
        job.remember(reason=f"its process was ended by {ended}")

    def handle_job_failure(self, job: Any, queue: Any, started_job_registry: Any = None, exc_string: str = "") -> None:
        """Try again, give up, or put back what this worker has no more time for."""
        # The job's process may have written since this one read: saving for the next try must not undo it.
        job.get_meta()
        if self._put_back == job.id:
            with self.connection.pipeline() as pipeline:
                job.meta.update(tries=job.meta["tries"] - 1, reason="put back: its worker was told to stop")
                self.cleanup_execution(job, pipeline=pipeline)
                queue._enqueue_job(job, pipeline=pipeline, at_front=True)
                pipeline.execute()
            return
        if self._stopped_job_id == job.id:
            job.remember(reason="cancelled")
        super().handle_job_failure(job, queue, started_job_registry, exc_string)

    # --- stopping ---

    def handle_warm_shutdown_request(self) -> None:
        """SIGTERM: the job at hand has its kind's grace."""
        grace = KINDS[self.current.kind].grace if self.current is not None and self.current.kind in KINDS else 0.0
        self._stop_at = time.monotonic() + grace
        log.info("told to stop", worker=self.place, job=self.current.id if self.current is not None else "", grace=grace)

    def maintain_heartbeats(self, job: Any) -> None:
        """Called every few seconds while a job is being done."""
        if self._stop_requested and time.monotonic() >= self._stop_at:
            self._put_back = job.id
            self.kill_horse()
            return
        super().maintain_heartbeats(job)

    def teardown(self) -> None:
        """Leave. The server may be away, and then there is no time to wait for it."""
        self.connection.set_retry(Retry(NoBackoff(), 0))
        try:
            super().teardown()  # type: ignore[no-untyped-call]
        except TRANSIENT as error:
            log.warning("server away while leaving", worker=self.place, error=str(error))

    def run_maintenance_tasks(self) -> None:
        """Nothing: rq would clean up only while it has no job to do, and under a lock that outlives its holder."""
        self.last_cleaned_at = None

    @property
    def should_run_maintenance_tasks(self) -> bool:
        """Never."""
        return False

    def work_on(self, settings_file: Path) -> None:
        """Until told to stop. Raises RuntimeError when rq gave up for another reason."""
        self._settings_file = settings_file
        self.work(logging_level=None)
        if self._horse_pid:
            self.kill_horse()
            self.wait_for_horse()
        if self._shutdown_requested_date is None:
            raise RuntimeError("rq ended its work; the reason is in the log above")


def control(settings: Settings, name: str, port: int | None, address: str = "0.0.0.0") -> None:
    """Work off the run's jobs until SIGTERM. Raises SettingsError without a server, ServerRefused."""
    if settings.redis_url is None:
        raise SettingsError("no server: set redis_url, or REDIS_URL in the environment (redis://:password@host:6379/0)")
    if not re.fullmatch(r"[a-z0-9]([a-z0-9.-]{0,38}[a-z0-9])?", name):
        raise SettingsError(f"--name {name}: up to 40 of a-z, 0-9, '.' and '-', with a letter or digit at both ends")
    if name in settings.node_names():
        raise SettingsError(f"--name {name}: a node has that name; control workers sign orders with names of their own")
    _log_through_structlog()
    client = patient_client(settings.redis_url)
    queue = ControlQueue(jobs_of(settings.run, settings.site), connection=client)
    rq_name = name_on_server(settings.run, name, secrets.token_hex(3))
    worker = ControlWorker(settings, name, [queue], name=rq_name, connection=client, serializer=JSONSerializer)
    folder = settings.run_folder / "control" / name
    folder.mkdir(parents=True, exist_ok=True)
    settings_file = folder / "settings.json"
    write_whole(settings_file, settings.model_dump_json(exclude=set(SECRETS), indent=1))
    caretaker = Caretaker(settings, name, lambda: worker.current)
    if port is not None:
        serve_health(caretaker, settings.run, port, address)
    address_of_policies = served_address(settings, name)
    if address_of_policies is not None:
        serve_policies(Path(store_url(settings)), address_of_policies, settings.policies_token or "", name)
    caretaker.start()
    try:
        worker.work_on(settings_file)
    finally:
        caretaker.stop()


def default_name() -> str:
    """`control-` and this machine's name, in the characters of a node's name."""
    host = re.sub(r"[^a-z0-9-]+", "-", socket.gethostname().lower()).strip("-")
    return f"control-{host}"[:40].strip("-.")


def name_on_server(run: str, name: str, suffix: str) -> str:
    """rq's names are one for all runs, and a killed worker's stays taken for a while: so run, name and a random part."""
    return f"gv-{run}.{name}.{suffix}"


def reason_of(error: BaseException) -> str:
    """An exception in one line."""
    text = " ".join(str(error).split())
    if isinstance(error, SettingsError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


class _ToStructlog(logging.Handler):
    """Standard log records as lines of our log."""

    def emit(self, record: logging.LogRecord) -> None:
        log.log(record.levelno, record.getMessage(), logger=record.name, exc_info=record.exc_info)


def _log_through_structlog() -> None:
    """Send rq's log where ours goes; a handler being there keeps rq from adding its own."""
    logger = logging.getLogger("rq")
    logger.handlers, logger.propagate = [_ToStructlog()], False
    logger.setLevel(logging.WARNING)
    for name in ("rq.worker", "rq.job", "rq.cron"):
        logging.getLogger(name).setLevel(logging.WARNING)
