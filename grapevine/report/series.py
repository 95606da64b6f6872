"""A run's lines as the numbers that charts and tables show.

Guarantees: pure functions; `thinned` leaves no more points than a chart can show, whatever the number of rounds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isfinite
from statistics import fmean
from typing import Any

from common.messages import TAGS
from grapevine.report.folder import RunFolder

POINTS = 150
RAW_POINTS = 200
BINS = 60
# Where a round's seconds go, as timing.jsonl names them and as people read them.
SECONDS = {
    "waited": "waiting for own groups",
    "drew": "drawing from the swarm",
    "updated": "updating",
    "finished": "saving and announcing",
}


@dataclass(frozen=True)
class Series:
    """A line of a chart, with its bounds where it has any and with what it smooths.

    Bounds are an interval of each point by itself, or else a band along the line.
    """

    label: str
    x: list[float]
    y: list[float]
    low: list[float] | None = None
    high: list[float] | None = None
    raw_x: list[float] | None = None
    raw_y: list[float] | None = None
    interval: bool = False


@dataclass(frozen=True)
class Stack:
    """Layers of an area chart, the lowest first; `edges` are the bins' borders, one more than values."""

    edges: list[float]
    layers: dict[str, list[float]]


def window(rounds: int) -> int:
    """Rounds that a smoothed line averages over: ten, more when the run is longer than a chart is wide."""
    return max(10, rounds // 20)


def smooth(values: Sequence[float], size: int) -> list[float]:
    """Mean over the last `size` values, over all of them where there are fewer."""
    result, total = [], 0.0
    for i, value in enumerate(values):
        total += value - (values[i - size] if i >= size else 0.0)
        result.append(total / min(i + 1, size))
    return result


def thin(values: Sequence[float], limit: int) -> list[float]:
    """At most `limit` of the values, evenly spread, the first and the last among them."""
    if len(values) <= limit:
        return list(values)
    return [values[round(i * (len(values) - 1) / (limit - 1))] for i in range(limit)]


def thinned(one: Series) -> Series:
    """A line with as many points as can be seen."""

    def few(values: list[float] | None, limit: int = POINTS) -> list[float] | None:
        return thin(values, limit) if values is not None else None

    return replace(
        one, x=thin(one.x, POINTS), y=thin(one.y, POINTS), low=few(one.low), high=few(one.high),
        raw_x=few(one.raw_x, RAW_POINTS), raw_y=few(one.raw_y, RAW_POINTS),
    )  # fmt: skip


def mean_line(label: str, lines: Sequence[Series]) -> Series:
    """The mean of lines at the rounds that all of them have; without a point where there are none."""
    points = [dict(zip(one.x, one.y, strict=True)) for one in lines]
    shared = sorted(set.intersection(*map(set, points)))
    return Series(label, shared, [fmean(one[x] for one in points) for x in shared])


def line(label: str, x: Sequence[float], y: Sequence[float], size: int, raw: bool = True) -> Series:
    """A smoothed line, with its raw values unless `raw` is false. Values that are no numbers are left out."""
    kept = [(one, other) for one, other in zip(x, y, strict=True) if isfinite(other)]
    x, y = [one for one, _ in kept], [other for _, other in kept]
    return Series(
        label, x, smooth(y, size), raw_x=x if raw else None, raw_y=y if raw else None,
    )  # fmt: skip


def per_node(run: RunFolder, key: str, raw: bool = True) -> list[Series]:
    """One figure of rounds.jsonl, a line per node that has it; `raw`: with each round's value."""
    found = []
    for node, lines in run.rounds.items():
        having = [line for line in lines if isinstance(line.get(key), (int, float))]
        if having:
            size = window(len(lines))
            found.append(line(node, [one["round"] for one in having], [float(one[key]) for one in having], size, raw))
    return found


def per_task(run: RunFolder) -> list[Series]:
    """Own reward per task: all nodes' groups of a round together; rounds without any are passed over."""
    rounds: dict[str, dict[int, list[float]]] = {}
    for lines in run.rounds.values():
        for one in lines:
            for task, reward in zip(one.get("own_tasks", ()), one["own_group_rewards"], strict=False):
                rounds.setdefault(task, {}).setdefault(one["round"], []).append(reward)
    size = window(max((max(by_round) for by_round in rounds.values()), default=0))
    return [
        line(task, sorted(by_round), [fmean(by_round[round]) for round in sorted(by_round)], size, raw=False)
        for task, by_round in sorted(rounds.items())
    ]


def heldout(run: RunFolder, greedy: bool) -> list[Series]:
    """Held-out accuracy with its 95 % interval, a line per node that was evaluated."""
    found = []
    for node, lines in run.heldout.items():
        if lines:
            points = [(float(one["round"]), *rate(one, greedy)) for one in lines]
            x, y, low, high = (list(column) for column in zip(*points, strict=True))
            found.append(Series(node, x, y, low, high, interval=True))
    return found


def rate(evaluation: dict[str, Any], greedy: bool) -> tuple[float, float, float]:
    """Rate, low and high end of an evaluation or of one task of it."""
    if greedy:
        found = evaluation["greedy"]
        return found["rate"], found["low"], found["high"]
    return evaluation["reward"], evaluation["low"], evaluation["high"]


def mix(run: RunFolder, side: str) -> Stack:
    """Groups per round and node by tag; side `own` or `swarm`, and of the swarm those that were missing."""
    lines = [one for rounds in run.rounds.values() for one in rounds]
    names: list[str] = [*TAGS, "missing"] if side == "swarm" else list(TAGS)
    rows = []
    for one in lines:
        counts: Counter[str] = Counter(one.get(f"{side}_tags", ()))
        counts["missing"] = one.get("swarm_missing", 0)
        rows.append((one["round"], {name: float(counts[name]) for name in names}))
    stack = _binned(rows, names)
    return Stack(stack.edges, {name: layer for name, layer in stack.layers.items() if any(layer)})


def seconds(run: RunFolder) -> Stack:
    """Seconds per round of a node, by what they were spent on."""
    rows = [
        (one["round"], {text: float(one[key]) for key, text in SECONDS.items()})
        for lines in run.timing.values()
        for one in lines
    ]
    return _binned(rows, list(SECONDS.values()))


def _binned(rows: list[tuple[int, dict[str, float]]], names: list[str]) -> Stack:
    """Means over bins of rounds. Bins are equal, the last maybe shorter; one without rows is as the one before."""
    last = max((round for round, _ in rows), default=0)
    if not last:
        return Stack([], {})
    size = -(-last // BINS)
    count = -(-last // size)
    sums = [dict.fromkeys(names, 0.0) for _ in range(count)]
    seen = [0] * count
    for round, values in rows:
        at = (max(round, 1) - 1) // size
        seen[at] += 1
        for name in names:
            sums[at][name] += values[name]
    layers: dict[str, list[float]] = {name: [] for name in names}
    for total, number in zip(sums, seen, strict=True):
        for name, layer in layers.items():
            layer.append(total[name] / number if number else (layer[-1] if layer else 0.0))
    return Stack([0.5 + i * size for i in range(count)] + [last + 0.5], layers)


def pace(run: RunFolder) -> list[Series]:
    """Tokens trained per second, all nodes together, from own rollouts and from the swarm's.

    Without each node's first round, which waits for models to be loaded.
    """
    rows: dict[int, list[tuple[float, float, float]]] = {}
    size = window(max((len(lines) for lines in run.rounds.values()), default=0))
    for node, lines in run.rounds.items():
        took = {one["round"]: sum(one[key] for key in SECONDS) for one in run.timing[node]}
        having = [one for one in lines[1:] if took.get(one["round"], 0.0) > 0]
        times = smooth([took[one["round"]] for one in having], size)
        own = smooth([float(one.get("tokens_own", 0.0)) for one in having], size)
        swarm = smooth([float(one.get("tokens_swarm", 0.0)) for one in having], size)
        for one, time, mine, others in zip(having, times, own, swarm, strict=True):
            rows.setdefault(one["round"], []).append((time, mine, others))
    # Only rounds that every node has reached: a node ahead of the others is not the swarm.
    full = max((len(row) for row in rows.values()), default=0)
    x = [float(round) for round in sorted(rows) if len(rows[round]) == full]
    both = [[sum(row[i] / row[0] for row in rows[int(round)]) for round in x] for i in (1, 2)]
    names = ("own rollouts", "swarm rollouts")
    return [Series(name, x, y) for name, y in zip(names, both, strict=True) if any(y)]


def restart_rounds(run: RunFolder) -> list[float]:
    """The round that the swarm was in, by the first node's clock, at each event."""
    clock = [(one["at"], one["round"]) for lines in run.timing.values() for one in lines]
    return sorted({float(max((round for at, round in clock if at <= event["at"]), default=0)) for event in run.events})


def learned_from(run: RunFolder) -> tuple[list[str], list[str], list[list[int]]]:
    """Authors, learners, and groups of each author (column) that each learner (row) trained on."""
    counts = {
        node: Counter(id.rpartition("/")[0] for one in lines for id in one["swarm_ids"])
        for node, lines in run.rounds.items()
    }
    others = sorted({author for count in counts.values() for author in count} - set(run.nodes))
    authors = [*run.nodes, *others]
    return authors, run.nodes, [[counts[node][author] for author in authors] for node in run.nodes]


def by_task(run: RunFolder) -> list[dict[str, Any]]:
    """Held-out accuracy per task, mean over the nodes: at the first and at the last evaluation of each."""
    ends = [(lines[0], lines[-1]) for lines in run.heldout.values() if lines]
    rows = []
    for task in sorted({task for pair in ends for one in pair for task in one["by_task"]}):
        first, last = ([pair[i]["by_task"][task] for pair in ends if task in pair[i]["by_task"]] for i in (0, 1))
        row: dict[str, Any] = {"task": task, "questions": max((one["questions"] for one in last), default=0)}
        for name, lines in (("first", first), ("last", last)):
            row[name] = fmean(rate(one, False)[0] for one in lines) if lines else None
            row[f"{name}_greedy"] = fmean(rate(one, True)[0] for one in lines) if lines else None
        rows.append(row)
    return rows
