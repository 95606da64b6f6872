"""`grapevine up`: a whole swarm on this machine, from server to summary.

Guarantees: an existing run is continued, or with `fresh` set aside under another name, never overwritten; two `up` of one
run exclude each other; Ctrl-C drains, and a second start goes on where the first stopped; what the ledger said last is
kept in the run's folder when the server is gone.
"""

from __future__ import annotations

import importlib.util
import json
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from common.files import lock, write_whole
from common.ledger import Ledger
from common.run import forget_run, open_run
from common.sections import STARTER_MODELS
from common.server import away
from common.settings import SECRETS, Settings, SettingsError
from common.worker import TRANSIENT
from grapevine.joining.invitation import Host, facts_of
from grapevine.report.folder import read_clock
from grapevine.report.summary import show_summary, summary
from grapevine.running.continuing import check_continues, check_mode, is_complete, resume_points
from grapevine.running.supervisor import Supervisor
from grapevine.screen.live import Screen
from grapevine.server import EmbeddedServer

SNAPSHOT_SECONDS = 2.0


def up(settings: Settings, fresh: bool, lockstep: bool, console: Console, joined: bool = False) -> int:
    """Run to the end; the exit code (0 complete, 130 interrupted).

    `joined`: another machine hosts the run (see `grapevine.joining.join`).
    """
    folder = settings.run_folder
    if fresh:
        set_aside(folder, console)
    folder.mkdir(parents=True, exist_ok=True)
    with _only_one(folder):
        facts = None if joined or lockstep else facts_of(settings)
        settings = with_models(settings)
        check_continues(settings)
        check_mode(folder, lockstep)
        if not joined and not lockstep and is_complete(settings):
            show_summary(summary(folder), console)
            console.print(
                f"the run is complete; for more: grapevine up --resume {folder} --set node.rounds=..., "
                f"to begin anew: --fresh",
                highlight=False, soft_wrap=True,
            )  # fmt: skip
            return 0
        if not lockstep:
            for sentence in resume_points(settings):
                console.print(sentence, highlight=False, soft_wrap=True)
        keep_settings(settings)
        server = None
        if settings.redis_url is None:
            server = EmbeddedServer(folder / "server", settings.listen)
            server.start()
        else:
            _reach(settings)
        url = settings.redis_url or (server.url if server else "")
        settings = settings.model_copy(update={"redis_url": url})
        if fresh:
            _forget(settings)
        clock = _Stopwatch(folder)
        try:
            if lockstep:
                from grapevine.running.lockstep import run_lockstep

                code = run_lockstep(settings, console)
            else:
                host = Host(facts, settings, console, keeps_server=server is not None) if facts else None
                code = _run_processes(settings, server, clock, console, host)
        finally:
            clock.write()
            with suppress(*TRANSIENT):
                _snapshot(settings, open_run(settings)[0])
            if server is not None:
                server.stop()
    facts_now = summary(folder)
    show_summary(facts_now, console)
    if code == 0:
        console.print(f"next: grapevine report {settings.run}", highlight=False, soft_wrap=True)
    else:
        last = max(settings.for_node(node).rounds for node in settings.node_names())
        told = f"stopped after round {facts_now['rounds']} of {last}; to go on: grapevine up --resume {folder}"
        console.print(told, highlight=False, soft_wrap=True)
    return code


def keep_settings(settings: Settings) -> None:
    """Write the settings into the run's folder, where reports and exports find them."""
    settings.run_folder.mkdir(parents=True, exist_ok=True)
    tree = settings.model_dump(mode="json", exclude=set(SECRETS))
    write_whole(settings.run_folder / "settings.json", json.dumps(tree, indent=1))


def set_aside(folder: Path, console: Console) -> None:
    """Keep an earlier run's folder under another name. Raises SettingsError when the run is up."""
    if not folder.exists():
        return
    aside = folder.with_name(f"{folder.name}-{time.strftime('%Y%m%d-%H%M%S', time.localtime(folder.stat().st_mtime))}")
    with _only_one(folder):  # a run that is up must not lose its folder
        folder.rename(aside)
    console.print(f"earlier run set aside as {aside}")


def _forget(settings: Settings) -> None:
    """Delete what the server knows of a run of this name, its jobs included."""
    ledger = open_run(settings)[0]
    forget_run(ledger)
    if importlib.util.find_spec("rq"):
        from grapevine.control.queue import Jobs

        Jobs(settings.run, ledger.redis, settings.site).forget()


def with_models(settings: Settings) -> Settings:
    """The settings with the starter models' names replaced by their folders, which are made when they are not there."""
    wanted = {settings.for_node(name).model for name in settings.node_names()} & {*STARTER_MODELS}
    if not wanted:
        return settings
    from grapevine.starter.model import starter_folder

    folders = {model: str(starter_folder(model)) for model in sorted(wanted)}
    return settings.with_models(folders)


def _reach(settings: Settings) -> None:
    """Raises ServerRefused when the server that the settings name does not answer now: later, workers wait for it."""
    try:
        open_run(settings)[0].redis.ping()
    except TRANSIENT as error:
        raise away(settings.redis_url or "", error) from None


def _run_processes(
    settings: Settings, server: EmbeddedServer | None, clock: _Stopwatch, console: Console, host: Host | None
) -> int:
    """Supervise until the learners are complete, those of guests too, or someone interrupts."""
    stop: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda received, _: stop.append(received))
    supervisor = Supervisor(settings, settings.run_folder / "settings.json")
    screen = Screen.of(settings, console, lambda: clock.restarts + clock.server_restarts)
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
        while not stop:
            if supervisor.learners_complete():
                clock.stop()
                if host is None or not host.has_guests():
                    break
            if server is not None and server.process is not None and server.process.poll() is not None:
                supervisor.event("server restart", "server", server.process.returncode)
                clock.server_restarts += 1
                server.start()
            supervisor.tend()
            clock.restarts = supervisor.restarts
            screen.show()
            if time.monotonic() > snapshot_due:
                clock.write()
                try:
                    ledger = ledger or open_run(settings)[0]
                    _snapshot(settings, ledger)
                    if host is not None:
                        host.publish(ledger)
                except TRANSIENT:
                    ledger = None
                snapshot_due = time.monotonic() + SNAPSHOT_SECONDS
            time.sleep(0.1)
    finally:
        screen.close()
        if stop:
            console.print(
                "draining: workers finish their step and write their checkpoints (Ctrl-C again does not hurry them)"
            )
        clock.stop()
        late = supervisor.stop()
        if late:
            console.print(f"[yellow]killed after the grace period: {', '.join(late)}[/yellow]")
    return 130 if stop and not supervisor.learners_complete() else 0


class _Stopwatch:
    """Seconds of this run over all its starts, and its restarts; kept in run.json."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "run.json"
        kept = read_clock(folder)
        self._before = kept.elapsed_seconds
        self._restarts_before = kept.restarts
        self._started = time.monotonic()
        self._stopped: float | None = None
        self.restarts = 0
        self.server_restarts = 0

    def stop(self) -> None:
        """Training has ended; draining does not count, nor what comes after the first call."""
        self._stopped = self._stopped or time.monotonic()

    def write(self) -> None:
        """Write run.json."""
        elapsed = self._before + (self._stopped or time.monotonic()) - self._started
        facts = {"elapsed_seconds": elapsed, "restarts": self._restarts_before + self.restarts + self.server_restarts}
        write_whole(self._path, json.dumps(facts))


def _snapshot(settings: Settings, ledger: Ledger) -> None:
    """Write the ledger's books and counts beside the run."""
    books = {}
    for node in settings.node_names():
        book = ledger.books(node)
        books[node] = {**asdict(book), "lost": book.lost}
    write_whole(settings.run_folder / "ledger.json", json.dumps({"books": books, "counts": ledger.counts()}, indent=1))


@contextmanager
def _only_one(folder: Path) -> Iterator[None]:
    with lock(folder / "lock") as held:
        if not held:
            raise SettingsError(
                f"run {folder.name} is already up in another process; stop it, or choose another name with --set run=NAME"
            )
        yield
