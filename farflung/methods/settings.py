"""The settings of rounds, and the method that they choose."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, fields, make_dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typing_extensions import Doc

from farflung import codecs, outer
from farflung.durations import seconds_of, ticks_of
from farflung.errors import UserError
from farflung.methods.limits import LIMITS
from farflung.methods.recipes import OWNED, RECIPES, defaults_of
from farflung.tables import BETWEEN_MACHINES, Checked, limited, setting

if TYPE_CHECKING:
    from farflung.outer import Method

OF_MOMENTUM = frozenset({"outer_momentum_warmup", "outer_momentum_final"})
"""Settings of how the outer momentum changes."""


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
    outer_lr: float | None = limited(None, LIMITS["outer_lr"])
    """Learning rate of the outer optimizer."""
    outer_momentum: float | None = limited(None, LIMITS["outer_momentum"])
    """Momentum of the outer optimizer."""
    outer_momentum_warmup: int | None = setting(None, least=1)
    """Inner steps in which the outer momentum rises from 0; unset: none."""
    outer_momentum_final: float | None = limited(None, LIMITS["outer_momentum"])
    """The outer momentum at the end of the run, to which it falls along a line; unset: it stays."""
    codec: str | None = None
    """How messages become bytes, such as int8, modulo4, topk2-int2 or ef-lowrank64-int4 (see `farflung methods`)."""
    merge: Literal["kept", "dropped", "mixed", "eager", "sent", "turned"] | None = None
    """What happens to the steps that a replica trains during a round."""
    adapt: bool | None = None
    """Adapt compression and the steps between rounds to the effective rank of the messages."""
    gamma: float | None = limited(None, LIMITS["gamma"])
    """How strongly the anchors of a group are pulled together (noloco, gasloc)."""
    group_size: int | None = limited(None, LIMITS["group_size"])
    """Replicas that average with each other in a round (noloco, diloco, ist, resist)."""
    averaging: Literal["whole", "parts"] | None = None
    """How groups of more than two average. whole: all-gather, as published; parts: reduce-scatter, fewer bytes."""
    weighting: Literal["even", "steps"] | None = None
    """What a message weighs in the mean: the same, or the steps behind it. Unset: even; on the internet, steps."""
    fuse: Literal["mean", "rda"] | None = None
    """How pseudo-gradients become one; rda: the mean of their lengths, along the mean of their directions."""
    quorum: int | None = limited(None, LIMITS["quorum"])
    """Peers on the internet or in a folder that must come to a round; with fewer it counts for nobody."""
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
        owned = OWNED | defaults_of(self.method).keys()
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


def chosen(rounds: RoundSettings, seed: int = 0, steps: int = 0) -> Method:
    """The method that the settings name, with those of its settings that are not left at its defaults.

    `steps` are the inner steps of the whole run, which `every_final` and the outer momentum are about. Raises UserError
    for a setting that the method does not have.
    """
    known, given = defaults_of(rounds.method), rounds.given()
    for name, needs in {**{name: name for name in given}, **_of_others(rounds)}.items():
        if needs not in known:
            settings = ", ".join(setting for setting in vars(rounds) if setting in known) or "none"
            raise UserError(f"{rounds.method} has no setting {name}; remove it (its settings: {settings})")
    if "codec" in given:
        given["codec"] = codecs.codec_named(given["codec"])
    if "seed" in known:
        given["seed"] = seed
    momentum = _momentum(rounds, given.get("outer_momentum", known.get("outer_momentum")), steps)
    if momentum:  # with none at all an outer optimizer would be one without, which keeps none and does not look ahead
        given["outer_momentum"] = momentum.highest or momentum.final
    method = RECIPES[rounds.method](**given)
    method = replace(method, fuse=rounds.fuse or method.fuse)
    if rounds.every_final is not None:
        method = replace(method, schedule=replace(method.schedule, final=rounds.every_final, steps=steps))
    if momentum:
        method = replace(method, momentum=momentum)
    return method


def _momentum(rounds: RoundSettings, highest: float | None, steps: int) -> outer.MomentumSchedule | None:
    """How the outer momentum changes; None where it stays. Raises UserError where it would stay 0."""
    warmup, final = rounds.outer_momentum_warmup, rounds.outer_momentum_final
    if highest is None or (warmup is None and final is None):
        return None
    if not (highest or final):
        name = "outer_momentum_final" if warmup is None else "outer_momentum_warmup"
        told = f"{name} is {getattr(rounds, name)}, but outer_momentum is 0 and stays so"
        raise UserError(f"{told}; give another outer_momentum, or leave {name} out")
    return outer.MomentumSchedule(highest, warmup or 0, final, steps)


def _of_others(rounds: RoundSettings) -> dict[str, str]:
    """Chosen settings that say how another one changes in the course of a run, with that one's name."""
    changes = {"every_final": "every"} | dict.fromkeys(OF_MOMENTUM, "outer_momentum")
    return {name: of for name, of in changes.items() if getattr(rounds, name) is not None}
