"""Gradients, or the like, averaged before every inner step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from farflung import codecs, outer
from farflung.lazy import Later
from farflung.methods.limits import codec_of

if TYPE_CHECKING:
    from farflung import inner
    from farflung.codecs import Codec
    from farflung.outer import Method, Way
else:
    inner = Later("farflung.inner")


def ddp(codec: Codec | str | None = None) -> Method:
    """Synchronous training: gradients averaged among all before every inner step; the yardstick.

    Paper: Li and others 2020, arXiv 2006.15704
    """
    return outer.Method(outer.Schedule(every=1), codec=codec_of(codec, codecs.Dense()))


def demo(averaging: Way = "whole") -> Method:
    """The fast-moving part of a momentum, by its largest frequencies, before every step; then only signs count.

    Paper: Peng and others 2024, arXiv 2411.19870
    """
    codec = codecs.ErrorFeedback(codecs.BlockDCT(chunk=64) | codecs.TopK(share=32 / 4096, chunk=4096), decay=0.999)
    return outer.Method(
        outer.Schedule(every=1), codec=codec, averaging=averaging, inner=inner.SIGN, needs_inner=inner.SignSGD
    )


def dynamic_threshold(codec: Codec | str | None = None, averaging: Way = "whole") -> Method:
    """Synchronous training with the largest 1 % of the gradient, by a threshold that is set now and then.

    Paper: Gupta and others 2020, arXiv 2010.08899
    """
    return outer.Method(
        outer.Schedule(every=1),
        codec=codec_of(codec, codecs.ErrorFeedback(codecs.Threshold(share=0.01))),
        averaging=averaging,
    )
