"""Parts of a model's parameters that travel together: their weights, fast and slow, as flat tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from farflung.cells import Cell, layers_of
from farflung.errors import UserError
from farflung.hooks.layouts import Layout, layout_of
from farflung.hooks.shards import own_of
from farflung.outer.columns import Message
from farflung.outer.keepers import Keeper
from farflung.outer.merges import Merge
from farflung.outer.optimizers import OuterOptimizer, kept_of, message_of, sends_weights, state_by_anchor, step_with
from farflung.outer.round import Offer

ANCHOR = "anchor"
"""What an anchor is called among what is kept."""
OUTER, NOTED = "outer ", "noted "
"""Begin the names of what the outer optimizer keeps, and of what is noted."""

LARGEST = torch.finfo(torch.float32).max


class Fragment:
    """The cells that this process keeps of a part of the model, read and written as one flat tensor of `numel` values.

    The flat tensor is float32, or float64 where a parameter is. Half-precision parameters round what is written to
    them; the remainder is kept and added again by `read`, so that small steps add up, and rounding does not look like
    progress. Where the replica is sharded, all of its shards read and write together: each has rows of all cells.

    Args:
        cells: of the part, as far as this process, or one that it swaps with, keeps them.
        parameters: what this process trains, by name.
        layout: how it lies in the replica.
        keepers: which of these processes keeps each cell, by its name.
    """

    def __init__(
        self, cells: Sequence[Cell], parameters: Mapping[str, nn.Parameter], layout: Layout, keepers: Mapping[str, int]
    ) -> None:
        self._layout = layout
        self.cells = [cell for cell in cells if keepers[cell.name] == layout.process]
        self.names = [cell.name for cell in self.cells]
        self.numel = sum(cell.numel for cell in self.cells)
        names = dict.fromkeys(piece.parameter for cell in cells for piece in cell.pieces)
        self.named = {name: parameters[name] for name in names if name in parameters}
        self.parameters = list(self.named.values())
        dtypes = {parameter.dtype for parameter in self.parameters}
        self.dtype = functools.reduce(torch.promote_types, dtypes, torch.float32)
        self.keeper = Keeper(cells, keepers, layout)
        self._inexact = any(torch.finfo(dtype).eps > torch.finfo(torch.float32).eps for dtype in dtypes)
        self.rounded_off: Tensor | None = None
        """What the parameters could not hold when they were last written; bfloat16, None where nothing is lost."""

    @torch.no_grad()
    def read(self, device: torch.device | None = None, out: Tensor | None = None) -> Tensor:
        """A flat copy of the parameters, into `out` if given, else on `device` (by default the parameters')."""
        if out is None:
            device = device or (self.parameters[0].device if self.parameters else None)
            out = torch.empty(self.numel, dtype=self.dtype, device=device)
        self.keeper.gather({name: own_of(parameter) for name, parameter in self.named.items()}, out)
        return out if self.rounded_off is None else out.add_(self.rounded_off)

    @torch.no_grad()
    def write(self, flat: Tensor) -> None:
        """Gives the parameters the values of `flat`, rounded to their own dtypes."""
        self.keeper.scatter(flat, {name: own_of(parameter) for name, parameter in self.named.items()})
        if self._inexact:
            self.rounded_off = None
            written = self.read(flat.device)
            self.rounded_off = torch.sub(flat, written, out=written).bfloat16()

    def parts(self, values: int) -> list[Fragment]:
        """It as fragments of neighbouring cells, each of at least so many values but for the last, and of its dtype.

        Where shards read together, it is one: a shard that misses another replica would keep them waiting.
        """
        if self._layout.processes > 1:
            return [self]
        keepers = dict.fromkeys(self.names, self._layout.process)
        runs: list[list[Cell]] = [[]]
        for cell in self.cells:
            if sum(one.numel for one in runs[-1]) >= values:
                runs.append([])
            runs[-1].append(cell)
        made = [Fragment(run, self.named, self._layout, keepers) for run in runs]
        for part in made:
            part.dtype = self.dtype
        return made

    def message(self, flat: Tensor) -> Message:
        """A flat tensor as that of these cells; one twice as long holds two tensors of each."""
        return Message(flat, self.names, self._views)

    def _views(self, flat: Tensor) -> dict[str, list[Tensor]]:
        found: dict[str, list[Tensor]] = {cell.name: [] for cell in self.cells}
        for values in torch.split(flat, max(self.numel, 1)):
            parts = iter(torch.split(values, [piece.numel for cell in self.cells for piece in cell.pieces]))
            for cell in self.cells:
                found[cell.name] += [next(parts).view(piece.shape) for piece in cell.pieces]
        return found

    def apart(self, kept: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Flat tensors as those of each cell, by its name; other values are every cell's."""
        cells: dict[str, dict[str, Any]] = {cell.name: dict(kept) for cell in self.cells}
        for name, value in kept.items():
            if isinstance(value, Tensor) and value.dim() and cells:
                parts = torch.split(value.view(-1, max(self.numel, 1)), [cell.numel for cell in self.cells], dim=1)
                for cell, part in zip(self.cells, parts, strict=True):
                    cells[cell.name][name] = part.flatten()
        return cells

    def together(self, cells: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """What `apart` took apart, perhaps for other fragments; `cells` may be more than this process keeps.

        What only some of them have, because of rounds that others have not had yet, is noughts for these.
        """
        own = [cells[cell.name] for cell in self.cells]
        kept: dict[str, Any] = {}
        for name in dict.fromkeys(name for one in own for name in one):
            first = next(one[name] for one in own if name in one)
            if isinstance(first, Tensor) and first.dim():
                each = list(zip(self.cells, own, strict=True))
                copies = next((one[name].numel() // cell.numel for cell, one in each if cell.numel and name in one), 1)
                parts = [
                    one[name].view(copies, cell.numel) if name in one else first.new_zeros(copies, cell.numel)
                    for cell, one in each
                ]
                kept[name] = torch.cat(parts, dim=1).flatten()
            else:
                kept[name] = first
        return kept

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
        self.noted: dict[str, Any] = {}
        """What goes along with rounds has noted for the next one: tensors as long as the anchor, and numbers."""
        self._outer = outer
        self._merge = merge
        self._writing = writing
        if sends_weights(outer) and (merge.only_sent or merge.turn):
            told = f"merge is {merge}, which is for pseudo-gradients, and {type(outer).__name__} sends whole weights"
            raise UserError(f"{told}; choose another, such as kept, or use diloco")
        if merge.turn and not outer.param_groups[0].get("momentum"):
            told = f"merge is {merge}, which turns towards the outer momentum, and {type(outer).__name__} has none"
            raise UserError(f"{told}; give an outer_momentum above 0, or choose another, such as kept")
        if merge.eager and getattr(outer, "notes_messages", False):
            told = f"merge is {merge}, which {type(outer).__name__} does not go with"
            raise UserError(f"{told}; choose another, such as kept, or use noloco")

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
        sent = mean != 0 if self._merge.only_sent else None
        if usable := sendable(mean):
            if delayed:
                self._turn(mean)
            step_with(self._outer, self.anchor, mean)
        merged = self.anchor
        if delayed:
            now = self.fragment.read(out=mean[: self.fragment.numel])
            merged = self._merge.merge(now, at_start, self.anchor)
        self.write(merged if sent is None else torch.where(sent, merged, self.fragment.read(self.anchor.device)))
        return usable

    def _turn(self, mean: Tensor) -> None:
        """Turns a late round's gradient towards the outer momentum, if the merge does, and there is one."""
        kept = kept_of(self._outer, self.anchor).get("momentum_buffer")
        if self._merge.turn is None or kept is None:
            return
        gradients, momenta = (self.fragment.message(flat).cells.values() for flat in (mean, kept))
        share = 1 - self._outer.param_groups[0]["momentum"]  # torch's is a sum, and not a mean
        for gradient, momentum in zip(chain(*gradients), chain(*momenta), strict=True):
            self._merge.turn(gradient, momentum * share)

    def kept(self) -> dict[str, Any]:
        """What is kept between rounds: the anchor, and what the outer optimizer keeps of it."""
        own = state_by_anchor(self._outer).get(self.anchor, {})
        state = {f"{OUTER}{name}": value for name, value in sorted(own.items())}
        state |= {f"{NOTED}{name}": value for name, value in sorted(self.noted.items())}
        rounded_off = self.fragment.rounded_off
        return {ANCHOR: self.anchor, **({} if rounded_off is None else {"rounded off": rounded_off}), **state}

    def take(self, kept: Mapping[str, Any]) -> None:
        """Goes on from what another was `kept`."""
        if self.fragment.numel:
            self.anchor.copy_(kept[ANCHOR])
        self.fragment.rounded_off = kept.get("rounded off")
        self.noted = {name.removeprefix(NOTED): value for name, value in kept.items() if name.startswith(NOTED)}
        state = {name.removeprefix(OUTER): value for name, value in kept.items() if name.startswith(OUTER)}
        if state:
            state_by_anchor(self._outer)[self.anchor] = state

    def notes(self) -> dict[str, Any]:
        """What is noted, by name, the same for all of the replica's processes: numbers, and None for a tensor."""
        return {name: None if isinstance(note, Tensor) else note for name, note in self.noted.items()}

    def take_notes(self, notes: Mapping[str, Any]) -> None:
        """Has all that was noted: who keeps no cell of the fragment has nothing of it else, and yet goes by it."""
        none = self.anchor[:0]
        self.noted = {name: none if note is None else note for name, note in notes.items()} | self.noted

    def shared(self) -> dict[str, Tensor]:
        """What late replicas take: the anchor, and the tensors that the outer optimizer keeps of it."""
        return {ANCHOR: self.anchor, **dict(sorted(kept_of(self._outer, self.anchor).items()))}

    def alike(self) -> dict[str, Tensor]:
        """What replicas have alike whose anchors are: what late ones take, and tensors that are noted."""
        return self.shared() | {name: note for name, note in self.noted.items() if isinstance(note, Tensor)}

    def take_shared(self, shared: Mapping[str, Tensor]) -> None:
        """Goes on from what another `shared`; numbers that the outer optimizer counts stay."""
        state = state_by_anchor(self._outer)
        for kind, value in shared.items():
            if kind == ANCHOR:
                self.anchor.copy_(value)
            else:
                state[self.anchor][kind] = value.to(self.anchor.device, copy=True)

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


def split(model: nn.Module, fragments: int, trained: Mapping[str, nn.Parameter] | None = None) -> list[Fragment]:
    """What is trained in fragments of whole layers, strided so that each mixes early and late layers.

    That is by default all trainable parameters; those that are given may not be what the model shows just now, as
    while FSDP2 has gathered them. Tied parameters appear once.

    Raises UserError when there are fewer layers than fragments.
    """
    known = dict(model.named_parameters())
    named = {n: p for n, p in known.items() if p.requires_grad} if trained is None else trained
    layout = layout_of(model, named)
    outline = {name: shape for name, shape in layout.outline.items() if name in named or name not in known}
    layers = list(layers_of(outline).values())
    if fragments > max(len(layers), 1):
        raise UserError(
            f"fragments is {fragments}, but the model has only {len(layers)} layers to divide; choose at most that"
        )
    keepers = layout.keepers([cell for layer in layers for cell in layer])
    chosen = [[cell for layer in layers[place::fragments] for cell in layer] for place in range(fragments)]
    return [Fragment([cell for cell in cells if cell.name in keepers], named, layout, keepers) for cells in chosen]
