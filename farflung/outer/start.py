"""The first agreement: all replicas are there, and begin alike."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import torch

from farflung.networks import Network, PeerLost, Pending
from farflung.networks.joining import WORD_SECONDS, log

T = TypeVar("T")

BYTES = 4
"""Of each fact's hash travel so many."""


class Disagreement(RuntimeError):
    """The replicas do not start alike."""


class Fact(NamedTuple):
    """Something that must be equal on all replicas.

    Args:
        what: how it is called in a Disagreement.
        told: what is told of it; it is enough that all tell the same in one of these places.
    """

    what: str
    told: tuple[str, ...]


def agree_on_start(network: Network, key: str, facts: Sequence[Fact], seconds: float) -> None:
    """Waits for all replicas, at most so many seconds, and compares what they begin with.

    Args:
        network: the replica's seat.
        key: of the exchange.
        facts: what must be equal; how many there are may depend on those before.
        seconds: the longest that starting may take.

    Raises Disagreement, and PeerLost when somebody does not come.
    """
    hashes = (hashlib.sha256(value.encode()).digest()[:BYTES] for fact in facts for value in fact.told)
    packet = torch.frombuffer(bytearray(b"".join(hashes)), dtype=torch.uint8)
    packets = all_there(network, network.exchange(packet, network.members(), key), seconds)
    told = {rank: packet.cpu().numpy().tobytes() for rank, packet in packets.items()}
    end = 0
    for what, ways in facts:
        places = [slice(end + way * BYTES, end + (way + 1) * BYTES) for way in range(len(ways))]
        end += len(ways) * BYTES
        agreed = any(len({words[place] for words in told.values()}) == 1 for place in places)
        if not agreed:
            own = told[network.rank]
            others = [str(rank) for rank, words in told.items() if any(words[p] != own[p] for p in places)]
            raise Disagreement(
                f"replica {network.rank} starts from other {what} than {', '.join(others)}; seed every replica alike "
                "before making the model, or load the same weights into all, and attach in the same order everywhere"
            )


def all_there(network: Network, pending: Pending[T], seconds: float) -> T:
    """The result of an exchange that waits for replicas to start; says now and then who is missing. Raises PeerLost."""
    began = network.now()
    while True:
        waited = network.now() - began
        try:
            return pending.wait(min(WORD_SECONDS, seconds - waited))
        except PeerLost as lost:
            missing = ", ".join(map(str, lost.ranks))
            waited = network.now() - began
            if pending.done():
                raise
            if waited >= seconds:
                raise PeerLost(
                    lost.ranks,
                    f"replica {missing} has not started within {seconds:g} s; see whether it is running and can be "
                    "reached, or give it longer with starting=",
                ) from None
            log.warning(
                "replica %d waits for replica %s to start: %.0f of %g s", network.rank, missing, waited, seconds
            )
