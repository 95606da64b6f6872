"""How far an experiment is: one bar over all rounds of all cells on a terminal, a line per cell everywhere else.

Guarantees: rounds of running cells are counted from their journals, so the bar moves while a cell runs; plain lines hold no
control codes.
"""

from __future__ import annotations

import time
from pathlib import Path
from types import TracebackType

from rich import progress as bars
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from grapevine.experiment.cells import Cell
from grapevine.report.page import span

NAMED = 3
# Before so much is done, what it took to begin would decide the time left.
SURE = 0.03


class Progress:
    """A context manager; `show` may be called as often as one likes."""

    def __init__(self, cells: list[Cell], console: Console) -> None:
        self._all, self._done, self._number = sum(cell.node_rounds for cell in cells), 0, 0
        # Told as rounds of a cell, counted as rounds of its nodes.
        self._rounds = sum(cell.rounds for cell in cells)
        self._cells, self._console, self._started = len(cells), console, time.monotonic()
        self._sizes: dict[Path, tuple[int, int]] = {}
        live = console.is_terminal and not console.is_dumb_terminal and console.file.isatty()
        columns = (
            bars.BarColumn(bar_width=24), bars.TextColumn("{task.fields[rounds]}"),
            bars.TextColumn("{task.fields[left]}"),
        )  # fmt: skip
        self._bar = bars.Progress(*columns, console=console, auto_refresh=False)
        self._task = self._bar.add_task("", total=self._all, rounds="", left="")
        # Drawn by `show` alone: no thread, since children are forked.
        self._live = Live(console=console, auto_refresh=False) if live else None

    def __enter__(self) -> Progress:
        if self._live and self._cells:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        if self._live:
            self._live.stop()

    def show(self, running: list[Cell]) -> None:
        """Draw the bar, where there is one."""
        if self._live is None:
            return
        under_way = {cell.name: self._rounds_of(cell) for cell in running}
        done = self._done + sum(under_way.values())
        names = [
            f"{cell.regime} {cell.arm} {cell.seed} ({cell.rounds * under_way[cell.name] // cell.node_rounds}/{cell.rounds})"
            for cell in running
        ]
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        self._bar.update(
            self._task, completed=done, left=self._left(done),
            rounds=f"round {round(self._rounds * done / self._all):,} of {self._rounds:,}",
        )  # fmt: skip
        now = Text(", ".join(names[:NAMED]) + more, style="dim", overflow="ellipsis", no_wrap=True)
        self._live.update(Group(self._bar, now), refresh=True)

    def finished(self, cell: Cell, line: str) -> None:
        """A cell is there."""
        self._done += cell.node_rounds
        self._say(line)

    def failed(self, cell: Cell, words: str) -> None:
        """A cell will not come this time; its rounds count as passed."""
        self._done += cell.node_rounds
        self._say(words)

    def _say(self, line: str) -> None:
        self._number += 1
        self._console.print(f"[{self._number}/{self._cells}] {line}", highlight=False, soft_wrap=True, markup=False)

    def _left(self, done: int) -> str:
        """By the pace since the start, loading of models included."""
        if done < SURE * self._all:
            return "time left comes with the next rounds"
        return f"{span((time.monotonic() - self._started) / done * (self._all - done))} left"

    def _rounds_of(self, cell: Cell) -> int:
        """Rounds of all nodes that the journals hold; only what was added is read."""
        total = 0
        for node in cell.settings.node_names():
            path = cell.scratch / "nodes" / node / "timing.jsonl"
            at, lines = self._sizes.get(path, (0, 0))
            try:
                with path.open("rb") as file:
                    file.seek(at)
                    added = file.read()
            except OSError:  # not there yet, or gone since the cell is finished
                added = b""
            self._sizes[path] = at + len(added), lines + added.count(b"\n")
            total += self._sizes[path][1]
        return total
