"""Evaluations on demand: of a policy in a running swarm, or of a model that stands alone.

Guarantees: both go through the same generators, verifiers and figures as the evaluations of a training run; a model that
stands alone is evaluated in one process on a server of its own that is gone afterwards.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
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
from common.sections import STARTER_MODELS, NodeSettings, UpdateSettings
from common.settings import Settings, SettingsError, merged
from grapevine.engines import make_engine
from grapevine.roles import make_generator, make_trainer, make_verifier
from learners.checkpoint import WEIGHTS_FILE, Checkpoints
from learners.evaluation import Evaluation, Plan

# One job has one evaluation, whoever works on it: there is nobody to fence off.
INCARNATION = 1
PATIENCE_SECONDS = 10.0**8

Progress = Callable[[int, int], None]


def evaluate_policy(
    settings: Settings,
    ledger: Ledger,
    directory: Directory,
    identity: Identity,
    job: str,
    policy: Policy,
    node: NodeSettings,
    tasks: str | list[Any] | None = None,
    questions: int | None = None,
    completions: int | None = None,
    on_progress: Progress | None = None,
) -> dict[str, Any]:
    """Evaluate a pinned policy in a running swarm, on the target `eval-<identity>-<job>`; waits for the last answer.

    What is left out is as `node`, the settings of the node that is evaluated, says. `job` holds no hyphen. Called again
    for the same job it takes up what is there. Raises Unanswered when nothing comes back, and what the connection raises:
    the caller tries again.
    """
    plan = _plan(settings, _asked(node, tasks, questions, completions))
    evaluation = Evaluation(job, plan, policy, ledger, directory, identity, INCARNATION)
    directory.register(identity)
    evaluation.rejoin()
    while not evaluation.step(wait_ms=500):
        if on_progress:
            on_progress(evaluation.answered, plan.orders)
    figures = {"version": str(policy.version), **evaluation.result()}
    evaluation.forget()
    return figures


def evaluate_model(
    settings: Settings,
    model: str,
    tasks: str | list[Any] | None = None,
    questions: int | None = None,
    completions: int | None = None,
    max_new_tokens: int | None = None,
    answers: Path | None = None,
    on_progress: Progress | None = None,
) -> dict[str, Any]:
    """Evaluate a model folder, a hub id or `RUN/NODE` (that node's newest checkpoint) in this process.

    What is left out is as the section `node` of the settings says, or the settings of NODE. `answers` names a JSONL file
    for every question with what was answered. Raises SettingsError for what is no model.
    """
    from transformers.utils import logging

    # Here and not above: a control worker that evaluates policies of a running swarm starts no server.
    from grapevine.server import EmbeddedServer

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # the caller shows one of its own
    with tempfile.TemporaryDirectory(prefix="grapevine-eval-") as scratch:
        folder = Path(scratch)
        own = run_of(settings.folder, model)
        node = settings.for_node(own.node) if own and own.node in settings.node_names() else settings.node
        node = _asked(node, tasks, questions, completions, max_new_tokens)
        # Nobody else's answers are waited for here, so no order is ever late.
        plan = replace(_plan(settings, node), order_seconds=PATIENCE_SECONDS)
        policy = _policy_of(own, model, node, folder)
        server = EmbeddedServer(folder / "server")
        server.start()
        try:
            alone = settings.model_copy(update={"redis_url": server.url, "folder": folder, "site": "local"})
            ledger, directory = open_run(alone)
            engine = make_engine(alone)
            generator = make_generator("generator-0", alone, ledger, directory, engine)
            verifier = make_verifier("verifier-0", alone, ledger, directory)
            identity = Identity.fresh("node", "alone", "local")
            evaluation = Evaluation("0", plan, policy, ledger, directory, identity, INCARNATION)
            directory.register(identity)
            raw = ledger.raw(ledger.keys.shard_of(evaluation.target))
            for worker in (generator, verifier, evaluation):
                worker.rejoin()
            try:
                done = False
                while not done:
                    if directory.waiting_orders([evaluation.target])[evaluation.target]:
                        generator.pool.serve(evaluation.target)
                        generator.step()
                        # Nobody else could answer: waiting would never end.
                        if refusal := generator.refusal(evaluation.target):
                            raise SettingsError(f"the model {model} cannot be evaluated: {refusal}")
                    while ledger.redis.xlen(raw):
                        verifier.step()
                    done = evaluation.step()
                    if on_progress:
                        on_progress(evaluation.answered, evaluation.plan.orders)
            finally:
                verifier.drain()
                engine.close()
        finally:
            server.stop()
    if answers is not None:
        _write_answers(answers, evaluation.answers())
    return {"model": model, "version": str(policy.version), "asked_for": node.evaluate.questions, **evaluation.result()}


@dataclass(frozen=True)
class RunNode:
    """A node of a run in this machine's folder of runs."""

    run_folder: Path
    node: str


def run_of(folder: Path, model: str) -> RunNode | None:
    """What `RUN/NODE` names; None when there is no such run, so that it may be a hub id.

    Raises SettingsError when the run has no such node.
    """
    run, _, node = model.partition("/")
    nodes = sorted(path.name for path in (folder / run / "nodes").glob("*"))
    if not node or not nodes:
        return None
    if node not in nodes:
        raise SettingsError(f"run {run} has no node {node}; it has {', '.join(nodes[:8])}{', ...' if nodes[8:] else ''}")
    return RunNode(folder / run, node)


def _asked(
    node: NodeSettings,
    tasks: str | list[Any] | None,
    questions: int | None,
    completions: int | None,
    max_new_tokens: int | None = None,
) -> NodeSettings:
    """A node's settings with what one evaluation asks for on top."""
    wanted = {"questions": questions, "completions": completions}
    own: dict[str, Any] = {"evaluate": {name: value for name, value in wanted.items() if value is not None}}
    if tasks is not None:
        own["tasks"] = tasks
    if max_new_tokens is not None:
        own["sampling"] = {"max_new_tokens": max_new_tokens}
    return NodeSettings.model_validate(merged(node.model_dump(), own))


def _plan(settings: Settings, node: NodeSettings) -> Plan:
    plan = Plan.of(node, tasks.resolve_tasks(node.tasks), settings.seed)
    if not plan.questions:
        raise SettingsError("setting node.evaluate.questions: nothing to evaluate; ask for at least one question")
    return plan


def _policy_of(own: RunNode | None, model: str, node: NodeSettings, folder: Path) -> Policy:
    """The weights to evaluate as a policy of their own."""
    store = PolicyStore(str(folder / "policies"), "alone", kept=2)
    if own is not None:
        found = Checkpoints(own.run_folder / "nodes" / own.node / "checkpoints").newest()
        if found is None:
            raise SettingsError(f"{model} has no checkpoint yet; evaluate it once it has trained a round")
        state, checkpoint = found
        return store.publish(checkpoint / WEIGHTS_FILE, state.version, node.model)
    if model in STARTER_MODELS:
        from grapevine.starter.model import starter_folder

        model = str(starter_folder(model))
    # How the nodes would train it is nothing to this model: adapters, say, might name none of its layers.
    make_trainer(model, node.model_copy(update={"update": UpdateSettings()})).save(folder)
    return store.publish(folder / WEIGHTS_FILE, Version(1, 0), model)


def _write_answers(path: Path, answers: list[tuple[ScoredGroup, ScoredGroup]]) -> None:
    """One line per question: task, text, right answer, and every completion with its accuracy."""
    lines = []
    for greedy, sampled in answers:
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
        title=f"{figures['model']}: {figures['questions']} held-out questions", title_justify="left", box=SIMPLE, padding=0
    )
    table.add_column("task", no_wrap=True)
    heads = ["asked", "greedy pass@1", "sampled pass@1", *([f"pass@{most}"] if most != "1" else [])]
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    parts = list(figures["by_task"].items())
    for place, (name, part) in enumerate([*parts, ("all", figures)] if len(parts) > 1 else parts, 1):
        mean = {"rate": part["reward"], "low": part["low"], "high": part["high"]}
        rates = [part["greedy"], mean, part["pass_at"][most]][: len(heads) - 1]
        table.add_row(name, str(part["questions"]), *map(_cell, rates), end_section=place == len(parts))
    console.print(table)
    if figures["questions"] + figures["unanswered"] < figures["asked_for"]:
        console.print(f"{figures['asked_for']} were asked for; the tasks have no more", style="dim", highlight=False)
    left_out = f"; {figures['unanswered']} questions were left unanswered" if figures["unanswered"] else ""
    of_each = f"{most} sampled completion{'s' if most != '1' else ''} per question"
    console.print(f"{of_each}; 95 % intervals over questions{left_out}", style="dim", highlight=False)


def _cell(rate: dict[str, float]) -> str:
    return f"{rate['rate']:.2f} {rate['low']:.2f}-{rate['high']:.2f}"
