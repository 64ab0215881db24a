"""Anchors that should be equal and are not: found by a few numbers sent with each round, and averaged.

After a lost round or a partition, replicas have different anchors and outer momentum, and would take their
pseudo-gradients from different points.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from farflung.networks import Group, Network, PeerLostError, Pending
from farflung.networks.base import fact_in, fact_packet

STRETCHES = 8
"""Parts of an anchor that have a sum each."""

TOLERANCE = 1e-6
"""Sums may differ by this part of the stretch's norm: machines of different kinds round differently."""


def sketch(anchor: Tensor, lost: bool) -> Tensor:
    """The sums and norms of an anchor's stretches, and whether its last round was lost: a packet of 136 bytes."""
    parts = anchor.tensor_split(STRETCHES)
    sums = [part.sum(dtype=torch.float64) for part in parts]
    norms = [torch.linalg.vector_norm(part, dtype=torch.float64) for part in parts]
    flag = torch.tensor([float(lost)], dtype=torch.float64)
    return torch.cat([torch.stack([*sums, *norms]).cpu(), flag]).view(torch.uint8)


def differ(packets: Mapping[int, Tensor]) -> bool:
    """Whether anchors must be averaged. All members have the same sketches, so all decide the same."""
    sketches = [packet.cpu().view(torch.float64) for packet in packets.values()]
    first = sketches[0]
    allowed = TOLERANCE * first[STRETCHES:-1]
    apart = any(bool(((other - first)[:STRETCHES].abs() > allowed).any()) for other in sketches)
    return apart or any(bool(other[-1]) for other in sketches)


def draw_together(
    kept: Mapping[str, Tensor], facts: Any, network: Network, group: Group, key: str, seconds: float
) -> Any:
    """Gives all members the mean of the equally long tensors, by name, that they all have: of anchors, and more.

    Returns the facts (any JSON) of the member with the lowest rank, for all to use. Raises PeerLostError, also when a
    member says that it stays away.
    """
    packets = _tell([sorted(kept), facts], network, group, key).wait(seconds)
    told = {rank: fact_in(packet) for rank, packet in packets.items()}
    if away := [rank for rank, facts in told.items() if facts is None]:
        raise PeerLostError(
            away, f"anchors differ, but replica {away[0]} has lost this round; the next one tries again"
        )
    common = sorted(set.intersection(*(set(names) for names, _ in told.values())))
    flat = [kept[name] for name in common]
    means = network.all_reduce(torch.cat(flat), group, f"{key}, healed").wait(seconds)
    for tensor, mean in zip(flat, torch.split(means, flat[0].numel()), strict=True):
        tensor.copy_(mean)
    return told[min(group)][1]


def stay_away(network: Network, group: Group, key: str) -> None:
    """Says that this member has lost the round and will not join `draw_together`, so that nobody waits for it."""
    _tell(None, network, group, key)


def _tell(facts: Any, network: Network, group: Group, key: str) -> Pending[dict[int, Tensor]]:
    return network.exchange(fact_packet(facts), group, f"{key}, healed, facts")
