"""A state's description: written by peers that serve one, read by peers that download it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from farflung.networks.base import SharedState
from farflung.networks.peers.frames import Frame, FrameError, digest, entry, name_in, reading, whole
from farflung.networks.peers.member import FURTHEST

PIECE = 1 << 22
PIECES = 512
"""A piece has at most PIECE bytes, or more where that many would not do for the whole."""
LONGEST = 1 << 20
"""Bytes of the longest description."""


@dataclass(frozen=True)
class Manifest:
    """A peer's description of its state: what it calls it, its pieces' digests, its float32 tensors' lengths.

    The `history` is the same for peers whose states came of the same rounds.
    """

    id: str
    digests: tuple[str, ...]
    tensors: tuple[tuple[str, int], ...]
    step: int
    history: str

    @property
    def size(self) -> int:
        """Bytes."""
        return 4 * sum(length for _, length in self.tensors)

    @cached_property
    def pieces(self) -> list[slice]:
        """Where its pieces lie."""
        return pieces_of([length for _, length in self.tensors])

    def fault(self, number: int, content: memoryview) -> str:
        """What is wrong with the bytes of one piece; "" where they are what was announced, and finite."""
        if digest(content) != self.digests[number]:
            return "a piece of its state is not what it announced"
        if not torch.frombuffer(content, dtype=torch.float32).isfinite().all():
            return "a piece of its state is not finite"
        return ""

    def like(self, other: Manifest, identical: bool) -> bool:
        """Whether pieces of both make one state; where peers are `identical`, only those of the same bits."""
        return self.tensors == other.tensors and (not identical or self.digests == other.digests)


def described(state: SharedState, core: bool = False) -> tuple[Tensor, Frame]:
    """A copy of a state, or of what of it is of the core, as bytes; and the facts and tensors of its description."""
    tensors = {name: value for name, value in state.tensors.items() if not (core and name in state.beside)}
    content = torch.cat([value.detach().flatten().to("cpu", torch.float32) for value in tensors.values()])
    told = {"facts": state.facts, "tensors": [[name, value.numel()] for name, value in tensors.items()]}
    return content.view(torch.uint8), told


@reading("a state's description")
def manifest_of(told: Frame, largest: int, furthest: float) -> Manifest:
    """The manifest in a peer's answer. Raises FrameError when it has too many bytes, or too late a step."""
    tensors = tuple((name, whole(length, largest)) for name, length in entry(told, "tensors", list))
    facts = {"history": "", **entry(told, "facts", dict)}
    step = whole(facts.get("step"), min(FURTHEST, furthest))
    history = name_in(facts, "history")
    manifest = Manifest(name_in(told, "id"), tuple(entry(told, "digests", list)), tensors, step, history)
    if not all(type(name) is str for name, _ in tensors) or len(dict(tensors)) < len(tensors):
        raise FrameError("a state's tensors have no names of their own")
    if not 0 < manifest.size <= largest:
        raise FrameError(f"a state has {manifest.size} bytes; at most {largest} are taken, and at least one")
    if len(manifest.digests) != len(manifest.pieces):
        raise FrameError("a state has other pieces than its size asks for")
    if not all(re.fullmatch("[0-9a-f]{64}", one) for one in manifest.digests):
        raise FrameError("a state's digests are none")
    return manifest


def pieces_of(lengths: Sequence[int]) -> list[slice]:
    """Where the pieces of tensors of so many values lie among all their bytes; none lies in two tensors."""
    most = max(PIECE, 4 * sum(lengths) // PIECES)
    found, begin = [], 0
    for length in lengths:
        end = begin + 4 * length
        parts = -(-4 * length // most)
        step = 4 * -(-length // max(parts, 1))
        found += [slice(place, min(place + step, end)) for place in range(begin, end, max(step, 1))]
        begin = end
    return found
