"""Jobs as people read them: a table, a result in one line, what pruning freed."""

from __future__ import annotations

import difflib
import inspect
import json
import sys
import time
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from common.settings import SettingsError
from common.tasks import PRESETS
from grapevine.control import work
from grapevine.control.queue import KINDS, Jobs, Row
from grapevine.prune import Planned

COLOURS = {"finished": "green", "failed": "red", "stopped": "red", "started": "cyan", "canceled": "dim"}
LOOK_SECONDS = 0.5


def arguments_of(kind: str, given: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a kind from what was given on the command line. Raises SettingsError for what does not fit."""
    if kind not in KINDS:
        near = difflib.get_close_matches(kind, KINDS, n=1)
        hint = f"; did you mean {near[0]}?" if near else f"; there are {', '.join(KINDS)}"
        raise SettingsError(f"{kind} is no kind of job{hint}")
    wanted = {name: value for name, value in given.items() if value is not None}
    known = inspect.signature(getattr(work, kind)).parameters
    for name in wanted:
        if name not in known:
            raise SettingsError(f"a job of kind {kind} takes no --{name.replace('_', '-')}")
    for name, parameter in known.items():
        if parameter.default is inspect.Parameter.empty and name not in wanted:
            raise SettingsError(f"a job of kind {kind} needs --{name.replace('_', '-')}")
    tasks = wanted.get("tasks")
    if tasks is not None and tasks not in PRESETS:
        wanted["tasks"] = tasks.split(",")
    return wanted


def show_rows(run: str, rows: list[Row], console: Console) -> None:
    """A table, or a sentence when there are none."""
    if not rows:
        console.print(f"run {run} has no jobs; `grapevine jobs add {run} evaluate --node node-0` puts one", highlight=False)
        return
    table = Table(box=SIMPLE, pad_edge=False)
    for head in ("id", "status"):
        table.add_column(head, no_wrap=True)
    for head in ("tries", "age", "took"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("what came of it", overflow="fold", min_width=24)
    for row in rows:
        colour = COLOURS.get(row.status, "default")
        took = _short(row.seconds) if row.seconds is not None and row.tries else ""
        told = f"{_arguments(row)}  {_outcome(row)}".strip()
        table.add_row(
            row.id, f"[{colour}]{row.status}[/]", str(row.tries), _short(row.age), took, escape(" ".join(told.split()))
        )
    console.print(table)


def wait_for(jobs: Jobs, id: str) -> int:
    """Wait until a job is over, and print its result as JSON. The exit code: 0, or 1 with the reason on stderr."""
    shown = ""
    while True:
        job = jobs.fetch(id)
        row = jobs.row(job)
        if row.status == "finished":
            print(json.dumps(row.result, indent=2))
            return 0
        if row.status in ("failed", "stopped", "canceled"):
            print(f"grapevine: job {id} {row.status}: {row.reason}", file=sys.stderr)
            return 1
        now = f"{id}: {row.status}, try {max(1, row.tries)}{f', {row.reason}' if row.reason else ''}"
        if now != shown:
            print(shown := now, file=sys.stderr)
        time.sleep(LOOK_SECONDS)


def show_pruned(planned: Planned, dry_run: bool, console: Console) -> None:
    """What went, or would go, and how much that is."""
    for item in planned.items:
        console.print(f"{_size(item.size):>9}  {item.path}  [dim]{escape(item.why)}[/dim]", highlight=False, soft_wrap=True)
    for run, reason in planned.passed_over.items():
        console.print(f"[dim]run {run} {reason} and was not touched[/dim]", highlight=False)
    verb = "would be freed" if dry_run else "freed"
    console.print(f"{_size(planned.size)} {verb}, {len(planned.items)} files and folders", highlight=False)


def _short(seconds: float) -> str:
    """`45s`, `3m`, `2h`, `4d`."""
    for unit, length, most in (("s", 1, 60), ("m", 60, 3600), ("h", 3600, 48 * 3600)):
        if seconds < most:
            return f"{seconds / length:.0f}{unit}"
    return f"{seconds / 86400:.0f}d"


def _arguments(row: Row) -> str:
    return " ".join(str(value) for value in row.arguments.values())


def _outcome(row: Row) -> str:
    if row.progress:
        return f"{row.progress} answered"
    if row.reason:
        return row.reason
    result = row.result
    if not isinstance(result, dict):
        return ""
    if row.kind == "evaluate":
        rate, low, high = (f"{result[name]:.3f}" for name in ("reward", "low", "high"))
        return f"{rate} ({low}-{high}) on {result['questions']} questions, version {result['version']}"
    if row.kind == "export":
        return str(result["folder"])
    if row.kind == "prune":
        return f"{_size(result['bytes'])} {'could be freed' if result['dry_run'] else 'freed'}"
    return str(result.get("page", ""))


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
