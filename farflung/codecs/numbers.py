"""Lists of whole numbers of any length, such as the rows of a table that are meant."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from farflung.codecs.bits import pack_bits, unpack_bits
from farflung.codecs.packets import Packet, PacketError

_WORD = 8
_BITS = 32
"""Numbers are less than 2 to the power of this less one; a word of the header holds a length and a width."""


def pack_numbers(lists: Sequence[Tensor]) -> Packet:
    """Lists of whole numbers from 0 to 2^31 - 1; each number takes the bits of the largest one of its list."""
    lists = [numbers.cpu() for numbers in lists]
    widths = [int(numbers.max()).bit_length() or 1 if numbers.numel() else 1 for numbers in lists]
    words = [numbers.numel() * _BITS + width for numbers, width in zip(lists, widths, strict=True)]
    header = torch.tensor([len(lists), *words]).view(torch.uint8)
    return torch.cat([header, *(_packed(numbers, width) for numbers, width in zip(lists, widths, strict=True))])


def unpack_numbers(packet: Packet) -> list[Tensor]:
    """The lists again, as int64. Raises PacketError."""
    packet = packet.cpu()
    try:
        count = int(packet[:_WORD].clone().view(torch.int64))
        words = packet[_WORD : _WORD * (1 + count)].clone().view(torch.int64).tolist()
    except RuntimeError as error:
        raise PacketError(f"packet of {packet.numel()} bytes has no whole header") from error
    lengths, widths = [word // _BITS for word in words], [word % _BITS for word in words]
    ends = [_WORD * (1 + count)]
    for length, width in zip(lengths, widths, strict=True):
        ends.append(ends[-1] + -(-length // 8) * width)
    if len(words) != count or ends[-1] != packet.numel() or any(width < 1 for width in widths):
        raise PacketError(f"packet of {packet.numel()} bytes does not hold the {count} lists that its header counts")
    parts = (packet[begin:end].view(1, -1) for begin, end in pairwise(ends))
    return [
        unpack_bits(part, width, torch.int64).view(-1)[:length] if length else torch.empty(0, dtype=torch.int64)
        for part, length, width in zip(parts, lengths, widths, strict=True)
    ]


def gaps_of(ordered: Tensor) -> Tensor:
    """The numbers from 0 in an order, each less the one before it: small where they are many; `cumsum` undoes it."""
    return ordered.diff(prepend=ordered.new_zeros(1))


def _packed(numbers: Tensor, width: int) -> Tensor:
    if not numbers.numel():
        return torch.empty(0, dtype=torch.uint8)
    return pack_bits(torch.nn.functional.pad(numbers, (0, -numbers.numel() % 8)).view(1, -1), width).view(-1)
