"""The rows of matrices that are not all noughts, as tables of embeddings have few that a batch has touched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from farflung.codecs.base import Name, Traits
from farflung.codecs.chain import Transform
from farflung.codecs.flat import by_kind, expected
from farflung.codecs.numbers import gaps_of, pack_numbers, unpack_numbers
from farflung.codecs.packets import PacketError


@dataclass(frozen=True)
class Rows(Transform):
    """Sends the rows of each matrix that hold anything but noughts, as they are, and which they are.

    What it sends is exact, but it does not count as lossless, since messages that do are averaged without packets. A
    vector is one row; a tensor of more dimensions has a row for each entry of the first. Each tensor costs 8 bytes, and
    each of its rows the bits of the largest gap between two.
    """

    traits = Traits(fixed_length=False, omits_zeros=True)

    @property
    def sees_shapes(self) -> bool:
        """See Transform."""
        return True

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The values of all rows that are sent, and packed gaps between these."""
        matrices = [_matrix(tensor) for tensor in tensors]
        touched = [matrix.any(dim=1).nonzero().view(-1) for matrix in matrices]
        chosen = zip(matrices, touched, strict=True)
        values = [matrix[rows].float().reshape(-1) for matrix, rows in chosen] or [torch.empty(0)]
        return [torch.cat(values), pack_numbers([gaps_of(rows) for rows in touched]).to(values[0].device)]

    def outline(self, like: Sequence[Tensor]) -> list[Tensor]:
        """See Transform: of tensors whose rows are all sent."""
        numbers = pack_numbers([torch.zeros(len(_matrix(tensor)), dtype=torch.int64) for tensor in like])
        sizes = ((sum(tensor.numel() for tensor in like), torch.float32), (numbers.numel(), torch.uint8))
        return [torch.empty(size, dtype=dtype, device="meta") for size, dtype in sizes]

    def inverse(self, parts: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
        """See Transform."""
        if len(parts) != 2 or by_kind(parts)[1][:1] != [parts[1]]:
            raise PacketError("packet does not hold values and their rows")
        touched = [gaps.cumsum(0) for gaps in unpack_numbers(parts[1])]
        matrices = [_matrix(tensor) for tensor in like]
        if len(touched) != len(like) or any(
            rows.numel() and int(rows[-1]) >= len(matrix) for rows, matrix in zip(touched, matrices, strict=True)
        ):
            raise PacketError("packet has rows that its tensors do not have")
        sizes = [rows.numel() * matrix.shape[1] for rows, matrix in zip(touched, matrices, strict=True)]
        (values,) = expected(parts[:1], (torch.float32, sum(sizes)))
        found = []
        for tensor, matrix, rows, own in zip(like, matrices, touched, values.split(sizes), strict=True):
            whole = values.new_zeros(matrix.shape).index_copy_(
                0, rows.to(values.device), own.view(rows.numel(), matrix.shape[1])
            )
            found.append(whole.view(tensor.shape))
        return found


def _matrix(tensor: Tensor) -> Tensor:
    """A view of a tensor, or a copy, with its rows as rows."""
    return tensor.reshape(1, -1) if tensor.dim() < 2 else tensor.flatten(1)


NAME = Name(
    pattern="rows",
    make=Rows,
    examples=("rows",),
    travels="the rows of matrices that are not all 0, as they are, and which they are; for sparse embeddings",
)
