"""Dividing layers among stages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from torch import nn

from farflung.config import UserError


@dataclass(frozen=True)
class Span:
    """The part of a model that one stage has: layers from `begin` to before `end`, and perhaps a model's ends."""

    begin: int
    end: int
    first: bool
    last: bool


def spans(costs: Sequence[float], before: float, after: float, pieces: int) -> list[Span]:
    """Cuts layers into consecutive pieces so that the costliest piece costs least.

    Args:
        costs: of each layer.
        before, after: of what comes before the first layer (embeddings) and after the last (norm and head).
        pieces: how many; each has a layer at least.

    Raises UserError when there are fewer layers than pieces.
    """
    layers = len(costs)
    if pieces > layers:
        raise UserError(f"{pieces} pieces of a model that has only {layers} layers; choose at most that many --stages")
    total = [0.0, *accumulate(costs)]

    def cost(begin: int, end: int) -> float:
        return total[end] - total[begin] + before * (begin == 0) + after * (end == layers)

    best = {0: (0.0, [0])}  # by the number of layers dealt out: the costliest piece so far, and the cuts
    for piece in range(1, pieces + 1):
        ends = range(piece, layers - pieces + piece + 1) if piece < pieces else (layers,)
        best = {end: _cheapest(best, end, cost) for end in ends}
    cuts = best[layers][1]
    return [Span(a, b, a == 0, b == layers) for a, b in pairwise(cuts)]


def _cheapest(best: dict[int, tuple[float, list[int]]], end: int, cost: object) -> tuple[float, list[int]]:
    candidates = [(max(worst, cost(begin, end)), cuts) for begin, (worst, cuts) in best.items() if begin < end]  # type: ignore[operator]
    worst, cuts = min(candidates)
    return worst, [*cuts, end]


def costs_of(
    layers: Sequence[nn.Module], before: Sequence[nn.Module], after: Sequence[nn.Module]
) -> tuple[list[float], float, float]:
    """What each layer, what comes before them, and what comes after costs: its share of the parameters and of the work.

    The work is that of matrix products; looking up embeddings is none.
    """
    memory = [_parameters(module) for module in layers]
    work = [_parameters(module, least_dimensions=2) for module in layers]
    memory_before = sum(map(_parameters, before))
    memory_after = sum(map(_parameters, after))
    work_after = sum(_parameters(module, least_dimensions=2) for module in after)
    all_memory = sum(memory) + memory_before + memory_after or 1
    all_work = sum(work) + work_after or 1
    shares = [m / all_memory + w / all_work for m, w in zip(memory, work, strict=True)]
    return shares, memory_before / all_memory, memory_after / all_memory + work_after / all_work


def _parameters(module: nn.Module, least_dimensions: int = 1) -> int:
    return sum(math.prod(p.shape) for p in module.parameters() if p.dim() >= least_dimensions)
