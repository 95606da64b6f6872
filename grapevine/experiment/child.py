"""The process of one cell: models, the run in lockstep, the cell's file; then the run's folder goes.

Guarantees: the cell's file is on disk before the run's folder is deleted; a cell whose process ended in any other way has no
file. It reads its job as JSON from standard input (see `job`).
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any, NoReturn

from common.guard import check_imports

check_imports()

# ruff: noqa: E402
from rich.console import Console

from common.files import write_whole
from common.settings import SECRETS, SettingsError, from_tree
from common.tasks import TaskRefused
from grapevine.disk import writing_to
from grapevine.experiment.cells import Cell
from grapevine.experiment.models import made
from grapevine.experiment.record import record
from grapevine.experiment.study import StarterArguments
from grapevine.logs import configure_logs
from grapevine.report.folder import read_run
from grapevine.running.local import up


def job(cell: Cell, out: Path, origin: dict[str, Any]) -> str:
    """What the process needs to know. `origin` goes into the cell's file as it is."""
    named = {"regime": cell.regime, "arm": cell.arm, "seed": cell.seed}
    return json.dumps(
        {
            "settings": cell.settings.model_dump(mode="json", exclude=set(SECRETS)),
            "file": str(cell.file(out).absolute()),
            "cell": {**named, **origin, **cell.resolved()},
        }
    )


def run_cell(job: dict[str, Any]) -> int:
    """The exit code: 0 when the cell's file is written."""
    settings, kept = from_tree(job["settings"], None), job["cell"]
    folders = {}
    for name, arguments in kept["models"].items():
        print(f"model {name} of seed {kept['seed']}", flush=True)
        folders[name] = str(made(name, StarterArguments(**arguments), kept["seed"]))
    settings = settings.with_models(folders)
    with writing_to(settings.run_folder):
        code = up(settings, fresh=False, lockstep=True, console=Console())
        if code == 0:
            _keep(Path(job["file"]), {**kept, **record(read_run(settings.run_folder))})
            shutil.rmtree(settings.run_folder)
    return code


def _keep(path: Path, figures: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(figures), durable=True)  # the run it comes from is about to be deleted


def main() -> NoReturn:
    """Settings that cannot be used are one sentence; the starter of this process tells it."""
    configure_logs(console=False)
    try:
        code = run_cell(json.loads(sys.stdin.read()))
    except (SettingsError, TaskRefused) as error:
        print(f"grapevine: {error}", file=sys.stderr, flush=True)
        code = 2
    sys.exit(code)


if __name__ == "__main__":
    main()
