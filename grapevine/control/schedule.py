"""Evaluations that nobody asks for one by one: every so many minutes, every so many rounds.

Guarantees: however many control workers look, each occasion is one job, because its name is the occasion; a worker that
starts late makes up for the last occasion and for none before it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from redis import Redis
from rq.cron import CronJob, CronScheduler

from common.directory import Directory
from common.settings import Settings
from grapevine.control.queue import ControlJob, Jobs


class OccasionJob(CronJob):
    """rq's cron job, put through Jobs: rq's own would pickle its arguments, and each worker's would be another job."""

    def __init__(self, put: Callable[[int], ControlJob | None], queue: str, name: str, seconds: int) -> None:
        """`put` takes the number of the occasion: whole intervals since 1970."""
        super().__init__(queue, func=put, interval=seconds, name=name)
        self._put = put
        self._seconds = seconds

    def enqueue(self, connection: Redis) -> Any:
        """Put the job of the present occasion, unless another worker has."""
        return self._put(int(time.time() // self._seconds))


class Schedule:
    """Puts due evaluations; `look` is called every few seconds."""

    def __init__(self, settings: Settings, jobs: Jobs, directory: Directory) -> None:
        self._settings = settings
        self._jobs = jobs
        self._directory = directory
        self._seen: dict[str, int] = {}
        # Not registered and started as rq's own process: nobody would end that one when its worker is killed.
        self._cron = CronScheduler(jobs.client, logging_level="WARNING", name=jobs.queue.name)
        minutes = settings.control.evaluate_minutes
        if minutes:
            for node in settings.node_names():
                self._cron.get_jobs().append(self._every(node, max(1, round(60 * minutes))))

    def look(self) -> None:
        """Put what is due."""
        self._cron.enqueue_jobs()
        if self._settings.control.evaluate_rounds:
            for node in self._settings.node_names():
                self._look_at_round(node, self._settings.control.evaluate_rounds)

    def _every(self, node: str, seconds: int) -> OccasionJob:
        def put(occasion: int) -> ControlJob | None:
            return self._add(node, f"evaluate-{node}-t{occasion * seconds}")

        return OccasionJob(put, self._jobs.queue.name, f"{self._jobs.queue.name}-evaluate-{node}", seconds)

    def _look_at_round(self, node: str, every: int) -> None:
        policy = self._directory.policy(node)
        round = policy.version.step // every * every if policy is not None else 0
        if round > self._seen.get(node, 0):
            self._add(node, f"evaluate-{node}-r{round}")
            self._seen[node] = round

    def _add(self, node: str, name: str) -> ControlJob | None:
        id = self._jobs.add("evaluate", {"node": node}, self._settings.control.retries, name)
        return self._jobs.fetch(id) if id is not None else None
