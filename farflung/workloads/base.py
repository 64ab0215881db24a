"""What training asks of what is trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

Batch = Any
"""Some samples: a tensor, or a tuple, list or dict of tensors."""
Ids = NDArray[np.int64]
"""Numbers of samples."""
Reshape = Callable[[Any], None]
"""Changes a model that has no memory yet."""


class Workload(Protocol):
    """What is trained: a model, its batches, its loss, what it is judged by, and something to look at.

    It is made of its settings, an instance of its `Settings`, and of `shares`: stretches of one length that the data is
    divided into, of which a replica sees one only. That reads no data; what needs data reads it once.
    """

    Settings: Any
    """The dataclass of its own settings."""
    units: str
    """What is counted of the samples, such as tokens."""
    measure: str
    """What `loss` and `evaluate` are measured in, such as nats a token."""

    def __init__(self, settings: Any, shares: int = 1) -> None: ...

    @property
    def divisible(self) -> Divisible | None:
        """Itself, where its model can be divided among processes."""
        ...

    @property
    def units_per_sample(self) -> int:
        """How many there are in one sample."""
        ...

    def check(self) -> None:
        """Raises UserError for settings that cannot work, as far as can be seen without reading all data."""
        ...

    def outline(self) -> nn.Module:
        """The model without memory for its weights. Raises UserError."""
        ...

    def build(self, seed: int, reshape: Reshape | None = None) -> Any:
        """The model on the CPU, from a seed or with its own weights.

        `reshape` may change it while it has no memory yet. A weight is a function of the seed and its module's name,
        whatever else there is of the model. Raises UserError.
        """
        ...

    def sample_ids(self, seed: int, replica: int, step: int, size: int) -> Ids:
        """Which samples a replica trains on in a step: a pure function. Raises UserError where there is no data."""
        ...

    def batch(self, ids: Ids) -> Batch:
        """These samples, on the CPU."""
        ...

    def loss(self, model: Any, batch: Batch) -> Tensor:
        """What training minimises: a mean over the batch's samples."""
        ...

    def evaluate(self, model: Any, size: int, device: torch.device) -> float:
        """What a model in evaluation mode is judged by, on samples held out; less is better.

        `size` is how many of them it may compute at a time.
        """
        ...

    def digest(self) -> str:
        """What stands for the samples held out: equal for equal ones."""
        ...

    def sample(self, model: Any, seed: int, device: torch.device) -> str:
        """Something to look at that a model in evaluation mode makes, as text."""
        ...

    def export(self, weights: Mapping[str, Tensor], target: Path, seed: int, constrained_to: int = 0) -> None:
        """Writes a model with these weights to a folder, in the form that others load.

        `seed` is the run's. Those of a divided model were `constrained_to` so many dimensions; 0 is for all others.
        """
        ...


@dataclass(frozen=True)
class Span:
    """The part of a model that one stage has: layers from `begin` to before `end`, and perhaps a model's ends."""

    begin: int
    end: int
    first: bool
    last: bool


class Load(NamedTuple):
    """What something takes: parameters, and those of them that are multiplied with for every unit."""

    memory: float
    work: float

    def plus(self, other: Load) -> Load:
        """Both together."""
        return Load(self.memory + other.memory, self.work + other.work)


class Coordinates(Protocol):
    """A subspace that hidden states are constrained to, so that a few coordinates represent them exactly."""

    rank: int

    def coordinates(self, hidden: Tensor, batch: Tensor) -> Tensor:
        """(…, rank) coordinates of the hidden states (…, width) of these samples."""
        ...

    def hidden(self, coordinates: Tensor, batch: Tensor) -> Tensor:
        """(…, width) hidden states of coordinates (…, rank)."""
        ...

    def basis_on(self, device: torch.device) -> Tensor:
        """(width, rank), orthonormal."""
        ...


class Divisible(Workload, Protocol):
    """A workload whose model can be divided among processes: embeddings, layers one after the other, and a head.

    A batch is one tensor whose rows are samples.
    """

    @property
    def held_out(self) -> int:
        """How many samples it is judged on."""
        ...

    def held_out_batch(self, ids: Ids) -> Tensor:
        """Some of them, by their numbers from 0, on the CPU."""
        ...

    def loads(self, model: Any) -> tuple[list[Load], Load, Load]:
        """What each layer takes, what comes before them, and what comes after. Raises UserError."""
        ...

    def layers(self, model: Any) -> nn.ModuleList:
        """A model's layers."""
        ...

    def tied_weight(self, model: Any) -> nn.Parameter | None:
        """The embeddings' weight where the head is it again."""
        ...

    def subspace(self, rank: int, seed: int) -> Coordinates:
        """What hidden states are to be constrained to. Raises UserError."""
        ...

    def keep(self, model: Any, span: Span, subspace: Coordinates | None = None, constrained: int = 0) -> None:
        """Takes out of a model without memory what is not in a span.

        Its first `constrained` layers are constrained to a subspace. Raises UserError where they cannot be.
        """
        ...

    def check_division(self, spans: list[Span], subspace: Coordinates | None, seed: int) -> None:
        """Raises UserError for a model that would be another one in these spans."""
        ...

    def piece(self, model: Any, span: Span, half: bool) -> Any:
        """The module that a stage computes, of a model of which only the span is there; with `half`, in bfloat16.

        It takes a batch (first) or hidden states, and gives hidden states, or the model's output (last). Where layers
        have a loss of their own, `sums` flat numbers of it come and go beside these in training. It has `model` and
        `span`, and `loss(leaving, batch)`: what training minimises, or in evaluation mode what the model is judged by.
        """
        ...

    def example(self, samples: int) -> Tensor:
        """A batch of so many samples, without memory."""
        ...

    def shapes(self, model: Any, batch: Tensor) -> tuple[torch.Size, torch.Size]:
        """Of a batch's hidden states between layers, and of the output."""
        ...

    def sample_in_pieces(self, forward: Forward, seed: int) -> str:
        """As `sample`, where several processes compute the model's output."""
        ...


Forward = Callable[[Tensor, Callable[[Tensor], Tensor], int], Tensor]
"""Takes a batch, what to pick of the model's output for it, and how many numbers that is: flat float64, on the CPU."""


def to(batch: Batch, device: torch.device) -> Batch:
    """A batch on a device."""
    if isinstance(batch, Tensor):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {key: to(value, device) for key, value in batch.items()}
    return type(batch)(to(value, device) for value in batch)


def drawn_ids(seed: int, replica: int, step: int, size: int, available: int, shares: int = 1) -> Ids:
    """Which of the samples a replica trains on in a step: drawn anew, with replacement.

    A pure function: replicas draw independently, so a replica that joins or leaves changes nobody else's data.

    Args:
        seed, replica, step: of what it is a function.
        size: how many to draw.
        available: how many samples there are, in all shares together.
        shares: stretches of one length; a replica draws from one of them only.
    """
    each = available // shares
    return replica % shares * each + np.random.default_rng((seed, replica, step)).integers(each, size=size)
