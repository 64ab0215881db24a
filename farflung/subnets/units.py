"""The units of a decoder: what can be left out of it without cutting the stream between its layers.

A KV group with its query heads is rows of q, k and v and columns of o. An FFN column is a row of gate and of up, and a
column of down. Or a unit is a whole layer. Embeddings, the last norm and the head are of no unit.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from torch import nn

from farflung.errors import UserError

ATTENTION, FEED_FORWARD = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
"""The matrices of the two branches of a layer; the last of each leads back to the stream between layers."""


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
    heads = [_heads(name, module) for name, module in _branches(model, ATTENTION)]
    return heads + [_columns(name, module) for name, module in _branches(model, FEED_FORWARD)]


def layers(model: nn.Module) -> list[Pool]:
    """The layers, all in one pool."""
    names = [name.rpartition(".")[0] for name, _ in _branches(model, ATTENTION)]
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


def _branches(model: nn.Module, names: tuple[str, ...]) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        if all(isinstance(getattr(module, one, None), nn.Linear) for one in names):
            yield name, module


def _heads(name: str, attention: nn.Module) -> Pool:
    width, columns = getattr(attention, "head_dim", 0), attention.get_parameter("o_proj.weight").shape[1]
    rows = {one: len(attention.get_parameter(f"{one}.weight")) for one in ATTENTION[:3]}
    groups = rows["k_proj"] // width if width else 0
    if not groups or any(count % groups for count in (*rows.values(), columns)):
        raise _inseparable(name, "they are not of one width")
    for one, parameter in attention.named_parameters():
        if one.partition(".")[0] not in ATTENTION and tuple(parameter.shape) != (width,):
            raise _inseparable(name, f"its {one} is of all of them together")
    return _pool(name, attention, groups, {one: count // groups for one, count in rows.items()}, "o_proj")


def _inseparable(name: str, why: str) -> UserError:
    return UserError(f"the heads of {name} cannot be dealt out: {why}; choose another method, such as resist or noloco")


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
