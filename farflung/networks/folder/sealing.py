"""How objects are kept from whoever owns the folder: encrypted, bound to their names, and signed by their writer.

An object's name holds all that is small, sealed; a listing tells it to everybody with one request. Its content holds
what is large. Names are made by one key and contents by another, both from the ticket's secret; a content opens under
its own object's name only.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import struct
from dataclasses import dataclass
from enum import IntEnum

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from farflung.networks.peers.frames import number as finite
from farflung.networks.peers.identity import SIGNATURE_BYTES, Identity, signed_by

VERSION = 1
"""Of what is written; all peers of a run write the same."""
NONCE, TAG, BOUND = 12, 16, 16
"""Bytes of a nonce, of a cipher's tag, and of the hash of its name with which a content begins."""
SUBJECT, WORD = 12, 8
"""Bytes of a subject and of shorter hashes in a name."""
FIXED = "="
"""How names begin that all peers know beforehand: of two that write one, the first has."""
LONGEST_NAME = 255
OVERHEAD = BOUND + NONCE + TAG + SIGNATURE_BYTES
"""Bytes of a content besides what it says."""


class SealError(ValueError):
    """An object is not what a member has written; `kind` says how."""

    def __init__(self, kind: str) -> None:
        super().__init__(f"an object is {kind}")
        self.kind = kind


class Kind(IntEnum):
    """What an object is for."""

    BEAT = 1
    """That a peer is there; its content is the peer's card."""
    HERE = 2
    """That a peer has come to a round."""
    PACKET = 3
    ASK = 4
    """That a peer wants the run's state."""
    PIECE = 5
    """Of a state."""
    STATE = 6
    """A state's description."""
    BUNDLE = 7
    """Of packets, as their writers have sealed them."""


@dataclass(frozen=True)
class Note:
    """What an object's name says; numbers of a writer's session grow. The writer's step and rate stand in each."""

    kind: Kind
    rank: int
    session: int
    number: int
    time: float
    """By the writer's clock, in seconds since 1970."""
    step: int
    rate: float
    trains: bool
    idle: bool = False
    """Of HERE: whether nobody whom its writer wants to meet can still come."""
    weight: float = 0.0
    subject: bytes = bytes(SUBJECT)
    """A hash of what it is about: a round, an exchange, a question."""
    lineage: bytes = bytes(WORD)
    wants: bytes = bytes(WORD)
    """Of HERE: a hash of the group that its writer wants."""
    count: int = 0
    """Of HERE: the group's size; else the parts of its content."""
    size: int = 0
    """Bytes of its content."""

    _FIELDS = struct.Struct(f">BQIIdQfBd{SUBJECT}s{WORD}s{WORD}sHQ")

    def packed(self) -> bytes:
        """As bytes."""
        flags = self.trains | self.idle << 1
        who = int(self.kind), self.rank, self.session, self.number, self.time, self.step, self.rate, flags
        return self._FIELDS.pack(*who, self.weight, self.subject, self.lineage, self.wants, self.count, self.size)

    @classmethod
    def unpacked(cls, body: bytes) -> Note:
        """The note that bytes are. Raises ValueError, also for what is no time, rate or weight."""
        kind, rank, session, number, time, step, rate, flags, weight, *rest = cls._FIELDS.unpack(body)
        subject, lineage, wants, count, size = rest
        about = (bool(flags & 1), bool(flags & 2), finite(weight), subject, lineage, wants, count, size)
        return cls(Kind(kind), rank, session, number, finite(time), step, finite(rate), *about)


class Seals:
    """Seals and opens what one run's members write."""

    def __init__(self, secret: str, identity: Identity) -> None:
        self._identity = identity
        self._key = _derived(secret, "subjects")
        self._names = ChaCha20Poly1305(_derived(secret, "names"))
        self._contents = ChaCha20Poly1305(_derived(secret, "contents"))

    def subject(self, *parts: object) -> bytes:
        """A hash of what an object is about, which tells nothing to those without the secret."""
        return self._hash("about", *parts)[:SUBJECT]

    def word(self, *parts: object) -> bytes:
        """A shorter one."""
        return self._hash("word", *parts)[:WORD]

    def fixed(self, *parts: object) -> str:
        """A name that all members know beforehand."""
        return FIXED + self._hash("name", *parts).hex()[:40]

    def name(self, note: Note) -> str:
        """The name of a note's object."""
        body = note.packed()
        signed = body + bytes.fromhex(self._identity.sign(b"note" + body))
        nonce = os.urandom(NONCE)
        return base64.urlsafe_b64encode(nonce + self._names.encrypt(nonce, signed, None)).decode().rstrip("=")

    def note(self, name: str) -> tuple[Note, bytes]:
        """The note in a name, and its signature, which is still to be checked. Raises SealError."""
        if len(name) > LONGEST_NAME:
            raise SealError("unknown")
        try:
            sealed = base64.b64decode(name + "=" * (-len(name) % 4), altchars=b"-_", validate=True)
            signed = self._names.decrypt(sealed[:NONCE], sealed[NONCE:], None)
            return Note.unpacked(signed[:-SIGNATURE_BYTES]), signed[-SIGNATURE_BYTES:]
        except (InvalidTag, ValueError, struct.error):
            raise SealError("unknown") from None

    def content(self, name: str, part: int, told: bytes | memoryview) -> bytes:
        """A part of the content of an object with a name."""
        bound, nonce = _bound(name, part), os.urandom(NONCE)
        signature = bytes.fromhex(self._identity.sign(_signed(bound, told)))
        return bound + nonce + self._contents.encrypt(nonce, signature + bytes(told), bound)

    def told(self, name: str, part: int, content: bytes | memoryview) -> tuple[bytes, memoryview]:
        """What a part of an object says, and its signature, which is still to be checked. Raises SealError."""
        bound, nonce = bytes(content[:BOUND]), bytes(content[BOUND : BOUND + NONCE])
        if len(content) < OVERHEAD:
            raise SealError("truncated")
        try:
            opened = memoryview(self._contents.decrypt(nonce, memoryview(content)[BOUND + NONCE :], bound))
        except InvalidTag:
            raise SealError("altered") from None
        if bound != _bound(name, part):
            raise SealError("swapped")
        return bytes(opened[:SIGNATURE_BYTES]), opened[SIGNATURE_BYTES:]

    def _hash(self, *parts: object) -> bytes:
        return hmac.new(self._key, repr(parts).encode(), hashlib.sha256).digest()


def check_note(peer: str, note: Note, signature: bytes) -> None:
    """Checks that a note is signed by who it says has written it. Raises SealError."""
    if not signed_by(peer, signature.hex(), b"note" + note.packed()):
        raise SealError("forged")


def check_told(peer: str, name: str, part: int, signature: bytes, told: memoryview) -> None:
    """Checks that a content is signed by a peer. Raises SealError."""
    if not signed_by(peer, signature.hex(), _signed(_bound(name, part), told)):
        raise SealError("forged")


def _bound(name: str, part: int) -> bytes:
    return hashlib.sha256(f"{part} {name}".encode()).digest()[:BOUND]


def _signed(bound: bytes, told: bytes | memoryview) -> bytes:
    return b"content" + bound + hashlib.sha256(told).digest()


def _derived(secret: str, what: str) -> bytes:
    info = f"farflung folder {VERSION} {what}".encode()
    return HKDF(hashes.SHA256(), 32, None, info).derive(bytes.fromhex(secret))
