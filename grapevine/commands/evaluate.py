"""`grapevine eval`: how good a model is, by itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from grapevine.commands.options import SetOption


def evaluate(
    model: Annotated[str, typer.Argument(help="a folder, a hub id, `starter`, or RUN/NODE for a node's newest checkpoint")],
    tasks: Annotated[str | None, typer.Option(help="a preset, or names with commas; default: as the settings say")] = None,
    questions: Annotated[int, typer.Option(help="distinct held-out questions, over all tasks")] = 200,
    completions: Annotated[int, typer.Option(help="sampled completions per question, for pass@k")] = 4,
    max_new_tokens: Annotated[int | None, typer.Option(help="longest completion; default: as the settings say")] = None,
    config: Annotated[Path | None, typer.Option(help="a YAML file of settings")] = None,
    set_: SetOption = None,
    answers: Annotated[Path | None, typer.Option(help="write every question and answer to this JSONL file")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="figures as one JSON object")] = False,
) -> None:
    """Evaluate a model on held-out questions: greedy pass@1 and sampled pass@k per task, with intervals.

    Example: grapevine eval starter --tasks starter --max-new-tokens 16

    Example: grapevine eval Qwen/Qwen2.5-0.5B-Instruct --tasks paper9 --questions 400

    Example: grapevine eval demo/node-0 --tasks gcd,count_bits
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from common.settings import load
    from common.tasks import PRESETS
    from grapevine.evaluate import evaluate_model, show
    from grapevine.logs import configure_logs

    configure_logs(console=False)
    flags = [f"node.evaluate.questions={questions}", f"node.evaluate.completions={completions}"]
    if tasks is not None:
        flags.append(f"node.tasks={tasks if tasks in PRESETS else json.dumps(tasks.split(','))}")
    if max_new_tokens is not None:
        flags.append(f"node.sampling.max_new_tokens={max_new_tokens}")
    run = Path("runs") / model.partition("/")[0] / "settings.json"
    if config is None and "/" in model and run.exists():
        config = run  # a node of a run is asked what the run asks
    settings = load(config, [*flags, *(set_ or [])])
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        row = bar.add_task("loading the model", total=None)
        figures = evaluate_model(
            settings,
            model,
            answers,
            lambda done, total: bar.update(row, completed=done, total=total, description="answered"),
        )
    if as_json:
        print(json.dumps(figures, indent=2))
    else:
        show(figures, Console())
