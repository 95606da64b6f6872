"""What a node writes down for people and reports: one JSON object per line.

`rounds.jsonl` holds what one seed reproduces, `timing.jsonl` the wall-clock figures, `heldout.jsonl` the evaluations,
`rollouts.jsonl` some groups to read.
Guarantees: a resumed learner's `rounds.jsonl` holds each round of the surviving lineage once; a line is written whole or,
cut short by a crash, left out by `read`.
"""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
import structlog

from common.files import write_whole
from common.settings import SettingsError
from learners.figures import Figures
from learners.sinks import Kind, Sink

log = structlog.get_logger()

FILES = ("rounds.jsonl", "timing.jsonl", "heldout.jsonl", "rollouts.jsonl")
SMOOTH = 10
RECENT = 64
CURVE_POINTS = 24


class Journal:
    """Appends to one node's files, and passes figures on to the sinks.

    `keep_until` is the checkpoint's round, later lines are dropped.
    """

    def __init__(self, folder: Path, node: str, keep_until: int, sinks: Sequence[Sink] = ()) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._sinks = list(sinks)
        for name in FILES:
            lines = read(folder / name)
            kept = [line for line in lines if line["round"] <= keep_until]
            if len(kept) != len(lines) or (folder / name).exists():
                write_whole(folder / name, b"".join(msgspec.json.encode(line) + b"\n" for line in kept))
        evaluations = read(folder / "heldout.jsonl")
        self.evaluated: set[int] = {line["round"] for line in evaluations}
        # One that an earlier release wrote has no interval.
        self.evaluations = [line for line in evaluations if "greedy" in line]
        rounds = read(folder / "rounds.jsonl")
        self._rewards = [line["own_reward"] for line in rounds]
        # The newest last: what decisions about later rounds may look at.
        self.recent: deque[dict[str, Any]] = deque(rounds, maxlen=RECENT)
        self._pace: deque[tuple[float, int]] = deque(maxlen=SMOOTH + 1)
        self._figures = Figures(node, rounds, self.evaluations)

    def round(self, record: dict[str, Any]) -> None:
        """One round's figures."""
        self._rewards.append(record["own_reward"])
        self.recent.append(record)
        self._append("rounds.jsonl", record)
        self._figures.round(record)
        self._pass_on("round", record)

    def timing(self, record: dict[str, Any]) -> None:
        """One round's seconds; `at` is when it ended."""
        last = self.recent[-1]
        self._pace.append((record["at"], last.get("tokens_own", 0) + last.get("tokens_swarm", 0)))
        self._append("timing.jsonl", record)

    def heldout(self, record: dict[str, Any]) -> None:
        """One evaluation's result; `evaluated` holds the rounds that have one."""
        self.evaluated.add(record["round"])
        self.evaluations.append(record)
        self._append("heldout.jsonl", record)
        self._figures.heldout(record)
        self._pass_on("heldout", record)

    def rollouts(self, records: list[dict[str, Any]]) -> None:
        """Groups to read."""
        for record in records:
            self._append("rollouts.jsonl", record)

    def _pass_on(self, kind: Kind, record: dict[str, Any]) -> None:
        for sink in list(self._sinks):
            try:
                sink.write(kind, record, record["round"])
            except Exception as error:
                # The files are the record; a service that is away must not end the training.
                log.error("sink given up", sink=type(sink).__name__, error=str(error))
                self._sinks.remove(sink)

    def close(self) -> None:
        """Close the sinks; the files are whole after every line."""
        for sink in self._sinks:
            sink.close()

    def facts(self) -> dict[str, Any]:
        """Where the node stands, for the status screen. Read only: the heartbeat's thread calls it."""
        rewards, pace = list(self._rewards), list(self._pace)
        last = self.recent[-1] if self.recent else {}
        seconds = pace[-1][0] - pace[0][0] if len(pace) > 1 else 0.0
        return {
            "own_reward": fmean(rewards[-SMOOTH:]) if rewards else None,
            "curve": curve(rewards, CURVE_POINTS),
            "heldout": self._heldout_facts(),
            "mix": {
                "own": dict(Counter(last.get("own_tags", ()))),
                "swarm": dict(Counter(last.get("swarm_tags", ()))),
                "missing": last.get("swarm_missing", 0),
            },
            "staleness": last.get("staleness", 0.0),
            "tokens_per_second": sum(tokens for _, tokens in pace[1:]) / seconds if seconds else 0.0,
        }

    def _heldout_facts(self) -> dict[str, Any] | None:
        if not self.evaluations:
            return None
        heldout = self.evaluations[-1]
        return {**{name: heldout[name] for name in ("round", "reward", "low", "high")}, "greedy": heldout["greedy"]["rate"]}

    def _append(self, name: str, record: dict[str, Any]) -> None:
        with (self._folder / name).open("ab") as file:
            file.write(msgspec.json.encode(record) + b"\n")


def read(path: Path) -> list[dict[str, Any]]:
    """All whole lines of a journal file; a last line cut short by a crash is left out.

    Raises SettingsError for a damaged line.
    """
    if not path.exists():
        return []
    records = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
        try:
            records.append(msgspec.json.decode(line))
        except msgspec.DecodeError:
            raise SettingsError(f"{path}: line {number} is damaged; take it out, or begin the run anew") from None
    return records


def curve(values: list[float], points: int) -> list[float]:
    """The whole series in at most `points` means over equal slices, the last one maybe shorter."""
    size = max(1, -(-len(values) // points))
    return [fmean(values[start : start + size]) for start in range(0, len(values), size)]


def question_mark(text: str) -> str:
    """Ten hex digits that tell distinct questions apart."""
    return hashlib.sha256(text.encode()).hexdigest()[:10]
