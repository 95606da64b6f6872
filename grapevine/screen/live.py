"""The screen of a run: a picture that stays in place on a terminal, plain lines everywhere else.

Guarantees: never holds up whoever shows it for longer than a second and a half, whatever the server does; a server that is
away leaves the last picture with a word about it; a terminal is left as it was found, with the last picture on it; plain
lines hold no control codes, tell each its own story, and come every four seconds at most. Nothing that a server or a file
says ends whoever shows it, but for a refusal of the server as such (ServerRefused).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any

import msgspec
import redis
from rich.console import Console
from rich.live import Live

from common.keys import Keys
from common.server import ServerChanged, connect
from common.settings import Settings
from common.worker import TRANSIENT
from grapevine.screen.picture import picture
from grapevine.screen.view import View
from grapevine.screen.watch import look
from grapevine.screen.wording import event_words, mean, mean_curve, sparkline

DRAW_SECONDS = 0.25
LOOK_SECONDS = 1.0
LINE_SECONDS = 4.0
# When no round ends, a line says why.
STILL_SECONDS = 20.0
ANSWER_SECONDS = 1.5
EVENTS_KEPT = 20
NODES_NAMED = 8


class _Event(msgspec.Struct, frozen=True):
    """A line of events.jsonl."""

    at: Annotated[float, msgspec.Meta(ge=0, lt=2**36)]
    event: str
    name: str
    code: int | None


class Screen:
    """Shows one run. A context manager; `show` may be called as often as one likes."""

    def __init__(
        self,
        url: str,
        keys: Keys,
        console: Console,
        known: Callable[[], dict[str, Any]] = dict,
        nodes: int = 1,
        live: bool | None = None,
    ) -> None:
        """`known` gives what no server knows: the view's elapsed, restarts and events. No line comes before `nodes` nodes.

        `live`: draw in place; None: where the console is a terminal that can.
        """
        # FORCE_COLOR makes rich take a log file for a terminal.
        able = console.is_terminal and not console.is_dumb_terminal and console.file.isatty()
        # Drawn by `show` alone: no thread, since the supervisor forks.
        self._live = Live(console=console, auto_refresh=False) if (able if live is None else live) else None
        self._console = console
        # A connection of its own: one that gives up soon, and whose ServerChanged is nobody else's.
        self._client: redis.Redis = connect(url, ANSWER_SECONDS)
        self._keys = keys
        self._known = known
        self._nodes = nodes
        self._started = time.monotonic()
        self._looked = self._seen = self._drawn = self._lined = float("-inf")
        self._moved = self._started
        self._told = 0
        self._told_at = time.time()
        self.view: View | None = None

    @classmethod
    def of(cls, settings: Settings, console: Console, restarts: Callable[[], int]) -> Screen:
        """The screen of a run that this process has up."""
        started, since = time.monotonic(), time.time()
        file = settings.run_folder / "events.jsonl"

        def known() -> dict[str, Any]:
            events = tuple(event for event in read_events(file) if event["at"] >= since)
            return {"elapsed": time.monotonic() - started, "restarts": restarts(), "events": events}

        keys = Keys(settings.run, settings.shards)
        return cls(settings.redis_url or "", keys, console, known, len(settings.node_names()))

    def __enter__(self) -> Screen:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def show(self) -> None:
        """Look and draw, if it is time to."""
        if time.monotonic() - self._looked >= LOOK_SECONDS:
            self._look()
        if self.view is None:
            return
        now = time.monotonic()
        if self._live is None:
            self._line(self.view, now)
        elif now - self._drawn >= DRAW_SECONDS:
            self._draw(self._live, self.view, now)

    def close(self) -> None:
        """Leave the last picture on the terminal."""
        if self._live is not None and self._live.is_started:
            self._look()
            if self.view is not None:
                self._draw(self._live, self.view, time.monotonic())
            self._live.stop()
        self._client.close()

    def _look(self) -> None:
        try:
            try:
                view = look(self._client, self._keys, self.view)
            except ServerChanged:
                view = look(self._client, self._keys, self.view)
        except (*TRANSIENT, redis.ResponseError):
            # A guest may have put something else in the place of a key: its host's run goes on, with the last picture.
            self._looked = time.monotonic()
            return
        self._looked = self._seen = time.monotonic()
        self.view = replace(view, **self._known())

    def _draw(self, live: Live, view: View, now: float) -> None:
        if not live.is_started:
            live.start()
        self._drawn = now
        away = now - self._seen
        width, height = self._console.size
        live.update(picture(view, width, height - 1, away if away > 2 * LOOK_SECONDS else 0.0), refresh=True)

    def _line(self, view: View, now: float) -> None:
        """A line, if there is something to tell: a round that all nodes did, a restart, an absence, a long wait."""
        if now - self._lined < LINE_SECONDS:
            return
        words = [event_words(event) for event in view.events if event["at"] > self._told_at]
        # A node that nobody has heard of yet says nothing about the rounds it is to do.
        if sum(node.facts.rounds > 0 for node in view.nodes) >= self._nodes and view.round > self._told:
            words.insert(0, round_line(view))
            self._told, self._moved = view.round, now
        elif now - self._seen > LINE_SECONDS:
            words.insert(0, f"server away for {now - self._seen:.0f} s")
        elif now - self._moved > STILL_SECONDS and view.waits:
            words.insert(0, f"no round ended for {now - self._moved:.0f} s: " + "; ".join(view.waits))
            self._moved = now
        if words:
            self._lined = now
            self._told_at = max([self._told_at, *(event["at"] for event in view.events)])
            self._console.print("; ".join(words), highlight=False, soft_wrap=True, markup=False)


def round_line(view: View) -> str:
    """The run in one plain line; rewards are means over the last ten rounds."""
    rewards = [node.facts.own_reward for node in view.nodes if node.facts.own_reward is not None]
    heldout = [node.facts.heldout.reward for node in view.nodes if node.facts.heldout is not None]
    curve = sparkline(mean_curve([node.facts.curve for node in view.nodes if node.facts.curve]))
    each = " ".join(f"{reward:.2f}" for reward in rewards[:NODES_NAMED]) + (" ..." if len(rewards) > NODES_NAMED else "")
    parts = [
        f"round {view.round:4d}/{max((node.facts.rounds for node in view.nodes), default=0)}",
        f"own reward {mean(rewards):.3f} {curve}" if rewards else "",
        f"nodes {each}" if len(rewards) > 1 else "",
        f"held-out {mean(heldout):.3f}" if heldout else "",
        f"swarm {mean([sum(node.facts.mix.swarm.values()) for node in view.nodes] or [0]):.0f}",
        f"staleness {mean([node.facts.staleness for node in view.nodes] or [0.0]):.1f}",
        f"{sum(node.facts.tokens_per_second for node in view.nodes):6.0f} tok/s",
        f"{view.elapsed:4.0f} s" if view.elapsed is not None else "",
        f"restarts {view.restarts}" if view.restarts else "",
        f"refused {sum(view.refused.values())}" if view.refused else "",
    ]
    return "  ".join(part for part in parts if part)


def read_events(path: Path) -> list[dict[str, Any]]:
    """The last events of a run on this machine: restarts of workers and of the server."""
    if not path.exists():
        return []
    found = []
    for line in path.read_bytes().split(b"\n")[:-1][-EVENTS_KEPT:]:
        with suppress(ValueError):  # damaged
            found.append(msgspec.structs.asdict(msgspec.json.decode(line, type=_Event)))
    return found
