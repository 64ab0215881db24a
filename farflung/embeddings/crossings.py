"""What crosses between the owner of some tables and a replica whose samples need them, there and back."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, embedding_bag

from farflung.codecs import Codec, Dense, Packet, as_codec
from farflung.codecs.numbers import gaps_of, pack_numbers, unpack_numbers
from farflung.codecs.topk import pack_places, packed_size, unpack_places
from farflung.errors import UserError


def crossing_named(name: str) -> Crossing:
    """The crossing of a name: rows, rows-int4 or rows of another codec, top12.5. Raises UserError."""
    kind, _, codec = name.partition("-")
    try:
        if kind == "rows":
            return DistinctRows(codec) if codec else DistinctRows()
        if found := re.fullmatch(r"top(\d+(?:\.\d+)?)", name):
            return LargestOfSample(float(found[1]) / 100)
    except UserError as error:
        raise UserError(f"crossing is {name!r}: {error}") from error
    raise UserError(f"crossing is {name!r}; give rows, rows-int8, rows-int4, or top12.5 for a sample's largest 12.5%")


class Bags(NamedTuple):
    """What a batch looks up in one table; as the arguments of nn.EmbeddingBag."""

    ids: Tensor
    """The rows of all samples, one after the other: int64."""
    offsets: Tensor
    """Where each sample's rows begin among these: int64."""


class Asked(NamedTuple):
    """What a replica asks the owner of some tables for, and what it keeps of that."""

    packet: Packet
    shape: tuple[int, int]
    """Of the activations that will come: float32."""
    bags: Sequence[Bags]
    """How they are pooled: which of them are each sample's, table by table."""


class Crossing(Protocol):
    """A way for activations to cross to the replica that needs them, and for their gradient to come back.

    The owner has `look_up`, `send` and `receive_gradient`; the replica that asks `ask`, `receive`, `pool` and
    `send_gradient`. Both keep the places that `send` and `receive` return until the gradient crosses.
    """

    def ask(self, bags: Sequence[Bags], tables: Sequence[nn.EmbeddingBag]) -> Asked:
        """What to ask the owner of these tables, of which the weights are not needed."""
        ...

    def look_up(self, packet: Packet, tables: Sequence[nn.EmbeddingBag], weights: Sequence[Tensor]) -> Tensor:
        """The activations that are asked for, as a differentiable function of the weights."""
        ...

    def send(self, activations: Tensor) -> tuple[Packet, Any]:
        """The activations on their way."""
        ...

    def receive(self, packet: Packet, like: Tensor) -> tuple[Tensor, Any]:
        """The activations as they arrive. Raises PacketError."""
        ...

    def pool(self, activations: Tensor, bags: Sequence[Bags], tables: Sequence[nn.EmbeddingBag]) -> Tensor:
        """(samples, tables, width) sums or means, differentiable."""
        ...

    def send_gradient(self, gradient: Tensor, places: Any) -> Packet:
        """The gradient on its way back."""
        ...

    def receive_gradient(self, packet: Packet, like: Tensor, places: Any) -> Tensor:
        """The gradient as it arrives. Raises PacketError."""
        ...


@dataclass
class DistinctRows:
    """Each row that a batch looks up crosses once, however many of its samples do, and is pooled where it arrives.

    With a lossless codec that is exact.

    Args:
        codec: of the rows, and of their gradient: a codec or its name, such as int8. Raises UserError for one that
            remembers what it left out, since the next batch's rows are others.
    """

    codec: Codec | str = field(default_factory=Dense)

    def __post_init__(self) -> None:
        self._codec = copy.deepcopy(as_codec(self.codec))
        if self._codec.traits.feeds_back or self._codec.traits.needs_receiver:
            raise UserError(f"rows are others in each batch, which {self._codec!r} cannot bear; take int8, say")

    def ask(self, bags: Sequence[Bags], tables: Sequence[nn.EmbeddingBag]) -> Asked:
        """See Crossing: the gaps between the rows, in order."""
        gaps, places, rows = [], [], 0
        for ids, offsets in bags:
            distinct, inverse = ids.unique(return_inverse=True)
            gaps.append(gaps_of(distinct))
            places.append(Bags(inverse + rows, offsets))
            rows += distinct.numel()
        return Asked(pack_numbers(gaps), (rows, tables[0].embedding_dim), places)

    def look_up(self, packet: Packet, tables: Sequence[nn.EmbeddingBag], weights: Sequence[Tensor]) -> Tensor:
        """See Crossing."""
        rows = (gaps.cumsum(0).to(weights[0].device) for gaps in unpack_numbers(packet))
        found = zip(rows, tables, weights, strict=True)
        return torch.cat([embedding(ids, weight, sparse=table.sparse) for ids, table, weight in found])

    def send(self, activations: Tensor) -> tuple[Packet, None]:
        """See Crossing."""
        return self._codec.encode([activations]), None

    def receive(self, packet: Packet, like: Tensor) -> tuple[Tensor, None]:
        """See Crossing."""
        return self._codec.decode(packet, [like])[0], None

    def pool(self, activations: Tensor, bags: Sequence[Bags], tables: Sequence[nn.EmbeddingBag]) -> Tensor:
        """See Crossing."""
        each = zip(bags, tables, strict=True)
        return torch.stack([embedding_bag(ids, activations, begin, mode=t.mode) for (ids, begin), t in each], dim=1)

    def send_gradient(self, gradient: Tensor, places: None) -> Packet:
        """See Crossing."""
        return self._codec.encode([gradient])

    def receive_gradient(self, packet: Packet, like: Tensor, places: None) -> Tensor:
        """See Crossing."""
        return self._codec.decode(packet, [like])[0]


@dataclass(frozen=True)
class LargestOfSample:
    """The owner pools, and of each sample only the largest activations cross (DCT, arXiv 2010.08899).

    Their places cross with them; the others count as 0. The gradient comes back for the same places, without them, and
    nothing is kept of what was left out. A value takes 4 bytes, and a place log2 of the owner's activations in bits.

    Args:
        share: of a sample's activations, more than 0 and at most 1; 1 is the plain exchange of all that is pooled.
    """

    share: float = 0.125

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise UserError(f"LargestOfSample has share={self.share}; choose more than 0 and at most 1")

    def ask(self, bags: Sequence[Bags], tables: Sequence[nn.EmbeddingBag]) -> Asked:
        """See Crossing: the rows of all samples, and how many each has."""
        end = torch.cat([torch.tensor([ids.numel()], device=ids.device) for ids, _ in bags])
        sizes = [offsets.diff(append=end[n : n + 1]) for n, (_, offsets) in enumerate(bags)]
        packet = pack_numbers([*(ids for ids, _ in bags), *sizes])
        return Asked(packet, (bags[0].offsets.numel(), len(tables) * tables[0].embedding_dim), bags)

    def look_up(self, packet: Packet, tables: Sequence[nn.EmbeddingBag], weights: Sequence[Tensor]) -> Tensor:
        """See Crossing."""
        numbers = [one.to(weights[0].device) for one in unpack_numbers(packet)]
        rows, sizes = numbers[: len(tables)], numbers[len(tables) :]
        pooled = [
            embedding_bag(ids, weight, size.cumsum(0) - size, mode=table.mode, sparse=table.sparse)
            for ids, size, table, weight in zip(rows, sizes, tables, weights, strict=True)
        ]
        return torch.cat(pooled, dim=1)

    def send(self, activations: Tensor) -> tuple[Packet, Tensor | None]:
        """See Crossing."""
        kept, width = self._kept(activations), activations.shape[1]
        if kept == width:
            return Dense().encode([activations]), None
        places = activations.abs().topk(kept, dim=1, sorted=False).indices.sort(dim=1).values
        values = Dense().encode([activations.gather(1, places)])
        return torch.cat([values, pack_places(places.view(-1), width).cpu()]), places

    def receive(self, packet: Packet, like: Tensor) -> tuple[Tensor, Tensor | None]:
        """See Crossing."""
        (samples, width), kept = like.shape, self._kept(like)
        if kept == width:
            return Dense().decode(packet, [like])[0], None
        end = packet.numel() - packed_size(samples * kept, width)
        places = unpack_places(packet[end:], samples * kept, width).view(samples, kept).to(like.device)
        (values,) = Dense().decode(packet[:end], [like.new_empty(samples, kept)])
        return torch.zeros_like(like).scatter_(1, places, values), places

    def pool(self, activations: Tensor, bags: Sequence[Bags], tables: Sequence[nn.EmbeddingBag]) -> Tensor:
        """See Crossing: that is done."""
        return activations.view(len(activations), len(tables), tables[0].embedding_dim)

    def send_gradient(self, gradient: Tensor, places: Tensor | None) -> Packet:
        """See Crossing."""
        return Dense().encode([gradient if places is None else gradient.gather(1, places)])

    def receive_gradient(self, packet: Packet, like: Tensor, places: Tensor | None) -> Tensor:
        """See Crossing."""
        if places is None:
            return Dense().decode(packet, [like])[0]
        (values,) = Dense().decode(packet, [like.new_empty(places.shape)])
        return torch.zeros_like(like).scatter_(1, places, values)

    def _kept(self, activations: Tensor) -> int:
        """How many activations of a sample cross."""
        return max(1, round(self.share * activations.shape[1]))
