"""A verifier: believes nothing but completion text and signatures, scores, tags, republishes.

Guarantees: question, answer and scorer are rebuilt from the signed order's task, settings, seed and index; a group is
refused whole (and its order stays open) when a signature, the site, the count, a version or the held-out rule is broken;
an answer that breaks its scorer scores 0 and costs no other answer anything. Stateless: any number of them may run.
"""

from __future__ import annotations

import time
from typing import Any, Protocol

import structlog

from common import metrics
from common.directory import Directory
from common.identity import Identity, unseal
from common.ledger import Entry, Ledger
from common.messages import (
    MAX_MESSAGE_BYTES,
    NewerSchema,
    Order,
    RawGroup,
    Refused,
    ScoredGroup,
    SharedCompletion,
    SwarmGroup,
    tag_of,
)
from common.settings import Settings
from common.tasks import Question, TaskRefused
from verifiers.sandbox import GroupVerdict

log = structlog.get_logger()

BATCH = 16
CHARACTERS_PER_TOKEN = 16


class Scorer(Protocol):
    """Scores the answers to one question; the sandbox, or a stand-in where no model is attached."""

    def score(self, question: Question, texts: list[str], max_characters: int) -> GroupVerdict:
        """Raises TaskRefused when the question cannot be built."""

    def close(self) -> None:
        """End the children."""


class Verifier:
    """Raw groups of its own site in, scored and swarm groups out."""

    role = "verifier"

    def __init__(
        self, name: str, settings: Settings, ledger: Ledger, directory: Directory, identity: Identity, scorer: Scorer
    ) -> None:
        self.name = name
        self._settings = settings
        self._ledger = ledger
        self._directory = directory
        self._identity = identity
        self._scorer = scorer
        # A command can wait at one shard only; with several, none of the others is kept waiting for long.
        self._wait_ms = (1000 if ledger.keys.shards == 1 else 20) if ledger.clock.unit == "ms" else 0
        self._waited_at = 0
        self._hand: list[Entry] = []
        self._backlog = True
        self._looked_for_quiet = 0.0
        self._scored = 0

    def rejoin(self) -> None:
        """Register the key; what this consumer held before is read again."""
        self._directory.register(self._identity)
        self._hand, self._backlog = [], True

    def step(self) -> bool:
        """One batch from each shard; a wait at one of them when all are empty."""
        self._take_over()
        backlog, self._backlog = self._backlog, False
        shards = self._ledger.keys.shards
        found = 0
        for shard in range(shards):
            if backlog:
                found += self._handle(shard, self._ledger.take_raw(shard, self.name, 1000, 0, backlog=True))
            found += self._handle(shard, self._ledger.take_raw(shard, self.name, BATCH, 0))
        if not found and self._wait_ms:
            self._waited_at = (self._waited_at + 1) % shards
            self._handle(self._waited_at, self._ledger.take_raw(self._waited_at, self.name, BATCH, self._wait_ms))
        return True

    def _take_over(self) -> None:
        """Every third of the quiet time, look for groups whose verifier fell silent."""
        quiet = self._settings.redeliver_seconds
        if time.monotonic() - self._looked_for_quiet < quiet / 3:
            return
        self._looked_for_quiet = time.monotonic()
        for shard in range(self._ledger.keys.shards):
            stream = self._ledger.raw(shard)
            if self._ledger.redeliver(shard, stream, "verifiers", "raw", self.name, int(1000 * quiet), BATCH):
                self._backlog = True

    def _handle(self, shard: int, entries: list[Entry]) -> int:
        """Verify each or refuse it; returns how many there were."""
        self._hand = entries
        for entry in entries:
            try:
                self._verify(entry)
            except NewerSchema:
                self._ledger.leave(shard, "verifiers", entry, "raw", self.name)
            except Refused as refusal:
                metrics.messages_refused.labels("raw", refusal.reason).inc()
                log.debug("group refused", entry=entry.id, reason=refusal.reason, detail=refusal.detail)
                self._ledger.refuse(shard, "verifiers", entry, "raw", refusal.reason, refusal.detail, self.name)
        self._hand = []
        return len(entries)

    def _verify(self, entry: Entry) -> None:
        raw, generator = unseal(RawGroup, entry.data, self._directory.lookup)
        order, node = unseal(Order, raw.order, self._directory.lookup)
        if node.name != order.node:
            raise Refused("wrong_node", f"node {node.name} signed an order of node {order.node}")
        if generator.site != node.site:
            raise Refused("foreign_site", f"a generator of site {generator.site} answered a node of site {node.site}")
        # The node would refuse what a verifier of another site scored, and its order is no longer open by then.
        if node.site != self._identity.record.site:
            raise Refused("foreign_site", f"node {node.name} belongs to site {node.site}")
        if len(raw.completions) != order.completions:
            raise Refused("wrong_count", f"{len(raw.completions)} completions where {order.completions} were ordered")
        if any(c.tokens > order.sampling.max_new_tokens for c in raw.completions):
            raise Refused("too_long", f"a completion is longer than the {order.sampling.max_new_tokens} tokens ordered")
        if min(c.spans[0].version for c in raw.completions) < order.lowest:
            raise Refused("stale", f"a completion was sampled before policy {order.lowest}")
        # Where the entry lies decides which order hash is asked: an order of another shard has no business here.
        if entry.stream != self._ledger.raw(self._ledger.keys.shard_of(order.target)):
            raise Refused("wrong_shard", f"target {order.target} belongs to another shard")

        budget = min(self._settings.verifiers.max_characters, CHARACTERS_PER_TOKEN * order.sampling.max_new_tokens)
        started = time.perf_counter()
        try:
            verdict = self._scorer.score(order.question, [c.text for c in raw.completions], budget)
        except TaskRefused as refusal:
            raise Refused("bad_question", str(refusal)) from None
        metrics.scoring_seconds.labels(order.question.task).observe(time.perf_counter() - started)
        if verdict.held_out != (order.purpose == "eval"):
            raise Refused(
                "held_out", f"the question is {'' if verdict.held_out else 'not '}held out, purpose {order.purpose}"
            )
        for fault in filter(None, verdict.faults):
            metrics.scoring_faults.labels(order.question.task, fault).inc()
        self._publish(entry, raw, order, verdict, generator.name)

    def _publish(self, entry: Entry, raw: RawGroup, order: Order, verdict: GroupVerdict, generator: str) -> None:
        tag = tag_of([components.accuracy for components in verdict.components])
        scored = ScoredGroup(
            order_id=order.id,
            node=order.node,
            purpose=order.purpose,
            question=order.question,
            completions=raw.completions,
            components=verdict.components,
            tag=tag,
            model=raw.model,
            generator=generator,
        )
        swarm = b""
        if order.purpose == "train" and tag in order.share:
            swarm = self._identity.seal(
                SwarmGroup(
                    order_id=order.id,
                    author=order.node,
                    question=order.question,
                    question_text=verdict.text,
                    completions=[
                        SharedCompletion(text=c.text, tokens=c.tokens, logprob=c.logprob, finish_reason=c.finish_reason)
                        for c in raw.completions
                    ],
                    components=verdict.components,
                    tag=tag,
                    model=raw.model,
                    version=raw.completions[0].spans[0].version,
                )
            )
        limits = self._settings.swarm
        age = limits.max_age * 1000 if self._ledger.clock.unit == "ms" else limits.max_age
        own = self._identity.seal(scored)
        if max(len(own), len(swarm)) > MAX_MESSAGE_BYTES:
            # Published, it would be refused by its reader, and the order asked and answered again for ever.
            raise Refused("too_large", f"the scored group would exceed {MAX_MESSAGE_BYTES} bytes")
        if self._ledger.publish(order, entry.id, own, tag, swarm, limits.quota, age):
            metrics.groups_scored.labels(tag).inc()
            self._scored += 1

    def drain(self) -> None:
        """Nothing is half done between steps; the children end."""
        self._scorer.close()

    def facts(self) -> dict[str, Any]:
        """Groups scored since the start."""
        return {"scored": self._scored}

    def in_hand(self) -> tuple[str, list[tuple[str, str]]]:
        """The batch being scored."""
        return "verifiers", [(entry.stream, entry.id) for entry in self._hand]
