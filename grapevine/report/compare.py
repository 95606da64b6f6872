"""Several runs side by side: their curves, their figures, and what was set otherwise.

Guarantees: a difference comes with its standard error, as far as its figures have one; the first run is what the others are
held against; what was learnt is compared over the rounds and evaluations that all runs have.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from grapevine.report import charts, series
from grapevine.report.folder import RunFolder
from grapevine.report.page import figure, render, span
from grapevine.report.settings import between
from grapevine.report.summary import figures, with_error

# Figure of the summary, its name for people, digits after the point; those with a standard error come first.
ROWS = (
    ("own_reward_first10", "own reward, first ten rounds", 3),
    ("own_reward_last10", "own reward, last ten rounds", 3),
    ("own_reward_all", "own reward, all rounds", 3),
    ("heldout_first", "held-out sampled, first", 3),
    ("heldout_last", "held-out sampled, last", 3),
    ("heldout_greedy_first", "held-out greedy, first", 3),
    ("heldout_greedy_last", "held-out greedy, last", 3),
    ("rounds", "rounds of every node", 0),
    ("nodes", "nodes", 0),
    ("groups_ordered", "groups ordered", 0),
    ("swarm_groups_used", "groups from the swarm", 0),
    ("distinct_question_share", "share of distinct questions", 3),
    ("groups_lost", "groups lost", 0),
    ("groups_trained_twice", "groups trained twice", 0),
    ("tokens_per_second", "own tokens per second", 0),
    ("restarts", "restarts", 0),
    ("quarantined", "messages quarantined", 0),
)


@dataclass(frozen=True)
class Difference:
    """A run's figure less the first run's; `clear`: more than two standard errors, None where there is none."""

    text: str
    clear: bool | None


def comparison_page(runs: list[RunFolder]) -> str:
    """The page of several runs."""
    rounds = min(run.rounds_done for run in runs)
    facts = [_on_common_ground(run, rounds, _evaluated_in_all(runs)) for run in runs]
    drawn = {
        "reward": ([_over_nodes(run) for run in runs], "own reward"),
        "sampled": ([_heldout_over_nodes(run, greedy=False) for run in runs], "held-out accuracy"),
        "greedy": ([_heldout_over_nodes(run, greedy=True) for run in runs], "held-out accuracy"),
    }
    return render(
        "compare.html.j2",
        title=" against ".join(run.name for run in runs),
        runs=runs,
        facts=facts,
        charts={
            name: charts.lines_chart(name, found, label)
            for name, (several, label) in drawn.items()
            if (found := [one for one in several if one is not None])
        },
        rows=_rows(facts),
        common=_common(runs, rounds) if rounds else [],
        rounds=rounds,
        uneven=any(run.rounds_done != rounds for run in runs),
        windows=sorted({series.window(run.rounds_done) for run in runs}),
        settings=between(runs),
        elapsed=[span(fact["elapsed_seconds"]) for fact in facts],
    )


def _evaluated_in_all(runs: list[RunFolder]) -> set[int]:
    """The rounds after which every node of every run was evaluated."""
    nodes = [{line["round"] for line in lines} for run in runs for lines in run.heldout.values()]
    return set.intersection(*nodes) if nodes else set()


def _on_common_ground(run: RunFolder, rounds: int, evaluated: set[int]) -> dict[str, Any]:
    """A run's figures; those of learning over the first `rounds` rounds and these evaluations, as far as all runs came."""
    cut = replace(
        run,
        rounds={node: lines[:rounds] for node, lines in run.rounds.items()},
        heldout={node: [line for line in lines if line["round"] in evaluated] for node, lines in run.heldout.items()},
    )
    learning = {key: value for key, value in figures(cut).items() if key.startswith(("own_reward", "heldout"))}
    return {**figures(run), **learning}


def _over_nodes(run: RunFolder) -> series.Series | None:
    """Own reward, mean over the nodes, between the least and the greatest node; rounds that all nodes have."""
    done = run.rounds_done
    if not done:
        return None
    size = series.window(done)
    curves = [series.smooth([one["own_reward"] for one in lines[:done]], size) for lines in run.rounds.values()]
    columns = list(zip(*curves, strict=True))
    x = [float(one["round"]) for one in next(iter(run.rounds.values()))[:done]]
    low, high = ([float(end(column)) for column in columns] for end in (min, max))
    several = len(curves) > 1
    return series.Series(
        run.name, x, [fmean(column) for column in columns], low if several else None, high if several else None,
    )  # fmt: skip


def _heldout_over_nodes(run: RunFolder, greedy: bool) -> series.Series | None:
    """Held-out accuracy, mean over the nodes, between the least and the greatest node; rounds all were evaluated at."""
    nodes = [{one["round"]: series.rate(one, greedy)[0] for one in lines} for lines in run.heldout.values() if lines]
    shared = sorted(set.intersection(*(set(node) for node in nodes))) if nodes else []
    if not shared:
        return None
    columns = [[node[round] for node in nodes] for round in shared]
    several = len(nodes) > 1
    return series.Series(
        run.name, [float(round) for round in shared], [fmean(column) for column in columns],
        [min(column) for column in columns] if several else None,
        [max(column) for column in columns] if several else None,
    )  # fmt: skip


def _rows(facts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row per figure: its text in each run, and the differences of the others from the first."""
    rows = []
    for key, name, digits in ROWS:
        texts = [with_error(fact, key) if f"{key}_se" in fact else figure(fact[key], digits) for fact in facts]
        differences = [difference(facts[0], fact, key, digits) for fact in facts[1:]]
        rows.append({"name": name, "texts": texts, "differences": differences})
    return rows


def difference(one: dict[str, Any], other: dict[str, Any], key: str, digits: int) -> Difference:
    """How much greater a figure of `other` is."""
    if one[key] is None or other[key] is None:
        return Difference(figure(None), None)
    value = other[key] - one[key]
    errors = [fact.get(f"{key}_se") for fact in (one, other)]
    text = f"{value:+.{digits}f}".replace("-", "\N{MINUS SIGN}")
    if None in errors:
        return Difference("0" if not value else text, None)
    error = sum(known**2 for known in errors if known is not None) ** 0.5
    return Difference(f"{text} ± {error:.{digits}f}", abs(value) > 2 * error)


def _common(runs: list[RunFolder], rounds: int) -> list[tuple[str, float, float | None]]:
    """Own reward summed over the rounds that all runs have, mean over nodes; and how much more than the first run's."""
    sums = [fmean(sum(one["own_reward"] for one in lines[:rounds]) for lines in run.rounds.values()) for run in runs]
    return [
        (run.name, total, total / sums[0] - 1.0 if i and sums[0] > 0 else None)
        for i, (run, total) in enumerate(zip(runs, sums, strict=True))
    ]
