"""Divides layers among stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

from farflung.errors import UserError
from farflung.workloads.base import Load, Span

NOTHING = Load(0.0, 0.0)


def spans(layers: Sequence[Load], before: Load, after: Load, pieces: int) -> list[Span]:
    """Cuts layers into consecutive pieces, so that the largest share of all parameters or work in a piece is least.

    Args:
        before, after: the loads before the first layer (embeddings) and after the last (norm and head).
        pieces: how many; each gets at least one layer.

    Raises UserError when there are fewer layers than pieces.
    """
    count = len(layers)
    if pieces > count:
        raise UserError(f"{pieces} pieces of a model that has only {count} layers; choose fewer stages")
    total = list(accumulate(layers, Load.plus, initial=NOTHING))
    everything = total[-1].plus(before).plus(after)

    def share(begin: int, end: int) -> float:
        load = Load(total[end].memory - total[begin].memory, total[end].work - total[begin].work)
        load = load.plus(before if begin == 0 else NOTHING).plus(after if end == count else NOTHING)
        return max(load.memory / (everything.memory or 1), load.work / (everything.work or 1))

    best = {0: (0.0, [0])}  # by the number of layers dealt out: the largest share so far, and the cuts
    for piece in range(1, pieces + 1):
        ends = range(piece, count - pieces + piece + 1) if piece < pieces else (count,)
        best = {end: _least(best, end, share) for end in ends}
    cuts = best[count][1]
    return [Span(a, b, a == 0, b == count) for a, b in pairwise(cuts)]


def _least(
    best: dict[int, tuple[float, list[int]]], end: int, share: Callable[[int, int], float]
) -> tuple[float, list[int]]:
    candidates = [(max(worst, share(begin, end)), cuts) for begin, (worst, cuts) in best.items() if begin < end]
    worst, cuts = min(candidates)
    return worst, [*cuts, end]
