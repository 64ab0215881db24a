"""Whom a newcomer believes, of three peers or more that tell it of the run's state.

Where states should be the same, the most: those whose states came of the same rounds must give each piece the same
digest. Where they are only near each other, those whose pieces are near: a piece is refused that lies further from the
median of all than TIMES the median distance, and than PART of its own size. Distances are told by sketches, a few sums
of a piece's values with random signs, whose differences are about as large as those of the pieces themselves. The
newcomer draws the signs when it has the digests, so that nobody can fit false values to them.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from farflung.networks.peers.manifests import Manifest
from farflung.networks.peers.member import Member

STRETCHES = 16
"""Sums of a piece's sketch."""
TIMES = 10.0
PART = 0.1

Source = tuple[Member, Manifest]


class Signs:
    """Random signs, the same for all who know the seed."""

    def __init__(self, seed: str, count: int) -> None:
        bits = torch.frombuffer(bytearray(hashlib.shake_256(seed.encode()).digest(count // 8 + 1)), dtype=torch.uint8)
        self._signs = ((bits[:, None] >> torch.arange(8, dtype=torch.uint8)) & 1).flatten().float().mul_(2).sub_(1)

    def sketch(self, content: memoryview) -> Tensor:
        """The sketch of a piece's bytes."""
        values = torch.frombuffer(content, dtype=torch.float32)
        parts = (values * self._signs[: len(values)]).tensor_split(STRETCHES)
        return torch.stack([part.sum(dtype=torch.float64) for part in parts])


def signs_for(seed: str, lengths: Iterable[int]) -> Signs:
    """Enough signs for pieces of so many bytes."""
    return Signs(seed, max(lengths) // 4)


def sketches_of(pieces: Sequence[memoryview], seed: str) -> Tensor:
    """The sketches of a state's pieces."""
    signs = signs_for(seed, map(len, pieces))
    return torch.stack([signs.sketch(piece) for piece in pieces])


class Spread:
    """How far what is believed may be from the median of `sketches`: of each voice, of each piece, in float64."""

    def __init__(self, sketches: Tensor, signs: Signs) -> None:
        self._signs = signs
        self._median = sketches.median(0).values
        typical = (sketches - self._median).norm(dim=-1).sort(0).values[len(sketches) // 2]
        self._limits = torch.maximum(TIMES * typical, PART * self._median.norm(dim=-1))

    def holds(self, sketches: Tensor) -> bool:
        """Whether all pieces of one peer lie within it."""
        return bool(((sketches - self._median).norm(dim=-1) <= self._limits).all())

    def holds_piece(self, number: int, content: memoryview) -> bool:
        """Whether the bytes of one piece do."""
        return bool((self._signs.sketch(content) - self._median[number]).norm() <= self._limits[number])


@dataclass
class Believed:
    """Peers whose states are taken, and those who said what cannot be; pieces that come lie within a `spread`."""

    sources: list[Source]
    false: list[Member] = field(default_factory=list)
    spread: Spread | None = None

    def holds_piece(self, number: int, content: memoryview) -> bool:
        """Whether a piece that came lies within the spread, if there is one."""
        return self.spread is None or self.spread.holds_piece(number, content)


def largest_group(sources: Sequence[Source], what: Callable[[Manifest], Hashable]) -> list[Source]:
    """Those of whom the most say the same of something."""
    (most, _), *_ = Counter(what(manifest) for _, manifest in sources).most_common(1)
    return [source for source in sources if what(source[1]) == most]


def by_majority(sources: Sequence[Source]) -> Believed | None:
    """Believes what most say, of at least two whose states came of the same rounds; None when there are no most."""
    peers = largest_group(sources, lambda manifest: manifest.history)
    said = [
        Counter(digests).most_common(1)[0] for digests in zip(*(manifest.digests for _, manifest in peers), strict=True)
    ]
    agreed = tuple(digest for digest, _ in said)
    if len(peers) < 2 or any(2 * votes <= len(peers) for _, votes in said):
        return None
    good = [source for source in peers if source[1].digests == agreed]
    return Believed(good, [member for member, manifest in peers if manifest.digests != agreed]) if good else None


def by_spread(sources: Sequence[Source], sketches: Sequence[Tensor], signs: Signs) -> Believed:
    """Believes those near each other. Who says the same as another is no further voice.

    With two voices, whoever is alone with what it says is not believed, but need not have lied.
    """
    voices = {
        (manifest.digests, sketch.numpy().tobytes()): sketch
        for (_, manifest), sketch in zip(sources, sketches, strict=True)
    }
    if len(voices) < 3:
        return Believed(largest_group(sources, lambda manifest: manifest.digests) if sources else [])
    spread = Spread(torch.stack(list(voices.values())), signs)
    near = [spread.holds(sketch) for sketch in sketches]
    good = [source for source, holds in zip(sources, near, strict=True) if holds]
    return Believed(good, [member for (member, _), holds in zip(sources, near, strict=True) if not holds], spread)
