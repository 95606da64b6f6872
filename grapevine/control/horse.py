"""The process that does one job, started by a control worker.

Guarantees: it never outlives its worker, so that a job is not done twice because its worker was killed; it shares no
thread, lock or connection with it. The server's address comes in the environment, not on the command line.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from rq.executions import Execution
from rq.serializers import JSONSerializer

from common.keys import jobs_of
from common.settings import load
from grapevine.control.queue import ControlJob, ControlQueue, patient_client
from grapevine.control.work import Place, free_scratch, work_at
from grapevine.control.worker import ControlWorker, name_on_server
from grapevine.logs import configure_logs
from grapevine.processes import die_with_parent


def main(worker: int, name: str, suffix: str, settings_file: str, job_id: str, execution_id: str) -> None:
    """Do the job and end; never returns."""
    die_with_parent()
    if os.getppid() != worker:
        sys.exit("the worker is gone")  # before the kernel was asked to tell
    configure_logs(console=True)
    settings = load(Path(settings_file))
    client = patient_client(settings.redis_url or "")
    queue = ControlQueue(jobs_of(settings.run, settings.site), connection=client)
    horse = ControlWorker(
        settings, name, [queue], name=name_on_server(settings.run, name, suffix), connection=client,
        serializer=JSONSerializer, prepare_for_work=False,
    )  # fmt: skip
    job = ControlJob.found(job_id, client)
    horse.execution = Execution.fetch(execution_id, job_id, client)
    free_scratch(settings, name)
    work_at(Place(settings, name))
    horse.main_work_horse(job, queue)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:7])
