"""Floor 4: every published method, as a recipe of choices on shared parts."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from farflung.codecs import Codec, Dense
from farflung.config import Config, UserError, suggestion
from farflung.networks import Network
from farflung.outer import (
    Attached,
    Average,
    Everyone,
    GossipNesterov,
    GradientLoop,
    OuterFactory,
    OuterLoop,
    RandomGroups,
    Round,
    Schedule,
    Topology,
)


@dataclass(frozen=True)
class Method:
    """The choices that make a method.

    Args:
        schedule: when rounds start and land.
        topology: who averages with whom.
        codec: how a message becomes bytes.
        outer: makes the outer optimizer of the anchors; None keeps no anchors and averages gradients before each
            inner step instead.
    """

    schedule: Schedule
    topology: Topology = field(default_factory=Everyone)
    codec: Codec = field(default_factory=Dense)
    outer: OuterFactory | None = None

    def attach(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        network: Network,
        *,
        outer_device: torch.device | str | None = None,
        deadline: float = 120.0,
        on_round: Callable[[Round], None] | None = None,
    ) -> Attached:
        """Hooks the method to the steps of an inner optimizer, for use in a `with` statement. See OuterLoop."""
        if self.outer is None:
            return GradientLoop(
                model,
                optimizer,
                network,
                topology=self.topology,
                codec=self.codec,
                deadline=deadline,
                on_round=on_round,
            )
        return OuterLoop(
            model,
            optimizer,
            network,
            schedule=self.schedule,
            topology=self.topology,
            codec=self.codec,
            outer=self.outer,
            outer_device=outer_device,
            deadline=deadline,
            on_round=on_round,
        )


def ddp() -> Method:
    """Synchronous training: gradients averaged among all before every inner step; the yardstick.

    Paper: Li and others 2020, arXiv 2006.15704
    """
    return Method(Schedule(every=1))


def local() -> Method:
    """No exchange at all: each replica trains alone on its share of the data; the lower bound.

    Paper: none
    """
    return Method(Schedule(every=None), outer=Average)


def diloco(
    every: int = 50, outer_lr: float = 0.7, outer_momentum: float = 0.9, delay: int = 0, fragments: int = 1
) -> Method:
    """Pseudo-gradients averaged among all every few inner steps, and an outer Nesterov step on the mean.

    Paper: Douillard and others 2023, arXiv 2311.08105
    """
    return Method(
        schedule=Schedule(every, fragments, delay),
        topology=Everyone(),
        outer=partial(torch.optim.SGD, lr=outer_lr, momentum=outer_momentum, nesterov=outer_momentum > 0, fused=True),
    )


def noloco(
    every: int = 50,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.5,
    gamma: float = 0.7,
    group_size: int = 2,
    delay: int = 0,
    fragments: int = 1,
    seed: int = 0,
) -> Method:
    """Averages in random pairs only, with a pull that keeps the pairs' anchors together; no all-reduce.

    Paper: Kolehmainen and others 2025, arXiv 2506.10911
    """
    return Method(
        schedule=Schedule(every, fragments, delay),
        topology=RandomGroups(group_size, seed),
        outer=partial(GossipNesterov, lr=outer_lr, momentum=outer_momentum, gamma=gamma),
    )


RECIPES: dict[str, Callable[..., Method]] = {recipe.__name__: recipe for recipe in (noloco, diloco, ddp, local)}
"""The methods that the command line offers, by name."""

_METHOD_SETTINGS = ("every", "delay", "fragments", "outer_lr", "outer_momentum", "gamma", "group_size")


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
    for key in given:
        if key not in known:
            settings = ", ".join(name for name in _METHOD_SETTINGS if name in known) or "none"
            raise UserError(f"{config.method} has no setting {key}; remove it (its settings: {settings})")
    if "seed" in known:
        given["seed"] = config.seed
    return RECIPES[config.method](**given)
