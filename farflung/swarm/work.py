"""What a stage computes of a microbatch, and what it has learnt since its last step."""

from __future__ import annotations

import copy
import math
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from farflung.hooks.trained import trainable
from farflung.pipeline.boundaries import Boundary
from farflung.swarm.letters import FalseLetterError, Forward, Gradient, LostError, Microbatch

Weights = dict[str, Tensor]

LATELY, FEW, TOO_LARGE = 16, 3, 1000.0
"""A gradient so many times as large as the median of so many before it, or of a few at first, is not believed."""
REMEMBERED = 4096
"""Microbatches of which a stage knows that it has learnt from them, so that none counts again."""


class Usual:
    """How large gradients were lately."""

    def __init__(self) -> None:
        self._lately: deque[float] = deque(maxlen=LATELY)

    def takes(self, size: float, usual: float = 0.0) -> bool:
        """Whether one can be believed, which then counts; beside what is `usual`, where that is known."""
        usual = usual or (median(self._lately) if len(self._lately) >= FEW else 0.0)
        if size > TOO_LARGE * usual > 0.0:
            return False
        self._lately.append(size)
        return True


@dataclass
class Learnt:
    """The sum of the gradients of some microbatches, each its samples' sum.

    Args:
        sums: by the parameters' names; float32.
        samples: by the microbatches' names.
        losses: the sum of the samples' losses.
        taken_back: the microbatches that an earlier step had learnt from, and this one unlearns.
    """

    sums: Weights
    samples: dict[Microbatch, int] = field(default_factory=dict)
    losses: float = 0.0
    taken_back: list[Microbatch] = field(default_factory=list)

    @classmethod
    def nothing(cls, parameters: Mapping[str, Tensor]) -> Learnt:
        """Before the first microbatch."""
        return cls({name: torch.zeros_like(one, dtype=torch.float32) for name, one in parameters.items()})

    def add(self, gradients: Mapping[str, Tensor], sign: int = 1) -> None:
        """Adds a microbatch's gradient, or takes it away."""
        for name, gradient in gradients.items():
            self.sums[name].add_(gradient, alpha=sign)

    def with_others(self, others: list[Learnt]) -> Learnt:
        """This and what others have learnt. Raises ValueError where two have learnt from the same microbatch."""
        total = Learnt({name: one.clone() for name, one in self.sums.items()}, dict(self.samples), self.losses)
        for other in others:
            if total.samples.keys() & other.samples.keys():
                raise ValueError("two peers of a stage have learnt from the same microbatch")
            total.add(other.sums)
            total.samples |= other.samples
            total.losses += other.losses
        return total


@dataclass
class _Under:
    """A microbatch under way: what it was computed with, and of what."""

    weights: Weights
    entering: Tensor
    leaving: Tensor | None
    batch: Tensor
    gradient: Any = None
    counted: bool = False


class StageWork:
    """One stage's forward and backward passes, and its steps.

    A microbatch's gradient belongs to the weights of its forward pass, whatever steps are taken in between (the
    stashed weights of PipeDream and Ravnest).

    Args:
        piece: see `Divisible.piece`.
        batch_of: a microbatch's samples, on the CPU: a pure function.
        optimizer: of the piece's parameters; None where somebody else takes the steps.
        before, after: the boundaries on both sides; None at the model's ends.
        alone: after how many microbatches the stage steps by itself, by `take_step`; 0 where `step` is called for it.
            Alone, it takes microbatches of any version of the weights.
    """

    def __init__(
        self,
        piece: Any,
        batch_of: Callable[[Microbatch], Tensor],
        optimizer: torch.optim.Optimizer | None,
        before: Boundary | None,
        after: Boundary | None,
        alone: int = 0,
    ) -> None:
        self.piece, self.optimizer, self.alone = piece, optimizer, alone
        self.version = 0
        self.take_step: Callable[[], None] = self.step
        self._batch_of, self._before, self._after = batch_of, before, after
        self._parameters = trainable(piece)
        self._twin = _twin(piece)
        """Computes with stashed weights: only its own modules have these meanwhile, as other threads see the piece."""
        self.learnt = Learnt.nothing(self._parameters)
        self._stash: Weights = {}
        self._under_way: dict[Forward, _Under] = {}
        self._learning = threading.Lock()
        self._coming, self._own = Usual(), Usual()
        self._known: dict[Microbatch, None] = {}
        """What it has learnt from, the latest last."""

    def forward(self, forward: Forward) -> Tensor | None:
        """See Work."""
        if not (self.alone or forward.judged):
            self._check_step(forward)
        batch = self._batch_of(forward.microbatch)
        if forward.text is not None:
            batch = _begun(batch, forward.text)
        if self._before is None:
            entering = batch.to(self._device)
        else:
            _check(forward.packet, self._before)
            entering = self._before.unpack(forward.packet, batch)
        if forward.judged:
            under = _Under({}, entering, None, batch)
            leaving = self._judge(entering, batch, forward.text)
        else:
            under = _Under(self._weights(), entering.requires_grad_(self._before is not None), None, batch)
            leaving = self._compute(under)
        under.leaving = leaving
        self._under_way[forward] = under
        if self._after is None:
            return None
        return _finite(self._after, self._after.pack(leaving, batch))

    def check(self, gradient: Gradient) -> None:
        """See Work."""
        if self._after is None:
            return
        _check(gradient.packet, self._after)
        if not self._coming.takes(float(self._after.unpack_gradient(gradient.packet).square().mean().sqrt())):
            raise FalseLetterError("a gradient that is far too large")

    def backward(self, forward: Forward, gradient: Gradient) -> Gradient:
        """See Work."""
        under = self._under_way[forward]
        under.gradient = gradient.packet
        assert under.leaving is not None
        if forward.text is not None:
            return gradient if self._after is not None else Gradient(under.leaving.float().cpu())
        loss = gradient.loss if self._after is not None else float(under.leaving.detach()) / len(under.batch)
        if forward.judged:
            return Gradient(None, loss)
        entering, gradients = self._gradients(under)
        size = float(torch.stack([one.norm() for one in gradients.values()]).norm())
        if not math.isfinite(size):
            raise LostError("a gradient that is not finite")
        if not self._own.takes(size):  # whoever is to blame for that, here or there: what came in was not checked so
            raise LostError("a gradient that is far too large")
        under.leaving = None
        back = None if self._before is None else _finite(self._before, self._before.pack_gradient(entering))
        under.counted = forward.counts() and forward.microbatch not in self._known  # once, if it comes again
        if under.counted:
            with self._learning:
                self._remember(forward.microbatch)
                self.learnt.add(gradients)
                self.learnt.samples[forward.microbatch] = len(under.batch)
                self.learnt.losses += loss * len(under.batch)
            if self.alone and len(self.learnt.samples) >= self.alone:
                self.take_step()
        return Gradient(back, loss)

    def take_back(self, forward: Forward) -> None:
        """See Work. The gradient is computed again: this is rare, and keeping each would cost a stage's memory.

        Where a step was taken with it, the next one is without as much of it.
        """
        under = self._under_way[forward]
        if not under.counted:
            return
        under.leaving = self._compute(under)
        gradients = self._gradients(under)[1]
        with self._learning:
            self._known.pop(forward.microbatch, None)
            self.learnt.add(gradients, sign=-1)
            if self.learnt.samples.pop(forward.microbatch, None) is None:
                self.learnt.taken_back.append(forward.microbatch)

    def forget(self, forward: Forward) -> None:
        """See Work."""
        self._under_way.pop(forward, None)

    def step(self, learnt: Learnt | None = None) -> None:
        """Takes the optimizer's step along the mean over the samples of what this peer, or its stage, has learnt."""
        assert self.optimizer is not None
        learnt = learnt or self.learnt
        with self._learning:
            self.learnt = Learnt.nothing(self._parameters)
        self.fill(learnt)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.advance()

    def learnt_from(self) -> frozenset[Microbatch]:
        """The microbatches that it has learnt from since its last step."""
        with self._learning:
            return frozenset(self.learnt.samples)

    def take(self) -> Learnt | None:
        """What it has learnt since it was asked last; None where that is of no microbatch."""
        with self._learning:
            if not self.learnt.samples:
                return None
            taken, self.learnt = self.learnt, Learnt.nothing(self._parameters)
        return taken

    def fill(self, learnt: Learnt) -> None:
        """Gives the parameters the mean gradient over the samples."""
        samples = sum(learnt.samples.values())
        for name, parameter in self._parameters.items():
            parameter.grad = (learnt.sums[name] / samples).to(parameter.dtype)

    def begin_at(self, version: int) -> None:
        """The weights are those of a later version, and nothing is learnt yet."""
        self.take()
        self._known, self._stash, self.version = {}, {}, version

    def advance(self) -> None:
        """The weights are those of the next version."""
        self._stash = {}
        self.version += 1

    def _check_step(self, forward: Forward) -> None:
        """Refuses what is not of the step that all take together: its samples would count in another one."""
        if forward.version != self.version:
            raise LostError("weights of another step")
        if (forward.microbatch.step, forward.microbatch.stream) != (self.version, 0):
            raise FalseLetterError("a microbatch of another step")

    def _remember(self, microbatch: Microbatch) -> None:
        self._known[microbatch] = None
        while len(self._known) > max(REMEMBERED, len(self.learnt.samples) + 1):
            del self._known[next(iter(self._known))]

    @property
    def _device(self) -> torch.device:
        device: torch.device = next(self.piece.parameters()).device
        return device

    def _weights(self) -> Weights:
        """The weights as they are now. Where a step may come before the backward pass, a copy, one for each version."""
        if not self._stash:
            self._stash = {
                name: (one.detach().clone() if self.alone else one.detach()).requires_grad_()
                for name, one in self._parameters.items()
            }
        return self._stash

    def _compute(self, under: _Under) -> Tensor:
        """See _leaving."""
        found = functional_call(self._twin, under.weights, (under.entering,), {"batch": under.batch})
        return self._leaving(found, under.batch)

    @torch.no_grad()
    def _judge(self, entering: Tensor, batch: Tensor, text: tuple[int, ...] | None) -> Tensor:
        """See _leaving; in evaluation mode, with the weights as they are now. Of a text, the scores of what follows."""
        self.piece.eval()
        try:
            found = self.piece(entering, batch=batch)
            if text is None or self._after is not None:
                return self._leaving(found, batch)
            scores: Tensor = found[0, len(text) - 1]
            return scores
        finally:
            self.piece.train()

    def _leaving(self, found: Tensor, batch: Tensor) -> Tensor:
        """Hidden states, or in the last stage the sum of the samples' losses."""
        if self._after is not None:
            return found
        loss: Tensor = self.piece.loss(found, batch.to(found.device))
        return loss * len(batch)

    def _gradients(self, under: _Under) -> tuple[Tensor, Weights]:
        """With respect to what enters, and to the weights."""
        assert under.leaving is not None
        wanted = list(under.weights.values())
        if self._before is not None:
            wanted.append(under.entering)
        along = None if self._after is None else self._after.unpack_gradient(under.gradient)
        found = torch.autograd.grad(under.leaving, wanted, along, allow_unused=True, materialize_grads=True)
        return found[-1], dict(zip(under.weights, found, strict=False))


def _twin(piece: Any) -> Any:
    """Modules of their own, with the same parameters and buffers: it takes no memory."""
    return copy.deepcopy(piece, {id(one): one for one in (*piece.parameters(), *piece.buffers())})


def _begun(batch: Tensor, text: tuple[int, ...]) -> Tensor:
    """A batch whose first sample begins with a text. No token sees those that follow it, so the rest plays no part."""
    if not 0 < len(text) <= batch.shape[1]:
        raise FalseLetterError("a text that is no part of a sample")
    begun = batch.clone()
    begun[0, : len(text)] = torch.tensor(text)
    return begun


def _check(packet: Any, boundary: Boundary) -> None:
    room = boundary.room()
    if not isinstance(packet, Tensor) or packet.shape != room.shape or packet.dtype != room.dtype:
        raise FalseLetterError("a packet of another shape")
    if packet.is_floating_point() and not packet.isfinite().all():
        raise FalseLetterError("numbers that are not finite")


def _finite(boundary: Boundary, packet: Tensor) -> Tensor:
    """A packet. Raises LostError where the boundary has put zeros in the place of what is not finite."""
    if boundary.spoilt:
        boundary.spoilt = False
        raise LostError("numbers that are not finite")
    return packet
