"""What a study would run, without running, making or fetching anything.

Guarantees: every cell's settings, tasks and nodes are resolved as for a run, so what would be refused there is refused here.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from common.sections import STARTER_MODELS, NodeSettings
from grapevine.experiment.cells import Cell, models_of
from grapevine.experiment.study import Study


def show_plan(study: Study, cells: list[Cell], there: set[str], out: Path, console: Console) -> None:
    """A table with a row per regime and arm, and what is missing."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("regime", "arm", "seeds", "nodes", "rounds", "own/swarm", "groups", "models"):
        number = heading in ("nodes", "rounds", "own/swarm", "groups")
        fixed = heading not in ("seeds", "models")
        table.add_column(heading, justify="right" if number else "left", overflow="fold", no_wrap=fixed)
    for regime in study.regimes:
        for arm in study.arms_of(regime):
            several = [cell for cell in cells if (cell.regime, cell.arm) == (regime, arm)]
            settings = several[0].settings
            nodes = [settings.for_node(node) for node in settings.node_names()]
            table.add_row(
                regime, arm, ", ".join(str(cell.seed) for cell in several), str(len(nodes)),
                _each(str(node.rounds) for node in nodes), _each(_mix(node) for node in nodes),
                f"{sum(node.rounds * node.mix.own for node in nodes) * len(several):,}", ", ".join(models_of(settings)),
            )  # fmt: skip
    console.print(table, soft_wrap=True)
    console.print()
    for line in _missing(cells, there, out):
        console.print(line, highlight=False, soft_wrap=True)


def _each(values: Iterable[str]) -> str:
    """What the nodes have, each value once."""
    return ", ".join(dict.fromkeys(values))


def _mix(node: NodeSettings) -> str:
    return f"{node.mix.own}/{node.mix.swarm}" + ("" if node.mix.own_filter == "none" else f" {node.mix.own_filter}")


def _missing(cells: list[Cell], there: set[str], out: Path) -> list[str]:
    """What is to be run, made and fetched."""
    from grapevine.experiment.models import is_made

    left = [cell for cell in cells if cell.name not in there]
    rounds = sum(cell.rounds for cell in left)
    lines = [f"{len(there)} of {len(cells)} cells are there; to run: {len(left)} cells, {rounds:,} rounds; in {out}"]
    made = {(name, cell.seed): model for cell in left for name, model in cell.models.items()}
    wanted = [f"{name} of seed {seed}" for (name, seed), model in made.items() if not is_made(model, seed)]
    if wanted:
        lines.append(f"models to make, at the first cell that needs them: {', '.join(wanted)}")
    known = {*STARTER_MODELS, *(name for cell in cells for name in cell.models)}
    for model in dict.fromkeys(model for cell in left for model in models_of(cell.settings)):
        if model not in known and not _is_here(model):
            lines.append(f"model {model} is not on this machine; it is fetched by the first cell that needs it")
    return lines


def _is_here(model: str) -> bool:
    """Whether a folder, or a hub's model with its weights, is on this disk."""
    if Path(model).expanduser().is_dir():
        return True
    from huggingface_hub import try_to_load_from_cache

    names = ("model.safetensors", "model.safetensors.index.json")
    try:
        return any(isinstance(try_to_load_from_cache(model, name), str) for name in names)
    except ValueError:  # no name that a hub could have
        return False
