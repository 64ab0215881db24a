"""An all-reduce in parts: each member of a group averages one part, and sends its mean to the others."""

from __future__ import annotations

import torch
from torch import Tensor

from farflung.networks.base import Group, Packets, mean_in_order


class Reduction:
    """One member's side of it, for `scatter_combine_gather`: the mean is put into the tensor itself."""

    def __init__(self, tensor: Tensor, rank: int, group: Group) -> None:
        self._dtype, self._rank, self._group = tensor.dtype, rank, group
        self._parts = dict(zip(group, torch.tensor_split(tensor.view(-1), len(group)), strict=True))

    @property
    def packets(self) -> Packets:
        """What the others average, by their ranks."""
        return {rank: bytes_of(part) for rank, part in self._parts.items() if rank != self._rank}

    def combine(self, received: Packets) -> Tensor:
        """The mean of this member's part; its own where not all of the others' have come, or have other sizes."""
        own = self._parts[self._rank]
        if len(received) < len(self._group) - 1 or any(len(p) != own.nbytes for p in received.values()):
            return bytes_of(own)
        values = {sender: packet.view(self._dtype) for sender, packet in received.items()} | {self._rank: own}
        return bytes_of(mean_in_order([values[member].to(own.device) for member in self._group]))

    def put(self, combined: Packets) -> None:
        """Takes all parts' means."""
        for member, part in self._parts.items():
            part.copy_(combined[member].view(self._dtype).to(part.device))


def bytes_of(tensor: Tensor) -> Tensor:
    """A tensor's bytes (uint8, flat), on the CPU."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
