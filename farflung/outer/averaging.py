"""The mean of a group's messages: by all-reduce where nothing is encoded, else of packets."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from threading import Event
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from farflung.codecs import Codec, Dense, Packet, PacketError
from farflung.codecs.values import norm
from farflung.networks import Group, Network, Pending
from farflung.outer.bundles import MOST_STRIPS, Bundle, Cells, cut, joint_error, strips
from farflung.outer.columns import Message
from farflung.outer.fusing import LENGTHS, Joined, Radial
from farflung.outer.pending import Averaged, Together

if TYPE_CHECKING:
    from farflung.outer.aggregation import Aggregation
    from farflung.outer.method import Method

Way = Literal["whole", "parts"]
"""How packets are averaged among more than two members. `whole` is an all-gather: n - 1 times a message's bytes,
encoded once. `parts` is a reduce-scatter and an all-gather: 2 (n - 1) / n times the bytes, encoded twice."""

Growth = float | Mapping[str, Sequence[float]]
"""Of a message; or of each tensor of each of its cells."""


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


@dataclass(frozen=True)
class Meeting:
    """Who averages a message: a group of a network. The key and the round's number are the same for all of it.

    By default all messages weigh the same.

    Args:
        growth: as how many times as large this replica's message counts where others' are judged by it: who has just
            come has trained for less than they have.
    """

    network: Network
    group: Group
    key: str
    round: int = 0
    weights: Mapping[int, float] = field(default_factory=dict)
    growth: Growth = 1.0


class Averaging:
    """Averages one fragment's messages, round after round, and keeps what its codecs remember between them.

    Args:
        rank: this replica's.
        method: its codec, copied for each use, and its way of averaging. Where all members must get the same mean, each
            also decodes its own message; else it uses it as it is.
        exact: whether messages of float64 must stay float64 when the codec is lossless.
        aggregation: the rule for members that cannot all be trusted; it checks every message.
        plain: the cells that are sent as they are.
        radial: takes messages apart and joins their mean again; None for the mean of the messages themselves.
    """

    def __init__(
        self,
        rank: int,
        method: Method,
        exact: bool = False,
        aggregation: Aggregation | None = None,
        plain: Collection[str] = (),
        radial: Radial | None = None,
    ) -> None:
        self._rank = rank
        self._prototype = method.codec
        self._way = method.averaging
        self._identical = method.topology.identical
        self._exact = exact
        self._aggregation = aggregation
        self._plain = {*plain, LENGTHS}
        self._radial = radial
        self._codecs: dict[tuple[str, str], Codec] = {}
        self._round = 0
        self.share = 1.0

    def start(self, message: Message, meeting: Meeting) -> tuple[Pending[Tensor], float]:
        """Starts averaging a message, whose memory it takes; returns the pending mean and the compression error.

        `wait` of the result raises PeerLostError when a part is missing or unreadable. The message then holds the mean
        of the others, or this replica's own values.
        """
        if self._radial is None:
            return self._start(message, meeting)
        apart = self._radial.apart(message)
        pending, error = self._start(apart, meeting)
        return Joined(self._radial, pending, apart, message.flat), error

    def _start(self, message: Message, meeting: Meeting) -> tuple[Pending[Tensor], float]:
        lossless = self._prototype.traits.lossless and (self._exact or message.flat.dtype == torch.float32)
        if lossless and self._aggregation is None and not meeting.weights:
            return meeting.network.all_reduce(message.flat, meeting.group, meeting.key), 0.0
        self._round = meeting.round
        whole = self._aggregation is not None and self._aggregation.whole
        if whole or uses_all_gather(self._prototype, self._way, len(meeting.group)):
            return self._all_gather(message, meeting)
        return self._reduce_scatter(message, meeting)

    def start_parts(self, parts: Sequence[Message], meetings: Sequence[Meeting]) -> tuple[list[Pending[Tensor]], float]:
        """Starts averaging the parts of a message, each in its meeting; returns one compression error for all."""
        sizes = [norm([part.flat]) if len(parts) > 1 else 1.0 for part in parts]  # while the values are its own
        started = [self.start(part, meeting) for part, meeting in zip(parts, meetings, strict=True)]
        return [pending for pending, _ in started], joint_error([error for _, error in started], sizes)

    def set_reference(self, message: Message) -> None:
        """See Codec."""
        for codec, strip in self._strips([message.cells]):
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
            codec.seed(zlib.crc32(f"{self._rank} {cell} {use}".encode()))
            codec.set_budget(self.share)
            self._codecs[cell, use] = codec
        self._codecs[cell, use].set_round(self._round)
        return self._codecs[cell, use]

    def _bundle(self, cells: Cells, use: str) -> Bundle:
        return Bundle([self._codec(cell, use) for cell in cells], [len(tensors) for tensors in cells.values()])

    def _all_gather(self, message: Message, meeting: Meeting) -> tuple[Pending[Tensor], float]:
        strips, packets, exchanges = self._strips(self._runs(message, meeting)), [], []
        for number, (codec, strip) in enumerate(strips):
            packets.append(codec.encode(strip))
            exchanges.append(meeting.network.exchange(packets[-1], meeting.group, f"{meeting.key}, strip {number}"))
        # What follows is computed while the packets are on the wire.
        errors = [codec.error_of(packet, strip) for (codec, strip), packet in zip(strips, packets, strict=True)]
        error = joint_error(errors, [norm(strip) for _, strip in strips])
        now = meeting.network.now
        average = partial(self._average, meeting, message.names, _tensors(self._likely(message, meeting)))
        if self._aggregation:
            return Averaged(exchanges, message.flat, partial(average, strips), now), error
        averaged = [
            Averaged([exchange], message.flat, partial(average, [strip]), now)
            for strip, exchange in zip(strips, exchanges, strict=True)
        ]
        return Together(averaged, now, lambda _: message.flat), error

    def _runs(self, message: Message, meeting: Meeting) -> list[Cells]:
        """A message's cells in runs of neighbours; all members make the same.

        They are one run where messages are looked at as a whole, and those of many would lie in memory at once.
        """
        if self._aggregation and len(meeting.group) > 2:
            return [message.cells]
        # A network that was made before there was such a thing lacks it.
        if worth := getattr(meeting.network, "worth_a_packet", 0):
            nbytes = self._prototype.nbytes(_tensors(message.cells))
            return strips(message.cells, min(MOST_STRIPS, max(1, nbytes // worth)))
        return strips(message.cells)

    def _strips(self, runs: Iterable[Cells]) -> list[tuple[Bundle, list[Tensor]]]:
        return [(self._bundle(run, "whole"), _tensors(run)) for run in runs]

    def _average(
        self,
        meeting: Meeting,
        cells: Sequence[str],
        likely: Sequence[Tensor],
        strips: Sequence[tuple[Bundle, list[Tensor]]],
        arriving: Iterable[Mapping[int, Packet]],
    ) -> dict[int, str]:
        """Makes strips the mean of what arrives, decoded strip by strip; tells why some of it could not be used."""
        messages: dict[int, _Message] = {}
        for (codec, strip), packets in zip(strips, arriving, strict=True):
            for sender, packet in packets.items():
                if self._identical or sender != self._rank:
                    messages.setdefault(sender, _Message(len(strips))).take(codec, packet, strip)
        whole = {sender: message.whole for sender, message in messages.items() if not message.missing}
        like = [tensor for _, strip in strips for tensor in strip]
        self._expect(cells, likely, meeting)
        mean, unreadable = self._mean(whole, cells, like, None if self._identical else like, meeting)
        _copy(mean, like)
        return unreadable

    def _mean(
        self,
        messages: Mapping[int, Callable[[], list[Tensor]]],
        cells: Sequence[str],
        like: Sequence[Tensor],
        own: Sequence[Tensor] | None,
        meeting: Meeting,
    ) -> tuple[list[Tensor], dict[int, str]]:
        """The mean of others' messages and of this replica's own; and why some could not be used.

        They are like its own message, which is in the mean as it is, or else as others see it.
        """
        total = self._aggregation.total(like) if self._aggregation else Mean(like)
        unreadable: dict[int, str] = {}
        for sender, message in messages.items():
            try:
                total.add(self._checked(sender, message, cells), meeting.weights.get(sender, 1.0))
            except PacketError as error:
                unreadable[sender] = str(error)
        if own is not None:
            total.add(own, meeting.weights.get(self._rank, 1.0))
        return total.result(), unreadable

    def _likely(self, message: Message, meeting: Meeting) -> Cells:
        """The cells of what others' messages are likely as large as; but for a growth that is one for all of them."""
        growth = meeting.growth
        if self._aggregation is None or not isinstance(growth, Mapping):
            return message.cells
        cells = message.like(message.flat.clone()).cells
        for name, tensors in cells.items():
            for tensor, times in zip(tensors, growth[name], strict=True):
                tensor.mul_(times)
        return cells

    def _likely_parts(
        self, message: Message, meeting: Meeting, own: dict[int, list[Tensor]]
    ) -> Mapping[int, Sequence[Tensor]]:
        """The same in parts, one a member; those of the message are its own."""
        if (cells := self._likely(message, meeting)) is message.cells:
            return own
        return dict(zip(own, map(_tensors, cut(cells, len(own))), strict=True))

    def _expect(self, cells: Sequence[str], likely: Sequence[Tensor], meeting: Meeting) -> None:
        if self._aggregation:
            growth = meeting.growth
            self._aggregation.expect(cells, likely, 1.0 if isinstance(growth, Mapping) else growth)

    def _checked(self, sender: int, message: Callable[[], list[Tensor]], cells: Sequence[str]) -> list[Tensor]:
        """A message of some cells that a packet is decoded to. Raises PacketError."""
        try:
            decoded = message()
            if self._aggregation:
                self._aggregation.check(cells, decoded)
        except PacketError as error:
            if self._aggregation:
                self._aggregation.blame(sender, str(error))
            raise
        return decoded

    def _reduce_scatter(self, message: Message, meeting: Meeting) -> tuple[Pending[Tensor], float]:
        own, group = self._rank, meeting.group
        cells = dict(zip(group, cut(message.cells, len(group)), strict=True))
        parts = {rank: _tensors(part) for rank, part in cells.items()}
        likely = self._likely_parts(message, meeting, parts)
        uses = {rank: f"part {number} of {len(group)}" for number, rank in enumerate(group)}
        senders = {rank: self._bundle(cells[rank], use) for rank, use in uses.items()}
        names = {rank: [*cells[rank], use] for rank, use in uses.items()}  # parts of the same cells differ in size
        packets = {rank: senders[rank].encode(parts[rank]) for rank in group if rank != own}
        unreadable: dict[int, str] = {}
        given_up = Event()

        def combine(received: dict[int, Packet]) -> Packet:
            messages = {rank: partial(senders[own].decode, p, parts[own]) for rank, p in received.items()}
            self._expect(names[own], likely[own], meeting)
            mean, bad = self._mean(messages, names[own], parts[own], parts[own], meeting)
            unreadable.update(bad)
            codec = self._bundle(cells[own], f"mean of {len(group)}")
            # Others may still want it, but what is remembered must not depend on when that was.
            return (copy.deepcopy(codec) if given_up.is_set() else codec).encode(mean)

        def finish(arriving: Iterable[Mapping[int, Packet]]) -> dict[int, str]:
            for rank, packet in next(iter(arriving)).items():
                part, message = parts[rank], partial(senders[rank].decode, packet, parts[rank])
                self._expect(names[rank], likely[rank], meeting)
                try:
                    _copy(self._checked(rank, message, names[rank]), part)
                except PacketError as error:
                    unreadable[rank] = str(error)
            return unreadable

        pending = meeting.network.scatter_combine_gather(packets, group, meeting.key, combine)
        errors = [senders[rank].error_of(packet, parts[rank]) for rank, packet in packets.items()]
        averaged = Averaged([pending], message.flat, finish, meeting.network.now, given_up)
        return averaged, sum(errors) / len(errors)


class _Message:
    """A message whose packets come strip by strip.

    The last is decoded when it is asked for: of the whole messages of many, one at a time shall lie in memory.
    """

    def __init__(self, strips: int) -> None:
        self.missing = strips
        self._tensors: list[Tensor] = []
        self._error: PacketError | None = None

    def take(self, codec: Bundle, packet: Packet, like: Sequence[Tensor]) -> None:
        """Takes the next strip."""
        self.missing -= 1
        self._last = partial(codec.decode, packet, like)
        if self.missing:
            try:
                self._tensors += self._last()
            except PacketError as error:
                self._error = self._error or error

    def whole(self) -> list[Tensor]:
        """All of it. Raises PacketError."""
        if self._error:
            raise self._error
        return self._tensors + self._last()


def _tensors(cells: Cells) -> list[Tensor]:
    return [tensor for tensors in cells.values() for tensor in tensors]


def _copy(source: Iterable[Tensor], target: Iterable[Tensor]) -> None:
    for to, tensor in zip(target, source, strict=True):
        to.copy_(tensor)
