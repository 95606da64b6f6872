"""How many rollouts the transport carries, against bare streams with the same bytes on the same server.

    python -m benchmarks.transport

One process drives all sides, one after the other, interleaved over the pairs; rates are completions per second. The
ceiling appends, reads, acknowledges and deletes the same payload without signing, checking or scripts.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from common.clock import ServerClock
from common.directory import Directory
from common.identity import Identity, unseal
from common.keys import Keys
from common.ledger import Ledger
from common.messages import Completion, Order, RawGroup, Sampling, ScoredGroup, Span, Version
from common.server import connect
from common.tasks import Components, Question
from grapevine.server import EmbeddedServer

COMPLETIONS, TOKENS, CHARACTERS = 8, 512, 2048
GROUPS, PAIRS = 200, 9


class Pipeline:
    """The three hops of a group through the ledger, with keys, signatures and checks."""

    def __init__(self, url: str) -> None:
        client = connect(url)
        keys = Keys("bench")
        self.ledger = Ledger(client, keys, ServerClock(client))
        self.directory = Directory(client, keys)
        self.node = Identity.fresh("node", "a", "site")
        self.generator = Identity.fresh("generator", "g", "site")
        self.verifier = Identity.fresh("verifier", "v", "site")
        for identity in (self.node, self.generator, self.verifier):
            self.directory.register(identity)
        self.next = 0

    def _order(self) -> Order:
        self.next += 1
        return Order(
            id=f"a/{self.next}",
            target="a",
            node="a",
            purpose="train",
            question=Question("gcd", {}, self.next, 0),
            completions=COMPLETIONS,
            sampling=Sampling(max_new_tokens=TOKENS),
            lowest=Version(0, 0),
            deadline=2**50,
            share=[],
        )

    def run(self) -> dict[str, float]:
        """Seconds of each hop for GROUPS groups."""
        seconds: dict[str, float] = {}
        orders = [self._order() for _ in range(GROUPS)]
        completions = [
            Completion(
                text="x" * CHARACTERS,
                token_ids=bytes(4 * TOKENS),
                logprobs=bytes(4 * TOKENS),
                tokens=TOKENS,
                logprob=-1.0,
                finish_reason="stop",
                spans=[Span(0, TOKENS, Version(1, 1))],
            )
        ] * COMPLETIONS
        started = time.perf_counter()
        sealed = [(order.id, order.deadline, self.node.seal(order)) for order in orders]
        self.ledger.settle("a", 1, self.next, (self.next, 0, 0, 0), b"", orders=sealed)
        seconds["order"] = time.perf_counter() - started

        started = time.perf_counter()
        for entry in self.ledger.take_orders("a", "g", GROUPS, 0):
            unseal(Order, entry.data, self.directory.lookup)
            group = RawGroup(order=entry.data, completions=completions, model="m")
            self.ledger.answer("a", entry.id, self.generator.seal(group))
        seconds["generator to raw"] = time.perf_counter() - started

        started = time.perf_counter()
        while entries := self.ledger.take_raw(0, "v", 16, 0):
            for entry in entries:
                raw, _ = unseal(RawGroup, entry.data, self.directory.lookup)
                order, _ = unseal(Order, raw.order, self.directory.lookup)
                scored = ScoredGroup(
                    order_id=order.id,
                    node="a",
                    purpose="train",
                    question=order.question,
                    completions=raw.completions,
                    components=[Components(1.0, 1.0, 0.5)] * COMPLETIONS,
                    tag="solved",
                    model="m",
                    generator="g",
                )
                self.ledger.publish(order, entry.id, self.verifier.seal(scored), "solved", b"", 32, 60_000)
        seconds["verifier to own"] = time.perf_counter() - started

        started = time.perf_counter()
        entries = self.ledger.take_own("a", 0)
        for entry in entries:
            unseal(ScoredGroup, entry.data, self.directory.lookup)
        acks = [entry.id for entry in entries]
        assert len(acks) == GROUPS
        self.ledger.settle("a", 1, self.next + 1, (self.next, self.next, 0, 0), b"", acks=acks)
        seconds["learner takes"] = time.perf_counter() - started
        return seconds


def ceiling(client: Any, payload: bytes) -> dict[str, float]:
    """The same bytes through one bare stream: appended singly, read by 16, acknowledged and deleted."""
    client.delete("bare")
    client.xgroup_create("bare", "g", id="0", mkstream=True)
    started = time.perf_counter()
    for _ in range(GROUPS):
        client.xadd("bare", {"m": payload})
    appended = time.perf_counter()
    while rows := client.xreadgroup("g", "me", {"bare": ">"}, count=16):
        ids = [id for id, _ in rows[0][1]]
        client.xack("bare", "g", *ids)
        client.xdel("bare", *ids)
    return {"append": appended - started, "read": time.perf_counter() - appended}


def main() -> None:
    """Print a table and one JSON line."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        server = EmbeddedServer(Path(folder))
        server.start()
        pipeline, client = Pipeline(server.url), connect(server.url)
        payload = bytes(COMPLETIONS * (CHARACTERS + 8 * TOKENS))
        ours, bare = [], []
        for _ in range(PAIRS):
            ours.append(pipeline.run())
            bare.append(ceiling(client, payload))
        server.stop()
    rate = {hop: GROUPS * COMPLETIONS / statistics.median(run[hop] for run in ours) for hop in ours[0]}
    top = {hop: GROUPS * COMPLETIONS / statistics.median(run[hop] for run in bare) for hop in bare[0]}
    against = {"generator to raw": "append", "learner takes": "read"}
    print(
        f"{GROUPS} groups of {COMPLETIONS} completions, {TOKENS} tokens and {CHARACTERS} characters each "
        f"({len(payload) / 1024:.0f} KiB a group); median of {PAIRS} interleaved runs; one process, append-only file on, "
        f"OMP_NUM_THREADS={os.environ['OMP_NUM_THREADS']}\n"
    )
    print(f"{'hop':<20}{'completions/s':>15}{'bare stream':>15}{'share':>8}")
    for hop, value in rate.items():
        other = top.get(against.get(hop, ""), 0.0)
        print(f"{hop:<20}{value:>15,.0f}" + (f"{other:>15,.0f}{value / other:>8.0%}" if other else ""))
    print(json.dumps({"completions_per_second": rate, "bare": top}))


if __name__ == "__main__":
    main()
