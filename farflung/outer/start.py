"""The first agreement: all replicas are there, and begin alike."""

from __future__ import annotations

import hashlib
from typing import TypeVar

import torch

from farflung.networks import Network, PeerLost, Pending
from farflung.networks.joining import WORD_SECONDS, log

T = TypeVar("T")

BYTES = 4
"""Of each fact's hash travel so many."""


class Disagreement(RuntimeError):
    """The replicas do not start alike."""


def agree_on_start(network: Network, key: str, facts: dict[str, str], seconds: float) -> None:
    """Waits for all replicas, at most so many seconds, and compares what they begin with.

    Args:
        network: the replica's seat.
        key: of the exchange.
        facts: what must be equal, by what it is called in a Disagreement.
        seconds: the longest that starting may take.

    Raises Disagreement, and PeerLost when somebody does not come.
    """
    own = [hashlib.sha256(value.encode()).digest()[:BYTES] for value in facts.values()]
    packet = torch.frombuffer(bytearray(b"".join(own)), dtype=torch.uint8)
    packets = all_there(network, network.exchange(packet, network.members(), key), seconds)
    for place, what in enumerate(facts):
        begin = place * BYTES
        told = {rank: packet.cpu().numpy().tobytes()[begin : begin + BYTES] for rank, packet in packets.items()}
        others = [str(rank) for rank, theirs in told.items() if theirs != own[place]]
        if others:
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
