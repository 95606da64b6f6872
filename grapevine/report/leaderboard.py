"""Who answers held-out questions best: every evaluation of a run, in training and by jobs, in one order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from grapevine.report.folder import RunFolder

WIDE = 76
Rate = tuple[float, float, float]


@dataclass(frozen=True)
class Standing:
    """One evaluation. Rates come with the low and the high end of their 95 % interval."""

    node: str
    round: int | None
    version: str
    source: str
    questions: int
    sampled: Rate
    greedy: Rate
    pass_at: dict[int, Rate]


def standings(run: RunFolder) -> list[Standing]:
    """All evaluations, the highest sampled rate first; among equals the greedy one decides, then the earlier round."""
    found = [_standing(node, "training", line) for node, lines in run.heldout.items() for line in lines]
    found += [_standing(line["node"], f"job {line['job']}", line) for line in run.evaluations]
    return sorted(
        found,
        key=lambda one: (
            -one.sampled[0], -one.greedy[0], one.round if one.round is not None else -1, one.node,
        ),
    )  # fmt: skip


def widest(rows: list[Standing]) -> int | None:
    """The greatest k above 1 that all evaluations give a pass@k for."""
    shared = set.intersection(*(set(row.pass_at) for row in rows)) if rows else set()
    return max((k for k in shared if k > 1), default=None)


def percent(figure: Rate) -> str:
    """`43.8 %`."""
    return f"{100 * figure[0]:.1f} %"


def interval(figure: Rate) -> str:
    """`39.7 to 47.9`, in per cent."""
    return f"{100 * figure[1]:.1f} to {100 * figure[2]:.1f}"


def show_standings(run: RunFolder, top: int, console: Console) -> None:
    """The table, its first `top` rows; 0: all."""
    rows = standings(run)
    if not rows:
        console.print(f"{run.name}: nothing evaluated yet; evaluations come every node.evaluate.every rounds")
        return
    k = widest(rows)
    # A narrow terminal has room for the figures alone.
    wide = console.width >= WIDE
    title = f"{run.name}: held-out accuracy in %{', with 95 % intervals' if wide else ''}"
    table = Table(box=SIMPLE if wide else None, padding=(0, 1, 0, 0), title=title, title_justify="left")
    for name in (
        *([""] if wide else []),
        "node",
        "round",
        "sampled",
        "greedy",
        *([f"pass@{k}"] if k else []),
        *(["of", "by"] if wide else []),
    ):
        table.add_column(name, justify="left" if name in ("node", "by") else "right", no_wrap=name != "by")
    for place, row in enumerate(rows[: top or None], 1):
        rates = [row.sampled, row.greedy, *([row.pass_at[k]] if k else [])]
        cells = [f"{100 * one[0]:.1f}" + (f" ({100 * one[1]:.0f}-{100 * one[2]:.0f})" if wide else "") for one in rates]
        round = str(row.round) if row.round is not None else row.version
        if wide:
            table.add_row(str(place), row.node, round, *cells, str(row.questions), row.source)
        else:
            table.add_row(row.node, round, *cells)
    console.print(table)
    if top and len(rows) > top:
        console.print(f"and {len(rows) - top} more: --top 0 shows all")


def _standing(node: str, source: str, line: dict[str, Any]) -> Standing:
    greedy = line["greedy"]
    return Standing(
        node=node,
        round=line["round"],
        version=line["version"],
        source=source,
        questions=line["questions"],
        sampled=(line["reward"], line["low"], line["high"]),
        greedy=(greedy["rate"], greedy["low"], greedy["high"]),
        pass_at={int(k): (one["rate"], one["low"], one["high"]) for k, one in line["pass_at"].items()},
    )
