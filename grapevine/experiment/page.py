"""The page of an experiment, the figures beside it, and summary.json.

Guarantees: one file without scripts and without an address to load from; every arm of the study is on it, finished or not,
and what could not be computed is said; files appear whole, so the page can be watched while cells run.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from common.files import write_whole
from common.settings import SettingsError
from grapevine.experiment.cells import Cell
from grapevine.experiment.curves import Panel, panels, window
from grapevine.experiment.study import Study, Tree
from grapevine.experiment.summary import FIRST, summarize
from grapevine.report.charts import lines_chart, lines_figure
from grapevine.report.page import figure, render
from grapevine.report.settings import leaves, text

# With so many seeds the smallest p that the test can give is below the usual 0.05.
FEWEST_SEEDS = 6

Drawn = tuple[list[Panel], list[Panel]]


def write_pages(study: Study, cells: list[Cell], found: dict[str, Tree], out: Path) -> None:
    """index.html, summary.json, figures/. Raises SettingsError when the place cannot be written to."""
    facts = summarize(study, cells, found)
    drawn = {regime: _drawn(study, regime, cells, found) for regime in study.regimes}
    try:
        (out / "figures").mkdir(parents=True, exist_ok=True)
        write_whole(out / "summary.json", json.dumps(facts, indent=1))
        write_whole(out / "index.html", study_page(study, cells, found, facts, drawn))
        for regime, (tested, described) in drawn.items():
            for name, several in ((regime, tested), (f"{regime}-descriptive", described)):
                for kind in ("svg", "png") if several else ():
                    write_whole(out / "figures" / f"{name}.{kind}", lines_figure(several, kind))
    except OSError as error:
        raise SettingsError(f"--out {out} cannot be written: {error.strerror}") from None


def study_page(
    study: Study, cells: list[Cell], found: dict[str, Tree], facts: dict[str, Any], drawn: dict[str, Drawn]
) -> str:
    """The page."""
    return render(
        "study.html.j2",
        Path(__file__).parent,
        filters={"mean_and_error": mean_and_error, "signed": signed},
        title=study.experiment,
        study=study,
        facts=facts,
        regimes=[_regime(study, name, cells, found, facts["regimes"][name], drawn[name]) for name in study.regimes],
        seconds=sum(cell.get("wall_seconds", 0.0) for cell in found.values()),
        first=FIRST,
    )


def _drawn(study: Study, regime: str, cells: list[Cell], found: dict[str, Tree]) -> Drawn:
    """A regime's panels: the arms over all seeds; apart, descriptive arms beside the references, over their few seeds."""
    about = study.regimes[regime]
    by_arm = {
        arm: {
            cell.seed: found[cell.name] for cell in cells if (cell.regime, cell.arm) == (regime, arm) and cell.name in found
        }
        for arm in study.arms_of(regime)
    }
    tested = {arm: list(by_seed.values()) for arm, by_seed in by_arm.items() if arm not in about.descriptive_arms}
    few = about.seeds[: about.descriptive_seeds]
    described = {
        arm: [by_arm[arm][seed] for seed in few if seed in by_arm[arm]]
        for arm in [*study.references_of(regime), *about.descriptive_arms]
    }
    return panels(tested), panels(described) if any(by_arm[arm] for arm in about.descriptive_arms) else []


def _regime(
    study: Study, name: str, cells: list[Cell], found: dict[str, Tree], facts: dict[str, Any], drawn: Drawn
) -> dict[str, Any]:
    """What the template shows of a regime."""
    mine = [cell for cell in cells if cell.regime == name]
    first = {cell.arm: cell for cell in reversed(mine)}
    shared, differing = _settings({arm: first[arm] for arm in study.arms_of(name)})
    rounds = sorted({cell.rounds for cell in mine})
    tested = max((pair["own_reward"]["seeds"] for pair in facts["pairs"]), default=0)
    return {
        "name": name,
        "about": study.regimes[name].about,
        "facts": facts,
        "arms": study.arms_of(name),
        "nodes": sorted({len(cell.settings.node_names()) for cell in mine}),
        "rounds": rounds,
        "window": sorted({window(count) for count in rounds}),
        "cells": len(mine),
        "charts": _charts(name, drawn[0]),
        "described": _charts(f"{name}-descriptive", drawn[1]),
        "described_seeds": study.regimes[name].seeds[: study.regimes[name].descriptive_seeds],
        "several_seeds": any(len(arm["seeds"]) > 1 for arm in facts["arms"].values()),
        "skipped": any(arm["mean"].get("skipped") for arm in facts["arms"].values()),
        "smallest_p": 2.0 ** (1 - tested) if tested > 1 else None,
        "few": tested < FEWEST_SEEDS,
        "pairs": [pair for pair in facts["pairs"] if pair["arms"][0] in facts["reference"]],
        "others": [pair for pair in facts["pairs"] if pair["arms"][0] not in facts["reference"]],
        "differing": differing,
        "shared": shared,
        "models": yaml.safe_dump(
            {key: model.model_dump(mode="json", exclude_none=True) for key, model in mine[0].models.items()}, sort_keys=False
        )
        if mine[0].models
        else "",
    }


def _charts(name: str, drawn: list[Panel]) -> list[tuple[str, str]]:
    return [
        (title, lines_chart(f"{name}-{i}", lines, y_label, most=len(lines), x_label=x_label))
        for i, (title, lines, x_label, y_label) in enumerate(drawn)
    ]


def _settings(arms: dict[str, Cell]) -> tuple[str, list[tuple[str, list[str]]]]:
    """What all arms have alike, in full; and what they do not: setting, value in each arm."""
    trees = [leaves(cell.resolved()["settings"]) for cell in arms.values()]
    for tree in trees:
        tree.pop("seed", None)
    keys = dict.fromkeys(key for tree in trees for key in tree)
    alike = [key for key in keys if all(key in tree and tree[key] == trees[0][key] for tree in trees)]
    shown = "\n".join(f"{key}: {text(trees[0][key])}" for key in alike)
    rows = [(key, [text(tree[key]) if key in tree else "\N{EN DASH}" for tree in trees]) for key in keys if key not in alike]
    return shown, rows


def mean_and_error(means: dict[str, Any], key: str, digits: int) -> str:
    """`12.3 ± 0.4` over seeds; without an error where there is one seed, a dash where there is none."""
    value, error = means.get(key), means.get(f"{key}_se")
    if value is None or error is None:
        return figure(value, digits)
    return f"{value:.{digits}f} ± {error:.{digits}f}"


def signed(value: float | None, digits: int = 3) -> str:
    """With its sign, a dash for none."""
    if value is None:
        return "\N{EN DASH}"
    return f"{value:+.{digits}f}".replace("-", "\N{MINUS SIGN}")
