"""A state's description: written by peers that serve one, read by peers that download it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from farflung.networks.internet.frames import Frame, FrameError, entry, reading, whole
from farflung.networks.internet.members import FURTHEST

PIECE = 1 << 22
PIECES = 512
"""A piece has at least PIECE bytes, and there are at most so many pieces."""


@dataclass(frozen=True)
class Manifest:
    """A peer's description of its state: what it calls it, its pieces' digests, its float32 tensors' lengths."""

    id: str
    digests: list[str]
    tensors: list[tuple[str, int]]
    step: int

    @property
    def size(self) -> int:
        """Bytes."""
        return 4 * sum(length for _, length in self.tensors)

    def like(self, other: Manifest, identical: bool) -> bool:
        """Whether pieces of both make one state; where peers are `identical`, only those of the same bits."""
        return self.tensors == other.tensors and (not identical or self.digests == other.digests)


@reading("a state's description")
def manifest_of(told: Frame, largest: int, furthest: float) -> Manifest:
    """The manifest in a peer's answer. Raises FrameError when it has too many bytes, or too late a step."""
    tensors = [(name, whole(length, largest)) for name, length in entry(told, "tensors", list)]
    step = whole(entry(told, "facts", dict).get("step"), min(FURTHEST, furthest))
    manifest = Manifest(entry(told, "id", str), entry(told, "digests", list), tensors, step)
    if not all(type(name) is str for name, _ in tensors) or len(dict(tensors)) < len(tensors):
        raise FrameError("a state's tensors have no names of their own")
    if not 0 < manifest.size <= largest:
        raise FrameError(f"a state has {manifest.size} bytes; at most {largest} are taken, and at least one")
    if len(manifest.digests) != count_of(manifest.size) or not all(type(one) is str for one in manifest.digests):
        raise FrameError("a state has other pieces than its size asks for")
    return manifest


def piece_of(content: memoryview, number: int) -> memoryview:
    """One piece of a state's bytes."""
    size = _piece_size(len(content))
    return content[number * size : (number + 1) * size]


def count_of(size: int) -> int:
    """The number of pieces of so many bytes."""
    return -(-size // _piece_size(size))


def digest(content: memoryview) -> str:
    """SHA-256, in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def _piece_size(size: int) -> int:
    return max(PIECE, -(-size // PIECES) + 3 & ~3)  # no value lies in two pieces
