"""The swarm: what nodes share with one another.

Guarantees: a draw picks an author uniformly, then one of that author's newest groups not seen before, so it costs the same
in a swarm of any size and a flooder crowds out nobody but itself. A reader filters by tag without reading other tags. What
was drawn or refused once is never returned again within the maximum age.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

import redis

from common.clock import Clock
from common.keys import Keys
from common.ledger import Entry
from common.messages import TAGS, Tag

LOOK_BACK = 4
_NAME = re.compile(rb"[a-z0-9][a-z0-9.-]{0,62}")
AUTHORS_FRESH_MS = 1000


class SwarmReader:
    """One learner's view of the swarm. `seen` (entry -> its time) belongs in the learner's checkpoint."""

    def __init__(
        self,
        client: redis.Redis,
        keys: Keys,
        clock: Clock,
        me: str,
        tags: Sequence[str],
        max_age: int,
        seen: dict[str, int] | None = None,
        depth: int = 256,
        weights: Mapping[Tag, float] | None = None,
    ) -> None:
        """`max_age` in the clock's unit (milliseconds, or rounds in lockstep); no stream is read deeper than `depth`.

        `weights`: how often a tag comes first among those of one author, 1 where it is not named.
        """
        self._redis: Any = client
        self._keys = keys
        self._clock = clock
        self._me = me
        self._tags = tuple(tags)
        self._max_age = max_age
        self._depth = depth
        self._weights: dict[str, float] = {str(tag): weight for tag, weight in (weights or {}).items()}
        self.seen: dict[str, int] = dict(seen or {})
        self._authors: list[tuple[str, str]] = []
        self._asked = -AUTHORS_FRESH_MS

    def draw(self, random: Random) -> Entry | None:
        """One group nobody showed us before, or None when the swarm has none. Marks it seen."""
        now = self._clock.now()
        self._forget(now)
        places = self._places(now)
        authors = sorted({author for author, _ in places})
        while authors:
            author = authors.pop(random.randrange(len(authors)))
            # All tags of this author before another one's turn: else who has used-up tags would be drawn less often.
            tags = [tag for name, tag in places if name == author]
            while tags:
                (tag,) = random.choices(tags, [self._weights.get(tag, 1.0) for tag in tags])
                tags.remove(tag)
                entry = self._newest_unseen(author, tag, now)
                if entry is not None:
                    self.seen[f"{entry.stream} {entry.id}"] = _time_of(entry.id)
                    return entry
        return None

    def shared(self, author: str) -> dict[Tag, tuple[int, float]]:
        """Of an author, by tag: how many groups lie in its stream, and how many come per unit of the clock's time.

        A full stream reaches back less far than the others, and its length alone would make a frequent tag look rare.
        """
        now = self._clock.now()
        pipeline = self._redis.pipeline(transaction=False)
        for tag in TAGS:
            pipeline.xlen(self._keys.swarm(author, tag))
            pipeline.xrange(self._keys.swarm(author, tag), count=1)
        replies = pipeline.execute()
        there = [(tag, count, rows) for tag, count, rows in zip(TAGS, replies[::2], replies[1::2], strict=True) if rows]
        spans = {tag: max(1, now + 1 - _time_of(rows[0][0].decode())) for tag, _, rows in there}
        # The others hold all that came since the author's first group, or since the maximum age.
        longest = max(spans.values(), default=1)
        return {tag: (count, count / (spans[tag] if count >= self._depth else longest)) for tag, count, _ in there}

    def is_new(self, group: str, entry: Entry) -> bool:
        """Whether this group was never drawn, under whatever entry; marks it. Entries can be copied, groups are signed."""
        if group in self.seen:
            return False
        self.seen[group] = _time_of(entry.id)
        return True

    def _forget(self, now: int) -> None:
        # An entry past the maximum age is never read again, so its mark is not needed.
        stale = [name for name, at in self.seen.items() if at < now - self._max_age]
        for name in stale:
            del self.seen[name]

    def _places(self, now: int) -> list[tuple[str, str]]:
        """(author, tag) pairs active within the maximum age, mine left out, in a stable order."""
        if self._clock.unit == "round" or now - self._asked > AUTHORS_FRESH_MS:
            found = []
            for shard in range(self._keys.shards):
                for tag in self._tags:
                    active = self._redis.zrangebyscore(self._keys.authors(shard, tag), now - self._max_age, "+inf")
                    found += [(author.decode(), tag) for author in active if _is_name(author)]
            self._authors = sorted(place for place in found if place[0] != self._me)
            self._asked = now
        return list(self._authors)

    def _newest_unseen(self, author: str, tag: str, now: int) -> Entry | None:
        stream = self._keys.swarm(author, tag)
        lockstep = self._clock.unit == "round"
        # In lockstep only earlier rounds may be read: round r writes ids r+1-*, so everything up to r is older.
        oldest = now - self._max_age + (1 if lockstep else 0)
        last = f"({now + 1}-0" if lockstep else "+"
        for _ in range(-(-self._depth // LOOK_BACK)):
            rows = self._redis.xrevrange(stream, max=last, min=max(0, oldest), count=LOOK_BACK)
            for id, fields in rows:
                if f"{stream} {id.decode()}" not in self.seen:
                    return Entry(stream, id.decode(), fields.get(b"m", b""))
            if len(rows) < LOOK_BACK:
                return None
            last = f"({rows[-1][0].decode()}"
        return None


def _is_name(author: bytes) -> bool:
    """Whether an author can be one: every site writes into these sets."""
    return _NAME.fullmatch(author) is not None


def _time_of(id: str) -> int:
    return int(id.partition("-")[0])
