"""A peer's own key: its libp2p identity, with which it also signs what it sends."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

import base58
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from farflung.errors import UserError
from farflung.files import replacing

KEY_BYTES, SIGNATURE_BYTES = 32, 64
STORED = b"\x08\x01\x12\x40"
"""What stands before an Ed25519 key and its public one in a file, as libp2p stores them: its kind and length."""
ID_BYTES = b"\x00\x24\x08\x01\x12\x20"
"""What stands before the key in an Ed25519 key's libp2p id: the id is the key itself, not its hash."""
LONGEST_ID = 64
"""Letters of a libp2p id that is read at all: the time that it takes grows with their square."""
KEPT = 512
"""Peers whose keys are read but once: each is heard of again and again."""
RANK_BITS = 52
"""Bits of a peer's rank: exact as a float, and too many to find another key with the same one."""


class Identity:
    """The key in a file, made if there is none; `peer` is its libp2p id, `rank` the peer's number as a replica.

    Raises UserError for a file that holds no such key, and OSError where none can be written.
    """

    def __init__(self, path: Path) -> None:
        if not path.exists():
            _write(path, Ed25519PrivateKey.generate())
        self.path = path
        self._key = _read(path)
        self.peer = base58.b58encode(ID_BYTES + self._key.public_key().public_bytes_raw()).decode()
        self.rank = rank_of(self.peer)

    def sign(self, text: bytes) -> str:
        """The signature of a text, in hexadecimal."""
        return self._key.sign(text).hex()


def rank_of(peer: str) -> int:
    """A replica's number: bits of its libp2p id's hash. It only names a peer; the id tells who it is."""
    return int.from_bytes(hashlib.sha256(peer.encode()).digest()[:8]) >> (64 - RANK_BITS)


def is_peer(peer: str) -> bool:
    """Whether a text is the libp2p id of an Ed25519 key."""
    return len(peer) <= LONGEST_ID and _key_of(peer) is not None


def signed_by(peer: str, signature: str, text: bytes) -> bool:
    """Whether the owner of a libp2p id has signed a text."""
    key = _key_of(peer) if is_peer(peer) else None
    if key is None or len(signature) != 2 * SIGNATURE_BYTES:  # fromhex would skip any number of spaces
        return False
    try:
        key.verify(bytes.fromhex(signature), text)
    except (InvalidSignature, ValueError):
        return False
    return True


@functools.lru_cache(KEPT)
def _key_of(peer: str) -> Ed25519PublicKey | None:
    """The key of which a text is the libp2p id; None if it is none."""
    try:
        content = base58.b58decode(peer)
        # Another spelling of an id, such as with spaces, would be another rank of the same key.
        if base58.b58encode(content).decode() != peer or not content.startswith(ID_BYTES):
            return None
        return Ed25519PublicKey.from_public_bytes(content[len(ID_BYTES) :])
    except ValueError:
        return None


def _write(path: Path, key: Ed25519PrivateKey) -> None:
    content = key.private_bytes_raw() + key.public_key().public_bytes_raw()
    with replacing(path, private=True) as file:
        file.write(STORED + content)


def _read(path: Path) -> Ed25519PrivateKey:
    stored = path.read_bytes()
    if stored.startswith(STORED) and len(stored) == len(STORED) + 2 * KEY_BYTES:
        return Ed25519PrivateKey.from_private_bytes(stored[len(STORED) : len(STORED) + KEY_BYTES])
    raise UserError(
        f"{path} holds an older farflung's key, or is damaged; join with another --out, or remove the file if no run "
        "folder is its own"
    )
