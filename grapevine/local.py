"""`grapevine up`: a whole swarm on this machine, from server to summary.

Guarantees: an existing run is continued, or with `fresh` set aside under another name, never overwritten; two `up` of one
run exclude each other; Ctrl-C drains, and a second start goes on where the first stopped; what the ledger said last is
kept in the run's folder when the server is gone.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from common.ledger import Ledger
from common.run import open_run
from common.server import ServerRefused
from common.settings import Settings, SettingsError
from common.worker import TRANSIENT
from grapevine.progress import Progress
from grapevine.report.summary import summary
from grapevine.server import EmbeddedServer
from grapevine.supervisor import Supervisor

SNAPSHOT_SECONDS = 2.0


def up(settings: Settings, fresh: bool, lockstep: bool, console: Console) -> int:
    """Run to the end; the exit code (0 complete, 130 interrupted)."""
    folder = settings.run_folder
    if fresh and folder.exists():
        aside = folder.with_name(f"{folder.name}-{time.strftime('%Y%m%d-%H%M%S', time.localtime(folder.stat().st_mtime))}")
        with _only_one(folder):  # a run that is up must not lose its folder
            folder.rename(aside)
        console.print(f"earlier run set aside as {aside}")
    folder.mkdir(parents=True, exist_ok=True)
    with _only_one(folder):
        settings = with_models(settings)
        server = None
        if settings.redis_url is None:
            server = EmbeddedServer(folder / "server")
            server.start()
        else:
            _reach(settings)
        url = settings.redis_url or (server.url if server else "")
        settings = settings.model_copy(update={"redis_url": url})
        if fresh:
            forget(settings)
        clock = _Stopwatch(folder)
        try:
            if lockstep:
                from grapevine.lockstep import run_lockstep

                code = run_lockstep(settings, console)
            else:
                code = _run_processes(settings, server, clock, console)
        finally:
            clock.write()
            with suppress(*TRANSIENT):
                _snapshot(settings, open_run(settings)[0])
            if server is not None:
                server.stop()
    show_summary(summary(folder), console)
    return code


def with_models(settings: Settings) -> Settings:
    """The settings with `starter` replaced by the folder of the starter model, which is made when it is not there."""
    if all(settings.for_node(name).model != "starter" for name in settings.node_names()):
        return settings
    from grapevine.starter.model import starter_folder

    model = str(starter_folder())
    nodes = settings.nodes
    if not isinstance(nodes, int):
        nodes = {
            name: {**(own or {}), "model": model} if (own or {}).get("model") == "starter" else own
            for name, own in nodes.items()
        }
    node = settings.node.model_copy(update={"model": model} if settings.node.model == "starter" else {})
    return settings.model_copy(update={"node": node, "nodes": nodes})


def _reach(settings: Settings) -> None:
    """Raises ServerRefused when the server that the settings name does not answer now: later, workers wait for it."""
    try:
        open_run(settings)[0].redis.ping()
    except TRANSIENT as error:
        raise ServerRefused(f"the server that redis_url names does not answer: {error}") from None


def forget(settings: Settings) -> None:
    """Delete what the server knows of a run of this name."""
    ledger, _ = open_run(settings)
    for key in list(ledger.redis.scan_iter(match=f"gv:{{{settings.run}*", count=1000)):
        if key.startswith((f"gv:{{{settings.run}}}".encode(), f"gv:{{{settings.run}:".encode())):
            ledger.redis.delete(key)


def _run_processes(settings: Settings, server: EmbeddedServer | None, clock: _Stopwatch, console: Console) -> int:
    """Supervise until the learners are complete or someone interrupts."""
    stop: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda received, _: stop.append(received))
    settings_file = settings.run_folder / "settings.json"
    tree = settings.model_dump(mode="json", exclude={"redis_url"})
    settings_file.write_text(json.dumps(tree, indent=1))
    supervisor = Supervisor(settings, settings_file, settings.redis_url or "")
    progress = Progress(settings, console)
    nodes, generators, verifiers = len(settings.node_names()), settings.generators.replicas, settings.verifiers.replicas
    console.print(
        f"run [bold]{settings.run}[/bold]: {nodes} nodes, {generators} generators, {verifiers} verifiers; "
        f"files and logs in {settings.run_folder}\nloading models; the first rounds follow ...",
        highlight=False,
        soft_wrap=True,
    )
    ledger: Ledger | None = None
    snapshot_due = 0.0
    try:
        while not stop and not supervisor.learners_complete():
            if server is not None and server.process is not None and server.process.poll() is not None:
                supervisor.event("server restart", "server", server.process.returncode)
                clock.server_restarts += 1
                server.start()
            supervisor.tend()
            clock.restarts = supervisor.restarts
            progress.show(supervisor.restarts + clock.server_restarts)
            if time.monotonic() > snapshot_due:
                clock.write()
                try:
                    ledger = ledger or open_run(settings)[0]
                    _snapshot(settings, ledger)
                except TRANSIENT:
                    ledger = None
                snapshot_due = time.monotonic() + SNAPSHOT_SECONDS
            time.sleep(0.1)
    finally:
        if stop:
            console.print(
                "draining: workers finish their step and write their checkpoints (Ctrl-C again does not hurry them)"
            )
        clock.stop()
        late = supervisor.stop()
        if late:
            console.print(f"[yellow]killed after the grace period: {', '.join(late)}[/yellow]")
    return 130 if stop else 0


class _Stopwatch:
    """Seconds of this run over all its starts, and its restarts; kept in run.json."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "run.json"
        kept = json.loads(self._path.read_text()) if self._path.exists() else {}
        self._before = kept.get("elapsed_seconds", 0.0)
        self._restarts_before = kept.get("restarts", 0)
        self._started = time.monotonic()
        self._stopped: float | None = None
        self.restarts = 0
        self.server_restarts = 0

    def stop(self) -> None:
        """Training has ended; draining does not count."""
        self._stopped = time.monotonic()

    def write(self) -> None:
        """Write run.json."""
        elapsed = self._before + (self._stopped or time.monotonic()) - self._started
        facts = {"elapsed_seconds": elapsed, "restarts": self._restarts_before + self.restarts + self.server_restarts}
        aside = self._path.with_suffix(".new")
        aside.write_text(json.dumps(facts))
        os.replace(aside, self._path)


def _snapshot(settings: Settings, ledger: Ledger) -> None:
    """Write the ledger's books and counts beside the run."""
    books = {}
    for node in settings.node_names():
        book = ledger.books(node)
        books[node] = {**asdict(book), "lost": book.lost}
    path = settings.run_folder / "ledger.json"
    aside = path.with_suffix(".new")
    aside.write_text(json.dumps({"books": books, "counts": ledger.counts()}, indent=1))
    os.replace(aside, path)


@contextmanager
def _only_one(folder: Path) -> Iterator[None]:
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise SettingsError(
                f"run {folder.name} is already up in another process; stop it, or choose another name with --set run=NAME"
            ) from None
        yield


def show_summary(facts: dict[str, Any], console: Console) -> None:
    """A run in five lines."""

    def figure(name: str) -> str:
        value, error = facts[name], facts.get(f"{name}_se")
        if value is None:
            return "-"
        return f"{value:.3f}" + (f" ± {error:.3f}" if error is not None else "")

    console.print(
        f"\n[bold]{facts['run']}[/bold]: {facts['rounds']} rounds on {facts['nodes']} nodes "
        f"in {facts['elapsed_seconds']:.0f} s\n"
        f"  own reward   {figure('own_reward_first10')}  ->  {figure('own_reward_last10')}   (first and last ten rounds)\n"
        f"  held-out     {figure('heldout_first')}  ->  {figure('heldout_last')}\n"
        f"  groups       {facts['groups_ordered']} ordered, {facts['groups_lost']} lost, "
        f"{facts['groups_trained_twice']} trained twice, {facts['swarm_groups_used']} taken from the swarm\n"
        f"  {facts['tokens_per_second']:.0f} tokens/s, {facts['restarts']} restarts, "
        f"{facts['quarantined']} messages quarantined",
        highlight=False,
    )
