"""Replicas of one model in one process that compute their gradients together: a batch of models, by `torch.vmap`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from farflung.errors import UserError
from farflung.hooks.trained import trainable
from farflung.pipeline.island import WholeIsland
from farflung.pipeline.local_model import persistent_buffers
from farflung.workloads.batches import Batch, mapped, to

REMEDY = "leave out --batched-replicas"

Came = tuple["BatchedIsland", int]
"""An island and the step that it is at."""
Meet = Callable[[Any, Callable[[Sequence[Any]], Sequence[Any]]], Any]
"""See `SimulatedNetwork.meet`."""


@dataclass
class BatchedIsland(WholeIsland):
    """A replica that computes together with those that it meets, all of one shape and with the same settings."""

    meet: Meet = field(kw_only=True)
    stack: Stack | None = None
    """Where its weights lie, since its first step."""

    def gradients(self, step: int) -> tuple[float, str]:
        """See Island. Raises UserError for models that torch.vmap cannot compute."""
        found: tuple[float, str] = self.meet((self, step), _together)
        return found


def _together(came: Sequence[Came]) -> list[tuple[float, str]]:
    """What `gradients` returns for each, in their order."""
    stacks = {island.stack for island, _ in came}
    stack = stacks.pop()
    if stack is None or stacks:
        stack = Stack([island for island, _ in came])
    return stack.gradients(came)


class Stack:
    """The weights of some replicas, which these hold as parts of it; a replica joins another one's by making it anew.

    Raises UserError for models with buffers that training changes.
    """

    def __init__(self, islands: Sequence[BatchedIsland]) -> None:
        if buffers := list(persistent_buffers(islands[0].model)):
            raise UserError(f"batched_replicas: the model has buffers, such as {buffers[0]}; {REMEDY}")
        self._place = {id(island): place for place, island in enumerate(islands)}
        self._named = [trainable(island.model) for island in islands]
        self._weights = {name: torch.stack([named[name].data for named in self._named]) for name in self._named[0]}
        self._objective = _Objective(islands[0])
        for island in islands:
            island.stack = self

    def gradients(self, came: Sequence[Came]) -> list[tuple[float, str]]:
        """See Island.gradients, of each."""
        islands = [island for island, _ in came]
        settings, device = islands[0].settings, islands[0].device
        weights = self._weights_of([self._place[id(island)] for island in islands])
        total = torch.zeros(len(came), device=device)
        for parts in zip(*(island.parts(step) for island, step in came), strict=True):
            batches, shares = zip(*parts, strict=True)
            losses = self._losses(weights, to(mapped(_stacked, *batches), device)) * torch.tensor(shares, device=device)
            total += losses.detach()
            torch.autograd.backward(losses.sum())
        found = {name: weight.grad for name, weight in weights.items() if weight.grad is not None}
        if settings.clip:
            _clip(list(found.values()), settings.clip)
        told = enumerate(zip(islands, total.tolist(), strict=True))
        return [self._give(island, number, loss, found) for number, (island, loss) in told]

    def _give(self, island: BatchedIsland, number: int, loss: float, found: Mapping[str, Tensor]) -> tuple[float, str]:
        """Gives an island its gradients, of those of all that came, unless its loss is not finite."""
        finite = math.isfinite(loss)
        for name, parameter in self._named[self._place[id(island)]].items():
            parameter.grad = found[name][number] if finite and name in found else None
        return loss, "" if finite else f"loss is {loss}"

    def _weights_of(self, places: Sequence[int]) -> dict[str, Tensor]:
        """The weights of those at some places, (replicas, …) each, as new leaves."""
        for place in places:
            for name, parameter in self._named[place].items():
                own = self._weights[name][place]
                if parameter.data_ptr() != own.data_ptr():  # somebody has given it other memory
                    parameter.data = own.copy_(parameter.data)
        every = list(places) == list(range(len(self._named)))
        return {n: (w.detach() if every else w[list(places)]).requires_grad_() for n, w in self._weights.items()}

    def _losses(self, weights: Mapping[str, Tensor], batches: Batch) -> Tensor:
        """(replicas,): the loss of each one's weights for its batch."""

        def loss(weights: Mapping[str, Tensor], batch: Batch) -> Tensor:
            named = {f"model.{name}": weight for name, weight in weights.items()}
            found: Tensor = functional_call(self._objective, named, (batch,))
            return found

        try:
            with sdpa_kernel(SDPBackend.MATH):  # others take one replica after the other
                return vmap(loss)(weights, batches)
        except RuntimeError as error:
            reason = str(error).strip().partition("\n")[0]
            raise UserError(f"batched_replicas: torch.vmap cannot compute this model: {reason}; {REMEDY}") from error


class _Objective(nn.Module):
    """An island's loss for a batch, as a module, in whose place others' weights can be put."""

    def __init__(self, island: WholeIsland) -> None:
        super().__init__()
        self.model: nn.Module = island.model
        self._loss = island.loss

    def forward(self, batch: Batch) -> Tensor:
        return self._loss(batch)


def _stacked(*parts: Any) -> Tensor:
    """Tensors of one shape as one, with a first dimension more. Raises UserError."""
    if not all(isinstance(part, Tensor) for part in parts):
        raise UserError(f"batched_replicas: a batch has a {type(parts[0]).__name__} beside its tensors; {REMEDY}")
    if len({part.shape for part in parts}) > 1:
        raise UserError(f"batched_replicas: the replicas' batches are of unlike shapes; {REMEDY}")
    return torch.stack(parts)


def _clip(gradients: Sequence[Tensor], most: float) -> None:
    """What `clip_grad_norm_` does, for each replica's gradients: (replicas, …) tensors."""
    norms = [torch.linalg.vector_norm(gradient.flatten(1), dim=1) for gradient in gradients]
    factors = (most / (torch.linalg.vector_norm(torch.stack(norms), dim=0) + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(factors.view(-1, *[1] * (gradient.dim() - 1)))
