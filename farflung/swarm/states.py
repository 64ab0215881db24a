"""A stage's weights as its peers give them: cell by cell, as anchors are."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from farflung.cells import Cell, layers_of
from farflung.errors import UserError
from farflung.outer.fragments import ANCHOR
from farflung.outer.shared import OF, OTHER_SHAPES


def given(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Flat float32 tensors, one a cell, of weights by their names."""
    flat = {name: one.detach().float().flatten() for name, one in weights.items()}
    return {f"{ANCHOR}{OF}{cell.name}": torch.cat([flat[n][at] for n, at in _places(cell)]) for cell in _cells(weights)}


def weights_in(state: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a given state, with the names and shapes of others. Raises UserError where it has other ones."""
    found = {name: torch.empty(one.numel()) for name, one in like.items()}
    for cell in _cells(like):
        content = state.get(f"{ANCHOR}{OF}{cell.name}")
        if content is None or content.numel() != cell.numel:
            raise UserError(OTHER_SHAPES)
        parts = content.split([piece.numel for piece in cell.pieces])
        for (name, at), part in zip(_places(cell), parts, strict=True):
            found[name][at] = part
    return {name: one.view(like[name].shape) for name, one in found.items()}


def _cells(weights: Mapping[str, Tensor]) -> list[Cell]:
    shapes = {name: tuple(one.shape) for name, one in weights.items()}
    return [cell for cells in layers_of(shapes).values() for cell in cells]


def _places(cell: Cell) -> list[tuple[str, slice]]:
    """Where a cell's pieces lie in their flat parameters."""
    begins = [piece.begin * (piece.numel // piece.shape[0]) if piece.shape else 0 for piece in cell.pieces]
    return [(one.parameter, slice(at, at + one.numel)) for one, at in zip(cell.pieces, begins, strict=True)]
