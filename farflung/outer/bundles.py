"""Cells that travel together: one packet behind the other, each by a codec of its own."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

import torch
from torch import Tensor

from farflung.codecs import Codec, Packet
from farflung.codecs.packets import split_packets
from farflung.codecs.values import norm

Cells = Mapping[str, Sequence[Tensor]]
"""The tensors of a message's cells, by the cells' names."""

STRIP = 1 << 19
"""Values in a strip: a long message is several, so that some are encoded or decoded while others are sent."""

MOST_STRIPS = 16
"""The most strips of one message."""


class Bundle:
    """The codecs of some cells, for a message that is all of their tensors in turn.

    Args:
        codecs: each cell's.
        counts: of the tensors that each cell has.
    """

    def __init__(self, codecs: Sequence[Codec], counts: Sequence[int]) -> None:
        self._codecs = codecs
        self._counts = counts

    def encode(self, tensors: Sequence[Tensor]) -> Packet:
        """Each cell's packet. Raises NotFiniteError."""
        packets = [codec.encode(cell) for codec, cell in self._cells(tensors)]
        if len(packets) == 1:
            return packets[0]
        return torch.cat(packets) if packets else torch.empty(0, dtype=torch.uint8)

    def decode(self, packet: Packet, like: Sequence[Tensor]) -> list[Tensor]:
        """New tensors like those given, which may be the receiver's own. Raises PacketError."""
        packets = split_packets(packet, len(self._codecs))
        cells = zip(self._cells(like), packets, strict=True)
        return [tensor for (codec, cell), part in cells for tensor in codec.decode(part, cell)]

    def error_of(self, packet: Packet, tensors: Sequence[Tensor]) -> float:
        """How much its packet leaves out of what is not sent as it is; see Codec."""
        packets = split_packets(packet, len(self._codecs))
        cells = zip(self._cells(tensors), packets, strict=True)
        lossy = [(codec, cell, part) for (codec, cell), part in cells if not codec.traits.lossless]
        errors = [codec.error_of(part, cell) for codec, cell, part in lossy]
        return joint_error(errors, [norm(cell) for _, cell, _ in lossy])

    def set_reference(self, tensors: Sequence[Tensor]) -> None:
        """See Codec."""
        for codec, cell in self._cells(tensors):
            codec.set_reference(cell)

    def _cells(self, tensors: Sequence[Tensor]) -> Iterator[tuple[Codec, list[Tensor]]]:
        rest = iter(tensors)
        return ((codec, list(islice(rest, count))) for codec, count in zip(self._codecs, self._counts, strict=True))


def joint_error(errors: Sequence[float], norms: Sequence[float]) -> float:
    """The relative error of parts together, of such norms."""
    if len(errors) == 1:
        return errors[0]
    return math.hypot(*(e * size for e, size in zip(errors, norms, strict=True))) / max(math.hypot(*norms), 1e-30)


def strips(cells: Cells, most: int = MOST_STRIPS) -> list[Cells]:
    """Cells in runs of neighbours of at least STRIP values (the last may have fewer), `most` at most."""
    sizes = {name: sum(tensor.numel() for tensor in tensors) for name, tensors in cells.items()}
    full = max(STRIP, -(-sum(sizes.values()) // most))
    runs: list[dict[str, Sequence[Tensor]]] = [{}]
    for name, tensors in cells.items():
        if sum(sizes[one] for one in runs[-1]) >= full:
            runs.append({})
        runs[-1][name] = tensors
    return list(runs)


def cut(cells: Cells, parts: int) -> list[Cells]:
    """Each cell cut into `parts` of about equally many values, as views; cells without a part are left out of it."""
    cuts = {name: _cut(tensors, parts) for name, tensors in cells.items()}
    return [{name: pieces[part] for name, pieces in cuts.items() if pieces[part]} for part in range(parts)]


def _cut(tensors: Sequence[Tensor], parts: int) -> list[list[Tensor]]:
    """Tensors in `parts` lists of about equally many values: whole ones, cut between rows where need be."""
    total = sum(tensor.numel() for tensor in tensors)
    lists: list[list[Tensor]] = [[] for _ in range(parts)]
    position = 0
    for tensor in tensors:
        if tensor.dim() == 0 or tensor.numel() == 0:
            lists[min(position * parts // max(total, 1), parts - 1)].append(tensor)
            position += tensor.numel()
            continue
        begin, width = 0, tensor.numel() // len(tensor)
        while begin < len(tensor):
            number = min(position * parts // total, parts - 1)
            boundary = -(-(number + 1) * total // parts)
            end = min(len(tensor), begin + -(-(boundary - position) // width))
            lists[number].append(tensor[begin:end])
            position += (end - begin) * width
            begin = end
    return lists
