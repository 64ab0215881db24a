"""Layers whose optimizer is far: their gradients leave in the backward pass, and the host steps them layer by layer."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from farflung.codecs import finite
from farflung.hooks.steps import hook_steps
from farflung.memory.copies import Arrival, Copies
from farflung.memory.far import Home, MakeHome, flat
from farflung.memory.moments import SMALLEST, Places
from farflung.memory.profile import Make


@dataclass(eq=False)
class Stepped:
    """A layer's parameters, the host's own of each, an optimizer of these, and where all that it needs lies.

    On a processor a parameter is the host's own.
    """

    own: Mapping[nn.Parameter, nn.Parameter]
    optimizer: Optimizer
    weights: Sequence[Home]
    """Those of its parameters that are far, too."""
    gradients: dict[nn.Parameter, Home] = field(default_factory=dict)
    moments: Places = field(default_factory=dict)
    leaving: deque[Arrival] = field(default_factory=deque)
    norms: dict[nn.Parameter, Tensor] = field(default_factory=dict)
    """Of the gradients that there are."""
    factor: Tensor | None = None
    """What these are still to be clipped by."""

    def left(self) -> None:
        """Waits until its gradients are far."""
        while self.leaving:
            self.leaving.popleft()()
        self.let_go()

    def settle(self) -> None:
        """Its gradients are far, and clipped."""
        if self.leaving:
            self.left()
        if self.factor is not None:
            for parameter in self.norms:
                self.gradients[parameter].tensor.mul_(self.factor)
            self.factor = None

    def forget(self) -> None:
        """Forgets its gradients."""
        self.left()
        self.norms.clear()
        self.factor = None

    def let_go(self) -> None:
        """Lets go of the host's memory."""
        for home in (*self.weights, *self.gradients.values(), *self.moments.values()):
            home.let_go()


class FarUpdates:
    """Has the host step some layers, whose gradients and moments are far.

    A gradient leaves when it is accumulated, at most two layers' at a time. At a step of the optimizer the host steps
    one layer after the other, the first one first, and their weights come back. Who takes means of gradients with
    other replicas before that, part by part, has each layer stepped when its own are there. Layers step as they would
    with all others, to the bit where the device is a processor and the optimizer treats each value by itself. The state
    of the optimizer holds the moments, as tensors of the far tier.

    Args:
        make: makes an optimizer such as `optimizer` of named parameters.
        layers: their parameters, in the order of the model.
        home: makes what gradients and moments lie in.
        copies: between such homes and the device.
        weights: where those of their parameters lie that are far.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        make: Make,
        layers: Sequence[Mapping[str, nn.Parameter]],
        home: MakeHome,
        copies: Copies,
        weights: Mapping[nn.Parameter, Home],
    ) -> None:
        self._optimizer, self._home, self._copies, self._weights = optimizer, home, copies, weights
        self._parts = [self._part(make, named) for named in layers if named]
        self._of = {parameter: part for part in self._parts for parameter in part.own}
        self._last: Stepped | None = None
        handles = [
            parameter.register_post_accumulate_grad_hook(partial(self._leave, part))
            for part in self._parts
            for parameter in part.own
        ]
        self._handles = [*(handle.remove for handle in handles), hook_steps(optimizer, before=self._step_all)]

    def undo(self) -> None:
        """Lets the optimizer step all layers together again, with all moments near, and forgets gradients."""
        for remove in self._handles:
            remove()
        for part in self._parts:
            part.left()
            for parameter, key, value in self._moments(part):
                self._optimizer.state[parameter][key] = value.to(parameter.device, copy=True)

    def places(self) -> dict[nn.Parameter, Places]:
        """Where moments lie, by the parameters that they are of."""
        return {parameter: part.moments for part in self._parts for parameter in part.own}

    def forget(self) -> None:
        """Forgets gradients that no step has taken."""
        for part in self._parts:
            part.forget()

    def clip(self, parameters: Iterable[nn.Parameter], most: float) -> None:
        """Clips all gradients, near and far, as torch.nn.utils.clip_grad_norm_ would with all of them near."""
        parameters = list(parameters)
        norms = {parameter: norm for part in self._parts for parameter, norm in part.norms.items()}
        norms |= {p: torch.linalg.vector_norm(p.grad) for p in parameters if p.grad is not None}
        if not norms:
            return
        ordered = [norms[parameter] for parameter in parameters if parameter in norms]
        total = nn.utils.get_total_norm(ordered)  # which takes those of one dtype together, as it does gradients
        nn.utils.clip_grads_with_norm_(parameters, most, total)
        factor = torch.clamp(most / (total + 1e-6), max=1.0).cpu()
        for part in self._parts:
            part.factor = factor if part.norms else None

    def keeps(self, parameter: nn.Parameter) -> bool:
        """Whether the host steps it."""
        return parameter in self._of

    def has(self, parameter: nn.Parameter) -> bool:
        """Whether such a parameter has a gradient."""
        return parameter in self._of[parameter].norms

    def gradient(self, parameter: nn.Parameter) -> Tensor:
        """Where its gradient lies, clipped; noughts, if it had none."""
        part = self._of[parameter]
        part.settle()
        if parameter not in part.gradients:
            part.gradients[parameter] = self._home(parameter)
        home = part.gradients[parameter].tensor
        if parameter not in part.norms:
            part.norms[parameter] = home.zero_().new_zeros(())
        return home

    def drop(self, parameter: nn.Parameter) -> None:
        """Lets it have no gradient."""
        self._of[parameter].norms.pop(parameter, None)

    def finite(self) -> bool:
        """Whether all values of gradients are finite, in float32, too."""
        largest = torch.finfo(torch.float32).max
        for part in self._parts:
            for parameter, norm in part.norms.items():
                if not norm <= largest:  # nor NaN; of very many large values, too
                    part.left()
                    home = part.gradients[parameter].tensor
                    if not finite(home.float()):
                        return False
        return True

    @torch.no_grad()
    def step(self, known: Set[nn.Parameter]) -> None:
        """Steps those layers that have gradients, of all whose parameters these are known."""
        for part in self._parts:
            if part.norms and part.own.keys() <= known:
                part.settle()
                self._update(part)
                part.norms.clear()
                part.let_go()

    def _part(self, make: Make, named: Mapping[str, nn.Parameter]) -> Stepped:
        own = {name: p if p.device.type == "cpu" else nn.Parameter(self._home(p).tensor) for name, p in named.items()}
        weights = [self._weights[parameter] for parameter in named.values() if parameter in self._weights]
        return Stepped({p: own[name] for name, p in named.items()}, make(list(own.items())), weights)

    def _leave(self, part: Stepped, parameter: nn.Parameter) -> None:
        """A gradient has been accumulated: adds it to what is far."""
        if self._last and self._last is not part:
            self._last.left()
        self._last = part
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        if parameter not in part.gradients:
            part.gradients[parameter] = self._home(gradient)
        home = part.gradients[parameter].tensor
        if parameter in part.norms:  # of the microbatches before
            part.left()
            home += gradient.to(home.device)
            gradient = home
        else:
            part.leaving.append(self._copies.out(flat(home), flat(gradient.contiguous())))
        part.norms[parameter] = torch.linalg.vector_norm(gradient)

    def _step_all(self, *_: Any) -> None:
        self.step(self._of.keys())

    def _update(self, part: Stepped) -> None:
        """Steps a layer on the host."""
        for group in part.optimizer.param_groups:
            group["lr"] = self._optimizer.param_groups[0]["lr"]
        for parameter, own in part.own.items():
            if parameter in part.norms or parameter in self._optimizer.state:  # which a checkpoint may have replaced
                part.optimizer.state[own] = self._optimizer.state[parameter]
            if own is not parameter:
                own.copy_(parameter)  # which a round may have changed
            if parameter in part.norms:
                own.grad = part.gradients[parameter].tensor
        self._lay(part)
        part.optimizer.step()
        self._lay(part)
        for parameter, own in part.own.items():
            own.grad = None
            if own is not parameter:
                parameter.copy_(own)

    def _lay(self, part: Stepped) -> None:
        """Brings moments to where they lie, which the optimizer has made, or a checkpoint."""
        for parameter, key, value in self._moments(part):
            if value.numel() < SMALLEST:
                self._optimizer.state[parameter][key] = value.to(part.own[parameter].device)
                continue
            home = part.moments.get((parameter, key))
            if home is None:
                home = part.moments[parameter, key] = self._home(value)
            if home.tensor is not value:
                home.tensor.copy_(value)
                self._optimizer.state[parameter][key] = home.tensor

    def _moments(self, part: Stepped) -> Iterator[tuple[nn.Parameter, str, Tensor]]:
        for parameter in part.own:
            for key, value in [*self._optimizer.state.get(parameter, {}).items()]:
                if isinstance(value, Tensor):
                    yield parameter, key, value


class FarWeights:
    """Has a processor compute with weights of some layers that lie in files, of which no more is near than is used.

    A layer's weights are near while it computes, and while the next one does. `homes` are where they lie.
    """

    def __init__(self, layers: Sequence[nn.Module], home: MakeHome) -> None:
        self.homes: dict[nn.Parameter, Home] = {}
        self._removes: list[Callable[[], None]] = []
        self._last: Sequence[Home] = ()
        for layer in layers:
            parameters = list(layer.parameters())
            for parameter in parameters:
                if parameter in self.homes:  # which layers share
                    continue
                self.homes[parameter] = home(parameter.data)
                self.homes[parameter].tensor.copy_(parameter.data)
                parameter.data = self.homes[parameter].tensor
                self.homes[parameter].let_go()
            homes = [self.homes[parameter] for parameter in parameters]
            self._computes(homes)
            passed = partial(self._computes, homes)
            handles = [p.register_post_accumulate_grad_hook(passed) for p in parameters if p.requires_grad]
            handles.append(layer.register_forward_hook(passed))
            self._removes += [handle.remove for handle in handles]

    def undo(self) -> None:
        """Brings all weights near again."""
        for remove in self._removes:
            remove()
        for parameter, home in self.homes.items():
            parameter.data = home.tensor.clone()
            home.let_go()

    def _computes(self, homes: Sequence[Home], *_: Any) -> None:
        """A layer computes: those of the one before, forward or backward, are not needed."""
        if self._last is not homes:
            for home in self._last:
                home.let_go()
            self._last = homes
