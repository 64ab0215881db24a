"""Floor 4: every published method, as a recipe of choices on shared parts.

Defaults are the papers', but for outer momenta: 0.5 in all of the DiLoCo family, whose 0.9 is for runs of hundreds of
rounds and did worse than no exchange at all in shorter ones (docs/evidence.md, "The gap", and docs/measured.md).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, make_dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typing_extensions import Doc

from farflung import codecs, outer, subnets
from farflung.durations import seconds_of, ticks_of
from farflung.errors import UserError
from farflung.lazy import Later, homes_of
from farflung.registry import Registry
from farflung.renamed import renamed
from farflung.tables import BETWEEN_MACHINES, Checked, rule_of, setting

if TYPE_CHECKING:
    import torch

    from farflung import inner
    from farflung.codecs import Codec
    from farflung.outer import Method, OuterFactory, Way
else:
    torch, inner = Later("torch"), Later("farflung.inner")


@dataclass(frozen=True)
class RoundSettings(Checked):
    """How the replicas work together; `farflung methods` shows each method's settings and defaults."""

    method: str = "noloco"
    """The method: see `farflung methods`."""
    every: int | str | None = setting(None, least=1)
    """Inner steps between two rounds, or by the clock: 30s, 2min. What is unset here has the method's own default."""
    delay: int | str | None = setting(None, least=0)
    """Inner steps, or by the clock a time, between a round's start and the moment its result is applied."""
    fragments: int | None = setting(None, least=1)
    """Parts that the model is split into; each is exchanged in its own rounds."""
    outer_lr: float | None = setting(None, above=0)
    """Learning rate of the outer optimizer."""
    outer_momentum: float | None = setting(None, least=0, below=1)
    """Momentum of the outer optimizer."""
    codec: str | None = None
    """How messages become bytes, such as int8, modulo4, topk2-int2 or ef-lowrank64-int4 (see `farflung methods`)."""
    merge: Literal["kept", "dropped", "mixed", "eager"] | None = None
    """What happens to the steps that a replica trains during a round."""
    adapt: bool | None = None
    """Adapt compression and the steps between rounds to the effective rank of the messages."""
    gamma: float | None = setting(None, least=0)
    """How strongly the anchors of a group are pulled together (noloco)."""
    group_size: int | None = setting(None, least=2)
    """Replicas that average with each other in a round (noloco, diloco, ist, resist)."""
    averaging: Literal["whole", "parts"] | None = None
    """How groups of more than two average. whole: all-gather, as published; parts: reduce-scatter, fewer bytes."""
    weighting: Literal["even", "steps"] | None = None
    """What a message weighs in the mean: the same, or the steps behind it. Unset: even; on the internet, steps."""
    every_final: int | None = setting(None, least=1)
    """Inner steps between two rounds at the end of the run; --every grows or shrinks to it by a constant factor."""
    robust: Literal["mean", "median", "clipped"] = "mean"
    """How groups on the internet average. median and clipped stay right where a minority sends wrong messages."""
    outer_device: Literal["model", "cpu"] = setting("model", may_differ=BETWEEN_MACHINES)
    """Where anchors and outer momentum are kept: beside the model, or on the CPU."""

    def __post_init__(self) -> None:
        """Takes a method's present name for an old one. Raises UserError for values out of their limits."""
        if isinstance(self.method, str):
            object.__setattr__(self, "method", RECIPES.current(self.method))
            RECIPES.check_known(self.method)
        super().__post_init__()
        for name in ("every", "delay"):
            if isinstance(given := getattr(self, name), str):
                ticks_of(name, seconds_of(name, given))

    def given(self) -> dict[str, Any]:
        """What was chosen for the method; what it is to take its own default for is left out."""
        owned = _OWNED | defaults_of(self.method).keys()
        return {name: value for name, value in vars(self).items() if name in owned and value is not None}

    def of_method(self, name: str) -> RoundSettings:
        """The same for another method; one of another package may take settings of its own besides."""
        kind: type = RoundSettings
        taken = {one.name for one in fields(RoundSettings)} | {"seed"}
        if defaults_of(name).keys() - taken:
            parameters = inspect.signature(RECIPES[name], eval_str=True).parameters.values()
            plain = [one for one in parameters if one.name not in taken and one.annotation in (int, float, bool, str)]
            told = Doc(f"A setting of {name}; unset: its own default.")
            more = [(one.name, Annotated[one.annotation | None, told], None) for one in plain]
            kind = make_dataclass("RoundSettings", more, bases=(RoundSettings,), frozen=True)
        usual = {one.name: getattr(self, one.name) for one in fields(RoundSettings)}
        made: RoundSettings = kind(**usual | {"method": name})
        return made


def ddp(codec: Codec | str | None = None) -> Method:
    """Synchronous training: gradients averaged among all before every inner step; the yardstick.

    Paper: Li and others 2020, arXiv 2006.15704
    """
    return outer.Method(outer.Schedule(every=1), codec=_codec(codec, codecs.Dense()))


def local() -> Method:
    """No exchange at all: each replica trains alone on its share of the data; the lower bound.

    Paper: none
    """
    return outer.Method(outer.Schedule(every=None), outer=outer.Average)


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
        codec=_codec(codec, codecs.Dense()),
        outer=_nesterov(outer_lr, outer_momentum),
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
    codec = _codec(codec, codecs.BlockFloat("e3m0"))
    return diloco(every, outer_lr, outer_momentum, delay, fragments, codec=codec, merge=merge)


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
        codec=_codec(codec, codecs.ErrorFeedback(codecs.LowRank(rank=64) | codecs.Quantize(bits=4))),
        outer=_nesterov(outer_lr, outer_momentum),
        merge=outer.merge_named(merge),
        adapt=outer.Adapt() if adapt else None,
    )


def sparseloco(
    every: int | str = 50, outer_lr: float = 1.0, codec: Codec | str | None = None, averaging: Way = "whole"
) -> Method:
    """DiLoCo without outer momentum: the largest 2 % of the pseudo-gradient in 2 bits, the rest fed back.

    Paper: Sarfi and others 2025, arXiv 2508.15706
    """
    return outer.Method(
        schedule=outer.Schedule(every),
        codec=_codec(codec, codecs.ErrorFeedback(codecs.TopK(share=0.02) | codecs.Quantize(bits=2), decay=0.95)),
        outer=_nesterov(outer_lr, momentum=0.0),
        averaging=averaging,
    )


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
        codec=_codec(codec, codecs.ErrorFeedback(codecs.Threshold(share=0.01))),
        averaging=averaging,
    )


def noloco(
    every: int | str = 50,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.5,
    gamma: float = 0.7,
    group_size: int = 2,
    delay: int | str = 0,
    fragments: int = 1,
    codec: Codec | str | None = None,
    merge: str = "kept",
    seed: int = 0,
) -> Method:
    """Averages in random pairs only, with a pull that keeps the pairs' anchors together; no all-reduce.

    Paper: Kolehmainen and others 2025, arXiv 2506.10911
    """
    codec = _codec(codec, codecs.Dense())
    _check_limits(outer_lr=outer_lr, outer_momentum=outer_momentum, gamma=gamma)
    # Rounding must be in proportion to what is new, and whole anchors are not: modulo sends what differs of them.
    together = codec.traits.keeps_weights
    if not (together or codec.traits.halves):
        codec = codecs.SplitCodec(codec, codecs.Modulo(bits=4, round_robin=2))
    kind = outer.GossipNesterov if together else outer.SplitGossip
    return outer.Method(
        schedule=outer.Schedule(every, fragments, delay),
        topology=outer.RandomGroups(group_size, seed),
        codec=codec,
        outer=partial(kind, lr=outer_lr, momentum=outer_momentum, gamma=gamma),
        merge=outer.merge_named(merge),
        averaging="whole",
    )


def nolocox(
    every: int | str = 125,
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
    codec = _codec(codec, codecs.Modulo(bits=3, round_robin=2))
    method = noloco(every, outer_lr, outer_momentum, gamma, delay=every, codec=codec, merge=merge, seed=seed)
    return replace(method, adapt=outer.Adapt(steps=False) if adapt else None)


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


def _codec(given: Codec | str | None, usual: Codec) -> Codec:
    """A codec, or the one of a name; the usual one where none is given. Raises UserError."""
    return usual if given is None else codecs.as_codec(given)


def _check_limits(**chosen: float) -> None:
    """Refuses settings of an outer optimizer that are out of the limits in RoundSettings. Raises UserError."""
    for one in fields(RoundSettings):
        rule_of(one).check(one.name, chosen.get(one.name))


def _nesterov(lr: float, momentum: float) -> OuterFactory:
    _check_limits(outer_lr=lr, outer_momentum=momentum)
    return partial(torch.optim.SGD, lr=lr, momentum=momentum, nesterov=momentum > 0, fused=True)


_ALL = (
    *(noloco, nolocox, diloco, dilocox, streaming_diloco, eager_diloco, sparseloco, demo, dynamic_threshold),
    *(random_tma, super_tma, ist, resist, ddp, local),
)


def _check_recipe(recipe: Callable[..., Method]) -> None:
    if not isinstance(made := recipe(), outer.Method):
        raise TypeError(f"it makes {made!r}, which is no farflung.Method")
    inspect.signature(recipe, eval_str=True)


RECIPES: Registry[Callable[..., Method]] = Registry(
    "method",
    {recipe.__name__.replace("_", "-"): recipe for recipe in _ALL},
    _check_recipe,
    renamed={"dct": "dynamic-threshold"},
)
"""The methods that the command line offers, by name."""

_OWNED = {name for recipe in _ALL for name in inspect.signature(recipe).parameters}


__getattr__ = renamed(__name__, {"dct": "dynamic_threshold", "settings_of": "defaults_of"}, homes_of(__file__))


def defaults_of(name: str) -> dict[str, Any]:
    """A method's settings and their defaults. Raises UserError for a name that is none."""
    parameters = inspect.signature(RECIPES[name]).parameters
    return {key: one.default for key, one in parameters.items() if one.default is not one.empty}


def chosen(rounds: RoundSettings, seed: int = 0, steps: int = 0) -> Method:
    """The method that the settings name, with those of its settings that are not left at its defaults.

    `steps` are the inner steps of the whole run, which `every_final` is about. Raises UserError for a setting that the
    method does not have.
    """
    known, given = defaults_of(rounds.method), rounds.given()
    asked = [*given, *(["every_final"] if rounds.every_final is not None else [])]
    for name in asked:
        if name not in known and not (name == "every_final" and "every" in known):
            settings = ", ".join(setting for setting in vars(rounds) if setting in known) or "none"
            raise UserError(f"{rounds.method} has no setting {name}; remove it (its settings: {settings})")
    if "codec" in given:
        given["codec"] = codecs.codec_named(given["codec"])
    if "seed" in known:
        given["seed"] = seed
    method = RECIPES[rounds.method](**given)
    if rounds.every_final is not None:
        method = replace(method, schedule=replace(method.schedule, final=rounds.every_final, steps=steps))
    return method
