"""The units of a decoder: what can be left out of it without cutting the stream between its layers.

A KV group with its query heads is rows of q, k and v and columns of o. An FFN column is a row of gate and of up, and a
column of down. Or a unit is a whole layer. Embeddings, the last norm and the head are of no unit.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import nn

from farflung.errors import UserError
from farflung.joint.branches import ATTENTION, FEED_FORWARD, branches, head_groups


@dataclass(frozen=True)
class Cut:
    """Where units lie in a parameter: `size` rows (`dim` 0) or columns (1) each, from unit number `first` on."""

    dim: int
    size: int
    first: int = 0


@dataclass(frozen=True)
class Pool:
    """Units that are alike, so that each replica can hold as many of them as another.

    Args:
        name: what the units are parts of.
        units: how many there are.
        cuts: where they lie, by the parameters' names.
        leaving: the parameters that lead out of them, back to the stream between layers.
        modules: the names of the modules that units are all of; a replica without one passes its input on.
    """

    name: str
    units: int
    cuts: Mapping[str, Cut]
    leaving: tuple[str, ...]
    modules: tuple[str, ...] = ()


def heads_and_columns(model: nn.Module) -> list[Pool]:
    """The KV groups, and the FFN columns, of each layer. Raises UserError where heads cannot be told apart."""
    heads = [_heads(name, module) for name, module in branches(model, ATTENTION)]
    return heads + [_columns(name, module) for name, module in branches(model, FEED_FORWARD)]


def layers(model: nn.Module) -> list[Pool]:
    """The layers, all in one pool."""
    names = [name.rpartition(".")[0] for name, _ in branches(model, ATTENTION)]
    cuts = {
        parameter: Cut(0, len(values), number)
        for number, name in enumerate(names)
        for parameter, values in model.get_submodule(name).named_parameters(name)
        if values.dim()
    }
    leaving = tuple(one for one in cuts if re.search(r"\.(o_proj|down_proj)(\.\w+)?$", one))
    return [Pool("the model", len(names), cuts, leaving, tuple(names))] if names else []


KINDS: dict[str, Callable[[nn.Module], list[Pool]]] = {"heads": heads_and_columns, "layers": layers}
"""What units can be, by name."""


def _heads(name: str, attention: nn.Module) -> Pool:
    groups, why = head_groups(attention)
    if why:
        raise UserError(
            f"the heads of {name} cannot be dealt out: {why}; choose another method, such as resist or noloco"
        )
    rows = {one: len(attention.get_parameter(f"{one}.weight")) // groups for one in ATTENTION[:3]}
    return _pool(name, attention, groups, rows, "o_proj")


def _columns(name: str, branch: nn.Module) -> Pool:
    columns = branch.get_parameter("down_proj.weight").shape[1]
    return _pool(name, branch, columns, dict.fromkeys(FEED_FORWARD[:2], 1), "down_proj")


def _pool(name: str, module: nn.Module, units: int, sizes: Mapping[str, int], leaving: str) -> Pool:
    entering = {
        f"{name}.{one}.{parameter}": Cut(0, size)
        for one, size in sizes.items()
        for parameter, _ in module.get_submodule(one).named_parameters()
    }
    out, columns = f"{name}.{leaving}.weight", module.get_parameter(f"{leaving}.weight").shape[1]
    return Pool(name, units, entering | {out: Cut(1, columns // units)}, (out,))
