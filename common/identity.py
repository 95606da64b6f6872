"""Who says so: Ed25519 identities, the record of a key, and the sealing of messages.

Guarantees: a sealed message names its kind, so a signature over an order can never pass for one over a group; `unseal`
returns a message only when its bytes, its key, the key's role and its signature are all in order. The signature covers a
SHA-256 digest: signing costs the same for long and short groups.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from common.files import write_whole
from common.messages import (
    SCHEMA,
    Envelope,
    Order,
    RawGroup,
    Refused,
    ScoredGroup,
    SwarmGroup,
    decode,
    encode,
    open_envelope,
)
from common.settings import SettingsError

M = TypeVar("M", bound=msgspec.Struct)
Role = Literal["node", "generator", "verifier"]


class KeyRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A registered public key: whose it is, what it may sign, and which site vouches for it."""

    role: Role
    name: str
    site: str
    public_key: bytes


# Finds the record of a key id, or None. Implemented by the directory (common.directory) and by dictionaries in tests.
KeyLookup = Callable[[str], KeyRecord | None]

_KINDS: dict[type[msgspec.Struct], tuple[bytes, Role, msgspec.msgpack.Decoder[Any]]] = {
    Order: (b"order", "node", msgspec.msgpack.Decoder(Order)),
    RawGroup: (b"raw", "generator", msgspec.msgpack.Decoder(RawGroup)),
    ScoredGroup: (b"scored", "verifier", msgspec.msgpack.Decoder(ScoredGroup)),
    SwarmGroup: (b"swarm", "verifier", msgspec.msgpack.Decoder(SwarmGroup)),
}


def key_id(public_key: bytes) -> str:
    """Short name of a public key: the first 16 hex digits of its SHA-256."""
    return hashlib.sha256(public_key).hexdigest()[:16]


class Identity:
    """A private key with its owner. Seals messages; never leaves the process except as the file it came from."""

    def __init__(self, role: Role, name: str, site: str, private_key: Ed25519PrivateKey) -> None:
        self._private = private_key
        public = private_key.public_key().public_bytes_raw()
        self.record = KeyRecord(role, name, site, public)
        self.key = key_id(public)

    @classmethod
    def fresh(cls, role: Role, name: str, site: str, seed: bytes | None = None) -> Identity:
        """A new key; `seed` (32 bytes) makes it reproducible for lockstep runs and tests."""
        private = Ed25519PrivateKey.from_private_bytes(seed) if seed else Ed25519PrivateKey.generate()
        return cls(role, name, site, private)

    @classmethod
    def kept(cls, role: Role, name: str, site: str, path: Path) -> Identity:
        """The key stored at `path` (32 raw bytes, mode 0600), made on first use. Raises SettingsError for a damaged one."""
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, Ed25519PrivateKey.generate().private_bytes_raw(), mode=0o600)
        kept = path.read_bytes()
        if len(kept) != 32:
            raise SettingsError(f"the key of {name}, {path}, is damaged; restore it from a copy, or begin anew with --fresh")
        return cls(role, name, site, Ed25519PrivateKey.from_private_bytes(kept))

    def seal(self, message: Order | RawGroup | ScoredGroup | SwarmGroup) -> bytes:
        """The signed envelope, ready for a stream."""
        body = encode(message)
        signature = self._private.sign(_digest(_KINDS[type(message)][0], body))
        return encode(Envelope(SCHEMA, self.key, signature, body))


def unseal(kind: type[M], data: bytes, lookup: KeyLookup) -> tuple[M, KeyRecord]:
    """Stream bytes to a message and the record of the key that signed it.

    Raises:
        NewerSchema: leave it for a newer worker.
        Refused: `too_large`, `malformed`, `old_schema`, `unknown_key`, `wrong_role` or `bad_signature`.
    """
    label, role, decoder = _KINDS[kind]
    envelope = open_envelope(data)
    record = lookup(envelope.key)
    if record is None:
        raise Refused("unknown_key", f"no registered key {envelope.key[:32]!r}")
    if record.role != role:
        raise Refused("wrong_role", f"a {record.role} key signed what only a {role} may sign")
    try:
        Ed25519PublicKey.from_public_bytes(record.public_key).verify(envelope.signature, _digest(label, envelope.body))
    except (InvalidSignature, ValueError):
        raise Refused("bad_signature", f"the signature is not that of {record.role} {record.name}") from None
    return decode(decoder, envelope.body), record


def _digest(label: bytes, body: bytes) -> bytes:
    return hashlib.sha256(b"grapevine/" + label + b"\0" + body).digest()
