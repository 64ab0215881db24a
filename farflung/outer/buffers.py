"""What a model keeps that no optimizer trains, such as BatchNorm's statistics, and averaging it on demand."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from farflung.codecs import finite
from farflung.networks import Group, Network
from farflung.outer.averaging import digest


class Buffers:
    """A model's persistent buffers: those in its `state_dict`."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._kept: dict[str, Tensor] = {}

    def named(self) -> dict[str, Tensor]:
        """The buffers as they are now, by name; a module may have put another tensor in a buffer's place."""
        passing = {
            f"{prefix}.{name}".lstrip(".")
            for prefix, module in self._model.named_modules()
            for name in module._non_persistent_buffers_set
        }
        return {name: buffer for name, buffer in self._model.named_buffers() if name not in passing}

    def floating(self) -> list[str]:
        """The names of those that training may move by less than one."""
        return [name for name, buffer in self.named().items() if buffer.is_floating_point()]

    @torch.no_grad()
    def keep(self) -> None:
        """Remembers them as they are, for `restore`."""
        self._kept = {name: buffer.clone() for name, buffer in self.named().items() if finite_or_whole(buffer)}

    @torch.no_grad()
    def restore(self) -> None:
        """Goes back to what was kept."""
        for name, buffer in self.named().items():
            if name in self._kept:
                buffer.copy_(self._kept[name])


def finite_or_whole(tensor: Tensor) -> bool:
    """Whether a tensor holds whole numbers, or only finite ones."""
    return not tensor.is_floating_point() or finite(tensor)


@torch.no_grad()
def average(tensors: Sequence[Tensor], network: Network, group: Group, key: str, seconds: float) -> None:
    """Gives all members the mean of floating tensors, and the largest of whole numbers; bools stay.

    Nothing but a few bytes travels where all members hold the same. Who holds what is not finite adds nothing, and gets
    the others' mean. Raises PeerLost.
    """
    tensors = [tensor.detach() for tensor in tensors if tensor.dtype != torch.bool and tensor.numel()]
    if not tensors or len(group) < 2:
        return
    own = digest(tensors).view(torch.uint8)
    digests = network.exchange(own, group, f"{key}, compared").wait(seconds)
    if all(torch.equal(other.cpu(), own) for other in digests.values()):
        return
    if floating := [tensor for tensor in tensors if tensor.is_floating_point()]:
        _average_floating(floating, network, group, f"{key}, averaged", seconds)
    if whole := [tensor for tensor in tensors if not tensor.is_floating_point()]:
        flat = torch.cat([tensor.reshape(-1).long() for tensor in whole])
        packets = network.exchange(flat.view(torch.uint8), group, f"{key}, the largest").wait(seconds)
        largest = torch.stack([packet.view(torch.int64).to(flat.device) for packet in packets.values()]).amax(0)
        _write(whole, largest)


def _average_floating(tensors: list[Tensor], network: Network, group: Group, key: str, seconds: float) -> None:
    dtype = torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32
    flat = torch.cat([tensor.reshape(-1).to(dtype) for tensor in tensors])
    sound = finite(flat)
    flag = flat.new_ones(1) if sound else flat.new_zeros(1)
    mean = network.all_reduce(torch.cat([flat if sound else torch.zeros_like(flat), flag]), group, key).wait(seconds)
    if float(mean[-1]):
        _write(tensors, mean[:-1] / mean[-1])


def _write(tensors: list[Tensor], flat: Tensor) -> None:
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        tensor.copy_(part.view(tensor.shape))
