"""What travels: orders, raw groups, scored groups, swarm groups, and the sealed envelope around each.

Guarantees: every message is decoded strictly (unknown fields, wrong types and sizes over the limit are refused with a
reason, never repaired); the schema version is read before anything else, so that a newer message can be left for a newer
worker; nothing is ever unpickled. Bytes on the wire are msgpack.
"""

from __future__ import annotations

import math
import sys
from array import array
from typing import Annotated, Any, Literal, TypeVar, get_args

import msgspec

from common.tasks import Components, Question

SCHEMA = 1
MAX_MESSAGE_BYTES = 16 * 2**20

Purpose = Literal["train", "eval"]
FinishReason = Literal["stop", "length"]
Tag = Literal["failed", "hard", "mixed", "easy", "solved"]
TAGS: tuple[Tag, ...] = get_args(Tag)

# `\Z` and not `$`, which lets a newline at the end pass; one spelling per number, since ids are compared as text.
Name = Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9]([a-z0-9.-]{0,62}[a-z0-9])?\Z")]
OrderId = Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9][a-z0-9.-]{0,126}/(0|[1-9][0-9]{0,14})\Z")]
M = TypeVar("M", bound=msgspec.Struct)
Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]


# Why messages are refused: the words of all counts. The last two are the ledger's own.
REASONS = (
    "malformed", "too_large", "old_schema", "unknown_key", "wrong_role", "bad_signature", "wrong_node", "foreign_site",
    "wrong_count", "wrong_shard", "wrong_question", "unknown_order", "misplaced", "replayed", "stale", "too_long",
    "bad_question", "held_out", "newer_schema", "deliveries",
)  # fmt: skip


class Refused(Exception):
    """A message that must not be used.

    Attributes:
        reason: one of REASONS.
        detail: one sentence for the person who reads the quarantine.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


class NewerSchema(Exception):
    """A message written by a newer release: not ours to judge, so it is left unacknowledged for a newer worker."""


class _Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class Version(msgspec.Struct, frozen=True, array_like=True, order=True, forbid_unknown_fields=True):
    """A policy version. Ordered; each learner start raises the incarnation, so no number ever names other weights."""

    incarnation: Count
    step: Count

    def __str__(self) -> str:
        return f"{self.incarnation}.{self.step}"


class Sampling(_Message, frozen=True):
    """How completions are drawn. Log-probabilities are recorded as sampled: after temperature and the top-p cut."""

    max_new_tokens: Annotated[int, msgspec.Meta(ge=1, le=131072)]
    temperature: Annotated[float, msgspec.Meta(ge=0.0, le=10.0)] = 1.0
    top_p: Annotated[float, msgspec.Meta(gt=0.0, le=1.0)] = 1.0


class Order(_Message, frozen=True):
    """One question to answer. Its id is the id of the group that answers it: `<target>/<number>`.

    `lowest` is the oldest policy version that may answer, `deadline` a time of the run's clock, `share` the reward tags
    under which the node lets the swarm see the group (none: it stays at home).
    """

    id: OrderId
    target: Name
    node: Name
    purpose: Purpose
    question: Question
    completions: Annotated[int, msgspec.Meta(ge=1, le=1024)]
    sampling: Sampling
    lowest: Version
    deadline: Count
    share: Annotated[list[Tag], msgspec.Meta(max_length=len(TAGS))]


class Span(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Tokens `start` to `end` (exclusive) of a completion were sampled from `version`."""

    start: Count
    end: Count
    version: Version


class Completion(_Message, frozen=True):
    """One answer as sampled.

    `token_ids` is little-endian int32, `logprobs` little-endian float32, one value per token, the end-of-sequence token
    included; both are opaque to the verifier. `logprob` is the sum over the tokens, in nats. Where the sampler records no
    probabilities, `logprobs` is empty and `logprob` None.
    """

    text: str
    token_ids: bytes
    logprobs: bytes
    tokens: Count
    logprob: float | None
    finish_reason: FinishReason
    spans: Annotated[list[Span], msgspec.Meta(max_length=4096)]


class RawGroup(_Message, frozen=True):
    """A generator's answer: the signed order inside, so that nobody can answer an order that was never given."""

    order: bytes
    completions: Annotated[list[Completion], msgspec.Meta(min_length=1, max_length=1024)]
    model: Annotated[str, msgspec.Meta(max_length=512)]


class ScoredGroup(_Message, frozen=True):
    """What the learner of the order's node reads: everything sampled, and reward components per completion."""

    order_id: OrderId
    node: Name
    purpose: Purpose
    question: Question
    completions: Annotated[list[Completion], msgspec.Meta(min_length=1, max_length=1024)]
    components: list[Components]
    tag: Tag
    model: Annotated[str, msgspec.Meta(max_length=512)]
    generator: str


class SharedCompletion(_Message, frozen=True):
    """A completion as other nodes see it: text, its length in the author's tokens, and one log-probability or none."""

    text: str
    tokens: Count
    logprob: float | None
    finish_reason: FinishReason


class SwarmGroup(_Message, frozen=True):
    """What every other learner may read: no token ids, since models and tokenizers differ.

    `question_text` is what the verifier rebuilt, so that no learner has to build a stranger's question.
    """

    order_id: OrderId
    author: Name
    question: Question
    question_text: Annotated[str, msgspec.Meta(min_length=1, max_length=32_768)]
    completions: Annotated[list[SharedCompletion], msgspec.Meta(min_length=1, max_length=1024)]
    components: list[Components]
    tag: Tag
    model: Annotated[str, msgspec.Meta(max_length=512)]
    version: Version


class Envelope(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The outermost layer: schema first, then who signed what (see `common.identity`)."""

    schema: int
    key: str
    signature: bytes
    body: bytes


class _SchemaOnly(msgspec.Struct):
    schema: int


_envelopes = msgspec.msgpack.Decoder(Envelope)
_schemas = msgspec.msgpack.Decoder(_SchemaOnly)
_encoder = msgspec.msgpack.Encoder()


def encode(message: msgspec.Struct) -> bytes:
    """Message to msgpack bytes."""
    return _encoder.encode(message)


def open_envelope(data: bytes) -> Envelope:
    """Bytes from a stream to the envelope.

    Raises:
        NewerSchema: a newer release wrote it.
        Refused: `too_large`, `malformed` or `old_schema`.
    """
    if len(data) > MAX_MESSAGE_BYTES:
        raise Refused("too_large", f"{len(data)} bytes, the limit is {MAX_MESSAGE_BYTES}")
    schema = _decode(_schemas, data).schema
    if schema > SCHEMA:
        raise NewerSchema(f"schema {schema}, this worker reads up to {SCHEMA}")
    if schema < max(1, SCHEMA - 1):
        raise Refused("old_schema", f"schema {schema}, this worker reads {max(1, SCHEMA - 1)} and {SCHEMA}")
    envelope: Envelope = _decode(_envelopes, data)
    return envelope


def decode(decoder: msgspec.msgpack.Decoder[M], body: bytes) -> M:
    """The body of an envelope to its message, checked field by field and for what types cannot say.

    Raises:
        Refused: `malformed`.
    """
    message: M = _decode(decoder, body)
    fault = _fault(message)
    if fault:
        raise Refused("malformed", fault)
    return message


def _decode(decoder: msgspec.msgpack.Decoder[Any], data: bytes) -> Any:
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        raise Refused("malformed", str(error)[:200]) from None


def _fault(message: msgspec.Struct) -> str | None:
    """What is wrong with a message whose types are right, or None."""
    if isinstance(message, Order):
        if message.id.rpartition("/")[0] != message.target:
            return "the order's id names another target"
        # No further hyphen: `eval-a-b-1` is an evaluation of node `a-b`, not of node `a`.
        evaluation = message.target.removeprefix(f"eval-{message.node}-")
        if message.target != message.node and (evaluation == message.target or "-" in evaluation):
            return "the order's target does not belong to its node"
        if (message.purpose == "train") != (message.target == message.node):
            return "a node trains on its own target and evaluates on others"
    if isinstance(message, RawGroup | ScoredGroup):
        for completion in message.completions:
            fault = _completion_fault(completion)
            if fault:
                return fault
    if isinstance(message, SwarmGroup) and not all(math.isfinite(c.logprob or 0.0) for c in message.completions):
        return "a log-probability is not a finite number"
    if isinstance(message, SwarmGroup) and message.order_id.rpartition("/")[0] != message.author:
        return "the group's id names another author"
    if isinstance(message, ScoredGroup | SwarmGroup) and len(message.components) != len(message.completions):
        return "components and completions differ in number"
    return None


def _completion_fault(completion: Completion) -> str | None:
    unknown = completion.logprob is None
    probabilities = 0 if unknown else completion.tokens
    if len(completion.token_ids) != 4 * completion.tokens or len(completion.logprobs) != 4 * probabilities:
        return "token ids, log-probabilities and the number of tokens disagree"
    if completion.tokens == 0:
        return "a completion holds at least one token"
    # One value that is no number would spoil the whole update; a sum is finite when all its float32 terms are.
    if not math.isfinite(completion.logprob or 0.0) or not math.isfinite(sum(_values("f", completion.logprobs))):
        return "a log-probability is not a finite number"
    if min(_values("i", completion.token_ids)) < 0:
        return "a token id is negative"
    edge = 0
    for span in completion.spans:
        if span.start != edge or span.end <= span.start:
            return "version spans must follow one another without gaps"
        edge = span.end
    return None if edge == completion.tokens else "version spans do not cover the completion"


def _values(kind: str, data: bytes) -> array[Any]:
    values = array(kind, data)
    if sys.byteorder == "big":
        values.byteswap()
    return values


def tag_of(accuracies: list[float]) -> Tag:
    """The reward tag of a group: `failed` or `solved` when all score 0 or all 1, else by the mean.

    A group whose accuracies are all alike but neither 0 nor 1 is tagged by its mean.
    """
    # Not by the mean: one that is almost 1 rounds away in it.
    if all(accuracy == 0.0 for accuracy in accuracies):
        return "failed"
    if all(accuracy == 1.0 for accuracy in accuracies):
        return "solved"
    mean = sum(accuracies) / len(accuracies)
    return "hard" if mean <= 1 / 3 else "mixed" if mean <= 2 / 3 else "easy"
