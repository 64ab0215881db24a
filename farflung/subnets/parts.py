"""The units that a replica holds, in the model's own parameters, which are as narrow as that makes them.

The model is then an ordinary narrower one of the same class: its logits and gradients are those of the whole one with
all other units masked. What is saved and loaded has the whole one's shapes, with noughts for what is not held, so that
the sum over all replicas is the whole model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from farflung.hooks.unshared import Unshared
from farflung.subnets.holdings import Units
from farflung.subnets.units import Cut, Pool


class Parts:
    """Holds some units of each pool in a model's parameters.

    `named` are the parameters that are cut, by name. `known` has all units as they were last seen here, of these
    parameters' whole shapes: own ones as of the last round, others as they were when they were given away, or at the
    start.

    Args:
        model: whole; its parameters change their shapes until `end`.
        pools: of its units.
        device: where `known` lies; None for beside the model.
    """

    def __init__(self, model: nn.Module, pools: Sequence[Pool], device: torch.device | None) -> None:
        self._model, self._pools = model, pools
        self.named = {name: model.get_parameter(name) for pool in pools for name in pool.cuts}
        self._places: dict[str, Tensor] = {}
        self.known = {name: p.detach().to(device or p.device, copy=True) for name, p in self.named.items()}
        self._wide = False
        self._hooks = [hook for name in self.named for hook in self._hooked(name)]

    def hold(self, held: Units) -> None:
        """Takes these units, as they are known, into the model."""
        for pool, units in zip(self._pools, held, strict=True):
            for name, cut in pool.cuts.items():
                self._places[name] = _places(cut, units, self.known[name])
            for number, module in enumerate(pool.modules):
                _pass_on(self._model.get_submodule(module), number not in units)
        self.restore()

    def restore(self) -> None:
        """Takes the units that are held back to what is known of them."""
        for name, parameter in self.named.items():
            parameter.grad = None
            parameter.data = self._held(name, self.known[name]).to(parameter.device, copy=True)

    def note(self) -> None:
        """Makes what the model holds now what is known."""
        for name in self.named:
            self._put(name, self.known[name], self._own(name))

    def sound(self) -> bool:
        """Whether all that is held is finite."""
        return all(bool(parameter.detach().isfinite().all()) for parameter in self.named.values())

    def values(self, units: Units) -> Tensor:
        """What is known of some units, as one flat packet of uint8."""
        pieces = [
            self.known[name].index_select(cut.dim, _places(cut, some, self.known[name])).reshape(-1)
            for pool, some in zip(self._pools, units, strict=True)
            for name, cut in pool.cuts.items()
        ]
        return torch.cat([piece.view(torch.uint8) for piece in pieces]).cpu()

    def learn(self, units: Units, packet: Tensor) -> None:
        """Takes what another replica knows of some units, as its `values`."""
        begin = 0
        for pool, some in zip(self._pools, units, strict=True):
            for name, cut in pool.cuts.items():
                known = self.known[name]
                places = _places(cut, some, known)
                shape = [len(places) if dim == cut.dim else size for dim, size in enumerate(known.shape)]
                count = torch.Size(shape).numel() * known.element_size()
                values = packet[begin : begin + count].clone().view(known.dtype).view(shape)
                known.index_copy_(cut.dim, places, values.to(known.device))
                begin += count

    @contextmanager
    def whole(self) -> Iterator[dict[str, nn.Parameter]]:
        """Within, the parameters have their whole shapes, and noughts for what is not held. Yields them by name."""
        narrow, wide = {name: parameter.data for name, parameter in self.named.items()}, self._wide
        self._widen()
        try:
            yield self.named
        finally:
            self._wide = wide
            for name, parameter in self.named.items():
                parameter.data = narrow[name]

    @torch.no_grad()
    def widen_with(self, units: Units) -> None:
        """Has these units in the whole shapes, and noughts for others: as they are known, where they are not held."""
        for pool, some in zip(self._pools, units, strict=True):
            for name, cut in pool.cuts.items():
                mixed, places = self.known[name].clone(), _places(cut, some, self.known[name])
                self._put(name, mixed, self._own(name))
                whole = torch.zeros_like(mixed).index_copy_(cut.dim, places, mixed.index_select(cut.dim, places))
                self.named[name].copy_(whole)

    def end(self) -> None:
        """Gives the parameters their whole shapes back, with noughts for what is not held."""
        for hook in self._hooks:
            hook.remove()
        for module in (module for pool in self._pools for module in pool.modules):
            _pass_on(self._model.get_submodule(module), False)
        self._widen()

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """What is known, and the weights that are held."""
        held = {name: self._own(name).clone() for name in self.named}
        return {"known": {name: known.clone() for name, known in self.known.items()}, "held": held}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Goes on from a `state_dict` with the same units."""
        for name, parameter in self.named.items():
            self.known[name].copy_(state["known"][name])
            parameter.data = state["held"][name].to(parameter.device, copy=True)

    def _own(self, name: str) -> Tensor:
        """What the model holds of a parameter, as narrow as that is."""
        own = self.named[name].detach()
        return self._held(name, own) if self._wide else own

    def _held(self, name: str, whole: Tensor) -> Tensor:
        return whole.index_select(self._dim(name), self._places[name].to(whole.device))

    def _put(self, name: str, whole: Tensor, held: Tensor) -> None:
        whole.index_copy_(self._dim(name), self._places[name].to(whole.device), held.to(whole.device))

    def _dim(self, name: str) -> int:
        return next(pool.cuts[name].dim for pool in self._pools if name in pool.cuts)

    def _padded(self, name: str) -> Tensor:
        parameter = self.named[name]
        whole = torch.zeros(self.known[name].shape, dtype=parameter.dtype, device=parameter.device)
        self._put(name, whole, self._own(name))
        return whole

    def _widen(self) -> None:
        for name, parameter in self.named.items():
            parameter.grad = None
            parameter.data = self._padded(name)
        self._wide = True

    def _hooked(self, name: str) -> Iterator[Any]:
        """Lets a parameter's module save and load it as the whole."""
        module = self._model.get_submodule(name.rpartition(".")[0])
        yield module.register_state_dict_post_hook(Unshared(partial(self._save, name)))
        yield module.register_load_state_dict_pre_hook(Unshared(partial(self._load, name)))

    def _save(self, name: str, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        if (key := prefix + name.rpartition(".")[2]) in state and not self._wide:
            state[key] = self._padded(name)

    @torch.no_grad()
    def _load(self, name: str, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        whole = state.get(key := prefix + name.rpartition(".")[2])
        if whole is not None and not self._wide and whole.shape == self.known[name].shape:
            self.known[name].copy_(whole)
            state[key] = self._held(name, whole)


def _places(cut: Cut, units: Sequence[int], whole: Tensor) -> Tensor:
    """The rows, or columns, of some units in a parameter; those that lie in it."""
    here = torch.tensor(units, dtype=torch.long) - cut.first
    here = here[(here >= 0) & (here < whole.shape[cut.dim] // max(cut.size, 1))]
    return (here[:, None] * cut.size + torch.arange(cut.size)).flatten().to(whole.device)


def _pass_on(module: nn.Module, passes: bool) -> None:
    """Lets a module return its input, or compute again."""
    if passes:
        vars(module)["forward"] = _input
    else:
        vars(module).pop("forward", None)


def _input(hidden: Tensor, *_: Any, **__: Any) -> Tensor:
    return hidden
