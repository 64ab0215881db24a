"""What a core can be: of low rank in each matrix, or some heads and FFN columns of each layer.

Paper: Simultaneous training of partially masked neural networks, arXiv 2106.08895.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from farflung.errors import UserError
from farflung.joint.branches import ATTENTION, FEED_FORWARD, branches, head_groups, refuse_shared
from farflung.joint.maps import REST, FirstColumns, FirstRows, LowRankMap, maps_of

SPREAD = 0.02
"""The standard deviation of a matrix's first values where a model's configuration does not say."""


class Core(Protocol):
    """A part of a model that computes without the rest."""

    def divide(self, model: nn.Module) -> None:
        """Has a model's matrices say what of them is the core's, in place. Raises UserError where that cannot be."""

    def ordinary(self, weights: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
        """The core's weights under the names of an ordinary model; the divided `model`'s own are not used."""

    def narrow(self, config: Any) -> None:
        """Makes a transformers configuration, in place, that of this ordinary model."""


@dataclass(frozen=True)
class LowRank:
    """y = U V x is the core of each matrix of a layer, and W x the rest, which is added. All else is the core's."""

    rank: int

    def divide(self, model: nn.Module) -> None:
        """See Core."""
        spread = getattr(getattr(model, "config", None), "initializer_range", SPREAD)
        for name, branch, maps in _found(model):
            for one in maps:
                linear: nn.Linear = getattr(branch, one)
                most = min(linear.in_features, linear.out_features) - 1
                if self.rank > most:
                    raise UserError(
                        f"core is lowrank{self.rank}, but {name}.{one} is {linear.out_features} x "
                        f"{linear.in_features}, and a core must be narrower; choose at most lowrank{most}"
                    )
                setattr(branch, one, LowRankMap(linear, self.rank, spread))

    def ordinary(self, weights: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
        """See Core: with the products U V, of the whole model's shapes."""
        found = _beside_maps(weights, model)
        for name, one in maps_of(model).items():
            assert isinstance(one, LowRankMap)
            found |= one.product(weights, name)
        return found

    def narrow(self, config: Any) -> None:
        """See Core: that of the whole model."""


@dataclass(frozen=True)
class Heads:
    """The first query heads of each layer, with their KV heads, and as large a part of its FFN columns.

    With embeddings, norms and head they are an ordinary narrower model of the same class.
    """

    count: int

    def divide(self, model: nn.Module) -> None:
        """See Core."""
        heads = 0
        for name, branch, maps in _found(model):
            if maps == ATTENTION:
                heads = self._heads_of(name, branch)
            columns: int = getattr(branch, maps[-1]).in_features
            if columns * self.count % heads:
                raise UserError(
                    f"core is heads{self.count} of {heads} heads, but {name} has {columns} FFN columns, which do not "
                    "divide so; choose another number of heads, or a core such as lowrank16"
                )
            for one in maps:
                linear: nn.Linear = getattr(branch, one)
                kind: Callable[..., nn.Module] = FirstColumns if one == maps[-1] else FirstRows
                width = linear.in_features if kind is FirstColumns else linear.out_features
                setattr(branch, one, kind(linear, width * self.count // heads))

    def _heads_of(self, name: str, attention: nn.Module) -> int:
        """How many query heads there are. Raises UserError where a core cannot have the first of them."""
        groups, why = head_groups(attention)
        if why:
            raise UserError(f"the heads of {name} cannot be told apart: {why}; choose a core such as lowrank16")
        heads = int(len(attention.get_parameter("q_proj.weight")) // attention.head_dim)  # type: ignore[operator]
        if self.count >= heads:
            raise UserError(
                f"core is heads{self.count}, but {name} has {heads} heads, and a core must be narrower; choose fewer"
            )
        if self.count * groups % heads:
            raise UserError(
                f"core is heads{self.count}, but {name} has {heads // groups} query heads to each KV head, which do "
                f"not divide so; choose a multiple of {heads // groups}"
            )
        return heads

    def ordinary(self, weights: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
        """See Core."""
        return {name: values for name, values in weights.items() if f".{REST}." not in name}

    def narrow(self, config: Any) -> None:
        """See Core."""
        heads = config.num_attention_heads
        config.head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        config.num_key_value_heads = config.num_key_value_heads * self.count // heads
        config.intermediate_size = config.intermediate_size * self.count // heads
        config.num_attention_heads = self.count


def whole(weights: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Core and rest under the names of an ordinary model; the divided `model`'s own weights are not used.

    Raises UserError where the rest is not there.
    """
    found = _beside_maps(weights, model)
    for name, one in maps_of(model).items():
        if f"{name}.{REST}.weight" not in weights:
            raise UserError("these weights are of a replica that has the core alone; add --core")
        found |= one.joined(weights, name)
    return found


def core_named(name: str) -> Core:
    """What a setting names. Raises UserError."""
    kinds: dict[str, Callable[[int], Core]] = {"lowrank": LowRank, "heads": Heads}
    if (found := re.fullmatch(r"(lowrank|heads)([1-9]\d*)", name)) is None:
        raise UserError(f"core is {name!r}; give lowrank16 or heads2, or another number")
    return kinds[found[1]](int(found[2]))


def _found(model: nn.Module) -> list[tuple[str, nn.Module, tuple[str, ...]]]:
    """The branches of a decoder, with the names of their matrices. Raises UserError where there are none."""
    kinds = [[(*found, maps) for found in branches(model, maps)] for maps in (ATTENTION, FEED_FORWARD)]
    if not all(kinds):
        raise UserError(
            f"no layers with {', '.join(ATTENTION)} and {', '.join(FEED_FORWARD)} are found in "
            f"{type(model).__name__}, so that nothing is known of a core; leave out --core"
        )
    found: list[tuple[str, nn.Module, tuple[str, ...]]] = [one for kind in kinds for one in kind]
    refuse_shared(model, [f"{name}.{one}.weight" for name, _, maps in found for one in maps])
    return found


def _beside_maps(weights: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """The weights that are of no map that has a core."""
    prefixes = tuple(f"{name}." for name in maps_of(model))
    return {name: values for name, values in weights.items() if not name.startswith(prefixes)}
