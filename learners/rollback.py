"""Rounds whose update was skipped, and the way back from too many in a row.

A skipped update leaves the weights as they are, so weights that make every gradient explode would stay for ever. What is
good is shown by what came of it: a checkpoint is good when an update of a later round succeeded from it.
Guarantees: the count is derived from the journal, so that a kill changes nothing; the good checkpoint is on disk as long
as it may be needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import structlog

from learners.checkpoint import Checkpoints

log = structlog.get_logger()


class Streak(NamedTuple):
    """`last` is the last round whose update changed the weights (0: none), `skipped` counts the updates skipped since.

    A round with nothing to learn neither counts nor ends the row; a return to a checkpoint begins a new one.
    """

    last: int = 0
    skipped: int = 0

    @classmethod
    def of(cls, lines: Iterable[Mapping[str, Any]]) -> Streak:
        """That of a journal's rounds."""
        streak = cls()
        for line in lines:
            streak = streak.after(line["round"], line)
        return streak

    def after(self, round: int, figures: Mapping[str, Any]) -> Streak:
        """With one round more. Figures without `steps`, of an earlier release, had one step, taken unless skipped."""
        skipped = figures.get("skipped", 0) > 0
        if figures.get("steps", 0 if skipped else 1) > 0:
            return Streak(round, 0)
        if figures.get("rolled_back"):
            return Streak(self.last, 0)
        return Streak(self.last, self.skipped + skipped)


class Restorable(Protocol):
    """What can take back an earlier checkpoint's tensors."""

    def roll_back(self, folder: Path) -> None:
        """Weights and optimizer of the checkpoint; the count of updates goes on."""


class Rollback:
    """Watches one node's updates."""

    def __init__(
        self, node: str, limit: int, checkpoints: Checkpoints, trainer: Restorable, lines: Iterable[Mapping[str, Any]]
    ) -> None:
        """`limit` updates skipped in a row bring back the last good checkpoint; 0: never.

        `lines` are the journal's rounds.
        """
        self._node = node
        self._limit = limit
        self._checkpoints = checkpoints
        self._trainer = trainer
        self._streak = Streak.of(lines)
        checkpoints.spared_before = self._streak.last

    def after(self, round: int, figures: dict[str, float]) -> dict[str, float]:
        """To be called after every update, before its checkpoint; returns the figures with `rolled_back` added."""
        streak = self._streak.after(round, figures)
        rolled_back = bool(self._limit) and streak.skipped >= self._limit and self._go_back(streak)
        figures = {**figures, "rolled_back": float(rolled_back)}
        self._streak = self._streak.after(round, figures)
        self._checkpoints.spared_before = self._streak.last
        return figures

    def _go_back(self, streak: Streak) -> bool:
        good = self._checkpoints.before(streak.last)
        if good is None:
            log.error("updates skipped in a row, and no checkpoint to go back to", node=self._node, skipped=streak.skipped)
            return False
        self._trainer.roll_back(good)
        log.error("rolled back: too many updates skipped", node=self._node, skipped=streak.skipped, checkpoint=good.name)
        return True
