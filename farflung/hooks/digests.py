"""Numbers that tell whether tensors are the same, bit for bit, without sending them."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch
from torch import Tensor

ROW = 1 << 14
"""Words in a row; words are summed with weights, and so are the rows' sums."""

BLOCK = 4 * ROW
"""Words that are summed at a time, few enough for a processor's cache."""

BLOCK_ON_DEVICES = 1024 * ROW


def digest(tensors: Iterable[Tensor]) -> Tensor:
    """Two int64 numbers, of the shapes and of the values; a changed or moved bit almost surely changes them.

    They are the same on every device. A word in row r and column c of a tensor counts by weight(c) · weight(ROW + r),
    modulo 2⁶⁴; words are 32 bits, or whole values where these are smaller.
    """
    total = torch.zeros(2, dtype=torch.int64, device="cpu")
    for tensor in tensors:
        size = functools.reduce(lambda sizes, length: (sizes * 31 + length) % (1 << 61), tensor.shape, tensor.dim())
        total = total * 31 + torch.tensor([size, 0], device="cpu")
        total[1] += _summed(_words(tensor.detach())).cpu()
    return total


def _words(tensor: Tensor) -> Tensor:
    kinds = {1: torch.uint8, 2: torch.int16}
    return tensor.contiguous().view(-1).view(kinds.get(tensor.element_size(), torch.int32))


def _summed(words: Tensor) -> Tensor:
    # 64-bit sums wrap around without an error, so that the order of additions does not matter.
    sums = []
    for block in torch.split(words, BLOCK if words.device.type == "cpu" else BLOCK_ON_DEVICES):
        rest = len(block) % ROW
        for part in (block[: len(block) - rest].view(-1, ROW), block[len(block) - rest :].view(-1, max(rest, 1))):
            sums.append(part.long().mul_(_columns(words.device)[: part.shape[1]]).sum(1))
    of_rows = torch.cat(sums)
    return (of_rows * _weights(ROW, len(of_rows), words.device)).sum()


@functools.cache
def _columns(device: torch.device) -> Tensor:
    return _weights(0, ROW, device)


def _weights(begin: int, count: int, device: torch.device) -> Tensor:
    """Odd 64-bit numbers without any pattern: SplitMix64 of begin + 1, begin + 2, … (Steele et al., OOPSLA 2014)."""
    z = torch.arange(begin + 1, begin + count + 1, device=device) * _signed(0x9E3779B97F4A7C15)
    z = (z ^ (z >> 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> 27)) * _signed(0x94D049BB133111EB)
    return (z ^ (z >> 31)) | 1


def _signed(number: int) -> int:
    return number - (1 << 64)
