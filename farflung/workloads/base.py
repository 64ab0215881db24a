"""What training asks of what is trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from farflung.errors import UserError
from farflung.workloads.batches import Batch as Batch
from farflung.workloads.batches import to as to

if TYPE_CHECKING:
    from farflung.workloads.dealing import Deal

Ids = NDArray[np.int64]
"""Numbers of samples."""
Reshape = Callable[[Any], None]
"""Changes a model that has no memory yet."""


class Score(NamedTuple):
    """How good a model is."""

    value: float
    """What it is judged by, over all held-out samples."""
    sources: Mapping[str, float] = MappingProxyType({})
    """The same of the samples of each source by its name, where there are several."""
    others: Mapping[str, float] = MappingProxyType({})
    """More figures, by their names."""

    @classmethod
    def of(cls, sums: Mapping[str, tuple[float, float]]) -> Score:
        """From each source's sum of losses, and the sum of the weights of these."""
        total, weight = map(sum, zip(*sums.values(), strict=True))
        each = {source: loss / own for source, (loss, own) in sums.items()}
        return cls(total / weight, each if len(each) > 1 else {})

    @classmethod
    def given(cls, found: Any) -> Score:
        """What a workload's `evaluate` has given, in plain numbers. Raises UserError for what is none."""
        value, *tables = found if isinstance(found, Score) else cls(found)
        try:
            return cls(float(value), *({name: float(own) for name, own in table.items()} for table in tables))
        except (TypeError, ValueError, RuntimeError, AttributeError) as error:
            raise UserError(
                f"the workload's evaluate has given {found!r}; let it return a number, or a Score of numbers"
            ) from error


PNG_BEGINS, PNG_ENDS = b"\x89PNG\r\n\x1a\n", b"IEND\xaeB`\x82"
"""What each PNG file begins with, and its last chunk."""


class Picture(NamedTuple):
    """A sample that is looked at."""

    png: bytes
    """A whole PNG file."""
    caption: str = ""

    @classmethod
    def or_text(cls, found: Any) -> str | Picture:
        """What a workload's `sample` has given, as pages can show it. Raises UserError for what is none.

        A lone half of a surrogate pair, which no file can hold, becomes a replacement character.
        """
        if isinstance(found, str):
            return found.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        if not (isinstance(found, cls) and isinstance(found.caption, str)):
            raise UserError(f"the workload's sample is {found!r}; let it return text, or a Picture")
        png = found.png
        if not (isinstance(png, bytes) and png.startswith(PNG_BEGINS) and PNG_ENDS in png):
            begins = f"{bytes(png[:8])!r}" if isinstance(png, bytes | bytearray) else f"a {type(png).__name__}"
            raise UserError(
                f"the workload's sample is a Picture of {begins}, which is no whole PNG file; give the bytes that "
                "Pillow's save(file, 'PNG') writes"
            )
        return cls(png, str(cls.or_text(found.caption)))


class Workload(Protocol):
    """What is trained: a model, its batches, its loss, how it is judged, and a sample to look at.

    It is made from an instance of its `Settings`, and a `deal` that says which samples come to which replica. Making
    it reads no data; the first use of data reads it, once.

    Where a model is judged by another figure than a loss in `measure`, it has `judged_by`, a
    `farflung.figure.Figure`.
    Where the microbatches of a step do not count the same, it has `weight(batch)`: what a batch's mean loss was taken
    over, such as its number of tokens; a batch of weight 0 is left out, and a step of such ones alone learns nothing.
    Where they can be counted, it has `operations(recompute)`: those that training on one unit takes, with all layers'
    forward passes computed twice or once. Where its samples are so many, and not made anew, it has `available`: how
    many there are to train on; or, of several sources, `epochs(samples)`: how often those of each come, by its name, in
    so many. Where its data may change, or comes piece by piece, it has `known`: a table of what it has found out of it,
    by its names, which checkpoints keep, and a resumed run puts back; a run that has found otherwise of a name
    meanwhile is refused. Where nobody is to wait for a piece any more, it has `let_go()`. Where replicas may deal
    tables of embeddings out among themselves, it has `crossing`: how rows cross between them, "" where each has all;
    and `tables_and_rest(model)`: the tables, which can be given out and taken back as those of `clicks.model.Tables`
    can, and the module that is the rest.
    """

    Settings: Any
    """The dataclass of its settings."""
    units: str
    """What samples consist of, such as tokens."""
    measure: str
    """The unit of `loss`, such as nats a token."""

    def __init__(self, settings: Any, deal: Deal) -> None: ...

    @property
    def divisible(self) -> Divisible | None:
        """Itself, where its model can be divided among processes."""
        ...

    @property
    def units_per_sample(self) -> int:
        """Units in one sample."""
        ...

    def check(self) -> None:
        """Raises UserError for settings that cannot work, without reading all data."""
        ...

    def outline(self) -> nn.Module:
        """The model without memory for its weights. Raises UserError."""
        ...

    def build(self, seed: int, reshape: Reshape | None = None) -> Any:
        """The model on the CPU, from a seed or with its own weights.

        `reshape` may change it while it has no memory yet. A weight depends only on the seed and its module's name.
        Raises UserError.
        """
        ...

    def sample_ids(self, seed: int, replica: int, step: int, size: int) -> Ids:
        """Which samples a replica trains on in a step: a pure function. Raises UserError where there is no data."""
        ...

    def batch(self, ids: Ids) -> Batch:
        """These samples, on the CPU."""
        ...

    def loss(self, model: Any, batch: Batch) -> Tensor:
        """What training minimises: a mean over the batch's samples, or over what is learnt of them; see `weight`."""
        ...

    def evaluate(self, model: Any, size: int, device: torch.device) -> float | Score:
        """The score of a model in evaluation mode on held-out samples, `size` at a time."""
        ...

    def digest(self) -> str:
        """A hash of the held-out samples."""
        ...

    def sample(self, model: Any, seed: int, device: torch.device) -> str | Picture:
        """Something to look at, made by a model in evaluation mode."""
        ...

    def export(self, weights: Mapping[str, Tensor], target: Path, seed: int, constrained_to: int = 0) -> None:
        """Writes a model with these weights to a folder, in the form that others load.

        `seed` is the run's. `constrained_to` is the rank of the subspace that the weights were trained in; 0 for none.
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
    """The parameters of something, and how many of them each unit is multiplied with."""

    memory: float
    work: float

    def plus(self, other: Load) -> Load:
        """Both together."""
        return Load(self.memory + other.memory, self.work + other.work)


class Coordinates(Protocol):
    """A subspace that hidden states lie in, so that a few coordinates represent them exactly."""

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

    A batch is one tensor whose rows are samples. Where the samples that it is judged on are of several sources, it has
    `sources`: how many of them, in their order, are of each, by its name.
    """

    @property
    def held_out(self) -> int:
        """How many samples it is judged on."""
        ...

    def held_out_batch(self, ids: Ids) -> Tensor:
        """Some of them, by their numbers from 0, on the CPU."""
        ...

    def loads(self, model: Any) -> tuple[list[Load], Load, Load]:
        """The loads of the layers, of what comes before them, and of what comes after. Raises UserError."""
        ...

    def layers(self, model: Any) -> nn.ModuleList:
        """A model's layers."""
        ...

    def tied_weight(self, model: Any) -> nn.Parameter | None:
        """The embeddings' weight, where the head shares it."""
        ...

    def subspace(self, rank: int, seed: int) -> Coordinates:
        """The subspace to constrain hidden states to. Raises UserError."""
        ...

    def keep(self, model: Any, span: Span, subspace: Coordinates | None = None, constrained: int = 0) -> None:
        """Removes from a model without memory all that is not in a span.

        Constrains its first `constrained` layers to a subspace. Raises UserError where that cannot be.
        """
        ...

    def check_division(self, spans: list[Span], subspace: Coordinates | None, seed: int) -> None:
        """Raises UserError for a model that would compute something else in these spans."""
        ...

    def piece(self, model: Any, span: Span, half: bool) -> Any:
        """The module that a stage computes, of a model of which only the span is left; with `half`, in bfloat16.

        It takes a batch (first) or hidden states, and gives hidden states, or the model's output (last). Where layers
        have a loss of their own, training hands `sums` flat numbers of it on beside these. The samples are given as
        `batch`, too. The module has `model`, `span` and `loss(leaving, batch)`: what training minimises, or in
        evaluation mode the model's score.
        """
        ...

    def example(self, samples: int) -> Tensor:
        """A batch of so many samples, without memory."""
        ...

    def shapes(self, model: Any, batch: Tensor) -> tuple[torch.Size, torch.Size]:
        """Of a batch's hidden states between layers, and of the output."""
        ...

    def sample_in_pieces(self, forward: Forward, seed: int) -> str:
        """As `sample`, for a model that several processes compute."""
        ...


def held_out_of(workload: Divisible) -> dict[str, range]:
    """The numbers of the held-out samples of each source, by its name; "" where there is one."""
    sources: dict[str, int] = getattr(workload, "sources", {"": workload.held_out})
    ends = accumulate(sources.values())
    return {source: range(end - sources[source], end) for source, end in zip(sources, ends, strict=True)}


Forward = Callable[[Tensor, Callable[[Tensor], Tensor], int], Tensor]
"""Takes a batch, what picks numbers of the model's output for it, and how many: flat float64, on the CPU."""
