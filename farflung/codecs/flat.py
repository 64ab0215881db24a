"""What codecs share that see a message as one long row of numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from farflung.codecs.packets import PacketError

PIECE = 1 << 18
"""Elements that are worked on at a time: the few temporaries of one piece fit a CPU's cache together."""


def by_kind(tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """The floating tensors, and those of finished bytes."""
    floating = [tensor for tensor in tensors if tensor.is_floating_point()]
    return floating, [tensor for tensor in tensors if not tensor.is_floating_point()]


def in_order(floating: Sequence[Tensor], finished: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
    """What `by_kind` took apart, in the shapes and the order of `like`."""
    numbers, rest = iter(floating), iter(finished)
    return [next(numbers).reshape(t.shape) if t.is_floating_point() else next(rest) for t in like]


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """All values as one flat float32 tensor; without a copy where they lie one after the other in memory."""
    if not tensors:
        return torch.empty(0, dtype=torch.float32)
    first, end = tensors[0], tensors[0].data_ptr()
    memory = first.untyped_storage().data_ptr()
    for tensor in tensors:
        follows = tensor.data_ptr() == end and tensor.untyped_storage().data_ptr() == memory
        if tensor.dtype != torch.float32 or not tensor.is_contiguous() or not follows:
            return torch.cat([tensor.detach().reshape(-1).float() for tensor in tensors])
        end += tensor.nbytes
    return first.detach().as_strided((sum(tensor.numel() for tensor in tensors),), (1,))


def joined(parts: Sequence[Tensor]) -> Tensor:
    """One part of several; without a copy where there is only one."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def count_of(like: Sequence[Tensor]) -> int:
    """How many values tensors of these shapes hold."""
    return sum(math.prod(tensor.shape) for tensor in like)


def rows(flat: Tensor, width: int, chosen: slice = slice(None)) -> list[Tensor]:
    """A flat tensor's rows of `width`, all or those chosen, as pieces; the last row is filled up with zeros."""
    whole = flat[: flat.numel() // width * width].view(-1, width)
    pieces = list(row_pieces(whole[chosen], width))
    rest = flat[whole.numel() :]
    if rest.numel() and len(whole) in range(len(whole) + 1)[chosen]:
        last = torch.nn.functional.pad(rest, (0, width - rest.numel())).view(1, width)
        if len(pieces[-1]) < _rows_of_a_piece(width):
            last = torch.cat([pieces.pop(), last])
        pieces.append(last)
    return pieces


def row_pieces(tensor: Tensor, width: int) -> Iterator[Tensor]:
    """A tensor with one entry (or row) for each row of `rows`, cut alike."""
    return iter(torch.split(tensor, _rows_of_a_piece(width)))


def _rows_of_a_piece(width: int) -> int:
    return max(PIECE // width, 1)


def expected(parts: Sequence[Tensor], *wanted: tuple[torch.dtype, int]) -> list[Tensor]:
    """The parts, if they are of these dtypes and lengths. Raises PacketError."""
    found = [(part.dtype, part.numel()) for part in parts]
    if found != list(wanted):
        raise PacketError(f"packet has parts {found} where {list(wanted)} were expected")
    return list(parts)
