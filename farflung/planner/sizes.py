"""How many bytes a method's messages take for a model, without making either."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import torch

from farflung.codecs import Apart, Codec, ErrorFeedback, LowRank, Stage
from farflung.codecs.base import Chain
from farflung.methods import bytes_of_random, bytes_per_value
from farflung.outer import Method, traffic_per_hop
from farflung.outer.averaging import cut

Shape = tuple[int, ...]


def square_model(parameters: float) -> list[Shape]:
    """Square matrices of about so many parameters in all, as large as those of a language model of that size."""
    side = max(round((8 * parameters) ** (1 / 3)), 1)
    return [(side, side)] * max(round(parameters / side**2), 1)


def shard_shapes(shapes: Sequence[Shape], shards: int, shard: int) -> list[Shape]:
    """What one of the shards has of parameters of these shapes: rows, dealt out as `torch.chunk` does."""
    held = []
    for rows, *rest in filter(None, shapes):
        most = -(-rows // shards)
        own = min(most, rows - most * shard)
        if own > 0:
            held.append((own, *rest))
    return held


def message_bytes(method: Method, shapes: Sequence[Shape], members: int) -> float:
    """A whole message as a member of such a group encodes it: in one packet, or in one for each member's part."""
    if len(traffic_per_hop(method.codec, method.averaging, members)) == 1:
        return packet_bytes(method.codec, shapes)
    parts = cut([torch.empty(shape, device="meta") for shape in shapes], members)
    return sum(packet_bytes(method.codec, [tuple(tensor.shape) for tensor in part]) for part in parts)


def packet_bytes(codec: Codec, shapes: Sequence[Shape]) -> float:
    """The size of one packet of tensors of these shapes, headers left out.

    Low rank is counted by the shapes. What follows it, and the matrices of all else, by what a value of a large random
    one takes; vectors, of which sparse codecs keep a larger part, by what random ones of their shapes take.
    """
    if isinstance(codec, ErrorFeedback):
        return packet_bytes(codec.codec, shapes)
    if isinstance(codec, Apart):
        return sum(packet_bytes(half, shapes) for half in codec.halves)
    stages = codec.stages if isinstance(codec, Stage | Chain) else ()
    if stages and isinstance(stages[0], LowRank):
        return sum(_factors(shape, stages[0].rank, stages[1:]) for shape in shapes)
    matrices, vectors = ([shape for shape in shapes if (len(shape) > 1) == wide] for wide in (True, False))
    return sum(map(math.prod, matrices)) * _measure(codec) + _measure_vectors(codec, tuple(vectors))


def _factors(shape: Shape, rank: int, rest: tuple[Stage, ...]) -> float:
    """Bytes of a tensor's two factors of this rank, or of itself where it has fewer numbers, after the other stages."""
    size = math.prod(shape)
    rows, columns = shape[0] if shape else 1, size // (shape[0] if shape else 1)
    if len(shape) < 2 or rank * (rows + columns) >= size:
        return size * (_measure(Chain(rest)) if rest else 4.0)
    return rank * (_direction(rest, rows) + _direction(rest, columns))


def _direction(rest: tuple[Stage, ...], width: int) -> float:
    """Bytes of one direction of a factor: stages keep them apart, so that narrow ones take more a number."""
    key = repr(rest), width
    if key not in _measured_directions:
        parts = [torch.randn(1, width, generator=torch.Generator().manual_seed(0))]
        for stage in copy.deepcopy(rest):
            parts = stage.shrink(parts)
        _measured_directions[key] = sum(part.nbytes for part in parts)
    return _measured_directions[key]


_measured_directions: dict[tuple[str, int], float] = {}
_measured: dict[str, float] = {}
_measured_vectors: dict[tuple[str, tuple[Shape, ...]], float] = {}


def _measure(codec: Codec) -> float:
    """Bytes a value, measured once for each codec."""
    name = repr(codec)
    if name not in _measured:
        _measured[name] = bytes_per_value(codec)
    return _measured[name]


def _measure_vectors(codec: Codec, shapes: tuple[Shape, ...]) -> float:
    """Bytes of all vectors of these shapes together, measured once for each codec and model."""
    name = repr(codec), shapes
    if name not in _measured_vectors:
        _measured_vectors[name] = bytes_of_random(codec, shapes) if shapes else 0.0
    return _measured_vectors[name]
