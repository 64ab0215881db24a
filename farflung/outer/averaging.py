"""The mean of a group's messages: by all-reduce where nothing is encoded, else of packets."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from threading import Event
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from farflung.codecs import Codec, Dense, Packet, PacketError
from farflung.codecs.values import norm
from farflung.networks import Group, Network, PeerLostError, Pending
from farflung.outer.bundles import Bundle, Cells, cut, joint_error, strips

if TYPE_CHECKING:
    from farflung.outer.aggregation import Aggregation
    from farflung.outer.method import Method

Way = Literal["whole", "parts"]
"""How packets are averaged among more than two members. `whole` is an all-gather: n - 1 times a message's bytes,
encoded once. `parts` is a reduce-scatter and an all-gather: 2 (n - 1) / n times the bytes, encoded twice."""


def uses_all_gather(codec: Codec, way: Way, members: int) -> bool:
    """Whether packets are averaged by all-gather; a pair's are, since that sends no more bytes."""
    return way == "whole" or members <= 2 or codec.traits.needs_receiver


class Mean:
    """The weighted mean, summed in the order given: the one order that every network uses, for equal bits.

    Of nothing, and of messages that all count nothing, it is `like`.
    """

    def __init__(self, like: Sequence[Tensor]) -> None:
        self._like = like
        self._sum = [torch.zeros_like(tensor) for tensor in like]
        self._weight = 0.0

    def add(self, message: Sequence[Tensor], weight: float) -> None:
        """Takes one message; its memory may be used again afterwards."""
        for to, tensor in zip(self._sum, message, strict=True):
            to.add_(tensor, alpha=weight)
        self._weight += weight

    def result(self) -> list[Tensor]:
        """The mean of those taken."""
        return [tensor.div_(self._weight) for tensor in self._sum] if self._weight else list(self._like)


class Averaging:
    """Averages one fragment's messages, round after round, and keeps what its codecs remember between them.

    Args:
        method: its codec, copied for each use, and its way of averaging. Where all members must get the same mean, each
            also decodes its own message; else it uses it as it is.
        by_cell: a flat message as the tensors of its cells.
        exact: whether messages of float64 must stay float64 when the codec is lossless.
        aggregation: the rule for members that cannot all be trusted; it checks every message.
        plain: the cells that are sent as they are.
    """

    def __init__(
        self,
        network: Network,
        method: Method,
        by_cell: Callable[[Tensor], Cells],
        exact: bool = False,
        aggregation: Aggregation | None = None,
        plain: Collection[str] = (),
    ) -> None:
        self._network = network
        self._prototype = method.codec
        self._by_cell = by_cell
        self._way = method.averaging
        self._identical = method.topology.identical
        self._exact = exact
        self._aggregation = aggregation
        self._plain = plain
        self._codecs: dict[tuple[str, str], Codec] = {}
        self._round = 0
        self._weights: Mapping[int, float] = {}
        self.share = 1.0

    def start(
        self, message: Tensor, group: Group, key: str, round: int, weights: Mapping[int, float] | None = None
    ) -> tuple[Pending[Tensor], float]:
        """Starts averaging a flat message, whose memory it takes; returns the pending mean and the compression error.

        `key` and the round's number are the same for the whole group. By default, all messages weigh the same. `wait`
        of the result raises PeerLostError when a part is missing or unreadable. The message then holds the mean of the
        others, or this replica's own values.
        """
        lossless = self._prototype.traits.lossless and (self._exact or message.dtype == torch.float32)
        if lossless and self._aggregation is None:
            return self._network.all_reduce(message, group, key), 0.0
        self._round, self._weights = round, weights or {}
        whole = self._aggregation is not None and self._aggregation.whole
        if whole or uses_all_gather(self._prototype, self._way, len(group)):
            return self._all_gather(message, group, key)
        return self._reduce_scatter(message, group, key)

    def set_reference(self, message: Tensor) -> None:
        """See Codec."""
        for codec, strip in self._strips(message):
            codec.set_reference(strip)

    def wants_reference(self) -> bool:
        """Whether a codec can use `set_reference` now."""
        return any(codec.wants_reference for codec in self._codecs.values() or [self._prototype])

    def set_budget(self, share: float) -> None:
        """See Codec."""
        self.share = share
        for codec in self._codecs.values():
            codec.set_budget(share)

    def state_dict(self) -> dict[str, Any]:
        """What the codecs remember, by cell and use."""
        codecs: dict[str, dict[str, Any]] = {}
        for (cell, use), codec in self._codecs.items():
            codecs.setdefault(cell, {})[use] = codec.state_dict()
        return codecs

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a `state_dict`."""
        self._codecs = {}
        for cell, uses in state.items():
            for use, saved in uses.items():
                self._codec(cell, use).load_state_dict(saved)

    def _codec(self, cell: str, use: str) -> Codec:
        if (cell, use) not in self._codecs:
            codec = Dense() if cell in self._plain else copy.deepcopy(self._prototype)
            codec.seed(zlib.crc32(f"{self._network.rank} {cell} {use}".encode()))
            codec.set_budget(self.share)
            self._codecs[cell, use] = codec
        self._codecs[cell, use].set_round(self._round)
        return self._codecs[cell, use]

    def _bundle(self, cells: Cells, use: str) -> Bundle:
        return Bundle([self._codec(cell, use) for cell in cells], [len(tensors) for tensors in cells.values()])

    def _all_gather(self, message: Tensor, group: Group, key: str) -> tuple[Pending[Tensor], float]:
        strips, packets, pendings = self._strips(message), [], []
        for number, (codec, strip) in enumerate(strips):
            packets.append(codec.encode(strip))
            pending = self._network.exchange(packets[-1], group, f"{key}, strip {number}")
            pendings.append(_Averaged(pending, message, partial(self._average_strip, codec, strip, self._weights)))
        # What follows is computed while the packets are on the wire.
        errors = [codec.error_of(packet, strip) for (codec, strip), packet in zip(strips, packets, strict=True)]
        if len(strips) == 1:
            return pendings[0], errors[0]
        error = joint_error(errors, [norm(strip) for _, strip in strips])
        return _Strips(pendings, message, self._network.now), error

    def _strips(self, message: Tensor) -> list[tuple[Bundle, list[Tensor]]]:
        """A message's tensors in runs of neighbouring cells; in one run where messages are looked at as a whole."""
        cells = self._by_cell(message)
        return [
            (self._bundle(run, "whole"), _tensors(run)) for run in ([cells] if self._aggregation else strips(cells))
        ]

    def _average_strip(
        self, codec: Bundle, strip: list[Tensor], weights: Mapping[int, float], packets: dict[int, Packet]
    ) -> dict[int, str]:
        own = None if self._identical else strip
        others = {rank: p for rank, p in packets.items() if self._identical or rank != self._network.rank}
        mean, unreadable = self._mean(codec, others, strip, own, weights)
        _copy(mean, strip)
        return unreadable

    def _mean(
        self,
        codec: Bundle,
        packets: Mapping[int, Packet],
        like: Sequence[Tensor],
        own: Sequence[Tensor] | None,
        weights: Mapping[int, float],
    ) -> tuple[list[Tensor], dict[int, str]]:
        """The mean of packets and of this replica's own message; and why some packets could not be used."""
        total = self._aggregation.total(like) if self._aggregation else Mean(like)
        unreadable: dict[int, str] = {}
        for sender, packet in packets.items():
            try:
                total.add(self._decoded(sender, codec, packet, like, own), weights.get(sender, 1.0))
            except PacketError as error:
                unreadable[sender] = str(error)
        if own is not None:
            total.add(own, weights.get(self._network.rank, 1.0))
        return total.result(), unreadable

    def _decoded(
        self, sender: int, codec: Bundle, packet: Packet, like: Sequence[Tensor], own: Sequence[Tensor] | None
    ) -> list[Tensor]:
        """A packet's message, checked. Raises PacketError."""
        try:
            # What came over the internet lies in the host's memory.
            message = codec.decode(packet.to(like[0].device) if like else packet, like)
            if self._aggregation and (own is None or sender != self._network.rank):
                self._aggregation.check(message, own)
        except PacketError as error:
            if self._aggregation:
                self._aggregation.blame(sender, str(error))
            raise
        return message

    def _reduce_scatter(self, message: Tensor, group: Group, key: str) -> tuple[Pending[Tensor], float]:
        own = self._network.rank
        cells = dict(zip(group, cut(self._by_cell(message), len(group)), strict=True))
        parts = {rank: _tensors(part) for rank, part in cells.items()}
        senders = {
            rank: self._bundle(cells[rank], f"part {number} of {len(group)}") for number, rank in enumerate(group)
        }
        packets = {rank: senders[rank].encode(parts[rank]) for rank in group if rank != own}
        unreadable: dict[int, str] = {}
        given_up = Event()

        weights = self._weights

        def combine(received: dict[int, Packet]) -> Packet:
            mean, bad = self._mean(senders[own], received, parts[own], parts[own], weights)
            unreadable.update(bad)
            codec = self._bundle(cells[own], f"mean of {len(group)}")
            # Others may still want it, but what is remembered must not depend on when that was.
            return (copy.deepcopy(codec) if given_up.is_set() else codec).encode(mean)

        def finish(combined: dict[int, Packet]) -> dict[int, str]:
            for rank, packet in combined.items():
                try:
                    _copy(self._decoded(rank, senders[rank], packet, parts[rank], parts[rank]), parts[rank])
                except PacketError as error:
                    unreadable[rank] = str(error)
            return unreadable

        pending = self._network.scatter_combine_gather(packets, group, key, combine)
        errors = [senders[rank].error_of(packet, parts[rank]) for rank, packet in packets.items()]
        return _Averaged(pending, message, finish, given_up), sum(errors) / len(errors)


class _Averaged:
    """A pending exchange of packets; its mean replaces the message."""

    def __init__(
        self,
        packets: Pending[dict[int, Packet]],
        message: Tensor,
        finish: Callable[[dict[int, Packet]], dict[int, str]],
        given_up: Event | None = None,
    ) -> None:
        self._packets = packets
        self._message = message
        self._finish = finish
        self._given_up = given_up

    def done(self) -> bool:
        return self._packets.done()

    @property
    def finished_at(self) -> float:
        return self._packets.finished_at

    def wait(self, timeout: float) -> Tensor:
        try:
            packets = self._packets.wait(timeout)
        except PeerLostError as lost:
            if self._given_up:
                self._given_up.set()
            self._finish(lost.delivered)
            raise
        if unreadable := self._finish(packets):
            ranks = tuple(sorted(unreadable))
            raise PeerLostError(ranks, f"replica {ranks[0]} sent what cannot be read: {unreadable[ranks[0]]}")
        return self._message


class _Strips:
    """A message whose strips are pending; each is decoded while later ones are on the wire."""

    def __init__(self, strips: Sequence[Pending[Tensor]], message: Tensor, now: Callable[[], float]) -> None:
        self._strips = strips
        self._pending = list(strips)
        self._message = message
        self._now = now

    def done(self) -> bool:
        return all(strip.done() for strip in self._pending)

    @property
    def finished_at(self) -> float:
        return max(strip.finished_at for strip in self._strips)

    def wait(self, timeout: float) -> Tensor:
        ends, late, lost = self._now() + timeout, [], []
        for strip in self._pending:
            try:
                strip.wait(max(0.0, ends - self._now()))
            except PeerLostError as error:
                late.append(strip)
                lost.append(error)
        self._pending = late  # what has been averaged must not be again, if this is called again
        if lost:
            raise PeerLostError(sorted({rank for error in lost for rank in error.ranks}), str(lost[0]))
        return self._message


def _tensors(cells: Cells) -> list[Tensor]:
    return [tensor for tensors in cells.values() for tensor in tensors]


def _copy(source: Iterable[Tensor], target: Iterable[Tensor]) -> None:
    for to, tensor in zip(target, source, strict=True):
        to.copy_(tensor)
