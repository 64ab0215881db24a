"""What becomes of the tensors that a layer's forward pass saves for its backward pass.

A layer keeps them; or computes them again from its input; or moves them out as they are made, and back before they are
needed; or moves its input out, and computes them again. The bits of losses and gradients are the same.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from farflung.memory.buffers import Found
from farflung.memory.copies import Arrival, Copies
from farflung.memory.measure import staying, tensors_in
from farflung.memory.plan import LayerCost, LayerPlan, Mode
from farflung.memory.step import stays_bytes

SMALLEST = 4096
"""Bytes below which a storage is not worth a copy."""


class Stored:
    """A storage that is moved out, and back when it is asked for. It gives its room back when nobody needs it more."""

    def __init__(self, copies: Copies, storage: torch.UntypedStorage, call: Call) -> None:
        self.size, self.call = storage.nbytes(), call
        self.near: Tensor | None = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        self._device, self._copies = storage.device, copies
        self._slot = copies.far.take(self.size)
        self._arrive: Arrival = copies.out(self._slot, self.near)

    def leave(self) -> None:
        """Frees it near, once it is far."""
        if self.near is not None:
            self._arrive()
            self.near = None

    def come(self) -> None:
        """Begins to bring it back, unless it is near."""
        if self.near is None:
            self.near = torch.empty(self.size, dtype=torch.uint8, device=self._device)
            self._arrive = self._copies.back(self._slot, self.near)

    def here(self) -> torch.UntypedStorage:
        """The storage, near again."""
        self.come()
        assert self.near is not None
        self._arrive()
        return self.near.untyped_storage()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # whoever waits for it has been told
            self._arrive()
            self._copies.far.give(self.size, self._slot)


class View(NamedTuple):
    """A saved tensor whose storage is moved."""

    stored: Stored
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass(eq=False)
class Pass:
    """A forward pass through the layers; its calls, of which those whose backward pass has ended are gone."""

    calls: list[Call] = field(default_factory=list)


@dataclass(eq=False)
class Call:
    """A layer's call in a pass: bytes that it `keeps`, that it makes `again`, about, and the storages that it moves."""

    number: int
    within: Pass
    keeps: int
    again: int
    stored: list[weakref.ref[Stored]] = field(default_factory=list)

    def alive(self) -> Iterator[Stored]:
        """The storages that are still needed."""
        return (one for ref in self.stored if (one := ref()) is not None)

    def near(self) -> int:
        """Bytes that it has near."""
        return self.keeps + sum(one.size for one in self.alive() if one.near is not None)

    def coming(self) -> int:
        """Bytes that it would take to bring all of it near."""
        return sum(one.size for one in self.alive() if one.near is None)


class Mover:
    """Moves what layers save, so that all of it that is near never takes more than `limit` bytes; one layer always may.

    `keeps`, `moves` and `again` are the bytes that each layer's call keeps near, moves, and makes again.
    """

    def __init__(
        self, copies: Copies, keeps: Sequence[int], moves: Sequence[int], again: Sequence[int], limit: int
    ) -> None:
        self._copies, self._keeps, self._moves, self._again, self._limit = copies, keeps, moves, again, limit
        self._passes: weakref.WeakSet[Pass] = weakref.WeakSet()  # their graphs hold them
        self._current = Pass()
        self._leaving: deque[Call] = deque()

    def begin(self, number: int) -> Call:
        """A layer's forward pass begins: makes room for what it saves."""
        if self._current.calls and number <= self._current.calls[-1].number:
            self._current = Pass()
        self._passes.add(self._current)
        while self._leaving and not any(self._leaving[0].alive()):
            self._leaving.popleft()
        wanted = self._keeps[number] + self._moves[number]
        while self._leaving and self._near() + wanted > self._limit:
            for stored in self._leaving.popleft().alive():
                stored.leave()
        call = Call(number, self._current, self._keeps[number], self._again[number])
        self._current.calls.append(call)
        if self._moves[number]:
            self._leaving.append(call)
        return call

    def backward_begins(self, call: Call, _: Any = None) -> None:
        """A layer's backward pass begins: brings what is needed next, nearest first, as far as it has room."""
        self.backward_ended(call)
        call.within.calls.append(call)  # the only one left beside those that come next
        call.keeps, call.again = call.keeps + call.again, 0
        for stored in call.alive():
            stored.come()
        for other in reversed(call.within.calls[:-1]):
            if self._near() + other.coming() > self._limit:
                return
            for stored in other.alive():
                stored.come()

    def backward_ended(self, call: Call, _: Any = None) -> None:
        """A layer's backward pass has ended, and those after it: what it kept is free."""
        call.within.calls[:] = [other for other in call.within.calls if other.number < call.number]

    @contextlib.contextmanager
    def moving(self, call: Call, layer: nn.Module, shared: Any) -> Iterator[None]:
        """A context in which saved tensors are moved: not the layer's weights, nor what it shares with others."""
        seen: dict[int, Stored] = {}
        with saved_tensors_hooks(partial(self._pack, call, staying(layer, shared), seen), _unpack):
            yield
        seen.clear()  # which autograd holds on to

    def _pack(self, call: Call, stays: set[int], seen: dict[int, Stored], tensor: Tensor) -> Tensor | View:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in stays or storage.nbytes() < SMALLEST or tensor.layout is not torch.strided:
            return tensor.detach()  # a node that holds its own output would never go
        if key not in seen:  # which keeps them until the layer's forward pass is over, so that none is moved twice
            seen[key] = Stored(self._copies, storage, call)
            call.stored.append(weakref.ref(seen[key]))
        return View(seen[key], tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def _near(self) -> int:
        return sum(call.near() for one in self._passes for call in one.calls)


def _unpack(packed: Tensor | View) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    storage = packed.stored.here()
    empty = torch.empty(0, dtype=packed.dtype, device=storage.device)
    return empty.set_(storage, packed.offset, packed.shape, packed.stride)


def _keep(_: nn.Module, forward: Callable[..., Any], args: Any, given: Any) -> Any:
    return forward(*args, **given)


def _recompute(layer: nn.Module, forward: Callable[..., Any], args: Any, given: Any) -> Any:
    return checkpoint(partial(forward, **given), *args, use_reentrant=False, context_fn=Found(layer).contexts)


FORWARD: dict[Mode, tuple[Callable[..., Any], bool]] = {
    "keep": (_keep, False),
    "recompute": (_recompute, False),
    "move": (_keep, True),
    "recompute-moved": (_recompute, True),
}
"""How a layer's forward pass is called in each mode, and whether what autograd saves then is moved."""


@dataclass(frozen=True)
class Calling:
    """How layers are called: what is moved by what, and may take near beyond what kept layers keep; if `compiled`.

    Where one `casts_again`, copies of weights that autocast has cast stay until the loss is computed.
    """

    copies: Copies
    prefetch: int
    compiled: bool = False
    casts_again: bool = False


@dataclass(frozen=True, eq=False)
class _Planned:
    """A layer's forward pass in its mode, in the place of its `own`, which it had if somebody gave it one."""

    own: Callable[..., Any] | None
    forward: Callable[..., Any]

    def __call__(self, *args: Any, **given: Any) -> Any:
        return self.forward(*args, **given)


def apply(
    layers: Sequence[nn.Module], plans: Sequence[LayerPlan], costs: Sequence[LayerCost], calling: Calling
) -> None:
    """Gives each layer its mode, in training; `undo` takes them back."""
    undo(layers)
    keeps = [stays_bytes(cost, plan) for plan, cost in zip(plans, costs, strict=True)]
    moves = [moved_bytes(plan.mode, cost) for plan, cost in zip(plans, costs, strict=True)]
    again = [again_bytes(plan.mode, cost) for plan, cost in zip(plans, costs, strict=True)]
    mover = Mover(calling.copies, keeps, moves, again, sum(keeps) + calling.prefetch)
    for number, (layer, plan) in enumerate(zip(layers, plans, strict=True)):
        forward = forward_of(layer, calling.compiled)
        if not calling.casts_again:
            forward = _casting_anew()(forward)
        moded = partial(_forward, layer, forward, number, plan.mode, mover)
        layer.forward = _Planned(vars(layer).get("forward"), moded)


def forward_of(layer: nn.Module, compiled: bool) -> Callable[..., Any]:
    """A layer's forward pass, perhaps compiled: then without what is around it, which is Python's to decide."""
    forward: Callable[..., Any] = layer.forward
    return torch.compile(forward, dynamic=False) if compiled else forward


def again(layer: nn.Module, meter: Callable[[], float], passes: Callable[[], None]) -> tuple[float, float]:
    """What some meter says of a layer's forward pass, and of it when it is computed again, in passes forward and back.

    The second ends as soon as the backward pass has what it needs.
    """
    forward, taken = layer.forward, []

    def metered(*args: Any, **given: Any) -> Any:
        began = meter()
        try:
            return forward(*args, **given)
        finally:  # which an error leaves once there is enough
            taken.append(meter() - began)

    with computing(layer, lambda *args, **given: _recompute(layer, metered, args, given)):
        passes()
    return taken[0], sum(taken[1:])


@contextlib.contextmanager
def computing(layer: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """A context in which a layer has another forward pass; after it, the one that it had, as its class's or its own."""
    own = vars(layer).get("forward")
    layer.forward = forward
    try:
        yield
    finally:
        _give_back(layer, own)


def undo(layers: Sequence[nn.Module]) -> None:
    """Lets layers compute as they did before they had modes."""
    for layer in layers:
        if isinstance(planned := vars(layer).get("forward"), _Planned):
            _give_back(layer, planned.own)


def _give_back(layer: nn.Module, own: Callable[..., Any] | None) -> None:
    """Gives a layer its own forward pass, where it had one, and else its class's."""
    del layer.forward
    if own is not None:
        layer.forward = own


def moved_bytes(mode: Mode, cost: LayerCost) -> int:
    """What a layer moves of what it saves."""
    return {"move": cost.saved_bytes, "recompute-moved": cost.input_bytes}.get(mode, 0)


def again_bytes(mode: Mode, cost: LayerCost) -> int:
    """What a layer saves once more when it is computed again."""
    return cost.saved_bytes - cost.input_bytes if mode in ("recompute", "recompute-moved") else 0


def _forward(
    layer: nn.Module, forward: Callable[..., Any], number: int, mode: Mode, mover: Mover, *args: Any, **given: Any
) -> Any:
    if not (layer.training and torch.is_grad_enabled()):
        return forward(*args, **given)
    call = mover.begin(number)
    compute, moves = FORWARD[mode]
    hooks = mover.moving(call, layer, (args[1:], given)) if moves else contextlib.nullcontext()
    with hooks:
        output = compute(layer, forward, args, given)
    leaving = next((tensor for tensor in tensors_in(output) if tensor.requires_grad), None)
    if leaving is not None:
        leaving.register_hook(partial(mover.backward_begins, call))
    for entering in tensors_in(args[:1]):
        if entering.requires_grad:
            entering.register_hook(partial(mover.backward_ended, call))
    return output


@contextlib.contextmanager
def _casting_anew() -> Iterator[None]:
    """A context in which autocast keeps no weights that it has cast, which would stay until the loss is computed."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
