"""How a run stands that this process has not up: on a server one knows the address of, or beside this machine's runs.

Guarantees: reads only; a run that is not there and a server that does not answer are one sentence each, which says what
there is instead; no password is ever printed.
"""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import redis
from rich.console import Console

from common.directory import HEARTBEAT_SECONDS
from common.keys import Keys
from common.server import ServerRefused, connect
from common.settings import SettingsError
from common.worker import TRANSIENT
from grapevine.report.folder import read_clock
from grapevine.screen.find import keys_of, local_runs, local_url, quarantine, runs_on
from grapevine.screen.live import ANSWER_SECONDS, DRAW_SECONDS, Screen, read_events
from grapevine.screen.picture import picture
from grapevine.screen.view import View, tree
from grapevine.screen.watch import look

SVG_WIDTH = 118
SAMPLES = 20


class NoSuchRun(Exception):
    """The server answers and knows no such run; one sentence that says which there are."""


@dataclass(frozen=True)
class Place:
    """A run that was found: its server, its keys, and what its folder on this machine knows besides."""

    url: str
    client: redis.Redis
    keys: Keys
    known: Callable[[], dict[str, Any]]

    @staticmethod
    def find(run: str | None, url: str | None, folder: Path) -> Place:
        """A run by name, or the only one there is: on the server at `url`, without it in `folder`.

        Raises NoSuchRun; SettingsError when several runs could be meant; ServerRefused when the server does not answer.
        """
        known: Callable[[], dict[str, Any]] = dict
        if url is None:
            names = local_runs(folder)
            run = run or _only(names, f"in {folder}", "set REDIS_URL for a run elsewhere")
            url = local_url(folder, run)
            if url is None:
                raise NoSuchRun(f"no run {run} with a server of its own in {folder}; {_these(names)}")
            known = _Beside(folder / run)
            hint = f"it is not up, or its machine is another; what it came to: grapevine report {run} --folder {folder}"
        else:
            hint = "check REDIS_URL"
        client = connect(url, ANSWER_SECONDS)
        try:
            names = runs_on(client) if known is dict else []
            run = run or _only(names, "on this server", "is REDIS_URL the right one?")
            keys = keys_of(client, run)
        except TRANSIENT as error:
            raise ServerRefused(
                f"the server of {f'run {run}' if run else 'REDIS_URL'} does not answer: {error}; {hint}"
            ) from None
        if keys is None:
            raise NoSuchRun(f"no run {run} on this server; {_these(names)}")
        return Place(url, client, keys, known)

    def look(self, before: View | None = None) -> View:
        """The run now. Raises ServerRefused when the server went away."""
        try:
            return replace(look(self.client, self.keys, before), **self.known())
        except redis.ResponseError as error:
            raise ServerRefused(f"run {self.keys.run} cannot be read from its server: {error}") from None
        except TRANSIENT as error:
            raise ServerRefused(f"the server of run {self.keys.run} does not answer: {error}") from None


class _Beside:
    """What a run's folder knows: seconds over all its starts, restarts, events."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __call__(self) -> dict[str, Any]:
        clock = read_clock(self._folder)
        return {
            "elapsed": clock.elapsed_seconds,
            "restarts": clock.restarts,
            "events": tuple(read_events(self._folder / "events.jsonl")),
        }


def _only(names: list[str], where: str, otherwise: str) -> str:
    if not names:
        raise NoSuchRun(f"no run {where}; {otherwise}")
    if len(names) > 1:
        raise SettingsError(f"there are several runs {where}, name one of them: {', '.join(names)}")
    return names[0]


def _these(names: list[str]) -> str:
    return f"there is {', '.join(names)}" if names else "there is none"


def show_status(place: Place, watch: bool, as_json: bool) -> None:
    """One look, printed; with `watch` until Ctrl-C (as JSON: a line each second)."""
    console = Console()
    if not watch:
        view = place.look()
        if as_json:
            print(json.dumps(tree(view), indent=2))
        else:
            console.print(picture(view, console.width))
        return
    try:
        if as_json:
            seen: View | None = None
            while True:
                seen = place.look(seen)
                print(json.dumps(tree(seen)), flush=True)
                time.sleep(1.0)
        with Screen(place.url, place.keys, console, place.known) as screen:
            while True:
                screen.show()
                time.sleep(DRAW_SECONDS / 2)
    except KeyboardInterrupt:
        return


def show_quarantine(place: Place, as_json: bool) -> None:
    """The last refused messages, newest first, with the counts since the run began."""
    try:
        samples = list(quarantine(place.client, place.keys, SAMPLES))
    except TRANSIENT as error:
        raise ServerRefused(f"the server of run {place.keys.run} does not answer: {error}") from None
    refused = place.look().refused
    if as_json:
        print(json.dumps({"refused": refused, "last": [asdict(one) for one in samples]}, indent=2))
        return
    if not refused:
        print(f"run {place.keys.run}: no message was refused")
        return
    for name, number in sorted(refused.items(), key=lambda one: -one[1]):
        stream, _, reason = name.partition(":")
        print(f"{number:8d}  {stream}: {reason}")
    print(f"\nthe last {len(samples)}, newest first" + (" in each shard:" if place.keys.shards > 1 else ":"))
    for one in samples:
        print(f"{one.stream}: {one.reason}, refused by {one.by}: {one.detail}")


def write_svg(place: Place, path: Path) -> None:
    """The picture as an SVG file. Looks for longer than a heartbeat, so that generators' speeds are known."""
    view = place.look()
    deadline = time.monotonic() + 2 * HEARTBEAT_SECONDS
    while time.monotonic() < deadline and any(one.tokens_per_second is None for one in view.generators if not one.silent):
        time.sleep(DRAW_SECONDS)
        view = place.look(view)
    path.write_text(svg(view))


def svg(view: View, width: int = SVG_WIDTH) -> str:
    """A view as an SVG picture `width` characters wide."""
    console = Console(
        record=True, width=width, file=io.StringIO(), force_terminal=True, color_system="truecolor", no_color=False
    )
    console.print(picture(view, width))
    return console.export_svg(title=f"grapevine status {view.run}", unique_id="grapevine")
