"""How a model calls its layers, which is what they are measured with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from farflung.errors import UserError
from farflung.memory.measure import storage_id, tensors_in

REMEDY = "or leave out --memory"


@dataclass
class Seen:
    """A layer's call as the model makes it, and how often it makes one in a pass.

    `returned` makes what it returns of other hidden states.
    """

    args: tuple[Any, ...]
    given: dict[str, Any]
    returned: Callable[[Tensor], Any]
    autocast: dict[str, Any]
    times: int = 1


class Casts(TorchDispatchMode):
    """A context that tells whether autocast casts some weight `again` in a pass: then all uses share one copy of it."""

    def __init__(self, weights: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.again = False
        self._left = set(map(storage_id, weights))
        self._known = set(self._left)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default and (key := storage_id(args[0])) in self._known:
            self.again |= key not in self._left
            self._left.discard(key)
        return func(*args, **(kwargs or {}))


def calls_of(layers: Sequence[nn.Module], loss: Callable[[], Tensor], device: torch.device) -> tuple[list[Seen], bool]:
    """How each layer is called; of the tensors, those of equal shapes are shared, as none of their values counts.

    And whether autocast casts a weight of theirs more than once.

    A layer that a pass leaves out counts as another one of its class. Raises UserError for layers that cannot be
    measured alone.
    """
    found: dict[int, Seen] = {}
    alike: dict[Any, Tensor] = {}
    entered: list[tuple[bool, list[int]]] = []

    def begins(_: nn.Module, *given: Any) -> None:
        entered.append((torch.is_autocast_cache_enabled(), [tensor._version for tensor in tensors_in(given)]))
        torch.set_autocast_cache_enabled(False)

    def note(number: int, layer: nn.Module, args: Any, given: Any, output: Any) -> None:
        cached, versions = entered.pop()
        torch.set_autocast_cache_enabled(cached)
        what = f"layer {number}, a {type(layer).__name__},"
        if not args or not isinstance(args[0], Tensor) or not args[0].is_floating_point():
            raise UserError(f"{what} must be given hidden states first, and not by name; call it so, {REMEDY}")
        if [tensor._version for tensor in tensors_in((args, given))] != versions:
            raise UserError(f"{what} changes what it is given, so that it cannot compute it again; copy it, {REMEDY}")
        dtype = torch.get_autocast_dtype(device.type)
        autocast = {"enabled": torch.is_autocast_enabled(device.type), "dtype": dtype}
        entering, *rest = args
        entering = alike.setdefault((entering.shape, entering.dtype), entering.detach())
        times = found[number].times + 1 if number in found else 1
        found[number] = Seen((entering, *rest), given, _returned(output, what), autocast, times)

    handles = [
        handle
        for number, layer in enumerate(layers)
        for handle in (
            layer.register_forward_pre_hook(begins, with_kwargs=True),
            layer.register_forward_hook(partial(note, number), with_kwargs=True),
        )
    ]
    cached_before = torch.is_autocast_cache_enabled()
    try:
        with torch.no_grad(), Casts(parameter for layer in layers for parameter in layer.parameters()) as casts:
            loss()
    finally:
        torch.set_autocast_cache_enabled(cached_before)
        for handle in handles:
            handle.remove()
    for one in found.values():
        one.autocast["cache_enabled"] = casts.again
    return [_seen(found, layers, number) for number in range(len(layers))], casts.again


def _seen(found: dict[int, Seen], layers: Sequence[nn.Module], number: int) -> Seen:
    if number in found:
        return found[number]
    kind = type(layers[number])
    for other, seen in found.items():
        if type(layers[other]) is kind:
            return seen
    raise UserError(f"layer {number}, a {kind.__name__}, takes no part in a step; have it do so, {REMEDY}")


def _returned(output: Any, what: str) -> Callable[[Tensor], Any]:
    leaves, structure = tree_flatten(output)
    place = next((place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)), None)
    if place is None:
        raise UserError(f"{what} returns no tensor; have it return hidden states, {REMEDY}")
    leaves[place] = None
    return lambda hidden: tree_unflatten([*leaves[:place], hidden, *leaves[place + 1 :]], structure)


def kind_of(layer: nn.Module, seen: Seen) -> Any:
    """What tells layers apart that take unlike time or memory."""
    weights = tuple((name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in layer.named_parameters())
    given = tuple((name, getattr(value, "shape", None)) for name, value in seen.given.items())
    return type(layer), getattr(layer, "attention_type", None), weights, seen.args[0].shape, given, seen.times
