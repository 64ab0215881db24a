"""Averaging on demand: buffers, frozen weights that the loop moves, and at the end the weights."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from farflung.codecs import finite
from farflung.errors import UserError
from farflung.hooks.digests import digest
from farflung.hooks.shards import own_of
from farflung.networks import Group, Network

LENGTH = 1e-5
"""How far a unit vector's length may be from 1, if its dtype is exact enough."""


@torch.no_grad()
def average(
    tensors: Mapping[str, Tensor], network: Network, group: Group, key: str, seconds: float, directions: bool = False
) -> None:
    """Gives all members the mean of floating and complex tensors, and the largest of whole numbers; bools stay.

    Tensors that are equal everywhere are not written, and cost only a few bytes. A member whose tensor is not finite
    adds nothing, and gets the others' mean. With `directions`, tensors of unit vectors, such as spectral norm's, are
    taken from the lowest rank instead: opposite vectors can be equivalent, and their mean useless.

    Raises PeerLostError, and UserError where members hold tensors of unlike sizes.
    """
    views = {name: real_view(tensor) for name, tensor in tensors.items() if tensor.dtype != torch.bool}
    if not views or len(group) < 2:
        return
    own = torch.stack([digest([view]) for view in views.values()]).view(-1)
    packets = network.exchange(own.view(torch.uint8), group, f"{key}, compared").wait(seconds)
    told = {rank: packet.cpu().view(torch.int64).view(-1, 2) for rank, packet in sorted(packets.items())}
    _check_sizes(list(views), told, network.rank)
    all_told = torch.stack(list(told.values()))
    differ = (all_told != all_told[0]).any(0).any(1).tolist()
    unequal = [view for view, differs in zip(views.values(), differ, strict=True) if differs]
    if floating := [view for view in unequal if view.is_floating_point()]:
        _average_floating(floating, network, group, key, seconds, directions)
    if whole := [view for view in unequal if not view.is_floating_point()]:
        flat = torch.cat([view.reshape(-1).long() for view in whole])
        numbers = network.exchange(flat.view(torch.uint8), group, f"{key}, the largest").wait(seconds)
        largest = torch.stack([packet.view(torch.int64).to(flat.device) for packet in numbers.values()]).amax(0)
        for view, part in zip(whole, torch.split(largest, [view.numel() for view in whole]), strict=True):
            view.copy_(part.view(view.shape))


def real_view(tensor: Tensor) -> Tensor:
    """The same memory as real numbers, each of them once: of complex ones the parts, of a shard what is here."""
    view = own_of(tensor.detach())
    if view.is_complex():
        view = torch.view_as_real(view.conj() if view.is_conj() else view)
    for dim, stride in enumerate(view.stride()):
        if stride == 0 and view.shape[dim] > 1:  # an expanded dimension
            view = view.narrow(dim, 0, 1)
    return view


def sound(view: Tensor) -> bool:
    """Whether a `real_view` holds whole numbers, or only finite ones."""
    return not view.is_floating_point() or finite(view.float() if _is_small(view) else view)


def _is_small(view: Tensor) -> bool:
    return view.element_size() == 1  # torch computes with no floating ones of a byte


def _of_unit_vectors(view: Tensor) -> bool:
    """Whether the whole of a tensor, or each of its rows along some dimension, has length 1."""
    if view.numel() < 2 or _is_small(view):
        return False
    exact = torch.promote_types(view.dtype, torch.float32)
    allowed = max(LENGTH, torch.finfo(view.dtype).eps)
    dims = [None, *(dim for dim, size in enumerate(view.shape) if size > 1)]
    lengths = (torch.linalg.vector_norm(view, dim=dim, dtype=exact) for dim in dims)
    return any(bool(((length - 1).abs() <= allowed).all()) for length in lengths)


def _check_sizes(names: list[str], told: dict[int, Tensor], own: int) -> None:
    """Raises UserError where sizes differ: then on all members alike, so that nobody waits for one that has left."""
    remedy = "; keep it equally large everywhere, or register it with persistent=False"
    for rank, theirs in told.items():
        if len(theirs) != len(told[own]):
            raise UserError(f"the model has {len(names)} buffers here, but {len(theirs)} on replica {rank}{remedy}")
        for name, here, there in zip(names, told[own][:, 0].tolist(), theirs[:, 0].tolist(), strict=True):
            if here != there:
                raise UserError(f"{name} has other sizes on replica {rank} than here{remedy}")


def _average_floating(
    views: list[Tensor], network: Network, group: Group, key: str, seconds: float, directions: bool
) -> None:
    words = [sound(view) + (directions and _of_unit_vectors(view)) for view in views]
    own = torch.tensor(words, dtype=torch.uint8, device="cpu")
    packets = network.exchange(own, group, f"{key}, judged").wait(seconds)
    judged = {rank: packet.cpu() for rank, packet in sorted(packets.items())}
    able = [rank for rank, words in judged.items() if bool(words.all())]
    if not able:
        return
    units = torch.stack([judged[rank] for rank in able]).eq(2).all(0).tolist()
    givers = [able[:1] if unit else able for unit in units]
    dtype = torch.float64 if any(view.dtype == torch.float64 for view in views) else torch.float32
    flat = torch.cat(
        [
            view.reshape(-1).to(dtype) if network.rank in giving else view.new_zeros(view.numel(), dtype=dtype)
            for view, giving in zip(views, givers, strict=True)
        ]
    )
    mean = network.all_reduce(flat, group, f"{key}, averaged").wait(seconds)
    for view, giving, part in zip(views, givers, torch.split(mean, [view.numel() for view in views]), strict=True):
        view.copy_((part if giving == list(group) else part * (len(group) / len(giving))).view(view.shape))
