"""How many bytes a method's messages take for a model, without making either."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from farflung.codecs import Apart, Codec, ErrorFeedback, LowRank, Stage
from farflung.codecs.base import Chain

Shape = tuple[int, ...]

SAMPLE = 1 << 20
"""Random values that a codec is measured on."""


def square_model(parameters: float) -> list[Shape]:
    """Square matrices of about so many parameters in all, as large as those of a language model of that size."""
    side = max(round((8 * parameters) ** (1 / 3)), 1)
    return [(side, side)] * max(round(parameters / side**2), 1)


def packet_bytes(codec: Codec, shapes: Sequence[Shape]) -> float:
    """The size of one packet of tensors of these shapes, headers left out.

    Low rank is counted by the shapes; what follows it, and all else, by what a value of a large random tensor takes.
    """
    if isinstance(codec, ErrorFeedback):
        return packet_bytes(codec.codec, shapes)
    if isinstance(codec, Apart):
        return sum(packet_bytes(half, shapes) for half in codec.halves)
    stages = codec.stages if isinstance(codec, Stage | Chain) else ()
    if stages and isinstance(stages[0], LowRank):
        values = sum(_factors(shape, stages[0].rank) for shape in shapes)
        rest: Codec | None = Chain(stages[1:]) if len(stages) > 1 else None
        return values * (_bytes_per_value(repr(rest), rest) if rest else 4.0)
    return sum(map(math.prod, shapes)) * _bytes_per_value(repr(codec), codec)


def _factors(shape: Shape, rank: int) -> int:
    """The numbers in a tensor's two factors of this rank, or in itself where it has fewer."""
    size = math.prod(shape)
    if len(shape) < 2:
        return size
    return min(rank * (shape[0] + size // shape[0]), size)


_measured: dict[str, float] = {}


def _bytes_per_value(name: str, codec: Codec) -> float:
    if name not in _measured:
        side = math.isqrt(SAMPLE)
        values = torch.randn(side, side, generator=torch.Generator().manual_seed(0))
        _measured[name] = codec.encode([values]).nbytes / SAMPLE
    return _measured[name]
