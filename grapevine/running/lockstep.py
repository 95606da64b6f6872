"""A whole swarm in one process, round by round: the same workers, one seed, one metric file.

Guarantees: streams are numbered by round, ages are counted in rounds, a learner sees only what the swarm shared in earlier
rounds; each worker acts in a fixed order. Two runs with one seed write identical `rounds.jsonl` and `heldout.jsonl`, and
so does a run that was killed at any moment and resumed: it goes on from its last barrier (`grapevine.running.barrier`).
"""

from __future__ import annotations

import signal
from typing import Any

from rich.console import Console
from transformers.utils import logging

from common.clock import RoundClock
from common.run import open_run
from common.settings import Settings, SettingsError
from grapevine.engines import make_engine
from grapevine.roles import make_generator, make_learner, make_verifier
from grapevine.running.barrier import Barriers
from grapevine.screen.live import Screen

# A generator that has nothing in hand after so many steps, with orders waiting, will not have.
MOST_IDLE_STEPS = 5


class Stuck(RuntimeError):
    """A round in which some learner could not act: a bug, or messages tampered with."""


def run_lockstep(settings: Settings, console: Console) -> int:
    """Run to the end; 0 when complete, 130 when interrupted between rounds."""
    stop: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda received, _: stop.append(received))
    clock = RoundClock()
    ledger, directory = open_run(settings, clock)
    nodes = settings.node_names()
    for node in nodes:
        if settings.for_node(node).order_seconds < 2:
            raise SettingsError(f"setting node.order_seconds of {node}: in lockstep it counts rounds; at least 2")
    barriers = Barriers(settings.run_folder)
    clock.round = barriers.restore(ledger, nodes, lambda sentence: console.print(f"[yellow]{sentence}[/yellow]"))
    if clock.round:
        console.print(f"resuming after round {clock.round}", highlight=False)
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # the screen shows one of its own
    engine = make_engine(settings, exact=True)
    generator = make_generator("generator-0", settings, ledger, directory, engine)
    verifier = make_verifier("verifier-0", settings, ledger, directory)
    learners = [make_learner(node, settings, ledger, directory) for node in nodes]
    every = min(settings.for_node(node).durable_every for node in nodes)
    workers: list[Any] = [generator, verifier, *learners]
    screen = Screen.of(settings, console, lambda: 0)
    try:
        for worker in workers:
            worker.rejoin()
        if not clock.round:
            barriers.save(0, ledger, learners)
        active = dict.fromkeys(nodes, True)
        while any(active.values()) and not stop:
            clock.round += 1
            answered = 0
            for target in directory.targets(settings.site):
                idle = 0
                while waiting := directory.waiting_orders([target])[target]:
                    generator.pool.serve(target)
                    generator.step()
                    answered += 1
                    unmoved = directory.waiting_orders([target])[target] == waiting and not generator.in_hand()[1]
                    idle = idle + 1 if unmoved else 0
                    if idle > MOST_IDLE_STEPS:
                        raise Stuck(f"the generator cannot answer the orders of {target}; its log says why")
            for shard in range(ledger.keys.shards):
                while ledger.redis.xlen(ledger.raw(shard)):
                    verifier.step()
            before = [learner.facts()["round"] for learner in learners]
            for learner in learners:
                if active[learner.name]:
                    active[learner.name] = learner.step()
            if not answered and before == [learner.facts()["round"] for learner in learners] and any(active.values()):
                raise Stuck(f"nothing happened in round {clock.round}")
            if clock.round % every == 0 or stop or not any(active.values()):
                barriers.save(clock.round, ledger, learners)
            for worker in workers:
                directory.beat(worker.role, worker.name, worker.facts())
            screen.show()
    finally:
        screen.close()
        # Not the learners: what they are is in the barrier, and after an exception this moment is none between two rounds.
        generator.drain()
        verifier.drain()
        for learner in learners:
            learner.close()
    return 130 if stop and any(active.values()) else 0
