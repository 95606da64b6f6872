"""What a run came to, in figures.

Guarantees: the same figures for people and for programs; a run that goes on gives those of its rounds so far.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from rich.console import Console

from grapevine.report.folder import Lines, RunFolder, read_run
from grapevine.report.series import SECONDS

EDGE = 10


def summary(folder: Path) -> dict[str, Any]:
    """The figures of `grapevine report RUN --json`. Raises SettingsError when there is no such run."""
    return figures(read_run(folder))


def figures(run: RunFolder) -> dict[str, Any]:
    """Rewards are means over groups, `_se` their standard errors; held-out ones are means over the evaluated nodes.

    All nodes answer the same held-out questions, so more nodes make their mean no surer: it has a node's standard error.
    """
    counts, books = run.counts, run.books.values()
    lines = [line for rounds in run.rounds.values() for line in rounds]
    first, last, every = (_rewards(run, part) for part in (slice(0, EDGE), slice(-EDGE, None), slice(None)))
    ids = [Counter(id for line in rounds for id in [*line["own_ids"], *line["stale_ids"]]) for rounds in run.rounds.values()]
    questions = [mark for line in lines for mark in line["questions"]]
    starts = [evaluations[0] for evaluations in run.heldout.values() if evaluations]
    ends = [evaluations[-1] for evaluations in run.heldout.values() if evaluations]
    return {
        "run": run.name,
        "nodes": len(run.nodes),
        "rounds": run.rounds_done,
        "own_reward_first10": _mean(first),
        "own_reward_first10_se": _standard_error(first),
        "own_reward_last10": _mean(last),
        "own_reward_last10_se": _standard_error(last),
        "own_reward_all": _mean(every),
        "own_reward_all_se": _standard_error(every),
        "heldout_first": _mean([line["reward"] for line in starts]),
        "heldout_first_se": _mean([line["standard_error"] for line in starts]),
        "heldout_last": _mean([line["reward"] for line in ends]),
        "heldout_last_se": _mean([line["standard_error"] for line in ends]),
        "heldout_greedy_first": _greedy(starts),
        "heldout_greedy_last": _greedy(ends),
        "groups_ordered": sum(book.get("ordered", 0) for book in books),
        "groups_scored": counts.get("scored:train", 0),
        "groups_evaluated": counts.get("scored:eval", 0),
        "groups_lost": sum(book.get("lost", 0) for book in books),
        "groups_trained_twice": sum(count - 1 for node in ids for count in node.values()),
        "swarm_groups_used": sum(len(line["swarm_ids"]) for line in lines),
        "swarm_groups_missing": sum(line["swarm_missing"] for line in lines),
        "duplicates": counts.get("duplicates", 0),
        "quarantined": sum(count for name, count in counts.items() if name.startswith("refused:")),
        "restarts": run.restarts,
        "distinct_question_share": len(set(questions)) / len(questions) if questions else 0.0,
        "tokens_per_second": _pace(run),
        "elapsed_seconds": run.elapsed_seconds,
    }


def show_summary(facts: dict[str, Any], console: Console) -> None:
    """A run in five lines."""
    console.print(
        f"\n[bold]{facts['run']}[/bold]: {facts['rounds']} rounds on {facts['nodes']} nodes "
        f"in {facts['elapsed_seconds']:.0f} s\n"
        f"  own reward   {with_error(facts, 'own_reward_first10')}  ->  {with_error(facts, 'own_reward_last10')}"
        "   (first and last ten rounds)\n"
        f"  held-out     {with_error(facts, 'heldout_first')}  ->  {with_error(facts, 'heldout_last')}\n"
        f"  groups       {facts['groups_ordered']} ordered, {facts['groups_lost']} lost, "
        f"{facts['groups_trained_twice']} trained twice, {facts['swarm_groups_used']} taken from the swarm\n"
        f"  {facts['tokens_per_second']:.0f} tokens/s, {facts['restarts']} restarts, "
        f"{facts['quarantined']} messages quarantined",
        highlight=False,
    )


def with_error(facts: dict[str, Any], name: str) -> str:
    """A figure and its standard error, as far as there are any."""
    value, error = facts[name], facts.get(f"{name}_se")
    if value is None:
        return "\N{EN DASH}"
    return f"{value:.3f}" + (f" ± {error:.3f}" if error is not None else "")


def _rewards(run: RunFolder, part: slice) -> list[float]:
    """Mean rewards of the own groups in these rounds, all nodes."""
    return [reward for rounds in run.rounds.values() for line in rounds[part] for reward in line["own_group_rewards"]]


def _pace(run: RunFolder) -> float:
    """Own tokens per second at work, all nodes together: loading models, or a run that was up for nothing, does not count.

    So without each node's first round, which waits for the models, where there are others.
    """
    skipped = 1 if run.rounds_done > 1 else 0
    tokens = sum(line["own_tokens"] for rounds in run.rounds.values() for line in rounds[skipped:])
    spent = [sum(line[part] for line in timing[skipped:] for part in SECONDS) for timing in run.timing.values()]
    return tokens / max(spent) if any(spent) else 0.0


def _mean(values: list[float]) -> float | None:
    return fmean(values) if values else None


def _standard_error(values: list[float]) -> float | None:
    return stdev(values) / len(values) ** 0.5 if len(values) > 1 else None


def _greedy(evaluations: Lines) -> float | None:
    return _mean([line["greedy"]["rate"] for line in evaluations])
