"""`grapevine monitor`: Prometheus beside a run on this machine, with the exporter and the alerts that a cluster has.

Guarantees: only addresses of this machine are scraped, whatever a heartbeat says; Prometheus listens on loopback unless told
otherwise, keeps its data in the run's folder, and ends with this process; a second monitor of a run leaves the first alone.
"""

from __future__ import annotations

import errno
import json
import logging
import shutil
import signal
import socket
import subprocess
import threading
import time
import urllib.request
from contextlib import suppress
from importlib import resources
from pathlib import Path
from typing import Any

import structlog
import yaml
from rich.console import Console

from common.addresses import LOOPBACK, in_url, listen_address
from common.clock import ServerClock
from common.directory import Directory
from common.files import lock, write_whole
from common.keys import Keys
from common.ledger import Ledger
from common.server import connect
from common.settings import Settings, SettingsError
from common.worker import TRANSIENT, Loop, serve_health
from grapevine.monitoring.exporter import Exporter
from grapevine.processes import die_with_parent
from grapevine.screen.status import Place

SCRAPE_SECONDS = 5
START_SECONDS = 30.0
END_SECONDS = 10.0
TARGETS_SECONDS = 2.0


def alert_rules() -> dict[str, Any]:
    """The alerts, as Prometheus reads them."""
    text = (resources.files("grapevine") / "monitoring" / "alerts.yaml").read_text()
    rules: dict[str, Any] = yaml.safe_load(text)
    return rules


def watch(run: str | None, folder: Path, listen: str, console: Console) -> None:
    """Until SIGINT or SIGTERM. Raises SettingsError, ServerRefused, NoSuchRun."""
    program = shutil.which("prometheus")
    if program is None:
        raise SettingsError(
            "Prometheus is not installed here (Debian: apt install prometheus; others: prometheus.io/download); without it "
            "`grapevine status --watch` shows the run"
        )
    address, port = _free(listen)
    place = Place.find(run, None, folder)
    home = folder / place.keys.run / "prometheus"
    home.mkdir(parents=True, exist_ok=True)
    with lock(home / "lock") as ours:
        if not ours:
            raise SettingsError(f"run {place.keys.run} has a monitor already; look at that one, or end it first")
        _watch(program, place, home, address, port, console)


def _free(listen: str) -> tuple[str, int]:
    """Where Prometheus is to listen. Raises SettingsError when it cannot."""
    try:
        address, port = listen_address(listen)
    except ValueError:
        port = None
    if port is None:
        raise SettingsError(f"--listen {listen}: write address:port, as in 127.0.0.1:9090")
    try:
        # Asked here, since whoever has the port may answer like a Prometheus.
        socket.create_server((address, port), family=socket.AF_INET6 if ":" in address else socket.AF_INET).close()
    except OSError as error:
        reason = "it is in use" if error.errno == errno.EADDRINUSE else (error.strerror or str(error))
        raise SettingsError(f"--listen {listen}: {reason}; choose another port") from None
    return address, port


def _watch(program: str, place: Place, home: Path, address: str, port: int, console: Console) -> None:
    _write_configuration(home)
    loop = exporter_loop(place.url, place.keys)
    server = serve_health(loop, place.keys.run, 0, LOOPBACK)
    signal.signal(signal.SIGTERM, loop.stop)
    with (home / "prometheus.log").open("ab") as log:
        process = subprocess.Popen(
            [
                program, f"--config.file={home / 'prometheus.yml'}", f"--storage.tsdb.path={home / 'data'}",
                f"--web.listen-address={in_url(address)}:{port}", "--storage.tsdb.retention.time=30d",
            ],
            stdout=log, stderr=log, stdin=subprocess.DEVNULL, preexec_fn=die_with_parent, start_new_session=True,
        )  # fmt: skip
    stop = threading.Event()
    # The loop would warn of every attempt to reach a server that is away; whoever looks is told once.
    quiet = structlog.make_filtering_bound_logger(logging.ERROR)
    structlog.configure(**{**structlog.get_config(), "wrapper_class": quiet})
    finder = threading.Thread(target=_find_targets, args=(place, home, loop.metrics_at, stop, console), daemon=True)
    finder.start()
    try:
        url = f"http://{in_url(address)}:{port}"
        _wait_until_ready(process, url, home)
        _tell(url, place.keys.run, home, console)
        # Prometheus is asked to stop by what stops this process; should it end by itself, that is told.
        threading.Thread(target=_stop_with, args=(process, loop), daemon=True).start()
        loop.run()
        if process.poll() is not None:
            raise SettingsError(f"Prometheus ended with exit code {process.returncode}; {home / 'prometheus.log'} says why")
    finally:
        stop.set()
        server.shutdown()
        process.terminate()
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _stop_with(process: subprocess.Popen[bytes], loop: Loop) -> None:
    process.wait()
    loop.stop()


def exporter_loop(url: str, keys: Keys) -> Loop:
    """An exporter for a run of which only the server is known."""

    def opened() -> tuple[Ledger, Directory]:
        client = connect(url)
        return Ledger(client, keys, ServerClock(client)), Directory(client, keys)

    # The run's own age limit is not on the server: groups past it are gone from their streams in any case.
    return Loop(Exporter("monitor", *opened(), 1000 * Settings().swarm.max_age), opened)


def _write_configuration(home: Path) -> None:
    config = {
        "global": {"scrape_interval": f"{SCRAPE_SECONDS}s", "evaluation_interval": f"{SCRAPE_SECONDS}s"},
        "rule_files": [str((home / "alerts.yaml").resolve())],
        "scrape_configs": [
            {
                "job_name": "grapevine",
                "file_sd_configs": [{"files": [str((home / "targets.json").resolve())], "refresh_interval": "30s"}],
            }
        ],
    }
    write_whole(home / "prometheus.yml", yaml.safe_dump(config, sort_keys=False))
    write_whole(home / "alerts.yaml", yaml.safe_dump(alert_rules(), sort_keys=False))
    write_whole(home / "targets.json", "[]")


def _find_targets(place: Place, home: Path, exporter: str, stop: threading.Event, console: Console) -> None:
    """Keep targets.json, which Prometheus watches, at what the heartbeats say."""
    directory = Directory(connect(place.url), place.keys)
    written: list[dict[str, Any]] = []
    away = False
    while not stop.wait(TARGETS_SECONDS if written else 0.2):
        try:
            beats = [beat for beat in directory.workers() if beat.metrics.startswith(f"{LOOPBACK}:")]
        except TRANSIENT:
            if not away:
                console.print("the run's server is away; it is watched again when it is back", highlight=False)
            away = True
            continue
        away = False
        found = {beat.metrics: {"worker": beat.name} for beat in beats}
        found[exporter] = {"worker": "monitor"}
        targets = [{"targets": [at], "labels": labels} for at, labels in sorted(found.items())]
        if targets != written:
            write_whole(home / "targets.json", json.dumps(targets, indent=1))
            written = targets


def _wait_until_ready(process: subprocess.Popen[bytes], url: str, home: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        with suppress(OSError), urllib.request.urlopen(f"{url}/-/ready", timeout=2):
            return
        if process.poll() is not None or time.monotonic() > deadline:
            lines = (home / "prometheus.log").read_text(errors="replace").splitlines()
            raise SettingsError(f"Prometheus does not start at {url}; its log ends: {lines[-1] if lines else '(nothing)'}")
        time.sleep(0.1)


def _tell(url: str, run: str, home: Path, console: Console) -> None:
    console.print(f"Prometheus watches run [bold]{run}[/bold]; Ctrl-C ends it. Look at", highlight=False)
    for what, where in (
        ("own reward of every node", f"{url}/graph?g0.expr=grapevine_own_reward&g0.tab=0&g0.range_input=15m"),
        ("who waits for whom", f"{url}/graph?g0.expr=rate(grapevine_waiting_seconds_total[1m])&g0.tab=0&g0.range_input=15m"),
        ("alerts", f"{url}/alerts"),
        ("what is scraped", f"{url}/targets"),
    ):
        console.print(f"  {what:<26}{where}", highlight=False, soft_wrap=True)
    console.print(
        "Grafana: add this address as a Prometheus data source and import k8s/components/monitoring/dashboards/*.json",
        highlight=False, soft_wrap=True,
    )  # fmt: skip
    console.print(f"its data and its log are in {home}", highlight=False, soft_wrap=True)
