"""The report of one run: a page that stands by itself.

Guarantees: one file without scripts and without a single address to load from; every text of a run is escaped; the same
folder gives the same page; a section without data says so in a sentence or is left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from common.settings import SettingsError
from grapevine.report import charts, series
from grapevine.report.folder import RunFolder
from grapevine.report.leaderboard import interval, percent, standings, widest
from grapevine.report.rollouts import samples
from grapevine.report.settings import from_defaults
from grapevine.report.summary import EDGE, figures, with_error

MOST_STANDINGS = 20
MOST_EVENTS = 40
MOST_TASKS = 10


def run_page(run: RunFolder) -> str:
    """The page of a run."""
    rows = standings(run)
    return render(
        "page.html.j2",
        run=run,
        title=run.name,
        facts=figures(run),
        state=_state(run),
        about=_about(run),
        charts=_charts(run),
        nodes=_nodes(run),
        tasks=series.by_task(run),
        standings=rows[:MOST_STANDINGS],
        more_standings=max(0, len(rows) - MOST_STANDINGS),
        widest=widest(rows),
        refused=_refused(run),
        events=_events(run)[-MOST_EVENTS:],
        more_events=max(0, len(run.events) - MOST_EVENTS),
        samples=samples(run),
        changed=from_defaults(run),
        settings=yaml.safe_dump(run.settings, sort_keys=False) if run.settings else "",
        faint=_faint(len(run.nodes)),
        window=series.window(max(len(lines) for lines in run.rounds.values())),
    )


def render(template: str, *folders: Path, filters: dict[str, Any] | None = None, **values: Any) -> str:
    """A template of this folder or of `folders`, everything in it escaped that is not a chart of ours."""
    environment = Environment(
        loader=FileSystemLoader([Path(__file__).parent, *folders]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"figure": figure, "percent": percent, "interval": interval, "span": span, **(filters or {})}
    environment.globals |= {"with_error": with_error}
    return environment.get_template(template).render(**values)


def write_page(page: str, out: Path) -> None:
    """Raises SettingsError when the place cannot be written to."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(page, encoding="utf-8")
    except OSError as error:
        raise SettingsError(f"--out {out} cannot be written: {error.strerror}") from None


def figure(value: float | None, digits: int = 3) -> str:
    """A figure, or a dash where there is none; whole numbers from a thousand on in groups of three digits."""
    if value is None:
        return "\N{EN DASH}"
    if isinstance(value, int) or digits == 0:
        return f"{round(value):,}".replace(",", "\N{NARROW NO-BREAK SPACE}")
    return f"{value:.{digits}f}"


def span(seconds: float) -> str:
    """`51 s`, `12 min`, `3 h 20 min`."""
    minutes = round(seconds / 60)
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def _charts(run: RunFolder) -> dict[str, Any]:
    """Charts by name; those without data are missing."""
    return dict(_drawn(run))


def _drawn(run: RunFolder) -> Iterator[tuple[str, Any]]:
    lines = {
        "reward": (series.per_node(run, "own_reward"), "own reward"),
        "tasks": (series.per_task(run), "own reward"),
        "sampled": (series.heldout(run, greedy=False), "held-out accuracy"),
        "greedy": (series.heldout(run, greedy=True), "held-out accuracy"),
        "staleness": (series.per_node(run, "staleness", raw=False), "policy steps"),
    }
    for name, (drawn, label) in lines.items():
        if drawn:
            yield name, charts.lines_chart(name, drawn, label, most=MOST_TASKS if name == "tasks" else charts.MOST_LINES)
    pace = series.pace(run)
    if pace:
        yield "pace", charts.lines_chart("pace", pace, "tokens per second", marks=series.restart_rounds(run))
    stacks = {
        "own": (series.mix(run, "own"), "groups per round and node"),
        "swarm": (series.mix(run, "swarm"), "groups per round and node"),
        "seconds": (series.seconds(run), "seconds per round"),
    }
    for name, (stack, label) in stacks.items():
        if stack.layers:
            yield name, charts.stack_chart(name, stack, label)
    authors, learners, counts = series.learned_from(run)
    if any(map(any, counts)):
        yield "authors", charts.heat_map("authors", authors, learners, counts)


def _faint(nodes: int) -> str:
    """What the faint lines behind the nodes' are."""
    return "each round" if nodes <= charts.MOST_RAW else "each node" if nodes > charts.MOST_LINES else ""


def _state(run: RunFolder) -> str:
    """How far the run is, in words."""
    wanted = [run.of_node(node, "rounds") for node in run.nodes]
    done = run.rounds_done
    known = [rounds for rounds in wanted if rounds is not None]
    if not known:
        return f"{done} rounds"
    if all(len(run.rounds[node]) >= rounds for node, rounds in zip(run.nodes, wanted, strict=True)):
        return f"complete: {done} rounds"
    return f"{done} of {max(known)} rounds" if done else f"just begun: 0 of {max(known)} rounds"


def _about(run: RunFolder) -> list[str]:
    """What kind of run it was: nodes, models, site, time."""
    models = dict.fromkeys(str(run.of_node(node, "model") or "") for node in run.nodes)
    named = [Path(model).name if model.startswith(("/", ".", "~")) else model for model in models if model]
    about = [f"{len(run.nodes)} node{'s' if len(run.nodes) > 1 else ''}"]
    if named:
        about.append(f"{', '.join(dict.fromkeys(named))}")
    if run.settings.get("site"):
        about.append(f"site {run.settings['site']}")
    times = [line["at"] for lines in run.timing.values() for line in lines]
    if times:
        about.append(f"{_time(min(times))} to {_time(max(times))} UTC")
    return about


def _time(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M")


def _nodes(run: RunFolder) -> list[dict[str, Any]]:
    """A row per node: learning, giving and taking, books."""
    _, _, counts = series.learned_from(run)
    rows = []
    for i, (node, lines) in enumerate(run.rounds.items()):
        facts = {
            name: [reward for line in lines[part] for reward in line["own_group_rewards"]]
            for name, part in (("first", slice(0, EDGE)), ("last", slice(-EDGE, None)))
        }
        rows.append(
            {
                "name": node,
                "trains": run.of_node(node, "learner") != "none",
                "rounds": len(lines),
                "first": sum(facts["first"]) / len(facts["first"]) if facts["first"] else None,
                "last": sum(facts["last"]) / len(facts["last"]) if facts["last"] else None,
                "taken": sum(counts[i]),
                "given": sum(row[i] for row in counts),
                "book": run.books.get(node, {}),
            }
        )
    return rows


def _refused(run: RunFolder) -> list[tuple[str, str, int]]:
    """Stream, reason and count of the messages in quarantine, the most frequent first."""
    rows = []
    for name, count in run.counts.items():
        kind, _, rest = name.partition(":")
        if kind == "refused":
            stream, _, reason = rest.partition(":")
            rows.append((stream, reason, count))
    return sorted(rows, key=lambda row: (-row[2], row))


def _events(run: RunFolder) -> list[dict[str, Any]]:
    """Restarts and the like, with the time since the first round."""
    begun = min((line["at"] - line["waited"] for lines in run.timing.values() for line in lines[:1]), default=None)
    return [{**event, "after": max(0.0, event["at"] - begun) if begun is not None else None} for event in run.events]
