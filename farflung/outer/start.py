"""The first agreement: all replicas are there, and begin alike."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch

from farflung.networks import Network, PeerLost, Pending
from farflung.networks.joining import WORD_SECONDS, log

if TYPE_CHECKING:
    from farflung.outer.method import Method

T = TypeVar("T")

BYTES = 4
"""Of each fact's hash travel so many."""


class Disagreement(RuntimeError):
    """The replicas do not start alike."""


@dataclass(frozen=True)
class Fact:
    """Something that must be equal on all replicas.

    Args:
        value: in words or as a digest.
        remedy: what to do where it is not.
    """

    value: str
    remedy: str


SETTING = "give all replicas the same method and settings"
STATE = (
    "seed every replica alike before making the model, or load the same weights into all, and attach in the same order "
    "everywhere"
)


def method_facts(method: Method, outer: torch.optim.Optimizer | None) -> dict[str, Fact]:
    """What a method's replicas must have alike, by what it is called in a Disagreement."""
    group = outer.param_groups[0] if outer else {}
    settings = {name: value for name, value in group.items() if name != "params"}
    parts: dict[str, object] = {
        "schedule": method.schedule,
        "topology": method.topology,
        "codec": method.codec,
        "merge": method.merge,
        "adaptation": method.adapt,
        "way of averaging": method.averaging,
        "outer optimizer": f"{type(outer).__name__} {settings}" if outer else "none",
    }
    # Where an object lies in memory is not a setting.
    return {name: Fact(re.sub(r" at 0x[0-9a-f]+", "", str(part)), SETTING) for name, part in parts.items()}


def agree_on_start(network: Network, key: str, facts: dict[str, Fact], seconds: float) -> None:
    """Waits for all replicas, at most so many seconds, and compares what they begin with.

    Args:
        network: the replica's seat.
        key: of the exchange.
        facts: what must be equal, by what it is called in a Disagreement.
        seconds: the longest that starting may take.

    Raises Disagreement, and PeerLost when somebody does not come.
    """
    hashes = b"".join(hashlib.sha256(fact.value.encode()).digest()[:BYTES] for fact in facts.values())
    packets = all_there(network, network.exchange(_packet(hashes), network.members(), key), seconds)
    if all(packet.cpu().numpy().tobytes() == hashes for packet in packets.values()):
        return
    told = json.dumps({what: fact.value for what, fact in facts.items()}).encode()
    packets = network.exchange(_packet(told), network.members(), f"{key}, in words").wait(seconds)
    values = {rank: json.loads(packet.cpu().numpy().tobytes()) for rank, packet in packets.items()}
    for what, fact in facts.items():
        if others := {rank: theirs[what] for rank, theirs in values.items() if theirs[what] != fact.value}:
            raise Disagreement(f"replica {network.rank} starts from other {what} than {_told(fact, others)}")


def _packet(words: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(words), dtype=torch.uint8)


def _told(fact: Fact, others: dict[int, str]) -> str:
    """Who has another value, both values where they are short, and the remedy."""
    rank, value = next(iter(others.items()))
    ranks = ", ".join(map(str, others))
    known = len(fact.value) + len(value) < 500 and fact.remedy == SETTING
    values = f": {fact.value}, and replica {rank} from {value}" if known else ""
    return f"{ranks}{values}; {fact.remedy}"


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
