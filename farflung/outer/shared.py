"""What a run's replicas share, and give to a late one: anchors and the outer optimizer's state, cell by cell."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from torch import Tensor

from farflung.codecs import finite
from farflung.errors import UserError
from farflung.outer.fragments import ANCHOR, Weights

OF = " of "
"""Between what a tensor is and the name of its cell."""
OTHER_SHAPES = "the run's anchors have other shapes than the model here; see that both use the same model"


def shared_tensors(all_weights: Iterable[Weights]) -> Iterator[tuple[str, Tensor]]:
    """The anchors, and what the outer optimizer keeps of them, cell by cell, by name."""
    for weights in all_weights:
        for cell, kept in weights.fragment.apart(weights.shared()).items():
            for kind, value in kept.items():
                yield f"{kind}{OF}{cell}", value


def check_shared(tensors: Mapping[str, Tensor], values: Mapping[str, int], kinds: Collection[str]) -> None:
    """Checks another replica's `shared_tensors`.

    Each cell has so many values; besides anchors they may be of these kinds. Raises UserError unless all fit.
    """
    with_anchor = set()
    for name, value in tensors.items():
        kind, _, cell = name.partition(OF)
        if value.numel() != values.get(cell) or kind not in (ANCHOR, *kinds):
            raise UserError(OTHER_SHAPES)
        if kind == ANCHOR:
            with_anchor.add(cell)
    if with_anchor != values.keys():
        raise UserError(OTHER_SHAPES)
    if not finite(*tensors.values()):
        raise UserError("a peer gave a state that is not finite; join again, from other peers' RUN/run.ticket")


def take_shared(all_weights: Sequence[Weights], tensors: Mapping[str, Tensor]) -> None:
    """Takes another replica's `shared_tensors`, which have been checked, of these weights' cells."""
    cells: dict[str, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        kind, _, cell = name.partition(OF)
        cells.setdefault(cell, {})[kind] = value
    for weights in all_weights:
        weights.take_shared(weights.fragment.together(cells))
