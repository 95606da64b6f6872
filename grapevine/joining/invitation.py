"""What a run tells machines that want to join, and what its host owes those that did.

Guarantees: the facts hold no code, no password and no path of the host; who reads them either can use them or learns in one
sentence why not; the server that a run brought along stays up while nodes of other machines train.
"""

from __future__ import annotations

import secrets
import time
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import msgspec
import redis
from rich.console import Console

from common.directory import UNREADABLE
from common.files import write_whole
from common.ledger import Ledger
from common.messages import SCHEMA
from common.run import open_run
from common.sections import STARTER_MODELS
from common.settings import Settings, SettingsError
from common.worker import TRANSIENT
from grapevine.screen.view import plain

FORMAT = 1
LOOK_SECONDS = 1.0
Positive = Annotated[int, msgspec.Meta(ge=1, le=2**31)]


class Facts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What all machines of a run have in common, and the host's section `node` to start from.

    `begun` names this beginning of the run, so that a machine notices when the host began anew. `model` is None where the
    host's model is a folder of its own. `own_tasks` are names only.
    """

    version: Annotated[str, msgspec.Meta(max_length=40)]
    schema: int
    run: Annotated[str, msgspec.Meta(max_length=40)]
    begun: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{16}\Z")]
    seed: Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
    shards: Annotated[int, msgspec.Meta(ge=1, le=1024)]
    nodes: Annotated[list[Annotated[str, msgspec.Meta(max_length=40)]], msgspec.Meta(max_length=100_000)]
    quota: Positive
    max_age: Positive
    node: dict[str, Any]
    model: Annotated[str, msgspec.Meta(max_length=512)] | None
    own_tasks: Annotated[list[Annotated[str, msgspec.Meta(max_length=40)]], msgspec.Meta(max_length=1000)]


class _Published(msgspec.Struct, frozen=True):
    """Read first: whether the rest can be read at all."""

    format: int
    facts: msgspec.Raw


_published = msgspec.json.Decoder(_Published)
_facts = msgspec.json.Decoder(Facts)


def facts_of(settings: Settings) -> Facts:
    """The facts of a run as its settings have them, before `starter` became a folder."""
    node = settings.node.model_dump(mode="json")
    model = node.pop("model")
    return Facts(
        version=version("grapevine-rl"),
        schema=SCHEMA,
        run=settings.run,
        begun=_begun(settings.run_folder),
        seed=settings.seed,
        shards=settings.shards,
        nodes=settings.node_names(),
        quota=settings.swarm.quota,
        max_age=settings.swarm.max_age,
        node=node,
        model=None if _is_folder(model) else model,
        own_tasks=sorted(settings.own_tasks),
    )


def _is_folder(model: str) -> bool:
    return model not in STARTER_MODELS and (model.startswith((".", "/", "~")) or Path(model).exists())


def _begun(folder: Path) -> str:
    path = folder / "begun"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(path, secrets.token_hex(8))
    return path.read_text().strip()


def publish(ledger: Ledger, facts: Facts) -> None:
    """Put the facts where a machine that joins looks for them."""
    ledger.redis.set(ledger.keys.invitation(), msgspec.json.encode({"format": FORMAT, "facts": facts}))


def read_facts(ledger: Ledger) -> Facts | None:
    """The run's facts; None where nothing is published. Raises SettingsError when this release cannot use them."""
    data = ledger.redis.get(ledger.keys.invitation())
    if data is None:
        return None
    mine = version("grapevine-rl")
    try:
        published = _published.decode(data)
        if published.format == FORMAT:
            facts = _facts.decode(published.facts)
            # All of them stand in sentences, and whoever has an invitation can write them.
            if not all(text.isprintable() for text in (facts.version, facts.model or "", *facts.nodes, *facts.own_tasks)):
                raise ValueError("it holds control characters")
            if facts.schema == SCHEMA:
                return facts
            theirs = facts.version
        else:
            theirs = f"{'a newer' if published.format > FORMAT else 'an older'} release"
    except UNREADABLE as error:
        why = plain(str(error), 300)
        raise SettingsError(f"what run {ledger.keys.run} says of itself cannot be read: {why}; ask its host") from None
    raise SettingsError(
        f"run {ledger.keys.run} is kept by grapevine {theirs} and this machine has {mine}, whose messages differ; "
        f"install the same release on both"
    )


class Host:
    """The hosting side of a run that is up: keeps the facts published, and the server running while others train."""

    def __init__(self, facts: Facts, settings: Settings, console: Console, keeps_server: bool) -> None:
        """`keeps_server`: the server ends with this run."""
        self._facts = facts
        self._keeps_server = keeps_server
        self._settings = settings
        self._console = console
        self._told: list[str] = []
        self._looked = float("-inf")

    def publish(self, ledger: Ledger) -> None:
        """Again and again, since a server can lose its memory."""
        publish(ledger, self._facts)

    def has_guests(self) -> bool:
        """Whether nodes of other machines are still training; says so when they change. True when nobody can tell."""
        if not self._keeps_server:
            return False
        if time.monotonic() - self._looked < LOOK_SECONDS:
            return True
        self._looked = time.monotonic()
        try:
            ledger, directory = open_run(self._settings)
            beats = directory.workers()
            ledger.redis.close()
        except (*TRANSIENT, redis.ResponseError):
            return True
        guests = [
            plain(beat.name)
            for beat in beats
            if beat.role == "learner"
            and beat.facts.get("site") not in (None, self._settings.site)
            and beat.facts.get("state") != "complete"
        ]
        if guests and guests != self._told:
            self._console.print(
                f"the nodes of this machine are complete; the server stays up for {', '.join(guests)}, "
                f"which {'is' if len(guests) == 1 else 'are'} still training (Ctrl-C ends it all the same)",
                highlight=False,
                markup=False,
                soft_wrap=True,
            )
        self._told = guests
        return bool(guests)
