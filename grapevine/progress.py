"""One plain line per round that all nodes have completed."""

from __future__ import annotations

import os
import time
from statistics import fmean
from typing import Any

import msgspec
from rich.console import Console

from common.settings import Settings

LINE_SECONDS = 4.0
BARS = "▁▂▃▄▅▆▇█"
SMOOTH = 10


class Progress:
    """Follows the nodes' journals."""

    def __init__(self, settings: Settings, console: Console) -> None:
        self._console = console
        self._nodes = settings.node_names()
        self._rounds = max(settings.for_node(node).rounds for node in self._nodes)
        self._files = {node: settings.run_folder / "nodes" / node / "rounds.jsonl" for node in self._nodes}
        self._heldout = {node: settings.run_folder / "nodes" / node / "heldout.jsonl" for node in self._nodes}
        self._offsets: dict[str, int] = {}
        self._inodes: dict[str, int] = {}
        self._rewards: dict[str, list[float]] = {node: [] for node in self._nodes}
        self._latest: dict[str, dict[str, Any]] = {}
        self._tokens: dict[str, int] = {}
        self._started = time.monotonic()
        self._shown_at = float("-inf")
        self._shown = 0
        self._first_round: int | None = None

    def show(self, restarts: int) -> None:
        """Print a line when all nodes are a round further, at most one every four seconds."""
        if time.monotonic() - self._shown_at < LINE_SECONDS:
            return
        for node in self._nodes:
            self._follow(node)
        round = (
            min((line["round"] for line in self._latest.values()), default=0) if len(self._latest) == len(self._nodes) else 0
        )
        if round <= self._shown:
            return
        if self._first_round is None:
            self._first_round = round
        self._shown, self._shown_at = round, time.monotonic()
        elapsed = time.monotonic() - self._started
        self._console.print(self.line(round, elapsed, restarts), highlight=False, soft_wrap=True)

    def line(self, round: int, elapsed: float, restarts: int) -> str:
        """The figures of one line; reward is the mean over the last ten rounds."""
        recent = {node: fmean(rewards[-SMOOTH:]) for node, rewards in self._rewards.items() if rewards}
        each = " ".join(f"{value:.2f}" for value in recent.values())
        curve = [fmean(column) for column in zip(*(rewards[:round] for rewards in self._rewards.values()), strict=False)]
        swarm = fmean(len(line["swarm_ids"]) for line in self._latest.values())
        stale = fmean(line["staleness"] for line in self._latest.values())
        return (
            f"round {round:4d}/{self._rounds}  own reward {fmean(recent.values()):.3f} {sparkline(curve)}  "
            f"nodes {each}  swarm {swarm:.0f}  staleness {stale:.1f}  {sum(self._tokens.values()) / elapsed:6.0f} tok/s  "
            f"{elapsed:4.0f} s" + (f"  restarts {restarts}" if restarts else "")
        )

    def _follow(self, node: str) -> None:
        path = self._files[node]
        if not path.exists():
            return
        with path.open("rb") as file:
            facts = os.fstat(file.fileno())
            if facts.st_ino != self._inodes.get(node) or facts.st_size < self._offsets[node]:
                # A learner that comes back from a checkpoint writes the file anew, without the rounds after it. Its size
                # says nothing: it may have grown again since.
                self._inodes[node] = facts.st_ino
                self._offsets[node], self._rewards[node], self._tokens[node] = 0, [], 0
            file.seek(self._offsets[node])
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offsets[node] += len(whole)
        for line in whole.splitlines():
            record = msgspec.json.decode(line)
            self._rewards[node].append(record["own_reward"])
            self._latest[node] = record
            self._tokens[node] += record["own_tokens"]


def sparkline(values: list[float], width: int = 16) -> str:
    """The whole curve in `width` characters, scaled from its least to its greatest column."""
    if not values:
        return ""
    size = max(1, -(-len(values) // width))
    columns = [fmean(values[i : i + size]) for i in range(0, len(values), size)]
    low, high = min(columns), max(columns)
    return "".join(BARS[int((value - low) / ((high - low) or 1.0) * (len(BARS) - 1))] for value in columns)
