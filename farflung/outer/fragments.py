"""Parts of a model's parameters that travel together: their weights, fast and slow, as flat tensors."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from farflung.errors import UserError
from farflung.hooks.shards import own_of
from farflung.outer.merges import Merge
from farflung.outer.optimizers import OuterOptimizer, message_of, step_with
from farflung.outer.round import Offer

LARGEST = torch.finfo(torch.float32).max


class Fragment:
    """Some parameters, read and written as one flat tensor of `numel` elements.

    The flat tensor is float32, or float64 where a parameter is. Half-precision parameters round what is written to
    them; the remainder is kept and added again by `read`, so that small steps add up, and rounding does not look like
    progress. `names` are the parameters' names in their model. Of parameters that FSDP2 has sharded, the tensor holds
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


class Weights:
    """A fragment's weights θ and their anchor φ: makes messages of them, and new weights of means.

    The anchor is flat, and of the fragment's dtype; the outer state lives on its device. `outer` is the optimizer of
    all anchors, `writing` a context in which the parameters are written.
    """

    def __init__(
        self,
        fragment: Fragment,
        anchor: Tensor,
        outer: torch.optim.Optimizer,
        merge: Merge,
        writing: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.fragment = fragment
        self.anchor = anchor
        self._outer = outer
        self._merge = merge
        self._writing = writing

    def offer(self, fault: str) -> Offer[Tensor]:
        """The progress since the last round; with a fault none, and the weights go back to the anchor."""
        if fault:
            self.write(self.anchor)
        weights = self.anchor.clone() if fault else self.fragment.read(self.anchor.device)
        keeps_anchor = self._merge.eager and isinstance(self._outer, OuterOptimizer)
        anchor = self.anchor.clone() if keeps_anchor else None
        return Offer(message_of(self._outer, self.anchor, weights), fault, anchor)

    def nothing(self, anchor: Tensor | None = None) -> Tensor:
        """The message of a replica without progress since an anchor, by default its own."""
        anchor = self.anchor if anchor is None else anchor
        return message_of(self._outer, anchor, anchor.clone())

    def keep(self, offer: Offer[Tensor], delayed: bool) -> None:
        """See Content."""
        offer.at_start = self.fragment.read(self.anchor.device) if self._merge.needs_start and delayed else None
        offer.own = offer.message.clone() if self._merge.eager else None

    def step_alone(self, offer: Offer[Tensor], members: int) -> None:
        """The first step of an eager merge: before any exchange, assume that the others made no progress."""
        if self._merge.eager:
            offer.applied = 1 / members
            step_with(self._outer, self.anchor, self.nothing().lerp_(offer.message, offer.applied))
            self.write(self.anchor)

    def absorb(self, offer: Offer[Tensor], mean: Tensor, fresh: Offer[Tensor] | None, delayed: bool) -> bool:
        """Steps the outer optimizer with a mean, and merges the new anchor into the weights.

        Returns whether the mean was finite; else there is no step. Without a `fresh` offer, an eager merge keeps the
        steps trained meanwhile.
        """
        at_start = offer.at_start
        if offer.own is not None:
            self._make_eager(mean, offer, fresh)
            at_start = None if fresh else self.anchor.clone()
        if usable := sendable(mean):
            step_with(self._outer, self.anchor, mean)
        merged = self.anchor
        if delayed:
            now = self.fragment.read(out=mean[: self.fragment.numel])
            merged = self._merge.merge(now, at_start, self.anchor)
        self.write(merged)
        return usable

    def write(self, weights: Tensor) -> None:
        """Gives the parameters these values."""
        with self._writing():
            self.fragment.write(weights)

    def _make_eager(self, mean: Tensor, offer: Offer[Tensor], fresh: Offer[Tensor] | None) -> None:
        """Replaces this replica's last message in a round's mean by its fresh one, for an eager merge.

        The part of the last one that was applied already is subtracted; the part of the fresh one that the next mean
        will contain is added. The others' messages count as if from the present anchor.
        """
        assert offer.own is not None
        mean.sub_(offer.own, alpha=offer.applied)
        if fresh:
            mean.add_(fresh.message, alpha=fresh.applied)
        if offer.anchor is not None:
            mean.add_(self.nothing(), alpha=1 - (fresh.applied if fresh else 0.0))
            mean.sub_(self.nothing(offer.anchor), alpha=1 - offer.applied)


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
