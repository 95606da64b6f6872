"""Figures of a View as short words: durations, mixes, curves, events. Pure functions."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.text import Text

from common.messages import TAGS
from grapevine.screen.view import Node, View

BARS = "▁▂▃▄▅▆▇█"
TAG_STYLES = {"failed": "red", "hard": "yellow", "mixed": "green", "easy": "cyan", "solved": "blue"}


def mean(values: Sequence[float]) -> float:
    """The mean of one value or more; never past the greatest number there is, as their sum would be."""
    return sum(value / len(values) for value in values)


def sparkline(values: Sequence[float], width: int = 16, scale: tuple[float, float] | None = None) -> str:
    """The whole curve in at most `width` characters, from the least to the greatest column or on a given scale."""
    if not values:
        return ""
    size = max(1, -(-len(values) // width))
    # Halves, since the span between two numbers may be no number.
    columns = [mean(values[i : i + size]) / 2 for i in range(0, len(values), size)]
    low, high = (scale[0] / 2, scale[1] / 2) if scale else (min(columns), max(columns))
    heights = [(value - low) / ((high - low) or 1.0) for value in columns]
    return "".join(BARS[int(min(1.0, max(0.0, height)) * (len(BARS) - 1))] for height in heights)


def mean_curve(curves: Sequence[Sequence[float]]) -> list[float]:
    """The mean of curves that may be unequally long: all are read at as many points as the shortest has."""
    points = min((len(curve) for curve in curves), default=0)
    return [mean([curve[at * len(curve) // points] for curve in curves]) for at in range(points)]


def mix_words(mix: Mapping[str, int], missing: int = 0) -> Text:
    """`h3 m5 e4`: groups by the first letter of their tag; `-2` are missing."""
    text = Text()
    for tag in TAGS:
        if mix.get(tag):
            text.append(" " if text else "").append(f"{tag[0]}{mix[tag]}", TAG_STYLES[tag])
    if missing:
        text.append(" " if text else "").append(f"-{missing}", "dim")
    return text or Text("-", "dim")


def tag_sums(nodes: Sequence[Node]) -> tuple[dict[str, int], dict[str, int], int]:
    """The last rounds' mixes of all nodes together: own, swarm, missing."""
    own: dict[str, int] = {}
    swarm: dict[str, int] = {}
    for node in nodes:
        for sums, mix in ((own, node.facts.mix.own), (swarm, node.facts.mix.swarm)):
            for tag, number in mix.items():
                sums[tag] = sums.get(tag, 0) + number
    return own, swarm, sum(node.facts.mix.missing for node in nodes)


def round_words(view: View) -> str:
    """`round 87 of 150`, or `rounds 85 to 87 of 150` when nodes differ."""
    rounds = [node.facts.round for node in view.nodes] or [0]
    whole = max((node.facts.rounds for node in view.nodes), default=0)
    span = f"round {rounds[0]}" if min(rounds) == max(rounds) else f"rounds {min(rounds)} to {max(rounds)}"
    return span + (f" of {whole}" if whole else "")


def duration(seconds: float) -> str:
    """`45 s`, `3 min 20 s`, `2 h 05 min`, `4 days`."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min" if whole < 48 * 3600 else f"{whole // 86400} days"


def clock(at: float) -> str:
    """The time of day here."""
    return time.strftime("%H:%M:%S", time.localtime(at))


def event_words(event: Mapping[str, Any]) -> str:
    """A line of events.jsonl as a sentence."""
    code = event["code"]
    if code is not None and code < 0:
        try:
            ended = f"killed by {signal.Signals(-code).name}"
        except ValueError:
            ended = f"killed by signal {-code}"
    else:
        ended = f"exit code {code}"
    words = {"restart": "restarted", "server restart": "restarted"}.get(event["event"], event["event"])
    name = "the server" if event["name"] == "server" else event["name"]
    return f"{name} {words} ({ended})"
