"""Evaluations on demand: of a policy in a running swarm, or of a model that stands alone.

Guarantees: both go through the same generators, verifiers and figures as the evaluations of a training run; a model that
stands alone is evaluated in one process on a server of its own that is gone afterwards.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from common import tasks
from common.directory import Directory, Policy
from common.identity import Identity
from common.ledger import Ledger
from common.messages import ScoredGroup, Version
from common.policies import PolicyStore
from common.run import open_run
from common.settings import STARTER_MODELS, NodeSettings, Settings, SettingsError, merged
from grapevine.roles import make_engine, make_generator, make_trainer, make_verifier
from learners.checkpoint import WEIGHTS_FILE, Checkpoints
from learners.evaluation import Evaluation, Plan, result

# One job has one evaluation, whoever works on it: there is nobody to fence off.
INCARNATION = 1

Progress = Callable[[int, int], None]


def evaluate_policy(
    settings: Settings,
    ledger: Ledger,
    directory: Directory,
    identity: Identity,
    job: str,
    policy: Policy,
    tasks: str | list[Any] | None = None,
    questions: int | None = None,
    completions: int | None = None,
    on_progress: Progress | None = None,
) -> dict[str, Any]:
    """Evaluate a pinned policy in a running swarm, on the target `eval-<identity>-<job>`; waits for the last answer.

    What is left out is as the section `node` of the settings says. `job` holds no hyphen. Called again for the same job
    it takes up what is there. Raises what the connection raises: the caller tries again.
    """
    node = _asked(settings.node, tasks, questions, completions)
    evaluation = Evaluation(job, _plan(settings, node), policy, ledger, directory, identity, INCARNATION)
    directory.register(identity)
    evaluation.rejoin()
    while True:
        groups = evaluation.step(wait_ms=500)
        if groups is not None:
            return {"version": str(policy.version), **result(groups)}
        if on_progress:
            on_progress(evaluation.answered, evaluation.plan.orders)


def evaluate_model(
    settings: Settings, model: str, answers: Path | None = None, on_progress: Progress | None = None
) -> dict[str, Any]:
    """Evaluate a model folder, a hub id or `RUN/NODE` (that node's newest checkpoint) as the section `node` says.

    `answers` names a JSONL file for every question with what was answered. Raises SettingsError for what is no model.
    """
    from transformers.utils import logging

    # Here and not above: a control worker that evaluates policies of a running swarm starts no server.
    from grapevine.server import EmbeddedServer

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # the caller shows one of its own
    with tempfile.TemporaryDirectory(prefix="grapevine-eval-") as scratch:
        folder = Path(scratch)
        policy = _policy_of(settings, model, folder)
        server = EmbeddedServer(folder / "server")
        server.start()
        try:
            alone = settings.model_copy(update={"redis_url": server.url, "folder": folder, "site": "local"})
            ledger, directory = open_run(alone)
            generator = make_generator("generator-0", alone, ledger, directory, make_engine(alone))
            verifier = make_verifier("verifier-0", alone, ledger, directory)
            identity = Identity.fresh("node", "alone", "local")
            evaluation = Evaluation("0", _plan(alone, alone.node), policy, ledger, directory, identity, INCARNATION)
            directory.register(identity)
            for worker in (generator, verifier, evaluation):
                worker.rejoin()
            try:
                groups = None
                while groups is None:
                    if directory.waiting_orders([evaluation.target])[evaluation.target]:
                        generator.pool.serve(evaluation.target)
                        generator.step()
                        verifier.step()
                    groups = evaluation.step()
                    if on_progress:
                        on_progress(evaluation.answered, evaluation.plan.orders)
            finally:
                verifier.drain()
        finally:
            server.stop()
    if answers is not None:
        _write_answers(answers, groups)
    return {"model": model, "version": str(policy.version), **result(groups)}


def _asked(
    node: NodeSettings, tasks: str | list[Any] | None, questions: int | None, completions: int | None
) -> NodeSettings:
    """A node's settings with what one evaluation asks for on top."""
    wanted = {"questions": questions, "completions": completions}
    own: dict[str, Any] = {"evaluate": {name: value for name, value in wanted.items() if value is not None}}
    if tasks is not None:
        own["tasks"] = tasks
    return NodeSettings.model_validate(merged(node.model_dump(), own))


def _plan(settings: Settings, node: NodeSettings) -> Plan:
    plan = Plan.of(node, tasks.resolve_tasks(node.tasks), settings.seed)
    if not plan.questions:
        raise SettingsError("setting node.evaluate.questions: nothing to evaluate; ask for at least one question")
    return plan


def _policy_of(settings: Settings, model: str, folder: Path) -> Policy:
    """The weights to evaluate as a policy of their own."""
    run, _, node = model.partition("/")
    trained = settings.folder / run / "nodes" / node
    store = PolicyStore(str(folder / "policies"), "alone", kept=2)
    if node and trained.is_dir():
        found = Checkpoints(trained / "checkpoints").newest()
        base = Settings.model_validate(json.loads((settings.folder / run / "settings.json").read_text()))
        if found is None:
            raise SettingsError(f"node {node} of run {run} has no checkpoint yet; evaluate it once it has trained a round")
        state, checkpoint = found
        return store.publish(checkpoint / WEIGHTS_FILE, state.version, base.for_node(node).model)
    if model in STARTER_MODELS:
        from grapevine.starter.model import starter_folder

        model = str(starter_folder(model))
    make_trainer(model, settings.node, "eval").save(folder)
    return store.publish(folder / WEIGHTS_FILE, Version(1, 0), model)


def _write_answers(path: Path, groups: list[ScoredGroup]) -> None:
    """One line per question: task, text, right answer, and every completion with its accuracy."""
    half = len(groups) // 2
    lines = []
    for greedy, sampled in zip(groups[:half], groups[half:], strict=True):
        item = tasks.build(greedy.question)
        said = [
            [{"text": c.text, "accuracy": score.accuracy} for c, score in zip(g.completions, g.components, strict=True)]
            for g in (greedy, sampled)
        ]
        line = {"task": greedy.question.task, "question": item.text, "answer": item.answer}
        lines.append(json.dumps({**line, "greedy": said[0][0], "sampled": said[1]}, ensure_ascii=False))
    path.write_text("\n".join(lines) + "\n")


def show(figures: dict[str, Any], console: Console) -> None:
    """The figures of an evaluation as a table, one row per task."""
    most = str(figures["completions"])
    table = Table(
        title=f"{figures['model']}: {figures['questions']} held-out questions",
        title_justify="left",
        box=SIMPLE,
        pad_edge=False,
    )
    table.add_column("task", no_wrap=True)

    for head in ("asked", "greedy pass@1", "sampled pass@1", f"pass@{most}"):
        table.add_column(head, justify="right", no_wrap=True)
    parts = list(figures["by_task"].items())
    for place, (name, part) in enumerate([*parts, ("all", figures)] if len(parts) > 1 else parts, 1):
        mean = {"rate": part["reward"], "low": part["low"], "high": part["high"]}
        cells = [_cell(part["greedy"]), _cell(mean), _cell(part["pass_at"][most])]
        table.add_row(name, str(part["questions"]), *cells, end_section=place == len(parts))
    console.print(table)
    console.print(f"{most} sampled completions per question; 95 % intervals over questions", style="dim", highlight=False)


def _cell(rate: dict[str, float]) -> str:
    return f"{rate['rate']:.2f} {rate['low']:.2f}-{rate['high']:.2f}"
