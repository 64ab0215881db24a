"""The bytes that a method's rounds send and keep, told from the parameters' shapes alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import starmap
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from farflung.cells import Cell, Shape, cells_among
from farflung.codecs import Codec, Dense
from farflung.outer.averaging import Way, uses_all_gather
from farflung.outer.bundles import cut
from farflung.outer.fusing import LENGTHS
from farflung.outer.gradient_exchange import BLOCK, NOTES, OTHER_NOTES
from farflung.outer.optimizers import after_a_step

if TYPE_CHECKING:
    from farflung.outer.method import Method

_FLOAT = 4
"""Bytes of a float32."""

_SIDE = 1024
"""Rows and columns of the matrix by which a method's bytes a parameter are told."""


def traffic_per_hop(codec: Codec, way: Way, members: int) -> tuple[float, ...]:
    """What part of a message each member of a group sends each other, hop after hop; by all-reduce if uncompressed."""
    if not codec.traits.lossless and uses_all_gather(codec, way, members):
        return (1.0,)
    return (1 / members, 1 / members)


def message_bytes(method: Method, cells: Sequence[Cell], members: int) -> int:
    """All packets of one message, as a member of such a group encodes it; times `traffic_per_hop` is what travels.

    Exact where the codec's packets have a fixed length. 0 for a method without rounds.
    """
    if not method.exchanges:
        return 0
    message, codec = _message(method, cells), method.codec
    if codec.traits.lossless:
        return _FLOAT * _count(message)
    gathered = uses_all_gather(codec, method.averaging, members)
    parts = [message] if gathered else cut(message, members)
    counted = _counted(codec, lambda codec, tensors: codec.nbytes(tensors))
    return sum(counted(cell, tensors) for part in parts for cell, tensors in part.items())


def added_bytes(method: Method, cells: Sequence[Cell], replicas: int) -> float:
    """What each of so many replicas sends in a round besides its message, as companions do; on the mean of many."""
    sent = 0.0
    for added in (companion.added(method, cells) for companion in method.companions):
        if added is not None:
            groups = added.topology.groups(tuple(range(replicas)), "counting")
            sent += sum(2 * (len(group) - 1) for group in groups) / replicas * added.nbytes
    return sent


def bytes_per_parameter(method: Method) -> float:
    """What a message takes for each parameter of a matrix of 2^20. 0 for a method without rounds."""
    return message_bytes(method, cells_among([[(_SIDE, _SIDE)]]), members=2) / _SIDE**2


def kept_bytes(method: Method, cells: Sequence[Cell], in_blocks: bool = False) -> float:
    """What rounds keep between steps: anchors, outer state, messages in flight, and what codecs remember.

    Gradients may travel `in_blocks`: then two of them are there at a time.
    """
    if not method.exchanges:
        return 0.0
    message = _message(method, cells)
    remembered = sum(
        starmap(_counted(method.codec, lambda codec, tensors: codec.state_nbytes(tensors)), message.items())
    )
    if method.outer is None:
        flights = 2 * (BLOCK + max(cell.numel for cell in cells)) if in_blocks else math.inf
        return _FLOAT * min(_count(message), flights) + remembered
    parameters = sum(cell.numel for cell in cells)
    lengths, kept = after_a_step(method.outer)
    schedule = method.schedule
    assert schedule.every
    flights = min(max(1, math.ceil(schedule.delay * schedule.fragments / schedule.every)), schedule.fragments)
    in_flight = flights / schedule.fragments * (lengths + (method.fuse != "mean") + bool(schedule.delay))
    return _FLOAT * parameters * (1 + len(kept) + in_flight) + remembered


def _message(method: Method, cells: Sequence[Cell]) -> dict[str, list[Tensor]]:
    """Outlines of the tensors that a method's messages consist of, by cell."""
    outlines = {cell.name: [_outline(piece.shape) for piece in cell.pieces] for cell in cells}
    told = [piece for cell in cells for piece in cell.pieces]
    if method.outer is not None:
        lengths = {} if method.fuse == "mean" else {LENGTHS: [_outline((len(told),))]}
        return {name: tensors * after_a_step(method.outer)[0] for name, tensors in outlines.items()} | lengths
    return outlines | {NOTES: list(_outline((len(told) + OTHER_NOTES,)).unbind())}


def _outline(shape: Shape) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device="meta")


def _count(message: Mapping[str, Sequence[Tensor]]) -> int:
    return sum(tensor.numel() for tensors in message.values() for tensor in tensors)


def _counted(
    codec: Codec, bytes_of: Callable[[Codec, Sequence[Tensor]], int]
) -> Callable[[str, Sequence[Tensor]], int]:
    """Counts a cell's bytes; large models have thousands of the same shapes, which are counted once."""
    dense, known = Dense(), dict[tuple[bool, tuple[Shape, ...]], int]()

    def counted(cell: str, tensors: Sequence[Tensor]) -> int:
        plain = cell in (NOTES, LENGTHS)
        key = plain, tuple(tensor.shape for tensor in tensors)
        if key not in known:
            known[key] = bytes_of(dense if plain else codec, tensors)
        return known[key]

    return counted
