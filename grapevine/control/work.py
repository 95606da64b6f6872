"""What control jobs do. Each function is a kind of job: its arguments and its result are JSON.

Guarantees: arguments hold no address and no path; where server and folder are is the worker's own to know. Every function
bears being repeated: a job is done at least once, and its result is recorded once.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import secrets
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import structlog
from rq import get_current_job

from common.directory import Directory, NameTaken, Policy
from common.identity import Identity
from common.ledger import Ledger
from common.messages import Version
from common.policies import BadPolicy, PolicyStore, fetch, store_url
from common.run import open_run
from common.settings import Settings, SettingsError
from common.worker import LONGEST_PAUSE_SECONDS, TRANSIENT
from grapevine.control.queue import ControlJob
from grapevine.export import check_node, export_model, find_policy, has_checkpoints, parse_version
from learners.journal import read

log = structlog.get_logger()

EVALUATIONS_FILE = "evaluations.jsonl"


class NotYet(Exception):
    """What a job needs is not there now, and may be when it is tried again."""


@dataclass(frozen=True)
class Place:
    """Where a worker works: its settings, server included, and its name."""

    settings: Settings
    name: str


_place: Place | None = None


def work_at(place: Place) -> None:
    """Say where the jobs of this process are done."""
    global _place
    _place = place


def _here() -> tuple[Place, ControlJob]:
    job = get_current_job()
    if _place is None or not isinstance(job, ControlJob):
        raise RuntimeError("control jobs are done by `grapevine control`")
    return _place, job


def evaluate(
    node: str,
    version: str | None = None,
    tasks: str | list[Any] | None = None,
    questions: int | None = None,
    completions: int | None = None,
) -> dict[str, Any]:
    """Evaluate a node's policy, the one announced last without `version`, through the run's generators and verifiers.

    The result is also a line of the run's evaluations.jsonl.
    """
    from grapevine.evaluate import evaluate_policy

    place, job = _here()
    settings = place.settings
    check_node(settings, node)
    pause = 0.05
    while True:
        try:
            ledger, directory = open_run(settings)
            recorded = _recorded(settings.run_folder / EVALUATIONS_FILE, job)
            if recorded is not None:  # an earlier try came as far as that
                release(settings, ledger, job)
                return recorded
            identity = _identity(place, directory)
            policy = _pinned(place, job, ledger, directory, identity, node, version)
            figures = evaluate_policy(
                settings, ledger, directory, identity, _mark(job), policy, settings.for_node(node),
                tasks, questions, completions, on_progress=lambda done, total: _progress(job, done, total),
            )  # fmt: skip
            break
        except TRANSIENT as error:
            log.warning("server away, will go on", job=job.short_id, error=str(error))
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
    # A node's step counts the rounds that it trained.
    record = {"round": policy.version.step, **figures, "job": job.short_id, "node": node, "at": time.time()}
    _record(settings.run_folder / EVALUATIONS_FILE, record)
    release(settings, ledger, job)
    return record


def export(node: str, version: str | None = None) -> dict[str, Any]:
    """Export a node's policy to the run's folder `exports`, as NODE-VERSION; one that is there already stays."""
    place, _ = _here()
    settings = place.settings
    check_node(settings, node)
    wanted = parse_version(version) if version else None
    policy = None if has_checkpoints(settings, node) else _announced(settings, node, wanted)
    found = policy or find_policy(settings, node, wanted)
    target = settings.run_folder / "exports" / f"{node}-{found.version}"
    if target.exists() and any(target.iterdir()):
        return {"node": node, "version": str(found.version), "model": found.model, "folder": str(target.absolute())}
    return export_model(settings, node, target, found.version, policy)


def _announced(settings: Settings, node: str, version: Version | None) -> Policy:
    """What a node on another machine announced last. Raises NotYet, or SettingsError for a version that is another."""
    policy = open_run(settings)[1].policy(node)
    if policy is None:
        raise NotYet(f"node {node} has announced no policy yet; its learner does when it starts")
    if version not in (None, policy.version):
        raise SettingsError(
            f"{node} keeps its versions elsewhere, and announced {policy.version} last; {version} is not here"
        )
    return policy


def prune(keep_policies: int = 2, older_than: str = "7d", dry_run: bool = False) -> dict[str, Any]:
    """Free what the folder's runs no longer need (see `grapevine.prune`); this run is up and so keeps all."""
    from grapevine.prune import parse_age, plan, prune_runs

    place, _ = _here()
    settings = place.settings
    spared = {settings.run: "is up"}
    planned = plan(settings.folder, None, keep_policies, parse_age(older_than), spared)
    if not dry_run:
        planned = prune_runs(planned)
    return {"bytes": planned.size, "removed": [str(item.path) for item in planned.items], "dry_run": dry_run}


def report() -> dict[str, Any]:
    """Write the run's report.html as it is now; the figures of `grapevine report`."""
    from grapevine.report.folder import read_run
    from grapevine.report.page import run_page, write_page
    from grapevine.report.summary import figures

    place, _ = _here()
    run = read_run(place.settings.run_folder)
    out = run.path / "report.html"
    write_page(run_page(run), out)
    return {**figures(run), "page": str(out.absolute())}


def release(settings: Settings, ledger: Ledger, job: ControlJob) -> bool:
    """Remove what an evaluation holds while it is under way: its target and its copy of the policy. False: nothing."""
    target = job.meta.get("target")
    if target is None:
        return False
    ledger.forget_target(target)
    PolicyStore(store_url(settings), _copy(job), kept=1).remove()
    job.remember(target=None, policy=None)
    return True


def _identity(place: Place, directory: Directory) -> Identity:
    """The key that signs the worker's orders, registered under its name."""
    settings = place.settings
    identity = Identity.kept("node", place.name, settings.site, settings.run_folder / "control" / place.name / "key")
    try:
        directory.register(identity)
    except NameTaken:
        # A container of the same name that started without the disk of the one before.
        identity = Identity.fresh("node", f"{place.name}-{secrets.token_hex(2)}", settings.site)
        directory.register(identity)
    return identity


def _pinned(
    place: Place, job: ControlJob, ledger: Ledger, directory: Directory, identity: Identity, node: str, version: str | None
) -> Policy:
    """The job's own copy of the policy, the same in every try: learners remove their old files.

    The job's meta remembers it, and the target that holds its orders: another worker may have begun.
    """
    settings, target = place.settings, f"eval-{identity.record.name}-{_mark(job)}"
    scratch = settings.run_folder / "control" / place.name
    kept = job.meta.get("policy")
    policy = msgspec.convert(kept, Policy) if kept is not None else None
    if job.meta.get("target") not in (None, target):
        ledger.forget_target(job.meta["target"])
    try:
        if policy is not None:
            fetch(policy, scratch, settings.policies_token).unlink()
    except BadPolicy:
        policy = None  # lost with a worker's disk, or half released: orders of another policy are no use
        ledger.forget_target(target)
    job.remember(target=target)
    if policy is None:
        policy = _copied(place, directory, node, version, scratch, _copy(job))
        job.remember(policy=msgspec.to_builtins(policy))
    return policy


def _copied(place: Place, directory: Directory, node: str, version: str | None, scratch: Path, name: str) -> Policy:
    """A verified copy of the node's policy in the store."""
    settings, worker = place.settings, place.name
    for _ in range(5):
        announced = directory.policy(node)
        if version is not None and (announced is None or str(announced.version) != version):
            announced = find_policy(settings, node, parse_version(version))
        if announced is None:
            raise NotYet(f"node {node} has announced no policy yet; its learner does when it starts")
        try:
            local = fetch(announced, scratch, settings.policies_token)
        except BadPolicy as error:
            if error.reason != "missing":
                raise
            continue  # replaced by a newer one since it was announced
        try:
            return PolicyStore.of(settings, name, kept=1, server=worker).publish(local, announced.version, announced.model)
        finally:
            local.unlink()
    raise NotYet(f"the policy of {node} cannot be read at {announced.url if announced else 'its place'}")


def _mark(job: ControlJob) -> str:
    """A job's name in its target: short, and without the hyphens that part a target's name."""
    return hashlib.sha256(job.id.encode()).hexdigest()[:12]


def _copy(job: ControlJob) -> str:
    return f"eval-job-{_mark(job)}"


def _progress(job: ControlJob, done: int, total: int) -> None:
    shown = f"{done}/{total}"
    if job.meta.get("progress") != shown:
        job.remember(progress=shown)


def _recorded(path: Path, job: ControlJob) -> dict[str, Any] | None:
    return next((line for line in read(path) if line.get("job") == job.short_id), None)


def _record(path: Path, record: dict[str, Any]) -> None:
    """Append a line, whole or not at all, unless the job has one; several workers may share the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        data = path.read_bytes()
        if data and not data.endswith(b"\n"):
            # A writer died over its line: what it left would swallow the next one.
            os.truncate(path, data.rfind(b"\n") + 1)
        if all(line.get("job") != record["job"] for line in read(path)):
            file.write(msgspec.json.encode(record) + b"\n")
            file.flush()
            os.fsync(file.fileno())


def free_scratch(settings: Settings, name: str) -> None:
    """Remove half-copied files of a job that was killed; called before the next one starts."""
    for path in (settings.run_folder / "control" / name).glob("policy-*.safetensors"):
        path.unlink(missing_ok=True)
