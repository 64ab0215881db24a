"""The bytes that a method's rounds send and keep, told from the parameters' shapes alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from farflung.codecs import Codec
from farflung.outer.averaging import Way, cut, strips, uses_all_gather
from farflung.outer.notes import NOTES, Noted
from farflung.outer.optimizers import OuterFactory, message_of, step_with

if TYPE_CHECKING:
    from farflung.outer.method import Method

Shape = tuple[int, ...]

_FLOAT = 4
"""Bytes of a float32."""

_SIDE = 1024
"""Rows and columns of the matrix by which a method's bytes a parameter are told."""


def traffic_per_hop(codec: Codec, way: Way, members: int) -> tuple[float, ...]:
    """What part of a message goes from each member of a group to each other, hop after hop.

    Uncompressed messages use all-reduce.
    """
    if not codec.traits.lossless and uses_all_gather(codec, way, members):
        return (1.0,)
    return (1 / members, 1 / members)


def message_bytes(method: Method, shapes: Sequence[Shape], members: int) -> int:
    """All packets of one message, as a member of such a group encodes it; times `traffic_per_hop` is what travels.

    Exact where the codec's packets have a fixed length. 0 for a method without rounds.
    """
    if not method.exchanges:
        return 0
    codec, tensors = _message(method, shapes)
    if codec.traits.lossless:
        return _FLOAT * _count(tensors)
    if not uses_all_gather(codec, method.averaging, members):
        packets = cut(tensors, members)
    else:
        packets = [tensors] if codec.traits.needs_whole else strips(tensors)
    return sum(codec.nbytes(packet) for packet in packets)


def bytes_per_parameter(method: Method) -> float:
    """What a message takes for each parameter of a matrix of 2^20. 0 for a method without rounds."""
    return message_bytes(method, [(_SIDE, _SIDE)], members=2) / _SIDE**2


def kept_bytes(method: Method, shapes: Sequence[Shape]) -> float:
    """What rounds keep between steps: anchors, outer state, messages in flight, and what codecs remember."""
    if not method.exchanges:
        return 0.0
    codec, tensors = _message(method, shapes)
    remembered = codec.state_nbytes(tensors)
    if method.outer is None:
        return _FLOAT * _count(tensors) + remembered
    parameters = sum(map(math.prod, shapes))
    lengths, kept = _outer(method.outer)
    schedule = method.schedule
    assert schedule.every
    flights = min(max(1, math.ceil(schedule.delay * schedule.fragments / schedule.every)), schedule.fragments)
    in_flight = flights / schedule.fragments * (lengths + bool(schedule.delay))
    return _FLOAT * parameters * (1 + kept + in_flight) + remembered


def _message(method: Method, shapes: Sequence[Shape]) -> tuple[Codec, list[Tensor]]:
    """What encodes a method's messages, and outlines of the tensors that one consists of."""
    outlines = [torch.empty(shape, dtype=torch.float32, device="meta") for shape in shapes]
    if method.outer is not None:
        return method.codec, outlines * _outer(method.outer)[0]
    told = sum(map(bool, map(math.prod, shapes)))  # of a parameter without values there is nothing to say
    notes = list(torch.empty(told + NOTES, dtype=torch.float32, device="meta").unbind())
    return method.codec if method.codec.traits.lossless else Noted(method.codec), outlines + notes


def _outer(make: OuterFactory) -> tuple[int, int]:
    """How many times an anchor's length an outer optimizer's message has; and what it keeps of the anchor, too."""
    anchor = torch.zeros(1, dtype=torch.float32, device="cpu")
    outer = make([anchor])
    message = message_of(outer, anchor, torch.ones_like(anchor))
    lengths = message.numel()
    step_with(outer, anchor, message)
    kept = outer.state.get(anchor, {}).values()
    return lengths, sum(isinstance(value, Tensor) and value.shape == anchor.shape for value in kept)


def _count(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)
