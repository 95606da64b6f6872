"""`grapevine eval`: how good a model is, by itself."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from grapevine.commands.options import FolderOption, SetOption


def evaluate(
    model: Annotated[str, typer.Argument(help="a folder, a hub id, `starter`, or RUN/NODE for a node's newest checkpoint")],
    tasks: Annotated[str | None, typer.Option(help="a preset, or names with commas; default: as the settings say")] = None,
    questions: Annotated[int, typer.Option(min=1, help="distinct held-out questions, over all tasks")] = 200,
    completions: Annotated[int, typer.Option(min=1, max=1024, help="sampled completions per question, for pass@k")] = 4,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="longest completion; default: by the settings")] = None,
    config: Annotated[Path | None, typer.Option(help="a YAML file of settings")] = None,
    set_: SetOption = None,
    answers: Annotated[Path | None, typer.Option(help="write every question and answer to this JSONL file")] = None,
    folder: FolderOption = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json", help="figures as one JSON object")] = False,
) -> None:
    """Evaluate a model on held-out questions: greedy pass@1 and sampled pass@k per task, with intervals.

    Example: grapevine eval starter --tasks starter --max-new-tokens 16

    Example: grapevine eval Qwen/Qwen2.5-0.5B-Instruct --tasks paper9 --questions 400

    Example: grapevine eval demo/node-0 --tasks gcd,count_bits
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from common.settings import SettingsError, load
    from common.tasks import PRESETS
    from grapevine.evaluate import evaluate_model, run_of, show
    from grapevine.logs import configure_logs
    from grapevine.running.continuing import resumed

    configure_logs(console=False)
    if answers is not None:
        try:
            answers.open("a").close()  # now, and not after an hour of work
        except OSError as error:
            raise SettingsError(f"--answers {answers} cannot be written: {error.strerror}") from None
    # What is in the temporary folder goes with us.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    place = [f"folder={json.dumps(str(folder))}"]
    own = run_of(folder, model)
    if own is not None and config is None:
        config, of_run, _ = resumed(str(own.run_folder.absolute()))
        place += of_run
    settings = load(config, [*place, *(set_ or [])])
    named = tasks if tasks is None or tasks in PRESETS else [task.strip() for task in tasks.split(",")]
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
            named,
            questions,
            completions,
            max_new_tokens,
            answers,
            lambda done, total: bar.update(row, completed=done, total=total, description="answered"),
        )
    if as_json:
        print(json.dumps(figures, indent=2))
    else:
        show(figures, Console())
