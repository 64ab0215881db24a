"""One replica, as each of its processes sees it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from farflung.errors import UserError
from farflung.networks import Traffic
from farflung.pipeline.ahead import Ahead, OnItsWay
from farflung.pipeline.compiling import eagerly
from farflung.pipeline.mesh import Mesh, MeshCoordinates
from farflung.pipeline.settings import IslandSettings
from farflung.workloads.base import Picture, Score, Workload
from farflung.workloads.batches import Batch, pinned, to

T = TypeVar("T")

Ledger = tuple[list[list[int]], list[list[int]]]
"""The microbatches that a step has learnt from, and those that it unlearns: lists of stream, step and their numbers."""


class Island(Protocol):
    """A replica's training, in one process or in several, which all make the same calls.

    `settings` are those of the replica's shape, `model` is what this process trains; `traffic` counts what it sends to
    other stages. Files with its part of a model's weights are called after `part_stem`.
    """

    settings: IslandSettings
    mesh: Mesh
    coordinates: MeshCoordinates
    model: nn.Module
    traffic: Traffic

    @property
    def part_stem(self) -> str:
        """That of a part of a replica, which the others have the rest of."""
        return self.mesh.file_stem(self.coordinates)

    def gradients(self, step: int) -> tuple[float, str]:
        """Computes the clipped gradients of the replica's mean loss in a step.

        Returns the loss and its fault: "" for none; with a fault, there are no gradients. The loss is NaN without a
        fault where nothing was learnt from yet. Raises PeerLostError.
        """
        ...

    @property
    def waited_s(self) -> float:
        """Seconds that steps have waited for batches so far."""
        return 0.0

    def close(self) -> None:
        """Ends what it does in the background; after it no more gradients are asked for."""
        return

    def slow_link(self) -> str:
        """A warning where the replica's processes are joined by too slow a link; or "". Raises PeerLostError."""
        ...

    def after_step(self) -> None:
        """Is called when the weights have changed. Raises PeerLostError."""
        ...

    def stay(self) -> None:
        """Is called after the last step, and returns when all others are done with theirs that need this process."""
        return

    def leave(self) -> None:
        """Is called when the results are written, and returns when nobody else needs this process any more."""
        return

    def restored(self, step: int) -> None:
        """Is told that the weights and the optimizer's state are those of a checkpoint after so many steps."""
        self.after_step()

    def steps_with(self, optimizer: torch.optim.Optimizer) -> None:
        """Is told once what takes the steps."""
        return

    def gives_with(self, give: Callable[[], None]) -> None:
        """Is told once what gives others this replica's state between two steps, where they ask for it."""
        return

    @property
    def at(self) -> int | None:
        """The steps that the weights have taken, where others decide on them; None where this process counts."""
        return None

    def ledger(self) -> Ledger:
        """Of the last step, once; empty where a replica's samples are known by their step."""
        return [], []

    def evaluate(self) -> Score | None:
        """The workload's measure of the model, without compression between stages; None where nobody has taken it yet.

        Raises PeerLostError.
        """
        ...

    def sample(self) -> str | Picture:
        """A sample of what the model makes. Raises PeerLostError."""
        ...

    @property
    def samples_beside(self) -> bool:
        """Whether other machines make the samples, from any thread, so that this one can train meanwhile."""
        return False

    def total(self, values: Tensor) -> Tensor:
        """Sums flat float64 values over the replica's processes. Raises PeerLostError."""
        ...


def shares_of(weights: Sequence[Any]) -> list[float]:
    """The share of each microbatch in a step's loss; 0 of all, where none has anything to learn. Raises UserError."""
    for weight in weights:
        try:
            good = 0 <= float(weight) < math.inf
        except (TypeError, ValueError, RuntimeError):
            good = False
        if not good:
            raise UserError(
                f"the workload's weight of a batch is {weight!r}; let it return a number, of at least 0, such as how "
                "many tokens the batch's mean loss was taken over"
            )
    numbers = [float(weight) for weight in weights]
    total = sum(numbers) or 1.0
    return [number / total for number in numbers]


@dataclass
class WholeIsland(Island):
    """A replica that one process has all of; `seed` is that of batches and samples.

    With `ahead`, a thread makes batches while the steps before them compute. `clip` clips gradients to a norm.
    """

    settings: IslandSettings
    workload: Workload
    model: Any
    mesh: Mesh
    coordinates: MeshCoordinates
    seed: int
    device: torch.device
    ahead: bool = False
    traffic: Traffic = field(default_factory=Traffic)
    clip: Callable[[float], object] = field(init=False)
    in_flight = 1
    """Microbatches whose forward passes wait for their backward passes, at most."""

    def __post_init__(self) -> None:
        self.clip = lambda most: nn.utils.clip_grad_norm_(self.model.parameters(), most)
        let_go = getattr(self.workload, "let_go", lambda: None)
        self._ahead = Ahead(self.parts, let_go) if self.ahead else None

    @property
    def waited_s(self) -> float:
        """See Island."""
        return self._ahead.waited_s if self._ahead else 0.0

    def close(self) -> None:
        """See Island."""
        if self._ahead:
            self._ahead.close()

    def gradients(self, step: int) -> tuple[float, str]:
        """See Island."""
        parts = self._ahead.at(step) if self._ahead else self.parts(step)
        batches = [(batch, share) for batch, share in parts if share]  # of nothing, a mean loss is NaN
        if not batches:
            return math.nan, ""
        losses: list[Tensor] = []
        for number, (batch, share) in enumerate(batches, 1):
            loss = self.loss(batch) * share
            if not loss.requires_grad:
                raise UserError(
                    "the workload's loss does not depend on what is trained; let it return floats that the model's "
                    "output gives, without detach()"
                )
            losses.append(loss.detach())
            if number == len(batches):
                told = OnItsWay(torch.stack(losses))  # before the backward pass, which need not be waited for
            torch.autograd.backward(loss)
        if self.settings.clip:
            self.clip(self.settings.clip)
        total = sum(told.read())
        if not math.isfinite(total):
            self.model.zero_grad()
            return total, f"loss is {total}"
        return total, ""

    def slow_link(self) -> str:
        """See Island."""
        return ""

    def after_step(self) -> None:
        """See Island."""

    def evaluate(self) -> Score:
        """See Island."""
        with self._evaluating(), self._precision():
            found = self.workload.evaluate(self.model, self.settings.batch_size, self.device)
        return Score.given(found)

    def sample(self) -> str | Picture:
        """See Island."""
        with self._evaluating():
            return Picture.or_text(self.workload.sample(self.model, self.seed, self.device))

    def total(self, values: Tensor) -> Tensor:
        """See Island."""
        return values

    def parts(self, step: int) -> list[tuple[Batch, float]]:
        """A step's microbatches, and the share of each in the step's loss. Raises UserError."""
        settings, workload = self.settings, self.workload
        ids = workload.sample_ids(self.seed, self.coordinates.replica, step, settings.batch_size)
        batches = [workload.batch(part) for part in np.array_split(ids, settings.microbatches or 1)]
        weigh = getattr(workload, "weight", lambda _: 1)
        shares = shares_of([weigh(batch) for batch in batches])
        return list(zip(map(pinned, batches) if self.device.type == "cuda" else batches, shares, strict=True))

    def told(self, fact: T) -> list[T]:
        """What each of the replica's processes tells: itself alone."""
        return [fact]

    def told_by_shards(self, fact: T) -> list[T]:
        """What each process tells that has shards of the same: itself alone."""
        return [fact]

    def layers(self) -> list[nn.Module]:
        """The model's, in their order; none where they cannot be told apart."""
        with suppress(UserError):  # which says why it has no stages
            return list(getattr(self.workload, "layers", lambda _: ())(self.model))
        return []

    def rehearsal(self, step: int) -> Callable[[], Tensor]:
        """What computes the loss of a step's first microbatch."""
        batch, _ = self.parts(step)[0]
        return lambda: self.loss(batch)

    def loss(self, batch: Batch) -> Tensor:
        """The mean loss of a batch from the CPU."""
        with self._precision():
            found = self.workload.loss(self.model, to(batch, self.device))
        if not isinstance(found, Tensor) or found.numel() != 1:
            given = f"a tensor of {tuple(found.shape)}" if isinstance(found, Tensor) else repr(found)
            raise UserError(f"the workload's loss is {given}; let it return the mean, as a tensor of one number")
        return found.reshape(())

    def _precision(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.settings.precision == "bfloat16")

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        self.model.eval()
        try:
            with torch.no_grad(), eagerly(self.settings.compile):
                yield
        finally:
            self.model.train()
