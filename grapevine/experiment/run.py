"""Runs the cells of a study, each in a process of its own, and writes the page after each.

Guarantees: a cell whose file is there is not run again; one that was begun and not finished is begun anew; a cell that fails
is told with its last words and holds up no other; when this process ends, however it does, its children end too.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rich.console import Console

from common.files import lock
from common.guard import HOME
from common.settings import SettingsError
from common.settings_checks import OTHER_VARIABLES
from grapevine.experiment.cells import Cell, kept, plan
from grapevine.experiment.child import job
from grapevine.experiment.progress import Progress
from grapevine.experiment.study import Study, Tree
from grapevine.experiment.summary import cell_figures, starts
from grapevine.processes import die_with_parent

LOOK_SECONDS = 0.3
GRACE_SECONDS = 10.0
LAST_LINES = 8


def run_study(study: Study, out: Path, parallel: int, console: Console) -> int:
    """Run what is left to run; the exit code (0 all there, 1 some failed, 130 interrupted)."""
    from grapevine.experiment.page import write_pages

    cells = plan(study, out)
    out.mkdir(parents=True, exist_ok=True)
    with _only_one(study, out):
        found = finished(cells, out)
        left = [cell for cell in cells if cell.name not in found]
        console.print(
            f"experiment [bold]{study.experiment}[/bold]: {len(found)} of {len(cells)} cells are there, "
            f"{len(left)} to run; page: {out / 'index.html'}",
            highlight=False, soft_wrap=True,
        )  # fmt: skip
        write_pages(study, cells, found, out)

        def keep(cell: Cell) -> str:
            figures = kept(cell, out)
            if figures is None:
                raise SettingsError(f"{cell.file(out)} was written and is gone; start again to run the cell anew")
            found[cell.name] = figures
            write_pages(study, cells, found, out)
            return _told(cell, figures)

        failed = _run(left, out, parallel, console, keep)
        with suppress(OSError):
            for place in [*(out / "runs").glob("*"), out / "runs"]:
                place.rmdir()
    if failed is None:
        again = f"grapevine experiment {study.path}" + ("" if out == study.default_out else f" --out {out}")
        console.print(
            f"stopped with {len(found)} of {len(cells)} cells finished; the same command goes on with the others: {again}",
            highlight=False, soft_wrap=True,
        )  # fmt: skip
        return 130
    if failed:
        console.print(
            f"[red]{len(failed)} of {len(cells)} cells failed[/red]: {', '.join(failed)}; mend what their logs say, and the "
            f"same command runs them again",
            highlight=False, soft_wrap=True,
        )  # fmt: skip
        return 1
    console.print(f"all {len(cells)} cells are there; page: {out / 'index.html'}", highlight=False, soft_wrap=True)
    return 0


def finished(cells: list[Cell], out: Path) -> dict[str, Tree]:
    """The figures of the cells that are there. Raises SettingsError when one was run with other settings."""
    return {cell.name: figures for cell in cells if (figures := kept(cell, out)) is not None}


def _run(left: list[Cell], out: Path, parallel: int, console: Console, keep: Callable[[Cell], str]) -> list[str] | None:
    """Run cells, so many at a time; the names of those that failed, None when interrupted."""
    stop: list[int] = []
    before = {
        number: signal.signal(number, lambda received, _: stop.append(received))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    origin = {"version": importlib.metadata.version("grapevine-rl"), "commit": commit()}
    waiting, running, failed = list(left), dict[str, tuple[Cell, subprocess.Popen[str]]](), list[str]()
    try:
        with Progress(left, console) as progress:
            while (waiting or running) and not stop:
                while waiting and len(running) < parallel:
                    cell = waiting.pop(0)
                    running[cell.name] = cell, _start(cell, out, origin)
                for name, (cell, process) in list(running.items()):
                    code = process.poll()
                    if code is None:
                        continue
                    del running[name]
                    if code == 0:
                        progress.finished(cell, keep(cell))
                    else:
                        failed.append(name)
                        progress.failed(cell, _last_words(cell, code, out))
                progress.show([cell for cell, _ in running.values()])
                time.sleep(LOOK_SECONDS)
    finally:
        _end([process for _, process in running.values()])
        for number, handler in before.items():
            signal.signal(number, handler)
    return None if stop else failed


def _start(cell: Cell, out: Path, origin: dict[str, Any]) -> subprocess.Popen[str]:
    """A cell's process, from nothing: what an earlier one left is deleted."""
    if cell.scratch.exists():
        shutil.rmtree(cell.scratch)
    log = cell.log(out)
    log.parent.mkdir(parents=True, exist_ok=True)
    # Only the study decides what a cell runs with.
    clean = {
        key: value
        for key, value in os.environ.items()
        if key in OTHER_VARIABLES or not (key.upper().startswith("GRAPEVINE_") or key == "REDIS_URL")
    }
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "grapevine.experiment.child"],
            stdin=subprocess.PIPE,
            stdout=file,
            stderr=file,
            text=True,
            env={"OMP_NUM_THREADS": "1", **clean, "PYTHONPATH": _python_path(clean)},
            start_new_session=True,  # the terminal's Ctrl-C is for us; we end them
            preexec_fn=die_with_parent,
        )
    assert process.stdin is not None
    with suppress(BrokenPipeError), process.stdin:
        process.stdin.write(job(cell, out, origin))
    return process


def _python_path(clean: dict[str, str]) -> str:
    """The packages of this process, from whatever folder it was started."""
    return os.pathsep.join([str(HOME), *filter(None, [clean.get("PYTHONPATH")])])


def _end(processes: list[subprocess.Popen[str]]) -> None:
    """Ask, so that their servers stop in good order; then kill."""
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + GRACE_SECONDS
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _told(cell: Cell, figures: Tree) -> str:
    """A finished cell in one line."""
    facts = cell_figures(figures, starts([figures])[cell.seed])
    heldout = "" if facts["heldout"] is None else f", held-out {facts['heldout']:.3f}"
    return (
        f"{cell.regime} {cell.arm} seed {cell.seed}: own reward {facts['own_reward']:.2f} over {cell.rounds} rounds, "
        f"from {facts['start']:.3f} to {facts['last']:.3f}{heldout}; {figures['wall_seconds']:.0f} s"
    )


def _last_words(cell: Cell, code: int, out: Path) -> str:
    log = cell.log(out)
    lines = log.read_text(errors="replace").strip().splitlines()[-LAST_LINES:]
    ended = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
    return f"{cell.name} {ended}; the end of {log}:\n" + "\n".join(f"    {line}" for line in lines)


def commit() -> str | None:
    """The commit that this code was checked out at, with `-dirty` when files differ from it; None where there is none."""
    if not (HOME / ".git").exists() or shutil.which("git") is None:
        return None
    git = ["git", "--no-optional-locks", "-C", str(HOME)]
    done, changed = (
        subprocess.run([*git, *rest], capture_output=True, text=True)
        for rest in (["rev-parse", "--short=10", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
    )
    if done.returncode or not done.stdout.strip():
        return None
    return done.stdout.strip() + ("-dirty" if changed.stdout.strip() else "")


@contextmanager
def _only_one(study: Study, out: Path) -> Iterator[None]:
    with lock(out / "lock") as held:
        if not held:
            raise SettingsError(
                f"experiment {study.experiment} is running in another process; wait for it, or choose another place (--out)"
            )
        yield
