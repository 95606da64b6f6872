"""`grapevine prune`: frees what stopped runs no longer need.

Guarantees: a run that is up is not touched, and none can be started while it is being pruned; the newest policies of every
node, those that a pending evaluation holds, what was written within the last hour, checkpoints, keys and records stay;
what goes is listed with its size first.
Only the run's own folder is looked at, not a `policies_url` elsewhere.
"""

from __future__ import annotations

import re
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from common.files import lock, read_object
from common.settings import SettingsError
from learners.checkpoint import STATE_FILE, LearnerState

SET_ASIDE = re.compile(r"(?P<run>.+)-(?P<at>\d{8}-\d{6})")
# Workers that nobody's `up` started hold no lock: what is younger may be theirs.
YOUNG_SECONDS = 3600.0
_AGE = re.compile(r"(\d+(?:\.\d+)?)([smhdw])")
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


@dataclass(frozen=True)
class Item:
    """A file or folder that can go: why, its size in bytes, and the run whose lock guards it."""

    path: Path
    why: str
    size: int
    run: Path


@dataclass(frozen=True)
class Planned:
    """What can go, and which runs were passed over for which reason."""

    items: tuple[Item, ...]
    passed_over: dict[str, str]

    @property
    def size(self) -> int:
        """Bytes in all."""
        return sum(item.size for item in self.items)


def parse_age(text: str) -> float:
    """`7d`, `12h`, `30m`, `90s` or `2w` in seconds. Raises SettingsError."""
    match = _AGE.fullmatch(text.strip())
    if match is None:
        raise SettingsError(f"{text} is no age; write a number and s, m, h, d or w, for example 7d")
    return float(match[1]) * _UNITS[match[2]]


def plan(folder: Path, run: str | None, keep: int, older_than: float, spared: dict[str, str] | None = None) -> Planned:
    """What can go in the folder of runs, or of one run and those set aside for it.

    Args:
        keep: newest policy files kept per node, at least 1.
        older_than: seconds since a run was set aside before it goes.
        spared: runs not to touch, each with the reason; runs that are up are found by themselves.

    Raises SettingsError when there is no such run.
    """
    if keep < 1:
        raise SettingsError("--keep-policies: at least 1, since the newest policy is what a run goes on with")
    if run is not None and not (folder / run).is_dir():
        raise SettingsError(f"{folder / run} holds no run; `grapevine up` makes one")
    items: list[Item] = []
    passed_over = {}
    for path in sorted(path for path in folder.glob("*") if _is_run(path)):
        original, since = _set_aside(path)
        if run not in (None, path.name, original):
            continue
        reason = (spared or {}).get(path.name)
        if reason is None and is_up(path):
            reason = "is up"
        if reason is not None:
            passed_over[path.name] = reason
        elif original is None:
            items += _leftovers(path, keep)
        elif time.time() - since > older_than:
            items.append(Item(path, f"set aside by {original}", _size(path), path))
    return Planned(tuple(items), passed_over)


def prune_runs(planned: Planned) -> Planned:
    """Remove what was planned; returns what was removed. A run that was started since is passed over."""
    removed: list[Item] = []
    passed_over = dict(planned.passed_over)
    for run in dict.fromkeys(item.run for item in planned.items):
        with lock(run / "lock") as free:
            if not free:
                passed_over[run.name] = "is up"
                continue
            for item in [item for item in planned.items if item.run == run]:
                if item.path.is_dir():
                    shutil.rmtree(item.path)
                else:
                    item.path.unlink(missing_ok=True)
                removed.append(item)
    return Planned(tuple(removed), passed_over)


def is_up(run: Path) -> bool:
    """Whether a `grapevine up` holds the run. Makes no file."""
    if not (run / "lock").exists():
        return False
    with lock(run / "lock") as free:
        return not free


def _leftovers(run: Path, keep: int) -> list[Item]:
    """Old policies and caches of a run that is not up."""
    items = []
    for store in sorted(path for path in (run / "policies").glob("*") if path.is_dir() and not path.is_symlink()):
        if store.name.startswith("eval-"):
            items.append(Item(store, "copy for an evaluation", _size(store), run))
            continue
        held = _held_by_evaluations(run / "nodes" / store.name)
        files = sorted(store.glob("*.safetensors"))
        old = [file for file in files[:-keep] if file.name not in held]
        items += [Item(file, f"old policy of {store.name}", file.stat().st_size, run) for file in old]
        items += [Item(part, "half a policy", part.stat().st_size, run) for part in sorted(store.glob("*.part"))]
    for cache in sorted((run / "cache").glob("*")):
        if not cache.is_symlink():
            items.append(Item(cache, "cache", _size(cache), run))
    now = time.time()
    return [item for item in items if item.size and now - _touched(item.path) > YOUNG_SECONDS]


def _held_by_evaluations(node: Path) -> set[str]:
    """File names of the policies that the node's checkpoints say are being evaluated."""
    names = set()
    for path in (node / "checkpoints").glob(f"*/{STATE_FILE}"):
        try:
            state = msgspec.json.decode(path.read_bytes(), type=LearnerState)
        except ValueError:
            continue  # damaged: the learner will use the one before it, which is looked at too
        versions = [state.version, *(pending.policy.version for pending in state.evaluations)]
        names |= {f"{version.incarnation:06d}-{version.step:09d}.safetensors" for version in versions}
    return names


def _is_run(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink() and (path / "nodes").is_dir()


def _set_aside(path: Path) -> tuple[str | None, float]:
    """The run that a folder was set aside for, and when it was last written to; None for a run of its own.

    A run may be named like one set aside: what it calls itself in its settings tells the two apart.
    """
    match = SET_ASIDE.fullmatch(path.name)
    if match is None or (read_object(path / "settings.json") or {}).get("run") != match["run"]:
        return None, 0.0
    return match["run"], time.mktime(time.strptime(match["at"], "%Y%m%d-%H%M%S"))


def _touched(path: Path) -> float:
    """When a file, or anything under a folder, was last written to."""
    return max((entry.lstat().st_mtime for entry in path.rglob("*")), default=0.0) if path.is_dir() else path.stat().st_mtime


def _size(path: Path) -> int:
    """Bytes of a file or of all files under a folder; links count as what they are."""
    if not path.is_dir():
        return path.lstat().st_size
    return sum(entry.lstat().st_size for entry in path.rglob("*") if entry.is_symlink() or entry.is_file())
