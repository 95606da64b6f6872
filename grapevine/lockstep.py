"""A whole swarm in one process, round by round: the same workers, one seed, one metric file.

Guarantees: streams are numbered by round, ages are counted in rounds, a learner sees only what the swarm shared in earlier
rounds; each worker acts in a fixed order. Two runs with one seed write identical `rounds.jsonl` and `heldout.jsonl`. A run
that was interrupted goes on with the round after the last one the server knows.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable
from typing import Any

from rich.console import Console

from common.clock import RoundClock
from common.ledger import Ledger
from common.messages import TAGS
from common.run import open_run
from common.settings import Settings
from grapevine.progress import Progress
from grapevine.roles import make_engine, make_generator, make_learner, make_verifier


class Stuck(RuntimeError):
    """A round in which some learner could not act: a bug, or messages tampered with."""


def run_lockstep(settings: Settings, console: Console) -> int:
    """Run to the end; 0 when complete, 130 when interrupted between rounds."""
    stop: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda received, _: stop.append(received))
    clock = RoundClock()
    ledger, directory = open_run(settings, clock)
    clock.round = _last_round(ledger, directory.targets(settings.site), settings.node_names())
    engine = make_engine(settings)
    generator = make_generator("generator-0", settings, ledger, directory, engine)
    verifier = make_verifier("verifier-0", settings, ledger, directory)
    learners = [make_learner(node, settings, ledger, directory) for node in settings.node_names()]
    workers: list[Any] = [generator, verifier, *learners]
    progress = Progress(settings, console)
    try:
        for worker in workers:
            worker.rejoin()
        active = dict.fromkeys(settings.node_names(), True)
        while any(active.values()) and not stop:
            clock.round += 1
            answered = 0
            for target in directory.targets(settings.site):
                while directory.waiting_orders([target])[target]:
                    generator.pool.serve(target)
                    generator.step()
                    answered += 1
            for shard in range(ledger.keys.shards):
                while ledger.redis.xlen(ledger.keys.raw(shard)):
                    verifier.step()
            before = [learner.facts()["round"] for learner in learners]
            for learner in learners:
                if active[learner.name]:
                    active[learner.name] = learner.step()
            if not answered and before == [learner.facts()["round"] for learner in learners] and any(active.values()):
                raise Stuck(f"nothing happened in round {clock.round}")
            progress.show(0)
    finally:
        for worker in workers:
            worker.drain()
    return 130 if stop else 0


def _last_round(ledger: Ledger, targets: Iterable[str], nodes: Iterable[str]) -> int:
    """The round that the newest entry of any stream belongs to: streams take no ids below those they had."""
    keys = ledger.keys
    streams = [keys.raw(shard) for shard in range(keys.shards)] + [keys.own(target) for target in {*targets, *nodes}]
    streams += [keys.swarm(node, tag) for node in nodes for tag in TAGS]
    ids = [ledger.redis.xinfo_stream(stream)["last-generated-id"] for stream in streams if ledger.redis.exists(stream)]
    return max((int(id.partition(b"-")[0]) - 1 for id in ids), default=0)
