"""Moments that are far: a layer's come near for its step of the optimizer, and leave after it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from farflung.hooks.steps import hook_steps
from farflung.memory.copies import Arrival, Copies
from farflung.memory.far import Home, flat
from farflung.memory.measure import bytes_of
from farflung.memory.profile import Make

SMALLEST = 2
"""Values of the smallest moments that leave: the number of a step stays."""

Places = dict[tuple[nn.Parameter, str], Home]
"""Where moments lie, by their parameters and names."""


@dataclass(eq=False)
class Part:
    """A layer's parameters, an optimizer of these alone, and where their moments lie when they are far."""

    named: Mapping[str, nn.Parameter]
    optimizer: Optimizer
    homes: Places = field(default_factory=dict)
    arrivals: list[Arrival] = field(default_factory=list)

    def moments(self) -> dict[tuple[nn.Parameter, str], Tensor]:
        """As the optimizer has them now."""
        return {
            (parameter, key): value
            for parameter in self.named.values()
            for key, value in self.optimizer.state[parameter].items()
            if isinstance(value, Tensor) and value.numel() >= SMALLEST
        }

    def put(self, parameter: nn.Parameter, key: str, value: Tensor) -> None:
        """Lets the optimizer have another tensor as a moment."""
        self.optimizer.state[parameter][key] = value

    def arrived(self) -> None:
        """Waits for what was begun to be copied, and lets go of the host's memory that it took."""
        for arrive in self.arrivals:
            arrive()
        self.arrivals.clear()
        for home in self.homes.values():
            home.let_go()


class FarMoments:
    """Has an optimizer step some layers one after the other, with their moments far between steps.

    The optimizer's state holds them as tensors of the far tier, which checkpoints copy as any others. Layers step as
    they would with all others, to the bit where the optimizer treats each value by itself.

    Args:
        make: makes an optimizer such as `optimizer` of named parameters.
        layers: whose moments are far.
        home: makes a home like a tensor.
        copies: between such tensors and the device.
        limit: bytes of moments that may be near at a time; those of one layer always may.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        make: Make,
        layers: Sequence[Mapping[str, nn.Parameter]],
        home: Callable[[Tensor], Home],
        copies: Copies,
        limit: int,
    ) -> None:
        self._optimizer, self._home, self._copies, self._limit = optimizer, home, copies, limit
        self._parts = [Part(named, make(list(named.items()))) for named in layers if named]
        self._gradients: dict[nn.Parameter, Tensor | None] = {}
        self._near: deque[Part] = deque()
        self._leaving: deque[tuple[Part, list[Tensor]]] = deque()
        self._undo = hook_steps(optimizer, before=self._step, after=self._give_back)

    def undo(self) -> None:
        """Lets the optimizer step all layers together again, with all moments near."""
        self._undo()
        for part in self._parts:
            self._link(part)
            self._come(part)
            part.arrived()

    def places(self) -> dict[nn.Parameter, Places]:
        """Where moments lie when they are far, by the parameters that they are of."""
        return {parameter: part.homes for part in self._parts for parameter in part.named.values()}

    def _step(self, *_: Any) -> None:
        """Steps the layers. The step that follows leaves them alone, as they have no gradients in it."""
        waiting = deque(part for part in self._parts if any(p.grad is not None for p in part.named.values()))
        for part in waiting:
            self._link(part)
        while waiting:
            part = waiting[0]
            self._come(part)
            if len(waiting) > 1 and self._taken() + bytes_of(waiting[1].moments().values()) <= self._limit:
                self._come(waiting[1])
            part.arrived()
            part.optimizer.step()
            self._leave(waiting.popleft())
            for parameter in part.named.values():
                self._gradients[parameter], parameter.grad = parameter.grad, None
        while self._leaving:
            self._free()
        if self._gradients and next(iter(self._gradients)).is_cuda:
            torch.cuda.synchronize()  # the host may read them from now on

    def _give_back(self) -> None:
        for parameter, gradient in self._gradients.items():
            parameter.grad = gradient
        self._gradients.clear()

    def _link(self, part: Part) -> None:
        """Lets a part go on from the learning rate and the state of the whole, which a checkpoint may have replaced."""
        for group in part.optimizer.param_groups:
            group["lr"] = self._optimizer.param_groups[0]["lr"]
        for parameter in part.named.values():
            if parameter.grad is not None or parameter in self._optimizer.state:
                part.optimizer.state[parameter] = self._optimizer.state[parameter]

    def _come(self, part: Part) -> None:
        """Begins to bring a part's moments near, where there is room; those of a checkpoint may be near."""
        if part in self._near:
            return
        moments = part.moments()
        while self._leaving and self._taken() + bytes_of(moments.values()) > self._limit:
            self._free()
        for (parameter, key), value in moments.items():
            if (home := part.homes.get((parameter, key))) and value is home.tensor:
                near = torch.empty_like(value, device=parameter.device)
                part.arrivals.append(self._copies.back(flat(value), flat(near)))
                part.put(parameter, key, near)
        self._near.append(part)

    def _leave(self, part: Part) -> None:
        """Begins to bring a part's moments to where they lie when they are far."""
        self._near.remove(part)
        moments = part.moments()
        for place, near in moments.items():
            home = part.homes.get(place)
            if home is None:
                home = part.homes[place] = self._home(near)
            part.arrivals.append(self._copies.out(flat(home.tensor), flat(near)))
            part.put(*place, home.tensor)
        self._leaving.append((part, list(moments.values())))

    def _free(self) -> None:
        """Waits for those that leave first."""
        part, _ = self._leaving.popleft()
        part.arrived()

    def _taken(self) -> int:
        """Bytes of moments that are near."""
        leaving = sum(bytes_of(moments) for _, moments in self._leaving)
        return leaving + sum(bytes_of(part.moments().values()) for part in self._near)
