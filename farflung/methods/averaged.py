"""DiLoCo and its kin: pseudo-gradients averaged among all, and an outer step of momentum."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from farflung import codecs, outer
from farflung.lazy import Later
from farflung.methods.limits import check_limits, codec_of, nesterov

if TYPE_CHECKING:
    from farflung import inner
    from farflung.codecs import Codec
    from farflung.outer import Method, Way
else:
    inner = Later("farflung.inner")


def diloco(
    every: int | str = 50,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.5,
    delay: int | str = 0,
    fragments: int = 1,
    group_size: int | None = None,
    codec: Codec | str | None = None,
    merge: str = "kept",
    seed: int = 0,
) -> Method:
    """Pseudo-gradients averaged every few inner steps, among all or in random groups, and an outer Nesterov step.

    Paper: Douillard and others 2023, arXiv 2311.08105
    """
    return outer.Method(
        schedule=outer.Schedule(every, fragments, delay),
        topology=outer.Everyone() if group_size is None else outer.RandomGroups(group_size, seed),
        averaging="parts" if group_size is None else "whole",
        codec=codec_of(codec, codecs.Dense()),
        outer=nesterov(outer_lr, outer_momentum),
        merge=outer.merge_named(merge),
    )


def streaming_diloco(
    every: int | str = 50,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.5,
    delay: int | str = 2,
    fragments: int = 3,
    codec: Codec | str | None = None,
    merge: str = "kept",
) -> Method:
    """DiLoCo in fragments with rounds of their own, 4 bits a value, applied some steps after they start.

    Paper: Douillard and others 2025, arXiv 2501.18512
    """
    codec = codec_of(codec, codecs.BlockFloat("e3m0"))
    return diloco(every, outer_lr, outer_momentum, delay, fragments, codec=codec, merge=merge)


def decoupled_diloco(
    every: int | str = 24,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.5,
    delay: int | str = 2,
    fragments: int = 3,
    codec: Codec | str | None = None,
    quorum: int = 1,
) -> Method:
    """Fragments with rounds of their own, for which nobody waits; lengths and directions averaged apart, by a quorum.

    Paper: 2026, Decoupled DiLoCo, arXiv 2604.21428
    """
    check_limits(quorum=quorum)
    method = diloco(every, outer_lr, outer_momentum, delay, fragments, codec=codec)
    return replace(method, fuse="rda", quorum=quorum)


def eager_diloco(
    every: int | str = 50, outer_lr: float = 0.7, outer_momentum: float = 0.5, codec: Codec | str | None = None
) -> Method:
    """DiLoCo with exchanges that take a whole round; a replica's own part of the mean is always fresh.

    Paper: Kale and others 2025, arXiv 2502.12996
    """
    return diloco(every, outer_lr, outer_momentum, delay=every, codec=codec, merge="eager")


def dilocox(
    every: int | str = 125,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.5,
    codec: Codec | str | None = None,
    merge: str = "kept",
    adapt: bool = True,
) -> Method:
    """DiLoCo with exchanges that take a whole round, of low rank in 4 bits, which shrink as training goes on.

    Paper: Qi and others 2025, arXiv 2506.21263
    """
    return outer.Method(
        schedule=outer.Schedule(every, delay=every),
        codec=codec_of(codec, codecs.ErrorFeedback(codecs.LowRank(rank=64) | codecs.Quantize(bits=4))),
        outer=nesterov(outer_lr, outer_momentum),
        merge=outer.merge_named(merge),
        adapt=outer.Adapt() if adapt else None,
    )


def des_loc(every: int | str = 50) -> Method:
    """Weights averaged among all, and the inner optimizer's moments, too, at every third and sixth round.

    Paper: Iacob and others 2025, DES-LOC, arXiv 2505.22549
    """
    moments = outer.AveragedMoments((("exp_avg", 3), ("momentum_buffer", 3), ("exp_avg_sq", 6)))
    return outer.Method(outer.Schedule(every), outer=outer.Average, inner=inner.ADAMW, companions=(moments,))


def gpa(every: int | str = 50, codec: Codec | str | None = None) -> Method:
    """Inner steps that look ahead by primal averaging, in place of outer ones; only the fast weights are averaged.

    Paper: 2025, Generalized Primal Averaging, arXiv 2512.17131
    """
    return outer.Method(
        outer.Schedule(every),
        codec=codec_of(codec, codecs.Dense()),
        outer=nesterov(lr=1.0, momentum=0.0),
        inner=inner.GPA,
        needs_inner=inner.PrimalAveraging,
        companions=(outer.FastWeights(),),
    )


def sparta(every: int | str = 1, codec: Codec | str | None = None) -> Method:
    """A random 0.5 % of the weights averaged among all in every step; the rest goes its own way until its turn comes.

    Paper: Beton and others 2025, SPARTA (EXO Labs)
    """
    return outer.Method(
        schedule=outer.Schedule(every),
        codec=codec_of(codec, codecs.Sampled(share=0.005)),
        outer=nesterov(lr=1.0, momentum=0.0),
        merge=outer.merge_named("sent"),
    )


def sparseloco(
    every: int | str = 50, outer_lr: float = 1.0, codec: Codec | str | None = None, averaging: Way = "whole"
) -> Method:
    """DiLoCo without outer momentum: the largest 2 % of the pseudo-gradient in 2 bits, the rest fed back.

    Paper: Sarfi and others 2025, arXiv 2508.15706
    """
    return outer.Method(
        schedule=outer.Schedule(every),
        codec=codec_of(codec, codecs.ErrorFeedback(codecs.TopK(share=0.02) | codecs.Quantize(bits=2), decay=0.95)),
        outer=nesterov(outer_lr, momentum=0.0),
        averaging=averaging,
    )
