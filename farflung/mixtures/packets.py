"""What machines that split a text together tell each other: how each packet is made, and read where it may be anything.

What reads raises ValueError for what is no such packet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.torch import load, save
from torch import Tensor

from farflung.networks.base import fact_packet, packet_of, words_of
from farflung.networks.peers.frames import reading, told_in

SCORE = np.dtype(np.float16)
NAME_BYTES = 256
"""What a weight's name, type and shape take in a packet, at most."""


@dataclass(frozen=True)
class Reading:
    """What a machine has read."""

    sequences: int
    """To train on."""
    tokens: int
    """With those held out."""
    digest: str
    """Of all of them, and of how they are to be split."""

    def packet(self) -> Tensor:
        """This, as others hear it."""
        return fact_packet(asdict(self))


@reading("what it has read")
def reading_in(packet: Tensor) -> Reading:
    """What another machine has read."""
    told = Reading(**told_in(words_of(packet)))
    return Reading(int(told.sequences), int(told.tokens), str(told.digest))


def scores_packet(scores: Sequence[NDArray[np.float32]]) -> Tensor:
    """The scores (n,) of each of a machine's routers, 2 bytes for each."""
    return packet_of(np.stack(scores).astype(SCORE).tobytes())


def scores_in(packet: Tensor, routers: int, sequences: int) -> NDArray[np.float16]:
    """(routers, sequences)."""
    wanted = routers * sequences * SCORE.itemsize
    if packet.numel() != wanted:
        raise ValueError(f"its scores have {packet.numel():,} bytes, and not {wanted:,}")
    scores = np.frombuffer(words_of(packet), dtype=SCORE).reshape(routers, sequences)
    if (scores[np.isfinite(scores)] > 0).any():
        raise ValueError("its scores say that texts are more than certain")
    return scores


def weights_packet(routers: Mapping[int, Any]) -> Tensor:
    """The weights of a machine's routers, by their numbers, as safetensors."""
    return packet_of(save({name: tensor.clone() for name, tensor in _weights_of(routers).items()}))


def load_weights(routers: Mapping[int, Any], packet: Tensor) -> None:
    """Gives routers the weights in a packet, which has theirs and no others."""
    with reading("what it sends as weights"):
        told = load(words_of(packet))
    if {name: _form(tensor) for name, tensor in told.items()} != {
        name: _form(tensor) for name, tensor in _weights_of(routers).items()
    }:
        raise ValueError("its weights are of other routers, or of other shapes")
    if not all(tensor.isfinite().all() for tensor in told.values()):
        raise ValueError("its weights are no finite numbers")
    for number, router in routers.items():
        router.load_state_dict({name: told[f"{number}/{name}"] for name in router.state_dict()})


def largest_packet(router: Any, routers: int, sequences: int) -> int:
    """Bytes of the largest packet of a machine with so many routers like one, that scores so many sequences at once."""
    weights = sum(tensor.nbytes + NAME_BYTES for tensor in router.state_dict().values())
    return routers * max(int(weights), sequences * SCORE.itemsize)


def _weights_of(routers: Mapping[int, Any]) -> dict[str, Tensor]:
    return {f"{one}/{name}": tensor for one in routers for name, tensor in routers[one].state_dict().items()}


def _form(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape
