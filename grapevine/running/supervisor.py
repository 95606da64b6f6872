"""Worker processes on this machine: started, watched, restarted, drained.

Guarantees: what dies comes back with growing pauses; a worker that cannot even start ends the run with its own words; no
child outlives the supervisor; every restart is written to the run's `events.jsonl`.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from common.addresses import LOOPBACK
from common.settings import Settings, SettingsError
from grapevine.processes import die_with_parent
from grapevine.running.continuing import node_is_complete

QUICK_SECONDS = 20.0
QUICK_DEATHS_ALLOWED = 4
GRACE_SECONDS = 30.0
CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
SETTINGS_EXIT_CODE = 2
SETTING_VARIABLES = tuple(f"GRAPEVINE_{name.upper()}" for name in Settings.model_fields)


def secret_variables(settings: Settings) -> dict[str, str]:
    """What a worker needs besides its file of settings, as variables: a command line can be read by everyone."""
    token = {"GRAPEVINE_POLICIES_TOKEN": settings.policies_token} if settings.policies_token else {}
    return {"REDIS_URL": settings.redis_url or "", **token}


class GaveUp(Exception):
    """A worker that cannot run; the message holds the end of its log."""


@dataclass
class Child:
    """One worker process over all its lives."""

    role: str
    name: str
    log: Path
    process: subprocess.Popen[bytes] | None = None
    started: float = 0.0
    due: float = 0.0
    quick_deaths: int = 0
    restarts: int = 0
    complete: bool = False
    codes: list[int] = field(default_factory=list)


class Supervisor:
    """Runs `grapevine worker ROLE NAME` processes for one run."""

    def __init__(self, settings: Settings, settings_file: Path) -> None:
        self._settings = settings
        self._folder = settings.run_folder
        self._settings_file = settings_file
        # The address holds the password: it travels in the environment, never on a command line.
        # The settings file holds what file, variables and flags came to; variables would overrule the flags in it.
        kept = {key: value for key, value in os.environ.items() if not key.upper().startswith(SETTING_VARIABLES)}
        self._environment = {
            **kept,
            **secret_variables(settings),
            "TOKENIZERS_PARALLELISM": "false",
        }
        # Several workers share the cores: more threads each would make them fight.
        self._environment.setdefault("OMP_NUM_THREADS", "1")
        (self._folder / "logs").mkdir(parents=True, exist_ok=True)
        names = [("learner", node) for node in settings.node_names()]
        # Workers of several sites meet on one server: their names tell them apart.
        site = "" if settings.site == "local" else f"{settings.site}-"
        names += [("generator", f"{site}generator-{i}") for i in range(settings.generators.replicas)]
        names += [("verifier", f"{site}verifier-{i}") for i in range(settings.verifiers.replicas)]
        names += [("control", f"{site}control-{i}") for i in range(settings.control.replicas)]
        self.children = [Child(role, name, self._folder / "logs" / f"{name}.log") for role, name in names]

    @property
    def restarts(self) -> int:
        """Deaths that were answered by a new start."""
        return sum(child.restarts for child in self.children)

    def learners_complete(self) -> bool:
        """All learners have ended in good order."""
        return all(child.complete for child in self.children if child.role == "learner")

    def tend(self) -> None:
        """Start what is due, notice what died. Raises GaveUp."""
        now = time.monotonic()
        for child in self.children:
            if child.process is None and not child.complete and now >= child.due:
                self._start(child)
            code = child.process.poll() if child.process is not None else None
            if code is None:
                continue
            child.process = None
            # The exit code alone would take a library's os._exit(0) for an end in good order.
            if code == 0 and child.role == "learner" and node_is_complete(self._settings, child.name):
                child.complete = True
                continue
            self._mourn(child, code, now)

    def _start(self, child: Child) -> None:
        command = [
            sys.executable,
            "-P",  # a file of the user's that is called common.py must not stand in for ours
            "-m",
            "grapevine",
            *(("control", "--name") if child.role == "control" else ("worker", child.role)),
            child.name,
            "--settings",
            str(self._settings_file),
            *("--port", "any", "--bind", LOOPBACK),
        ]
        with child.log.open("ab") as log:
            child.process = subprocess.Popen(
                command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=self._environment,
                preexec_fn=die_with_parent, start_new_session=True,
            )  # fmt: skip
        child.started = time.monotonic()

    def _mourn(self, child: Child, code: int, now: float) -> None:
        child.quick_deaths = child.quick_deaths + 1 if now - child.started < QUICK_SECONDS else 0
        # Only deaths of its own count towards giving up: who kills a worker from outside wants to see it come back.
        own_fault = code >= 0 or -code in CRASHES
        if code == SETTINGS_EXIT_CODE:
            raise SettingsError(f"{child.name} cannot run: {_said(child.log)}")
        if own_fault and child.quick_deaths > QUICK_DEATHS_ALLOWED:
            raise GaveUp(f"{child.name} cannot run (exit code {code}); its log {child.log} ends:\n{_tail(child.log)}")
        child.restarts += 1
        # Killed once or twice it is back at once; who keeps dying at the start, for want of memory say, has to pause.
        child.due = now + (min(0.5 * 2**child.quick_deaths, 15.0) if own_fault or child.quick_deaths > 2 else 0.0)
        self.event("restart", child.name, code)

    def event(self, what: str, name: str, code: int) -> None:
        """Append to events.jsonl."""
        line = msgspec.json.encode({"at": time.time(), "event": what, "name": name, "code": code})
        with (self._folder / "events.jsonl").open("ab") as file:
            file.write(line + b"\n")

    def stop(self) -> list[str]:
        """SIGTERM to all, SIGKILL after the grace period. Returns who had to be killed."""
        running = [child for child in self.children if child.process is not None]
        for child in running:
            if child.process is not None:
                child.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + GRACE_SECONDS
        late = []
        for child in running:
            if child.process is None:
                continue
            try:
                child.process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.process.kill()
                child.process.wait()
                late.append(child.name)
        return late


def _said(path: Path) -> str:
    """The sentence that a worker ended with. The rest of its log would hide it."""
    lines = [line for line in _tail(path).splitlines() if line.startswith("grapevine: ")]
    if lines:
        return lines[-1].removeprefix("grapevine: ")
    # Its last words did not fit on the disk, as a rule because that is what they were about.
    free = shutil.disk_usage(path.parent).free >> 20
    return f"its log {path} does not say why ({free} MB are free there; where that is little, make room and start again)"


def _tail(path: Path, characters: int = 1500) -> str:
    return path.read_text(errors="replace")[-characters:].strip() if path.exists() else "(no log)"
