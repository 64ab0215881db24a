"""Matrices as products of two thin ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from farflung.codecs.base import Name, Traits
from farflung.codecs.chain import Transform
from farflung.codecs.chunks import Shape, separate, together, totals
from farflung.codecs.flat import expected
from farflung.codecs.packets import PacketError
from farflung.codecs.values import rescaled, unscaled
from farflung.errors import UserError

_RANK_BYTES = 4
"""Bytes of the rank, an int32."""
_MOST = 1 << 20
"""The highest rank: more than matrices have."""


@dataclass
class LowRank(Transform):
    """Sends each matrix M (m × k) as P (m × r) and Q (k × r), by one step of power iteration from the last Q.

        P = orthonormalise(M · Q);   Q = Mᵀ · P;   M' = P · Qᵀ

    (PowerSGD, arXiv 1905.13727; DiLoCoX, arXiv 2506.21263). The first Q is random. Tensors of more dimensions count as
    matrices of their first one; vectors, and matrices that r (m + k) numbers would not make smaller, are sent whole.
    The transposed P and Q are sent as matrices of chunks, so that what a block of a later transform holds belongs to
    one direction: P's numbers are at most 1, Q's are as large as M's, and would drown them.

    Args:
        rank: r.
    """

    rank: int = 64
    traits = Traits(remembers=True)
    sees_shapes = True
    _share: float = field(default=1.0, init=False, repr=False, compare=False)
    _seed: int = field(default=0, init=False, repr=False, compare=False)
    _bases: list[Tensor] = field(default_factory=list, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 1 <= self.rank <= _MOST:
            raise UserError(f"LowRank has rank={self.rank}; choose 1 to {_MOST}")

    @property
    def rank_now(self) -> int:
        """The rank after `set_budget`."""
        return max(1, round(self.rank * self._share))

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """All Pᵀ and Qᵀ, a matrix for each width; what is sent whole; and the rank."""
        rank = self.rank_now
        matrices = [_matrix(t).float() for t in tensors if _is_low_rank(t, rank)]
        whole = [t.detach().reshape(-1).float() for t in tensors if not _is_low_rank(t, rank)]
        lefts, rights = [], []
        bases = self._warm_starts(matrices, rank)
        for matrix, basis in zip(matrices, bases, strict=True):
            small, scale = unscaled(matrix)
            left = torch.linalg.qr(small @ basis).Q
            right = rescaled(small.mT @ left, scale)
            lefts.append(left.mT.contiguous())
            rights.append(right.mT.contiguous())
            basis.copy_(right)
        self._bases = bases
        device = tensors[0].device if tensors else None
        rank_bytes = torch.tensor([rank], dtype=torch.int32).view(torch.uint8).to(device)
        return [
            *together(lefts + rights),
            torch.cat(whole or [torch.empty(0, dtype=torch.float32, device=device)]),
            rank_bytes,
        ]

    def outline(self, like: Sequence[Tensor]) -> list[Tensor]:
        """See Transform."""
        rank = self.rank_now
        factors, whole = _outline(like, rank)
        return [
            *(torch.empty(size, dtype=torch.float32, device="meta") for size in totals(factors)),
            torch.empty(sum(whole), dtype=torch.float32, device="meta"),
            torch.empty(_RANK_BYTES, dtype=torch.uint8, device="meta"),
        ]

    def state_nbytes(self, like: Sequence[Tensor]) -> int:
        """See Codec: a Q for each matrix."""
        rank = self.rank_now
        return sum(4 * rank * _matrix_shape(tensor)[1] for tensor in like if _is_low_rank(tensor, rank))

    def _warm_starts(self, matrices: list[Tensor], rank: int) -> list[Tensor]:
        """The last Q of each matrix with `rank` columns: cut, or filled up with random ones."""
        fitting = len(self._bases) == len(matrices)
        generator = torch.Generator().manual_seed(self._seed)
        bases = []
        for number, matrix in enumerate(matrices):
            basis = torch.randn(matrix.shape[1], rank, dtype=torch.float32, generator=generator).to(matrix.device)
            if fitting and len(self._bases[number]) == matrix.shape[1]:
                known = self._bases[number][:, :rank]
                basis[:, : known.shape[1]] = unscaled(known)[0]
            bases.append(basis)
        return bases

    def inverse(self, parts: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
        """See Transform."""
        if not parts or parts[-1].dtype != torch.uint8 or parts[-1].numel() != _RANK_BYTES:
            raise PacketError("packet does not say its rank")
        rank = int(parts[-1].view(torch.int32))
        if rank < 1:
            raise PacketError(f"packet has rank {rank}")
        factors, rest = _outline(like, rank)
        sizes = [(torch.float32, count * width) for count, width in totals(factors)]
        *joint, whole = expected(parts[:-1], *sizes, (torch.float32, sum(rest)))
        wide = [part.view(-1, width) for part, (_, width) in zip(joint, totals(factors), strict=True)]
        found = separate(wide, factors)
        products = map(_product, found[: len(found) // 2], found[len(found) // 2 :])
        wholes = iter(torch.split(whole, rest))
        return [next(products).view(t.shape) if _is_low_rank(t, rank) else next(wholes).view(t.shape) for t in like]

    def state_dict(self) -> dict[str, Any]:
        """The warm starts, and the share of the rank."""
        return {"bases": self._bases, "share": self._share}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See Codec."""
        self._bases, self._share = list(state["bases"]), state["share"]

    def seed(self, seed: int) -> None:
        """See Codec."""
        self._seed = seed

    def set_budget(self, share: float) -> None:
        """See Codec."""
        self._share = share


NAME = Name(
    pattern=r"lowrank(\d+)",
    make=lambda rank: LowRank(rank=int(rank)),
    examples=("lowrank64",),
    travels="matrices as products of two thin ones, here of rank 64, by power iteration from the last round's",
)


def _outline(like: Sequence[Tensor], rank: int) -> tuple[list[Shape], list[int]]:
    """The shapes of all Pᵀ, then of all Qᵀ; and the values of each tensor that is sent whole."""
    shapes = [_matrix_shape(tensor) for tensor in like if _is_low_rank(tensor, rank)]
    whole = [tensor.numel() for tensor in like if not _is_low_rank(tensor, rank)]
    return [(rank, m) for m, _ in shapes] + [(rank, k) for _, k in shapes], whole


def _matrix_shape(tensor: Tensor) -> tuple[int, int]:
    rows = tensor.shape[0] if tensor.dim() else 1
    return rows, tensor.numel() // max(rows, 1)


def _matrix(tensor: Tensor) -> Tensor:
    # In one order in memory: some processors' products round otherwise with another.
    return tensor.detach().reshape(_matrix_shape(tensor)).contiguous()


def _is_low_rank(tensor: Tensor, rank: int) -> bool:
    rows, columns = _matrix_shape(tensor)
    return tensor.dim() > 1 and rank * (rows + columns) < rows * columns


def _product(left: Tensor, right: Tensor) -> Tensor:
    small, scale = unscaled(right)
    return rescaled(left.mT @ small, scale)
