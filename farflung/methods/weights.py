"""Weights averaged as they are: of all of the model, of parts that are dealt out, or never."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from farflung import outer, subnets
from farflung.lazy import Later
from farflung.methods.averaged import diloco
from farflung.methods.gossip import noloco

if TYPE_CHECKING:
    from farflung import inner
    from farflung.codecs import Codec
    from farflung.outer import Method
else:
    inner = Later("farflung.inner")


def local() -> Method:
    """No exchange at all: each replica trains alone on its share of the data; what rounds must beat.

    Paper: none
    """
    return outer.Method(outer.Schedule(every=None), outer=outer.Average)


def random_tma(every: int | str = 10) -> Method:
    """Weights averaged among all; each trains on random nodes of a graph, and the edges among them.

    Paper: Zhu and others 2023, arXiv 2305.09887
    """
    return _tma(every, "random")


def super_tma(every: int | str = 10) -> Method:
    """Weights averaged among all; each trains on random clusters of a graph's nodes, which keep most of the edges.

    Paper: Zhu and others 2023, arXiv 2305.09887
    """
    return _tma(every, "super")


def _tma(every: int | str, cut: str) -> Method:
    return outer.Method(outer.Schedule(every), outer=outer.Average, inner=inner.ADAMW, cut=cut)


def ist(
    every: int | str = 50, group_size: int | None = None, codec: Codec | str | None = None, seed: int = 0
) -> Method:
    """Each replica trains some heads and FFN columns of every layer, dealt anew in each round; the rest is averaged.

    Paper: Yuan and others 2019, arXiv 1910.02120
    """
    return replace(_mean(every, group_size, codec, seed), dealing=subnets.DealtUnits("heads", seed))


def resist(
    every: int | str = 50, group_size: int | None = None, codec: Codec | str | None = None, seed: int = 0
) -> Method:
    """Each replica trains some of the layers, dealt anew in each round; embeddings, last norm and head are averaged.

    Paper: Dun and others 2021, arXiv 2107.00961
    """
    return replace(_mean(every, group_size, codec, seed), dealing=subnets.DealtUnits("layers", seed))


def _mean(every: int | str, group_size: int | None, codec: Codec | str | None, seed: int) -> Method:
    """The plain mean of a group's weights: an outer optimizer that takes the mean progress as it is."""
    if group_size is None:
        return diloco(every, outer_lr=1.0, outer_momentum=0.0, codec=codec)
    return noloco(every, 1.0, 0.0, 1.0, group_size, codec=codec, seed=seed)
