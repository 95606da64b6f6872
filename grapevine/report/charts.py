"""Charts as inline SVG.

Guarantees: the same numbers give the same bytes; no fonts, scripts, images or addresses in them; colours are those of the
page's style sheet, light or dark; lines differ in dashes and markers and areas in hatches, so that a print in black and
white reads as well. No state is kept between calls.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import matplotlib
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from grapevine.report.labels import short, spread
from grapevine.report.series import Series, Stack, mean_line, thinned

# More lines than this are shown faintly, with their mean and their best and worst by name.
MOST_LINES = 6
# With more lines than this, raw values behind them would hide the others.
MOST_RAW = 4
# Intervals of more points than this become a band.
MOST_BARS = 12
WIDTH, HEIGHT = 4.5, 2.9  # inches; 432 pixels wide in a page
TEXT = 9.0  # points

# Colours that stand for a variable of the style sheet, which knows a light and a dark value of each.
INK, MUTED, GRID, PAPER = "#1b1b1d", "#66666a", "#dededf", "#fdfdfc"
LINES = ("#0b62a3", "#c64a05", "#0a7d5c", "#a0408b", "#9a7000", "#2f8fc4", "#7b4b2a", "#55565b")
AREAS = ("#f1f4f9", "#c3d6ea", "#88b3d8", "#4586bd", "#1d5488", "#fbfaf8")
_VARIABLES = {
    INK: "ink", MUTED: "muted", GRID: "grid", PAPER: "paper",
    **{color: f"line{i}" for i, color in enumerate(LINES)},
}  # fmt: skip
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.6)), (0, (1.2, 1.2)), (0, (6, 1.6, 1.2, 1.6)), (0, (8, 3)))
MARKERS = "os^DvPX*"
HATCHES = ("", "///", "---", "", "\\\\\\", "xxx")
# Tags and their like by name, so that a layer looks the same in each chart.
_LAYER = {"failed": 0, "hard": 1, "mixed": 2, "easy": 3, "solved": 4, "missing": 5}

_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none", "text.parse_math": False, "font.family": "sans-serif", "font.size": TEXT,
    "axes.labelsize": TEXT, "xtick.labelsize": TEXT, "ytick.labelsize": TEXT, "legend.fontsize": TEXT,
    "text.color": INK, "axes.labelcolor": MUTED, "xtick.color": MUTED, "ytick.color": MUTED,
    "axes.edgecolor": GRID, "axes.spines.top": False, "axes.spines.right": False, "axes.spines.left": False,
    "axes.grid": True, "axes.grid.axis": "y", "axes.axisbelow": True, "grid.color": GRID, "grid.linewidth": 0.7,
    "xtick.major.size": 3.0, "ytick.major.size": 0.0, "figure.facecolor": "none", "axes.facecolor": "none",
    "legend.frameon": False, "hatch.linewidth": 0.5, "lines.linewidth": 1.6, "savefig.facecolor": "none",
    "path.simplify": True,
}  # fmt: skip


def lines_chart(
    name: str,
    series: Sequence[Series],
    y_label: str,
    marks: Sequence[float] = (),
    most: int = MOST_LINES,
    x_label: str = "round",
) -> Markup:
    """Lines over rounds, from zero upwards, each named at its end; more than `most` are summed up.

    `marks` are rounds to draw an upright dotted line at.
    """
    with _chart(name) as (axes, result):
        for mark in marks:
            axes.axvline(mark, color=MUTED, linewidth=0.8, linestyle=(0, (1, 2)))
        _draw_lines(axes, series, x_label, y_label, most)
    return result[0]


def lines_figure(panels: Sequence[tuple[str, Sequence[Series], str, str]], kind: str) -> bytes:
    """Lines as a file of their own, `svg` or `png`, on white. A panel: title, lines, labels of x and y; two in a row."""
    file = io.BytesIO()
    with matplotlib.rc_context(
        {**_STYLE, "svg.hashsalt": "figure", "figure.facecolor": "#ffffff", "savefig.facecolor": "#ffffff"}
    ):
        rows = -(-len(panels) // 2)
        figure = Figure(figsize=(2 * WIDTH, rows * (HEIGHT + 0.25)), layout="constrained")
        for i, (title, series, x_label, y_label) in enumerate(panels):
            axes = figure.add_subplot(rows, 2, i + 1)
            axes.set_title(title, loc="left", fontsize=TEXT + 1)
            _draw_lines(axes, series, x_label, y_label, len(series))
        metadata = dict.fromkeys(("Date", "Creator", "Format", "Type")) if kind == "svg" else {"Software": None}
        figure.savefig(file, format=kind, dpi=160, metadata=metadata)
    return file.getvalue()


def _draw_lines(axes: Axes, series: Sequence[Series], x_label: str, y_label: str, most: int) -> None:
    (_few if len(series) <= most else _many)(axes, series)
    axes.set(xlabel=x_label, ylabel=y_label)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))


def _few(axes: Axes, series: Sequence[Series]) -> None:
    """Every line with its own colour, dashes, markers, and its bounds or its raw values behind it."""
    series = _side_by_side([thinned(one) for one in series])
    for i, one in enumerate(series):
        color, dashes = LINES[i % len(LINES)], DASHES[i % len(DASHES)]
        if one.low is not None and one.high is not None:
            if one.interval:
                axes.vlines(one.x, one.low, one.high, color=color, linewidth=1.1, alpha=0.6, clip_on=False)
                for ends in (one.low, one.high):
                    axes.plot(one.x, ends, linestyle="", marker="_", markersize=4.5, color=color, alpha=0.6, clip_on=False)
            else:
                axes.fill_between(one.x, one.low, one.high, color=color, alpha=0.13, linewidth=0)
                for ends in (one.low, one.high):
                    axes.plot(one.x, ends, color=color, linewidth=0.5, alpha=0.5, linestyle=dashes)
        if one.raw_x is not None and one.raw_y is not None and len(series) <= MOST_RAW:
            axes.plot(one.raw_x, one.raw_y, color=color, linewidth=0.5, alpha=0.22)
        # Markers of neighbouring lines stand apart; short lines get one at each point.
        every = max(1, len(one.x) // 6)
        axes.plot(
            one.x, one.y, color=color, linestyle=dashes, marker=MARKERS[i % len(MARKERS)], markersize=4.2,
            markeredgewidth=0, markevery=(i * every // max(1, len(series)) if every > 1 else 0, every), clip_on=False,
        )  # fmt: skip
    _from_zero(axes, series)
    if len(series) > 1:
        _names_at_ends(axes, [(one.label, one.x[-1], one.y[-1], LINES[i % len(LINES)]) for i, one in enumerate(series)])


def _side_by_side(series: Sequence[Series]) -> Sequence[Series]:
    """Few points with intervals stand a little apart, so that no bar hides another; many become bands."""
    if not any(one.interval for one in series):
        return series
    if max(len(one.x) for one in series) > MOST_BARS:
        return [replace(one, interval=False) for one in series]
    room = 0.3 * min((b - a for one in series for a, b in pairwise(one.x)), default=1.0)
    shifts = [room * ((i + 0.5) / len(series) - 0.5) for i in range(len(series))]
    return [replace(one, x=[x + shift for x in one.x]) for one, shift in zip(series, shifts, strict=True)]


def _many(axes: Axes, series: Sequence[Series]) -> None:
    """All lines faintly, their mean boldly, the best and the worst at the end by name."""
    # Before anything is left out: lines of unequal length keep different rounds.
    mean = thinned(mean_line(f"mean of {len(series)}", series))
    series = [thinned(one) for one in series]
    for one in series:
        axes.plot(one.x, one.y, color=LINES[0], linewidth=0.6, alpha=0.35)
    axes.plot(mean.x, mean.y, color=INK, linewidth=2.2)
    _from_zero(axes, series)
    ranked = sorted(series, key=lambda one: one.y[-1])
    named = [(ranked[-1], LINES[0]), *([(mean, INK)] if mean.x else []), (ranked[0], LINES[0])]
    _names_at_ends(axes, [(one.label, one.x[-1], one.y[-1], color) for one, color in named])


def _from_zero(axes: Axes, series: Sequence[Series]) -> None:
    """From zero, unless something is below; up to what the eye should see, not to the last raw spike."""
    values = [y for one in series for y in [*one.y, *(one.high or ()), *(one.low or ())]]
    raw = sorted(y for one in series for y in one.raw_y or ())
    top = max([*values, raw[int(0.99 * (len(raw) - 1))] if raw else 0.0])
    bottom = min([0.0, *values])
    axes.set_ylim(bottom - (0.05 * (top - bottom) if bottom < 0 else 0.0), top + 0.05 * (top - bottom) or 1.0)
    first, last = min(one.x[0] for one in series), max(one.x[-1] for one in series)
    axes.set_xlim(first, last) if last > first else axes.set_xlim(first - 1, first + 1)


def _names_at_ends(axes: Axes, ends: list[tuple[str, float, float, str]]) -> None:
    """Names right of the axes, moved apart where they would touch, each tied to the end of its line."""
    low, high = axes.get_ylim()
    gap = (TEXT + 2.5) / (HEIGHT * 72 * 0.78)
    places = spread([(y - low) / (high - low) for _, _, y, _ in ends], gap)
    for (label, x, y, color), place in zip(ends, places, strict=True):
        axes.annotate(
            short(label), (x, y), xytext=(1.05, place), textcoords="axes fraction", va="center", annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": color, "linewidth": 0.7, "shrinkA": 0, "shrinkB": 0, "relpos": (0, 0.5)},
        )  # fmt: skip


def stack_chart(name: str, stack: Stack, y_label: str) -> Markup:
    """Areas on top of one another over rounds, named in a legend in the same order from the top."""
    with _chart(name) as (axes, result):
        below = [0.0] * (len(stack.edges) - 1)
        for i, (label, values) in enumerate(stack.layers.items()):
            look = _LAYER.get(label, i + 1)
            above = [one + other for one, other in zip(below, values, strict=True)]
            axes.fill_between(
                stack.edges, [*below, below[-1]], [*above, above[-1]], step="post", label=label, linewidth=0.6,
                facecolor=AREAS[look], edgecolor="#2b4a66", hatch=HATCHES[look],
            )  # fmt: skip
            below = above
        axes.set(xlabel="round", ylabel=y_label, xlim=(stack.edges[0], stack.edges[-1]), ylim=(0, _top(below)))
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
        handles, labels = axes.get_legend_handles_labels()
        longest = max(map(len, labels))
        columns = 2 if longest > 12 else len(labels) if len(labels) < 6 else 3
        # The legend fills column by column; people read line by line.
        order = [i for column in range(columns) for i in range(column, len(labels), columns)]
        axes.legend(
            [handles[i] for i in order], [labels[i] for i in order], ncols=columns, loc="lower left", bbox_to_anchor=(0, 1),
            handlelength=1.4, handleheight=1.1, handletextpad=0.5, columnspacing=1.0, borderaxespad=0.3,
        )  # fmt: skip
    return result[0]


def _top(totals: list[float]) -> float:
    """The upper end: a start that took far longer than the rest would flatten the rest, and is cut off."""
    rest = totals[1:]
    if len(rest) >= 5 and totals[0] > 3 * max(rest) > 0:
        return max(rest) * 1.15
    return max(totals) * 1.04 or 1.0


def heat_map(name: str, columns: Sequence[str], rows: Sequence[str], counts: Sequence[Sequence[int]]) -> Markup:
    """Counts as shades, darker is more, with the numbers in the cells as long as they fit."""
    wide, high = len(columns), len(rows)
    with _chart(name, height=max(1.6, 0.9 + 0.17 * max(high, 6))) as (axes, result):
        most = max(max(row) for row in counts) or 1
        mesh = axes.pcolormesh(
            range(wide + 1), range(high + 1), counts, cmap="Blues", vmin=0, vmax=most * 1.15,
            edgecolors=PAPER, linewidth=1.0 if wide <= 10 else 0.4,
        )  # fmt: skip
        mesh.set_rasterized(False)
        if wide <= 10:
            for y, row in enumerate(counts):
                for x, count in enumerate(row):
                    color = "#ffffff" if count > 0.6 * most else "#101114"
                    axes.text(x + 0.5, y + 0.5, str(count or "\N{EN DASH}"), ha="center", va="center", color=color)
        named = range(0, wide, -(-wide // 24))
        axes.set_xticks([x + 0.5 for x in named], [short(columns[x]) for x in named], rotation=90 if wide > 5 else 0)
        axes.set_yticks([y + 0.5 for y in range(high)], [short(name) for name in rows])
        axes.set(xlabel="author", ylabel="learner")
        axes.invert_yaxis()
        axes.grid(False)
        axes.tick_params(length=0)
        axes.spines["bottom"].set_visible(False)
    return result[0]


@contextmanager
def _chart(name: str, height: float = HEIGHT) -> Iterator[tuple[Axes, list[Markup]]]:
    """Axes to draw on; the SVG is appended to the list at the end. `name` keeps ids of several charts in a page apart."""
    result: list[Markup] = []
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        yield figure.add_subplot(), result
        file = io.StringIO()
        no_metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(file, format="svg", metadata=no_metadata)
        result.append(Markup(_inline(file.getvalue(), name)))


def _inline(svg: str, name: str) -> str:
    """An SVG file as a part of a page: scaled by the style sheet, in its colours, with ids of its own."""
    body = svg[svg.index("<svg") :]
    opening, _, rest = body.partition(">")
    box = re.search(r'viewBox="[^"]*"', opening)
    assert box is not None
    rest = re.sub(r'(\bid="|href="#|url\(#)', rf"\1{name}-", rest)
    # A hundredth of a point is finer than any screen.
    rest = re.sub(r' d="[^"]*"', lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path[0]), rest)
    rest = re.sub("|".join(_VARIABLES), lambda color: f"var(--{_VARIABLES[color[0]]})", rest)
    return f'<svg {box[0]} role="img" aria-hidden="true">{rest.strip()}'
