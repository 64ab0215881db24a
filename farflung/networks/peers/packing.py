"""Float32 values in fewer bytes, to the bit: a value's first byte, its sign and exponent, is one of a few."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from farflung.networks.peers.frames import FrameError, reading

BYTES = 4
"""Of a value; the machines that farflung runs on put the first one last."""


def packed(content: memoryview) -> bytes:
    """Values packed: the lower bytes as they are, then the first ones in Huffman's code."""
    values = _values(content)
    coder = zlib.compressobj(level=1, strategy=zlib.Z_HUFFMAN_ONLY)
    first = coder.compress(values[:, -1].contiguous().numpy().data) + coder.flush()
    return values[:, :-1].contiguous().numpy().tobytes() + first


def longest(size: int) -> int:
    """What so many bytes of values take at most when packed."""
    return size + size // 100 + 100


@reading("a piece of a state")
def unpack(told: bytearray, into: memoryview) -> None:
    """Puts the values in their place. Raises FrameError when they are not as many."""
    values = _values(into)
    count, lower = len(values), (BYTES - 1) * len(values)
    coder = zlib.decompressobj()
    first = coder.decompress(memoryview(told)[lower:], count + 1)
    if len(first) != count:
        raise FrameError("a piece of a state has another length than it should have")
    values[:, :-1] = torch.frombuffer(told, dtype=torch.uint8, count=lower).view(count, BYTES - 1)
    values[:, -1] = torch.frombuffer(bytearray(first), dtype=torch.uint8)


def _values(content: memoryview) -> Tensor:
    return torch.frombuffer(content, dtype=torch.uint8).view(-1, BYTES)
