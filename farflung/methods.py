"""Floor 4: every published method, as a recipe of choices on shared parts.

Defaults are the papers', but for outer momenta: 0.5 in all of the DiLoCo family, whose 0.9 is for runs of hundreds of
rounds and did worse than no exchange at all in shorter ones (docs/evidence.md, "The gap", and the README's table).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from farflung.codecs import (
    BlockDCT,
    BlockFloat,
    Codec,
    Dense,
    ErrorFeedback,
    LowRank,
    Modulo,
    Quantize,
    SplitCodec,
    Threshold,
    TopK,
    codec_named,
)
from farflung.config import Config
from farflung.errors import UserError, suggestion
from farflung.inner import ADAMW, INNER, MUON, SIGN
from farflung.outer import (
    Adapt,
    Average,
    Everyone,
    GossipApart,
    GossipNesterov,
    Method,
    OuterFactory,
    RandomGroups,
    Schedule,
    Way,
    merge_named,
)


def ddp(codec: Codec | str | None = None) -> Method:
    """Synchronous training: gradients averaged among all before every inner step; the yardstick.

    Paper: Li and others 2020, arXiv 2006.15704
    """
    return Method(Schedule(every=1), codec=_codec(codec, Dense()))


def local() -> Method:
    """No exchange at all: each replica trains alone on its share of the data; the lower bound.

    Paper: none
    """
    return Method(Schedule(every=None), outer=Average)


def diloco(
    every: int = 50,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.5,
    delay: int = 0,
    fragments: int = 1,
    group_size: int | None = None,
    codec: Codec | str | None = None,
    merge: str = "kept",
    seed: int = 0,
) -> Method:
    """Pseudo-gradients averaged every few inner steps, among all or in random groups, and an outer Nesterov step.

    Paper: Douillard and others 2023, arXiv 2311.08105
    """
    return Method(
        schedule=Schedule(every, fragments, delay),
        topology=RandomGroups(group_size, seed) if group_size else Everyone(),
        averaging="whole" if group_size else "parts",
        codec=_codec(codec, Dense()),
        outer=_nesterov(outer_lr, outer_momentum),
        merge=merge_named(merge),
    )


def streaming_diloco(
    every: int = 50,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.5,
    delay: int = 2,
    fragments: int = 3,
    codec: Codec | str | None = None,
    merge: str = "kept",
) -> Method:
    """DiLoCo in fragments with rounds of their own, 4 bits a value, which land some steps after they start.

    Paper: Douillard and others 2025, arXiv 2501.18512
    """
    codec = _codec(codec, BlockFloat("e3m0"))
    return diloco(every, outer_lr, outer_momentum, delay, fragments, codec=codec, merge=merge)


def eager_diloco(
    every: int = 50, outer_lr: float = 0.7, outer_momentum: float = 0.5, codec: Codec | str | None = None
) -> Method:
    """DiLoCo with exchanges that take a whole round; a replica's own part of the mean is always fresh.

    Paper: Kale and others 2025, arXiv 2502.12996
    """
    return diloco(every, outer_lr, outer_momentum, delay=every, codec=codec, merge="eager")


def dilocox(
    every: int = 125,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.5,
    codec: Codec | str | None = None,
    merge: str = "kept",
    adapt: bool = True,
) -> Method:
    """DiLoCo with exchanges that take a whole round, of low rank in 4 bits, which shrink as training goes on.

    Paper: Qi and others 2025, arXiv 2506.21263
    """
    return Method(
        schedule=Schedule(every, delay=every),
        codec=_codec(codec, ErrorFeedback(LowRank(rank=64) | Quantize(bits=4))),
        outer=_nesterov(outer_lr, outer_momentum),
        merge=merge_named(merge),
        adapt=Adapt() if adapt else None,
    )


def sparseloco(
    every: int = 50, outer_lr: float = 1.0, codec: Codec | str | None = None, averaging: Way = "whole"
) -> Method:
    """DiLoCo without outer momentum: the largest 2 % of the pseudo-gradient in 2 bits, the rest fed back.

    Paper: Sarfi and others 2025, arXiv 2508.15706
    """
    return Method(
        schedule=Schedule(every),
        codec=_codec(codec, ErrorFeedback(TopK(share=0.02) | Quantize(bits=2), decay=0.95)),
        outer=_nesterov(outer_lr, momentum=0.0),
        averaging=averaging,
    )


def demo(averaging: Way = "whole") -> Method:
    """The fast-moving part of a momentum, by its largest frequencies, before every step; then only signs count.

    Paper: Peng and others 2024, arXiv 2411.19870
    """
    codec = ErrorFeedback(BlockDCT(chunk=64) | TopK(share=32 / 4096, chunk=4096), decay=0.999)
    return Method(Schedule(every=1), codec=codec, averaging=averaging, inner=SIGN)


def dct(codec: Codec | str | None = None, averaging: Way = "whole") -> Method:
    """Synchronous training with the largest 1 % of the gradient, by a threshold that is set now and then.

    Paper: Gupta and others 2020, arXiv 2010.08899
    """
    return Method(Schedule(every=1), codec=_codec(codec, ErrorFeedback(Threshold(share=0.01))), averaging=averaging)


def noloco(
    every: int = 50,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.5,
    gamma: float = 0.7,
    group_size: int = 2,
    delay: int = 0,
    fragments: int = 1,
    codec: Codec | str | None = None,
    merge: str = "kept",
    seed: int = 0,
) -> Method:
    """Averages in random pairs only, with a pull that keeps the pairs' anchors together; no all-reduce.

    Paper: Kolehmainen and others 2025, arXiv 2506.10911
    """
    codec = _codec(codec, Dense())
    # Rounding must be in proportion to what is new, and whole anchors are not: modulo sends what differs of them.
    together = codec.traits.lossless or codec.traits.needs_receiver
    return Method(
        schedule=Schedule(every, fragments, delay),
        topology=RandomGroups(group_size, seed),
        codec=codec if together else SplitCodec(codec, Modulo(bits=4, round_robin=2)),
        outer=partial(GossipNesterov if together else GossipApart, lr=outer_lr, momentum=outer_momentum, gamma=gamma),
        merge=merge_named(merge),
        averaging="whole",
    )


def nolocox(
    every: int = 125,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.5,
    gamma: float = 0.7,
    codec: Codec | str | None = None,
    merge: str = "kept",
    adapt: bool = True,
    seed: int = 0,
) -> Method:
    """NoLoCo's random pairs with DiLoCoX's overlap, compression and adaptation: nobody waits, few bytes.

    Paper: none; both arXiv 2506.10911 and arXiv 2506.21263
    """
    codec = _codec(codec, Modulo(bits=3, round_robin=2))
    method = noloco(every, outer_lr, outer_momentum, gamma, delay=every, codec=codec, merge=merge, seed=seed)
    return replace(method, adapt=Adapt(steps=False) if adapt else None)


def _codec(given: Codec | str | None, usual: Codec) -> Codec:
    """A codec, or the one of a name; the usual one where none is given. Raises UserError."""
    return codec_named(given) if isinstance(given, str) else given or usual


def _nesterov(lr: float, momentum: float) -> OuterFactory:
    return partial(torch.optim.SGD, lr=lr, momentum=momentum, nesterov=momentum > 0, fused=True)


_ALL = (noloco, nolocox, diloco, dilocox, streaming_diloco, eager_diloco, sparseloco, demo, dct, ddp, local)

RECIPES: dict[str, Callable[..., Method]] = {recipe.__name__.replace("_", "-"): recipe for recipe in _ALL}
"""The methods that the command line offers, by name."""

_METHOD_SETTINGS = (
    *("every", "delay", "fragments", "outer_lr", "outer_momentum", "codec", "merge", "adapt", "gamma", "group_size"),
    *("averaging",),
)


def settings_of(name: str) -> dict[str, Any]:
    """A method's settings and their defaults. Raises UserError for a name that is none."""
    if name not in RECIPES:
        raise UserError(f"there is no method {name!r}{suggestion(name, list(RECIPES))}")
    parameters = inspect.signature(RECIPES[name]).parameters
    return {key: parameter.default for key, parameter in parameters.items()}


def from_config(config: Config) -> Method:
    """The method that the settings name, with those of its settings that are not left at its defaults.

    Raises UserError for a setting that the method does not have.
    """
    known = settings_of(config.method)
    given = {key: value for key in _METHOD_SETTINGS if (value := getattr(config, key)) is not None}
    unknown = [key for key in given if key not in known]
    if config.every_final is not None and "every" not in known:
        unknown.append("every_final")
    if unknown:
        settings = ", ".join(name for name in _METHOD_SETTINGS if name in known) or "none"
        raise UserError(f"{config.method} has no setting {unknown[0]}; remove it (its settings: {settings})")
    if "codec" in given:
        given["codec"] = codec_named(given["codec"])
    if "seed" in known:
        given["seed"] = config.seed
    method = RECIPES[config.method](**given)
    if config.every_final is not None:
        method = replace(method, schedule=replace(method.schedule, final=config.every_final, steps=config.steps))
    if config.inner is None and method.inner is MUON and config.shard > 1:
        return replace(method, inner=ADAMW)  # Muon needs whole matrices
    return replace(method, inner=INNER[config.inner]) if config.inner else method


def settled(config: Config) -> Config:
    """The settings with the inner optimizer and the learning rate that a run takes where they do not say."""
    inner = from_config(config).inner
    name = next(name for name, known in INNER.items() if known is inner)
    return replace(config, inner=name, lr=config.lr or inner.lr)  # type: ignore[arg-type]
