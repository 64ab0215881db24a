"""Parts of a model's parameters that travel together, as one flat buffer."""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn

from farflung.errors import UserError
from farflung.outer.shards import own_of

LARGEST = torch.finfo(torch.float32).max


class Fragment:
    """Some parameters, read and written as one flat tensor of `numel` elements.

    The flat tensor is float32, or float64 where a parameter is. What parameters of half precision cannot hold of what
    is written to them is kept beside them and comes back with `read`, so that small steps add up, and rounding is not
    taken for progress. `names` are those of the parameters in their model. Of parameters that FSDP2 has sharded, it is
    this process's shards.
    """

    def __init__(self, parameters: list[nn.Parameter], names: Sequence[str] = ()) -> None:
        self.parameters = parameters
        self.names = list(names)
        self._shapes = [own_of(parameter).shape for parameter in parameters]
        self.sizes = [shape.numel() for shape in self._shapes]
        self.numel = sum(self.sizes)
        dtypes = {parameter.dtype for parameter in parameters}
        self.dtype = functools.reduce(torch.promote_types, dtypes, torch.float32)
        self._inexact = any(torch.finfo(dtype).eps > torch.finfo(torch.float32).eps for dtype in dtypes)
        self.rounded_off: Tensor | None = None
        """What the parameters could not hold when they were last written; bfloat16, None where nothing is lost."""

    @torch.no_grad()
    def read(self, device: torch.device | None = None, out: Tensor | None = None) -> Tensor:
        """A flat copy of the parameters, into `out` if given, else on `device` (by default the parameters')."""
        if out is None:
            device = device or (self.parameters[0].device if self.parameters else None)
            out = torch.empty(self.numel, dtype=self.dtype, device=device)
        for parameter, part in zip(self.parameters, torch.split(out, self.sizes), strict=True):
            own = own_of(parameter)
            part.view(own.shape).copy_(own)
        return out if self.rounded_off is None else out.add_(self.rounded_off)

    def views(self, message: Tensor) -> list[Tensor]:
        """A flat message as tensors of the parameters' shapes; one twice as long holds two of each."""
        copies = message.numel() // max(self.numel, 1)
        parts = torch.split(message, self.sizes * copies)
        return [part.view(shape) for part, shape in zip(parts, self._shapes * copies, strict=True)]

    @torch.no_grad()
    def write(self, flat: Tensor) -> None:
        """Gives the parameters the values of `flat`, rounded to their own dtypes."""
        for parameter, part in zip(self.parameters, torch.split(flat, self.sizes), strict=True):
            own = own_of(parameter)
            own.copy_(part.view(own.shape))
        if self._inexact:
            self.rounded_off = None
            written = self.read(flat.device)
            self.rounded_off = torch.sub(flat, written, out=written).bfloat16()

    def sound(self) -> bool:
        """Whether all values can be sent."""
        return all(sendable(own_of(parameter.detach())) for parameter in self.parameters)


def sendable(tensor: Tensor) -> bool:
    """Whether no value is NaN, infinite, or beyond what float32 holds."""
    if tensor.numel() == 0:
        return True
    low, high = (value.double() for value in tensor.aminmax())
    return bool((low >= -LARGEST) & (high <= LARGEST))


def split(model: nn.Module, fragments: int, among: Collection[nn.Parameter] | None = None) -> list[Fragment]:
    """The trainable parameters in fragments of whole layers, strided so that each mixes early and late layers.

    With `among`, only those of these parameters.

    A layer is what one number in a parameter's name counts (`model.layers.3.…`); what lies outside of layers
    (embeddings, norms, head) counts as one each. Tied parameters appear once, frozen ones not at all, nor those of
    which this process has no rows.

    Raises UserError when there are fewer layers than fragments.
    """
    layers: dict[str, list[tuple[str, nn.Parameter]]] = {}
    wanted = None if among is None else set(among)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and (wanted is None or parameter in wanted):
            layers.setdefault(_layer_of(name), []).append((name, parameter))
    if fragments > max(len(layers), 1):
        raise UserError(
            f"fragments is {fragments}, but the model has only {len(layers)} layers to divide; choose at most that"
        )
    groups = list(layers.values())
    chosen = [[named for layer in groups[p::fragments] for named in layer] for p in range(fragments)]
    parts = [[(name, parameter) for name, parameter in part if own_of(parameter).numel()] for part in chosen]
    return [Fragment([parameter for _, parameter in part], [name for name, _ in part]) for part in parts]


def _layer_of(name: str) -> str:
    numbered = re.match(r".*?\.?\d+(?=\.)", name)
    return numbered.group() if numbered else name.rpartition(".")[0] or name
