"""The mean of a group's messages, by whichever way is cheapest for the codec."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from farflung.codecs import Codec, Dense, Packet, PacketError
from farflung.networks import Group, Network, PeerLost, Pending


def average(network: Network, codec: Codec, message: Tensor, group: Group, key: str) -> Pending[Tensor]:
    """Starts averaging a flat message over a group; the message's memory belongs to the exchange from then on.

    What a codec need not encode is averaged in the network, 2 (n - 1) / n times its bytes from each member; packets go
    from everyone to everyone, n - 1 times their bytes. `wait` of the result raises PeerLost only when a reduction
    failed; where packets are missing or unreadable, the mean is that of the others.
    """
    if codec == Dense(message.dtype):
        return network.all_reduce(message, group, key)
    packet = codec.encode([message])
    return _Decoded(network.exchange(packet, group, key), codec, message, network.rank)


class _Decoded:
    """The mean of the messages in the packets of a pending exchange."""

    def __init__(self, packets: Pending[dict[int, Packet]], codec: Codec, message: Tensor, rank: int) -> None:
        self._packets = packets
        self._codec = codec
        self._message = message
        self._rank = rank

    def done(self) -> bool:
        return self._packets.done()

    @property
    def finished_at(self) -> float:
        return self._packets.finished_at

    def wait(self, timeout: float) -> Tensor:
        try:
            packets = self._packets.wait(timeout)
        except PeerLost as lost:
            packets = lost.delivered
        return self._mean(packets.values())

    def _mean(self, packets: Iterable[Packet]) -> Tensor:
        count = 0
        total = torch.zeros_like(self._message)
        for packet in packets:
            try:
                total += self._codec.decode(packet, [self._message])[0]
            except PacketError:
                continue
            count += 1
        return self._message.copy_(total.div_(count)) if count else self._message


def agree(network: Network, tensors: Iterable[Tensor], deadline: float) -> bool:
    """Whether all members hold the same bits in these tensors, by a checksum of a few bytes."""
    digest = torch.zeros(2, dtype=torch.int64)
    for tensor in tensors:
        words = tensor.detach().flatten().view(torch.uint8 if tensor.element_size() < 4 else torch.int32)
        # 64-bit sums wrap around without an error, and the order of additions does not matter.
        digest[0] = digest[0] * 31 + tensor.numel()
        digest[1] = digest[1] * 31 + words.sum(dtype=torch.int64).cpu()
    packets = network.exchange(digest.view(torch.uint8), network.members(), "agree").wait(deadline)
    return all(torch.equal(packet.cpu(), digest.view(torch.uint8)) for packet in packets.values())
