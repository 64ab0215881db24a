"""A peer's own key: its libp2p identity, with which it also signs what it sends."""

from __future__ import annotations

import hashlib
from pathlib import Path

import multihash
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa
from hivemind.p2p import P2P, PeerID
from hivemind.proto import crypto_pb2

from farflung.files import beside

_PADDING = padding.PKCS1v15()


class Identity:
    """The key in a file, made if there is none; `peer` is its libp2p id, `rank` the peer's number as a replica."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            new = beside(path)
            P2P.generate_identity(str(new))
            new.rename(path)
        stored = path.read_bytes()
        key = serialization.load_der_private_key(crypto_pb2.PrivateKey.FromString(stored).data, password=None)
        assert isinstance(key, rsa.RSAPrivateKey)
        self.path = path
        self._key = key
        self.peer = str(PeerID.from_identity(stored))
        self.rank = rank_of(self.peer)
        form = serialization.PublicFormat.SubjectPublicKeyInfo
        self.public = key.public_key().public_bytes(serialization.Encoding.DER, form).hex()

    def sign(self, text: bytes) -> str:
        """The signature of a text, in hexadecimal."""
        return self._key.sign(text, _PADDING, hashes.SHA256()).hex()


def rank_of(peer: str) -> int:
    """A replica's number: 31 bits of its libp2p id's hash."""
    return int.from_bytes(hashlib.sha256(peer.encode()).digest()[:4]) >> 1


def peer_of(public: str) -> str:
    """The libp2p id of a public key; nobody can have that id without the key. Raises ValueError."""
    wrapped = crypto_pb2.PublicKey(key_type=crypto_pb2.RSA, data=bytes.fromhex(public)).SerializeToString()
    return str(PeerID(multihash.encode(hashlib.sha256(wrapped).digest(), multihash.coerce_code("sha2-256"))))


def signed_by(public: str, signature: str, text: bytes) -> bool:
    """Whether the owner of a public key has signed a text."""
    try:
        key = serialization.load_der_public_key(bytes.fromhex(public))
        assert isinstance(key, rsa.RSAPublicKey)
        key.verify(bytes.fromhex(signature), text, _PADDING, hashes.SHA256())
    except (InvalidSignature, ValueError, AssertionError):
        return False
    return True
