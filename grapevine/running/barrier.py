"""Barriers of a lockstep run: everything as it was between two rounds, so that a killed run goes on as if it had not been.

Guarantees: a barrier is one file that appears whole or not at all; it holds what the server knew, and names each node's
checkpoint and the lengths of its journal files; restoring it may itself be killed and repeated; a damaged one, or one whose
checkpoint is damaged or whose journal lost lines, is named aloud and the one before it is used.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from common.files import write_whole
from common.ledger import Ledger
from common.run import forget_run, run_keys
from common.settings import SettingsError
from learners.checkpoint import Checkpoints, LearnerState
from learners.journal import FILES
from learners.learner import Learner

KEPT = 3


class Mark(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a node stood: the name of its checkpoint's folder, its state, the bytes in each of its journal files."""

    checkpoint: str
    state: LearnerState
    sizes: dict[str, int]


class Barrier(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A run between two rounds. `server` holds every key with its milliseconds to live (0: for ever) and its dump."""

    round: int
    server: list[tuple[bytes, int, bytes]]
    nodes: dict[str, Mark]


class Damaged(Exception):
    """A barrier that cannot be restored; the message says what is wrong."""


class Barriers:
    """The barriers of one run, in its folder `barriers`; the newest are kept."""

    def __init__(self, run_folder: Path) -> None:
        self._run = run_folder
        self._folder = run_folder / "barriers"

    @staticmethod
    def there(run_folder: Path) -> bool:
        """Whether this run was ever in lockstep."""
        return (run_folder / "barriers").is_dir()

    def save(self, round: int, ledger: Ledger, learners: list[Learner]) -> None:
        """Write down the present moment, which must lie between two rounds."""
        nodes = {}
        for learner in learners:
            checkpoint, state = learner.checkpoint()
            sizes = {name: _size(self._node(learner.name) / name) for name in FILES}
            nodes[learner.name] = Mark(checkpoint.name, state, sizes)
        body = msgspec.msgpack.encode(Barrier(round, _dump(ledger), nodes))
        final = self._folder / f"{round:09d}"
        write_whole(final, hashlib.sha256(body).digest() + body, durable=True)
        for old in self._all()[:-KEPT]:
            old.unlink()

    def restore(self, ledger: Ledger, nodes: list[str], say: Callable[[str], None]) -> int:
        """Bring server, checkpoints and journals back to the newest good barrier; its round.

        Without any, an unfinished beginning is cleared away and the round is 0. Raises SettingsError when there are
        barriers and none is good, when the nodes are no longer those of the barrier, or when the server holds a run of
        this name that was begun elsewhere.
        """
        if not self._folder.is_dir():
            if run_keys(ledger):
                raise SettingsError(
                    f"the server holds a run {ledger.keys.run} that was not begun here; choose another name with "
                    f"--set run=NAME, or delete that one with --fresh"
                )
            self._folder.mkdir(parents=True)
        faults = []
        for path in reversed(self._all()):
            try:
                barrier = self._read(path)
            except Damaged as damage:
                faults.append(str(damage))
                say(f"barrier of round {int(path.name)} cannot be used ({damage}); going back to the one before")
                continue
            if set(barrier.nodes) != set(nodes):
                raise SettingsError(
                    f"setting nodes: the run has {', '.join(sorted(barrier.nodes))}; in lockstep they stay the same, "
                    f"or begin anew with --fresh"
                )
            self._bring_back(barrier, ledger)
            return barrier.round
        if faults:
            raise SettingsError(f"no barrier of {self._run.name} can be used ({faults[0]}); begin anew with --fresh")
        if any(_size(self._node(node) / "rounds.jsonl") for node in nodes):
            # The first barrier is older than the first round.
            raise SettingsError(f"{self._folder} lost its barriers; put a copy of one there, or begin anew with --fresh")
        forget_run(ledger)
        for node in nodes:
            for name in FILES:
                (self._node(node) / name).unlink(missing_ok=True)
            Checkpoints(self._node(node) / "checkpoints").begin_anew()
        return 0

    def _read(self, path: Path) -> Barrier:
        """A barrier with everything it names. Raises Damaged."""
        data = path.read_bytes()
        body = data[32:]
        if hashlib.sha256(body).digest() != data[:32]:
            raise Damaged("its checksum is wrong")
        try:
            barrier = msgspec.msgpack.decode(body, type=Barrier)
        except msgspec.DecodeError as error:
            raise Damaged(f"another release wrote it: {error}") from None
        for node, mark in barrier.nodes.items():
            fault = Checkpoints(self._node(node) / "checkpoints").fault(mark.checkpoint)
            if fault:
                raise Damaged(f"checkpoint {mark.checkpoint} of {node}: {fault}")
            for name, size in mark.sizes.items():
                if _size(self._node(node) / name) < size:
                    raise Damaged(f"{name} of {node} lost lines")
        return barrier

    def _bring_back(self, barrier: Barrier, ledger: Ledger) -> None:
        # Each step can be repeated: a kill in between leaves the barrier, and the next start begins here again.
        for node, mark in barrier.nodes.items():
            Checkpoints(self._node(node) / "checkpoints").go_back(mark.checkpoint, mark.state)
            for name, size in mark.sizes.items():
                if (self._node(node) / name).exists():
                    os.truncate(self._node(node) / name, size)
        for path in self._all():
            if int(path.name) > barrier.round:
                path.unlink()
        forget_run(ledger)
        pipeline = ledger.redis.pipeline(transaction=False)
        for key, life, dump in barrier.server:
            pipeline.restore(key, life, dump, replace=True)
        pipeline.execute()

    def _node(self, node: str) -> Path:
        return self._run / "nodes" / node

    def _all(self) -> list[Path]:
        return sorted(path for path in self._folder.iterdir() if path.name.isdigit())


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _dump(ledger: Ledger) -> list[tuple[bytes, int, bytes]]:
    keys = sorted(run_keys(ledger))
    pipeline = ledger.redis.pipeline(transaction=False)
    for key in keys:
        pipeline.pttl(key)
        pipeline.dump(key)
    replies = iter(pipeline.execute())
    return [(key, max(0, life), dump) for key, life, dump in zip(keys, replies, replies, strict=True) if dump]
