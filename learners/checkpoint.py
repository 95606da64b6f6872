"""Checkpoints: what a learner is, on disk.

Guarantees: a checkpoint appears whole or not at all (written aside, synced, renamed); nothing in it is pickled
(safetensors and JSON); a damaged one is recognised by its checksums, named aloud, and the one before it is used.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import shutil
from pathlib import Path
from typing import Protocol

import msgspec
import structlog

from common.directory import Policy
from common.files import sync, write_whole
from common.messages import Version
from common.policies import sha256
from common.settings import SettingsError
from learners.orders import AccountState

log = structlog.get_logger()

STATE_FILE = "state.json"
WEIGHTS_FILE = "model.safetensors"


class PendingEvaluation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An evaluation under way: of the policy after `round`, whose file is pinned. `plan` tells what was asked."""

    round: int
    policy: Policy
    plan: str = ""


class LearnerState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All of a learner but its tensors. Randomness needs no state: it is derived from seed, node and round."""

    round: int = 0
    version: Version = Version(0, 0)
    account: AccountState = AccountState()
    seen: dict[str, int] = {}
    evaluations: tuple[PendingEvaluation, ...] = ()
    checksums: dict[str, str] = {}


class Tensors(Protocol):
    """What writes and reads its tensors in a checkpoint's folder."""

    def save(self, folder: Path) -> None:
        """Write safetensors files, `model.safetensors` among them."""

    def load(self, folder: Path) -> None:
        """Read them back."""


class Checkpoints:
    """The checkpoints of one node, the newest last by (incarnation, round)."""

    def __init__(self, folder: Path, kept: int = 2) -> None:
        self._folder = folder
        self._kept = kept
        # The newest checkpoint of a round before this one stays, however many are newer: what a rollback goes back to.
        self.spared_before = 0
        folder.mkdir(parents=True, exist_ok=True)

    def sweep(self) -> None:
        """Clear away what an earlier life began to write. Only for the one who writes here: others may be looking on."""
        for leftover in self._folder.glob("*.part"):
            shutil.rmtree(leftover)

    def save(self, state: LearnerState, tensors: Tensors) -> Path:
        """Write a checkpoint durably; returns its folder. The oldest go.

        A round saved before in this incarnation has the same tensors: only the state is renewed.
        """
        final = self._folder / f"{state.version.incarnation:06d}-{state.round:09d}"
        if final.exists():
            self.amend(state)
            return final
        aside = final.with_suffix(".part")
        aside.mkdir()
        try:
            _write(aside, state, tensors)
        except BaseException:
            shutil.rmtree(aside)  # on a full disk the half of it would be in the way
            raise
        os.replace(aside, final)
        sync(self._folder)
        spared = [folder for folder in self._all() if _round_of(folder) < self.spared_before][-1:]
        for old in self._all()[: -self._kept]:
            if old not in spared:
                shutil.rmtree(old)
        return final

    def amend(self, state: LearnerState) -> None:
        """Renew the state of the checkpoint last saved; its tensors stay."""
        path = self._all()[-1] / STATE_FILE
        kept = msgspec.json.decode(path.read_bytes(), type=LearnerState)
        write_whole(path, _state_bytes(msgspec.structs.replace(state, checksums=kept.checksums)), durable=True)

    def newest(self) -> tuple[LearnerState, Path] | None:
        """The newest checkpoint that is whole, None when there is none at all.

        Raises SettingsError when all are damaged: beginning anew unasked would throw the node's work away.
        """
        folders = self._all()
        for folder in reversed(folders):
            try:
                return _read_whole(folder), folder
            except (OSError, ValueError) as error:
                log.error("checkpoint damaged, using the one before", folder=str(folder), detail=str(error))
        if folders:
            raise SettingsError(
                f"none of the {len(folders)} checkpoints in {self._folder} is whole; put a copy of one there, "
                f"or begin the run anew with `grapevine up --fresh`"
            )
        return None

    def before(self, round: int) -> Path | None:
        """The newest whole checkpoint of an earlier round."""
        earlier = [folder for folder in self._all() if _round_of(folder) < round]
        return next((folder for folder in reversed(earlier) if self.fault(folder.name) is None), None)

    def damaged(self) -> list[str]:
        """The checkpoints newer than the newest whole one, by name."""
        names = [folder.name for folder in reversed(self._all())]
        return list(itertools.takewhile(self.fault, names))

    def fault(self, name: str) -> str | None:
        """What is wrong with the checkpoint in the folder `name`, None when it is whole."""
        try:
            _read_whole(self._folder / name)
        except (OSError, ValueError) as error:
            return str(error)
        return None

    def go_back(self, name: str, state: LearnerState) -> None:
        """Make the checkpoint `name` the newest, with this state."""
        self.clear(after=name)
        self.amend(state)

    def clear(self, after: str) -> None:
        """Delete the checkpoints newer than `after`."""
        for folder in self._all():
            if folder.name > after:
                shutil.rmtree(folder)

    def begin_anew(self) -> None:
        """Delete everything, the number of incarnations included."""
        shutil.rmtree(self._folder)
        self._folder.mkdir()

    def raise_incarnation(self) -> int:
        """A number above every earlier one of this node, remembered before it is returned."""
        path = self._folder / "incarnation"
        last = max([int(folder.name.partition("-")[0]) for folder in self._all()], default=0)
        if path.exists():
            try:
                last = max(last, int(path.read_text()))
            except ValueError:
                raise SettingsError(f"{path} is damaged: it should hold a whole number; write {last + 1} into it") from None
        write_whole(path, str(last + 1), durable=True)
        return last + 1

    def _all(self) -> list[Path]:
        return sorted(path for path in self._folder.iterdir() if path.is_dir() and path.suffix != ".part")


def _round_of(folder: Path) -> int:
    return int(folder.name.rpartition("-")[2])


def _write(folder: Path, state: LearnerState, tensors: Tensors) -> None:
    """A checkpoint's files, durably."""
    tensors.save(folder)
    checksums = {path.name: sha256(path) for path in sorted(folder.iterdir())}
    (folder / STATE_FILE).write_bytes(_state_bytes(msgspec.structs.replace(state, checksums=checksums)))
    for path in folder.iterdir():
        sync(path)
    sync(folder)


def _read_whole(folder: Path) -> LearnerState:
    """The state of a checkpoint whose files are all what was written. Raises OSError or ValueError."""
    state = msgspec.json.decode((folder / STATE_FILE).read_bytes(), type=LearnerState)
    for name, checksum in state.checksums.items():
        found = _state_checksum(state) if name == STATE_FILE else sha256(folder / name)
        if found != checksum:
            raise ValueError(f"{name} is not what was written")
    if STATE_FILE not in state.checksums:
        raise ValueError(f"{STATE_FILE} holds no checksum of itself")
    return state


def _state_bytes(state: LearnerState) -> bytes:
    checksums = {**state.checksums, STATE_FILE: _state_checksum(state)}
    return msgspec.json.format(msgspec.json.encode(msgspec.structs.replace(state, checksums=checksums)))


def _state_checksum(state: LearnerState) -> str:
    """Of a state with all its checksums but this one."""
    others = {name: checksum for name, checksum in state.checksums.items() if name != STATE_FILE}
    return hashlib.sha256(msgspec.json.encode(msgspec.structs.replace(state, checksums=others))).hexdigest()
