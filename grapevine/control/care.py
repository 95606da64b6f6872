"""What a control worker does beside its job: finds abandoned jobs, puts due ones, counts, gives signs of life.

Guarantees: it goes on while a job is being done; one worker of a run cleans up at a time, and a dead one holds the others
up for seconds only; after the server was away nothing counts as abandoned until every worker had time to speak.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import structlog
from redis.exceptions import LockError
from rq.registry import clean_registries
from rq.scheduler import RQScheduler
from rq.serializers import JSONSerializer
from rq.utils import now
from rq.worker_registration import clean_worker_registry

from common import metrics
from common.directory import HEARTBEAT_SECONDS, Directory
from common.ledger import Ledger
from common.run import open_run
from common.settings import Settings
from common.worker import TRANSIENT
from grapevine.control.queue import ControlJob, Jobs
from grapevine.control.schedule import Schedule
from grapevine.control.work import release

log = structlog.get_logger()

LOCK_SECONDS = 20
STUCK_SECONDS = 5.0

# Its worker may begin a job after all, just now: then it is no longer there to be put back.
PUT_BACK = """
if redis.call('LREM', KEYS[1], 1, ARGV[1]) == 0 then
    return 0
end
return redis.call('LPUSH', KEYS[2], ARGV[1])
"""


class Caretaker:
    """A thread with connections of its own."""

    def __init__(self, settings: Settings, name: str, current: Callable[[], ControlJob | None]) -> None:
        """`current` says which job the worker is at."""
        self._settings = settings
        self._name = name
        self._current = current
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="care", daemon=True)
        self._clean_from = 0.0
        self._in_transit: dict[str, float] = {}
        self.role = "control"
        self.metrics_at = ""
        self.failure: BaseException | None = None
        self._counted = False
        self.joined = False
        self.last_step = time.monotonic()

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End. Raises what ended the thread before its time."""
        self._stop.set()
        self._thread.join(timeout=HEARTBEAT_SECONDS + 1)
        if self.failure is not None:
            raise self.failure

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                try:
                    self._care()
                except TRANSIENT as error:
                    self.joined = False
                    # Whoever was cut off as we were needs time to say that it lives.
                    self._clean_from = time.monotonic() + 2 * self._settings.redeliver_seconds
                    log.warning("server away, will retry", worker=self._name, error=str(error))
                    self._stop.wait(1.0)
        except BaseException as error:
            self.failure = error
            os.kill(os.getpid(), signal.SIGTERM)

    def _care(self) -> None:
        ledger, directory = open_run(self._settings)
        jobs = Jobs(self._settings.run, ledger.redis, self._settings.site)
        schedule = Schedule(self._settings, jobs, directory)
        if not self._counted:
            ledger.count_start("control")
            self._counted = True
        while not self._stop.is_set():
            self._beat(directory)
            self._clean_up(jobs, ledger)
            schedule.look()
            for status, count in jobs.counts().items():
                metrics.jobs.labels(status).set(count)
            self.joined, self.last_step = True, time.monotonic()
            self._stop.wait(min(HEARTBEAT_SECONDS, self._settings.redeliver_seconds / 4))
        directory.gone("control", self._name)

    def _beat(self, directory: Directory) -> None:
        job = self._current()
        facts: dict[str, Any] = {"job": "", "kind": ""}
        if job is not None:
            facts = {"job": job.short_id, "kind": job.kind}
        directory.beat("control", self._name, facts, self.metrics_at)

    def _clean_up(self, jobs: Jobs, ledger: Ledger) -> None:
        if time.monotonic() < self._clean_from:
            return
        # Released only as long as it is ours: whoever took longer than its time must not end another's.
        lock = jobs.client.lock(f"rq:gv-care:{jobs.queue.name}", timeout=LOCK_SECONDS, blocking=False)
        if not lock.acquire():
            return
        try:
            clean_registries(jobs.queue, [_note_abandoned])
            clean_worker_registry(jobs.queue)
            # Jobs whose pause before the next try is over. rq's own process for this would outlive a killed worker.
            scheduler = RQScheduler([jobs.queue], jobs.client, logging_level="WARNING", serializer=JSONSerializer)
            scheduler._connection = jobs.client
            scheduler.prepare_registries([jobs.queue.name])
            scheduler.enqueue_scheduled_jobs()  # type: ignore[no-untyped-call]
            self._return_stuck(jobs)
            self._release_over(jobs, ledger)
        finally:
            with suppress(LockError):
                lock.release()

    def _return_stuck(self, jobs: Jobs) -> None:
        """Jobs that a worker took and died before it began: back into the queue."""
        queue = jobs.queue
        in_transit = queue.intermediate_queue.get_job_ids()
        self._in_transit = {id: self._in_transit.get(id, time.monotonic()) for id in in_transit}
        started = set(queue.started_job_registry.get_job_ids(cleanup=False))
        for id, since in self._in_transit.items():
            if id in started or time.monotonic() - since <= STUCK_SECONDS:
                continue
            if jobs.client.eval(PUT_BACK, 2, queue.intermediate_queue_key, queue.key, id):
                log.warning("job was taken and never begun; put back", job=id)

    def _release_over(self, jobs: Jobs, ledger: Ledger) -> None:
        """Evaluations that failed for good or were cancelled, wherever that happened, leave nothing behind."""
        over = []
        for registry in (jobs.queue.failed_job_registry, jobs.queue.canceled_job_registry):
            over += registry.get_job_ids(cleanup=False)
        for job in ControlJob.found_of(over, jobs.client):
            # A moment later, so that one put again at once is not taken apart under its worker.
            if job.meta.get("target") and now() - _over_at(job) > timedelta(seconds=STUCK_SECONDS):
                release(self._settings, ledger, job)


def _over_at(job: ControlJob) -> Any:
    return job.ended_at or job.started_at or job.created_at


def _note_abandoned(job: ControlJob, *_: Any) -> None:
    """rq asks this of every job whose worker fell silent, before it is tried again or given up."""
    job.remember(reason="its worker died")
    metrics.job_failures.labels(job.kind).inc()
    log.warning("job was abandoned", job=job.id, tries=job.meta.get("tries"))
