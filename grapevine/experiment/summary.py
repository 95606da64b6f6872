"""The figures of an experiment: of each cell, of each arm over its seeds, of each pair of arms seed by seed.

Guarantees: arms are compared over the seeds that both have, never over others; what cannot be computed is None.
"""

from __future__ import annotations

from itertools import combinations
from statistics import fmean, stdev
from typing import Any

from grapevine.experiment.cells import Cell
from grapevine.experiment.record import LAST
from grapevine.experiment.signflip import sign_flip_p
from grapevine.experiment.study import Study, Tree

FIRST = 10

# What pairs of arms are tested on.
TESTED = ("own_reward", "heldout")


def starts(cells: list[Tree]) -> dict[int, float]:
    """By seed: own reward at the start, the mean of the first rounds over all cells of the seed.

    All arms of a seed begin with the same models and nearly the same questions: pooled, the chance of ten rounds does not
    pass for a difference between arms.
    """
    found: dict[int, list[float]] = {}
    for cell in cells:
        found.setdefault(cell["seed"], []).extend(cell["rounds"]["own_reward"][:FIRST])
    return {seed: fmean(rewards) for seed, rewards in found.items() if rewards}


def cell_figures(cell: Tree, start: float | None) -> dict[str, Any]:
    """`own_reward` is the sum over rounds of the mean over nodes, `gain` the mean of all rounds less `start`."""
    rounds, heldout = cell["rounds"], cell["heldout"]
    rewards = rounds["own_reward"]
    return {
        "own_reward": cell["cumulative_own_reward"],
        "start": start,
        "last": fmean(rewards[-LAST:]) if rewards else None,
        "gain": None if start is None else cell["cumulative_own_reward"] / len(rewards) - start,
        "heldout": heldout[-1]["sampled"] if heldout else None,
        "heldout_greedy": heldout[-1]["greedy"] if heldout else None,
        "tokens": sum(rounds["own_tokens"]),
        "swarm_groups": sum(rounds["swarm_groups"]),
        "skipped": sum(rounds["skipped"]),
    }


def summarize(study: Study, cells: list[Cell], found: dict[str, Tree]) -> dict[str, Any]:
    """The content of summary.json. `found`: the finished cells by name."""
    return {
        "experiment": study.experiment,
        "cells": len(cells),
        "finished": len(found),
        "commits": sorted({str(cell.get("commit")) for cell in found.values()}),
        "versions": sorted({str(cell.get("version")) for cell in found.values()}),
        "regimes": {regime: _regime(study, regime, cells, found) for regime in study.regimes},
    }


def _regime(study: Study, regime: str, cells: list[Cell], found: dict[str, Tree]) -> dict[str, Any]:
    arms, references = study.arms_of(regime), study.references_of(regime)
    mine = [cell for cell in cells if cell.regime == regime]
    start = starts([found[cell.name] for cell in mine if cell.name in found])
    figures = {
        arm: {
            cell.seed: cell_figures(found[cell.name], start.get(cell.seed))
            for cell in mine
            if cell.arm == arm and cell.name in found
        }
        for arm in arms
    }
    return {
        "purpose": study.regimes[regime].purpose,
        "reference": references,
        "seeds": study.regimes[regime].seeds,
        "missing": [cell.name for cell in mine if cell.name not in found],
        "arms": {
            arm: {
                "seeds": {str(seed): one for seed, one in by_seed.items()},
                "mean": _means(list(by_seed.values())),
                "percent_of_gain": {
                    reference: _percent(figures[reference], by_seed) for reference in references if reference != arm
                },
            }
            for arm, by_seed in figures.items()
        },
        "pairs": [_pair(one, other, figures) for one, other in _pairs(arms, references)],
    }


def _pairs(arms: list[str], references: list[str]) -> list[tuple[str, str]]:
    """All pairs, those with a reference first; of each pair the reference, or the arm that is named first, comes first."""
    order = [*references, *(arm for arm in arms if arm not in references)]
    return list(combinations(order, 2))


def _means(cells: list[dict[str, Any]]) -> dict[str, Any]:
    """Over seeds: the mean of each figure and, from two seeds on, its standard error."""
    means: dict[str, Any] = {}
    for key in cells[0] if cells else ():
        values = [cell[key] for cell in cells if cell[key] is not None]
        means[key] = fmean(values) if values else None
        means[f"{key}_se"] = stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
    return means


def _percent(reference: dict[int, dict[str, Any]], arm: dict[int, dict[str, Any]]) -> float | None:
    """The arm's gain as a percentage of the reference's; None where the reference gained nothing."""
    seeds = [seed for seed in arm if seed in reference]
    gains = [[by_seed[seed]["gain"] for seed in seeds if by_seed[seed]["gain"] is not None] for by_seed in (reference, arm)]
    if not gains[0] or len(gains[0]) != len(gains[1]) or fmean(gains[0]) <= 0:
        return None
    return 100.0 * fmean(gains[1]) / fmean(gains[0])


def _pair(one: str, other: str, figures: dict[str, dict[int, dict[str, Any]]]) -> dict[str, Any]:
    """`other` less `one`, seed by seed."""
    pair: dict[str, Any] = {"arms": [one, other]}
    for key in TESTED:
        differences = {
            seed: figures[other][seed][key] - figures[one][seed][key]
            for seed in figures[one]
            if seed in figures[other] and None not in (figures[one][seed][key], figures[other][seed][key])
        }
        values = list(differences.values())
        pair[key] = {
            "seeds": len(values),
            "mean_difference": fmean(values) if values else None,
            "differences": {str(seed): value for seed, value in differences.items()},
            # Of one seed both signs are equally far: there is nothing to test.
            "p": sign_flip_p(values) if len(values) > 1 else None,
        }
    return pair
