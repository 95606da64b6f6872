"""Where everything lies on the server: the one place that spells a key.

Guarantees: all keys of a target carry the hash tag of its shard and nothing else in braces, so a script over them runs in
one slot of a Redis Cluster; two runs never share a key.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass


@dataclass(frozen=True)
class Keys:
    """Key names of one run. `shards` is fixed for the life of a run: it decides where a target's keys lie."""

    run: str
    shards: int = 1

    def shard_of(self, target: str) -> int:
        """The shard of a target (a node, or an evaluation of one)."""
        return zlib.crc32(target.encode()) % self.shards

    def _shard(self, shard: int, name: str) -> str:
        return f"gv:{{{self.run}:{shard}}}:{name}"

    def _target(self, target: str, name: str) -> str:
        return self._shard(self.shard_of(target), f"{name}:{target}")

    def _run(self, name: str) -> str:
        return f"gv:{{{self.run}}}:{name}"

    # One per shard.
    def open(self, shard: int) -> str:
        """Hash: order id -> deadline. Its length is what the autoscaler reads."""
        return self._shard(shard, "open")

    def raw(self, shard: int, site: str) -> str:
        """Stream of one site's raw groups: its verifiers read no others."""
        return self._shard(shard, f"raw:{site}")

    def counts(self, shard: int) -> str:
        """Hash of totals: scored:<purpose>, shared, duplicates, redelivered, refused:<stream>:<reason>, started:<role>"""
        return self._shard(shard, "counts")

    def quarantine(self, shard: int) -> str:
        """List: the last refused messages, cut short."""
        return self._shard(shard, "quarantine")

    def authors(self, shard: int, tag: str) -> str:
        """Sorted set: author -> time of the last shared group of this tag."""
        return self._shard(shard, f"authors:{tag}")

    # One per target.
    def orders(self, target: str) -> str:
        """Stream of orders, read by generators."""
        return self._target(target, "orders")

    def own(self, target: str) -> str:
        """Stream of scored groups, read by the learner."""
        return self._target(target, "own")

    def books(self, target: str) -> str:
        """Hash: incarnation, round, ordered, trained, filtered, expired."""
        return self._target(target, "books")

    def policy(self, target: str) -> str:
        """String: the policy announced last."""
        return self._target(target, "policy")

    def swarm(self, author: str, tag: str) -> str:
        """Short stream of one author's shared groups of one tag."""
        return self._target(author, f"swarm-{tag}")

    # One per run; no script touches these.
    def identities(self) -> str:
        """Hash: key id -> key record."""
        return self._run("identities")

    def targets(self) -> str:
        """Hash: target -> site."""
        return self._run("targets")

    def invitation(self) -> str:
        """String: the facts that another machine needs to join."""
        return self._run("invitation")

    def workers(self) -> str:
        """Hash: worker -> heartbeat."""
        return self._run("workers")

    def assignments(self) -> str:
        """Hash: generator -> target, a hint with a time."""
        return self._run("assignments")


def jobs_of(run: str, site: str) -> str:
    """What a site's control jobs are called on the server: sites of one run do not take one another's."""
    return f"gv-{run}" if site == "local" else f"gv-{run}-site-{site}"
