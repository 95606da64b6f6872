"""Puts a role together: settings in, a worker in its loop out. The only place that knows every constructor."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from common.directory import Directory
from common.identity import Identity
from common.ledger import Ledger
from common.policies import served_address, store_url
from common.policy_server import serve_policies
from common.run import open_run
from common.sections import NodeSettings
from common.settings import Settings, SettingsError
from common.worker import Loop, Worker
from generators.engines.base import Engine
from generators.generator import Generator
from grapevine.engines import make_engine
from grapevine.monitoring.exporter import Exporter
from learners.learner import Learner
from verifiers.verifier import Scorer, Verifier

if TYPE_CHECKING:
    from learners.update import PolicyTrainer
    from verifiers.sandbox import Sandbox


def make_generator(name: str, settings: Settings, ledger: Ledger, directory: Directory, engine: Engine) -> Generator:
    """A generator with a fresh key."""
    identity = Identity.fresh("generator", name, settings.site)
    return Generator(name, settings, ledger, directory, identity, engine, settings.run_folder / "cache" / name)


def make_scorer(settings: Settings) -> Sandbox:
    """The sandbox that the settings ask for."""
    from verifiers.child import Limits
    from verifiers.sandbox import Sandbox

    limits = settings.verifiers
    own_tasks = [own.definition(task) for task, own in settings.own_tasks.items()]
    return Sandbox(Limits(answer=limits.answer_seconds, memory=limits.memory_megabytes * 2**20), own_tasks)


def make_verifier(name: str, settings: Settings, ledger: Ledger, directory: Directory) -> Verifier:
    """A verifier with a fresh key and a sandbox of its own."""
    scorer: Scorer = make_scorer(settings)
    return Verifier(name, settings, ledger, directory, Identity.fresh("verifier", name, settings.site), scorer)


def make_trainer(model: str, node: NodeSettings, name: str = "") -> PolicyTrainer:
    """The model that the node `name` trains, or nobody yet. Raises SettingsError when it is none."""
    from safetensors import SafetensorError

    from grapevine.models import examine_model
    from learners.update import PolicyTrainer

    try:
        examine_model(model)
        return PolicyTrainer(model, node)
    except (SettingsError, OSError, ValueError, SafetensorError) as error:  # the last: weights cut short by a download
        reason = " ".join(str(error).split())
        raise SettingsError(f"the model {model}{f' of {name}' if name else ''} cannot be loaded: {reason}") from error


def make_learner(node: str, settings: Settings, ledger: Ledger, directory: Directory, stay: bool = False) -> Learner:
    """A learner with its node's key and its model; `stay`: it does not end when it is complete."""
    identity = Identity.kept("node", node, settings.site, settings.run_folder / "nodes" / node / "key")
    own = settings.for_node(node)
    address = served_address(settings, node)
    if address is not None:
        serve_policies(Path(store_url(settings)), address, settings.policies_token or "", node)
    return Learner(node, settings, ledger, directory, identity, make_trainer(own.model, own, node), own.model, stay)


def make_loop(role: str, name: str, settings: Settings, stay: bool = False) -> Loop:
    """The loop of one worker process; `stay`: a learner does not end when it is complete."""
    ledger, directory = open_run(settings)
    worker: Worker
    if role == "generator":
        worker = make_generator(name, settings, ledger, directory, make_engine(settings))
    elif role == "verifier":
        worker = make_verifier(name, settings, ledger, directory)
    elif role == "exporter":
        worker = Exporter(name, ledger, directory, 1000 * settings.swarm.max_age)
    else:
        worker = make_learner(name, settings, ledger, directory, stay)
    return Loop(worker, lambda: open_run(settings))
