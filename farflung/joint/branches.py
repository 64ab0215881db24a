"""The branches of a decoder's layers: attention and feed-forward, by their matrices' names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from torch import nn

from farflung.errors import UserError

ATTENTION, FEED_FORWARD = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
"""The matrices of the two branches of a layer; the last of each leads back to the stream between layers."""


def branches(model: nn.Module, names: tuple[str, ...]) -> Iterator[tuple[str, nn.Module]]:
    """The modules that have linear maps of these names, with their own names."""
    for name, module in model.named_modules():
        if all(isinstance(getattr(module, one, None), nn.Linear) for one in names):
            yield name, module


def head_groups(attention: nn.Module) -> tuple[int, str]:
    """How many groups of heads share a key and a value; or why they cannot be told apart."""
    width, columns = getattr(attention, "head_dim", 0), attention.get_parameter("o_proj.weight").shape[1]
    rows = [len(attention.get_parameter(f"{one}.weight")) for one in ATTENTION[:3]]
    groups = rows[1] // width if width else 0
    if not groups or any(count % groups for count in (*rows, columns)):
        return 0, "they are not of one width"
    for one, parameter in attention.named_parameters():
        if one.partition(".")[0] not in ATTENTION and tuple(parameter.shape) != (width,):
            return 0, f"its {one} is of all of them together"
    return groups, ""


def refuse_shared(model: nn.Module, names: Iterable[str]) -> None:
    """Raises UserError where one of some parameters is another module's, too, which would be left with all of it."""
    owners = Counter(id(one) for module in model.modules() for one in module.parameters(recurse=False))
    for name in names:
        if owners[id(model.get_parameter(name))] > 1:
            raise UserError(
                f"{name} is the weight of another module, too, and cannot be cut; give each its own, or leave out "
                "--core and methods that deal out units"
            )
