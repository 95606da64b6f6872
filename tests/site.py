"""A whole site in one process: real workers on a real server, with stand-ins where a model would be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from common.identity import Identity
from common.ledger import Entry
from common.run import open_run
from common.settings import Settings
from generators.engines.paced import PacedEngine
from generators.generator import Generator
from learners.learner import Learner
from tests.chaos.workers import CoinScorer, NullTrainer
from verifiers.verifier import Verifier


class Site:
    """Two nodes, a generator and a verifier, stepped by hand."""

    def __init__(
        self,
        folder: Path,
        url: str,
        run: str,
        site: str = "local",
        nodes: tuple[str, ...] = ("node-0", "node-1"),
        **node: Any,
    ) -> None:
        defaults: dict[str, Any] = {
            "rounds": 10**6,
            "group_size": 2,
            "sampling": {"max_new_tokens": 8},
            "mix": {"own": 2, "swarm": 2, "tags": ["failed", "hard", "mixed", "easy", "solved"]},
            "evaluate": {"questions": 0},
        }
        self.settings = Settings(
            run=run, folder=folder, redis_url=url, site=site, nodes=dict.fromkeys(nodes), node={**defaults, **node}
        )  # type: ignore[arg-type]
        self.ledger, self.directory = open_run(self.settings)
        self.identities = {
            "node": Identity.kept("node", nodes[0], site, self.settings.run_folder / "nodes" / nodes[0] / "key"),
            "generator": Identity.fresh("generator", "g", site),
            "verifier": Identity.fresh("verifier", "v", site),
        }
        self.generator = Generator(
            "g", self.settings, self.ledger, self.directory, self.identities["generator"], PacedEngine(), folder / "cache"
        )
        self.verifier = Verifier("v", self.settings, self.ledger, self.directory, self.identities["verifier"], CoinScorer())
        self.verifier._wait_ms = 0
        self.learners = [self._learner(node) for node in self.settings.node_names()]
        for worker in (self.generator, self.verifier, *self.learners):
            worker.rejoin()

    def _learner(self, node: str) -> Learner:
        identity = Identity.kept("node", node, self.settings.site, self.settings.run_folder / "nodes" / node / "key")
        return Learner(node, self.settings, self.ledger, self.directory, identity, NullTrainer(), "no-model")

    def generate(self) -> None:
        """Until no order waits anywhere."""
        for target in self.directory.targets(self.settings.site):
            while self.directory.waiting_orders([target])[target]:
                self.generator.pool.serve(target)
                self.generator.step()

    def verify(self) -> None:
        """Until no raw group waits; those left for a newer release stay."""
        raw = self.ledger.raw(0)
        before = -1
        while (left := self.ledger.redis.xlen(raw)) and left != before:
            before = left
            self.verifier.step()

    def learn(self, rounds: int = 1) -> None:
        """Whole rounds of both nodes."""
        for learner in self.learners:
            goal = learner.facts()["round"] + rounds
            while learner.facts()["round"] < goal:
                self.generate()
                self.verify()
                learner.step()

    def order(self) -> None:
        """Until the first node has orders that nobody answered yet."""
        learner = self.learners[0]
        while not self.ledger.redis.xlen(self.ledger.keys.orders(learner.name)):
            self.verify()
            learner.step()

    def entries(self, stream: str) -> list[Entry]:
        """All entries of a stream, without moving any group."""
        return [Entry(stream, id.decode(), fields.get(b"m", b"")) for id, fields in self.ledger.redis.xrange(stream)]

    def refused(self, stream: str) -> dict[str, int]:
        """Counts of one stream by reason."""
        prefix = f"refused:{stream}:"
        return {name.removeprefix(prefix): n for name, n in self.ledger.counts().items() if name.startswith(prefix)}
