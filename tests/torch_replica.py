"""One replica in a process of its own, for tests over torch.distributed: `python torch_replica.py CASE OUT`."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import registered
import torch
from patience import patience
from problem import Trained, replica, trainer

from farflung import methods
from farflung.codecs import ErrorFeedback, LowRank, Quantize
from farflung.errors import UserError
from farflung.networks import Network, PeerLostError, Pending, TorchNetwork
from farflung.outer import bundles

RANDOM_DIGITS = ErrorFeedback(LowRank(2) | Quantize(4, stochastic=True))


def _by_clock(name: str, weighting: str, clock: Callable[[], float]) -> Callable[[Network], Trained]:
    return trainer(lambda: registered.made(name, every="2s"), rounds=3, clock=clock, weighting=weighting)


METHODS = {
    **{name: partial(registered.made, name, every=4) for name in registered.METHODS},
    "noloco in fragments": lambda: methods.noloco(every=4, fragments=2, delay=2),
    "dilocox rounded at random": lambda: methods.dilocox(every=4, codec=RANDOM_DIGITS),
}


BY_CLOCK: dict[str, Callable[[Callable[[], float]], Callable[[Network], Trained]]] = {
    f"{name}, {weighting}": partial(_by_clock, name, weighting)
    for name, weighting in (("noloco", "even"), ("diloco", "steps"), ("sparseloco", "steps"))
}
"""What replicas do under a clock that they are given, by method and weighting."""


SHORT = 50
"""Values of a strip in which the small model's message goes as three."""


def train(network: TorchNetwork, names: str) -> Any:
    bundles.STRIP = SHORT
    return {name: replica(METHODS[name], steps=12)(network).weights for name in names.split(",")}


def by_clock(network: TorchNetwork, recorded: str) -> dict[str, Trained]:
    """What this replica comes to by the clocks of others, as they were recorded."""
    clocks = json.loads(Path(recorded).read_text())
    return {case: work(iter(clocks[case][network.rank]).__next__)(network) for case, work in BY_CLOCK.items()}


def contract(network: Network, _: str) -> Any:
    """What the network's contract promises, as one dictionary of observations; ranks as places among the members."""
    members = network.members()
    rank, place = members.index(network.rank), {member: number for number, member in enumerate(members)}
    packet = torch.full((rank + 1,), rank, dtype=torch.uint8)
    packets = network.exchange(packet, members, "packets").wait(patience(20))
    tensor = torch.arange(10.0) * (rank + 1)
    mean = network.all_reduce(tensor, members, "mean").wait(patience(20))
    pair = members[:2] if rank < 2 else members[2:]
    large = torch.full((700_001,), float(rank))
    pending = network.all_reduce(large, pair, "pair")
    pair_mean = pending.wait(patience(20))
    summed = network.scatter_combine_gather(
        {m: torch.full((3,), 10 * rank + place[m], dtype=torch.uint8) for m in members if m != network.rank},
        members,
        "relay",
        lambda received: torch.tensor([rank, *(int(packet[0]) for packet in received.values())], dtype=torch.uint8),
    ).wait(patience(20))
    dealt = network.all_to_all(
        {m: torch.full((place[m] + 1,), 10 * rank + place[m], dtype=torch.uint8) for m in members if m != network.rank},
        members,
        "dealt",
    ).wait(patience(20))
    empty = network.all_reduce(torch.empty(0), members, "empty").wait(patience(20))
    observed = {
        "packets": {place[member]: p.tolist() for member, p in packets.items()},
        "mean": mean.tolist(),
        "in_place": mean is tensor,
        "pair_mean": pair_mean.unique().tolist(),
        "done": pending.done(),
        "relayed": {place[member]: p.tolist() for member, p in summed.items()},
        "dealt": {place[member]: p.tolist() for member, p in dealt.items()},
        "dealt_alone": network.all_to_all({}, (network.rank,), "dealt alone").wait(patience(20)),
        "empty": empty.numel(),
        "received": network.traffic.bytes_received,
        "sent": network.traffic.bytes_sent,
        "alone": network.exchange(packet, (network.rank,), "alone").wait(0.0)[network.rank] is packet,
        "attachments": [network.attachment() for _ in range(3)],
        "elastic": network.elastic is network,
        "processes": network.processes,
    }
    try:
        network.exchange(packet, members, f"only {rank}").wait(0.2)
    except PeerLostError as lost:
        observed["lost"] = [place[member] for member in lost.ranks]
    try:
        packets = {member: packet for member in members if member != network.rank}
        network.all_to_all(packets, members, f"dealt to {rank} alone").wait(0.2)
    except PeerLostError as lost:
        observed["lost when dealt"] = [place[member] for member in lost.ranks]
    return observed


def tables(network: TorchNetwork, _: str) -> Any:
    """What a replica sees in two steps on tables that are dealt out."""
    from test_embeddings import two_steps

    from farflung.embeddings import DistinctRows

    return two_steps(network, "mean", DistinctRows("int8"))


def late(network: TorchNetwork, _: str) -> Any:
    """Rank 1 comes to one exchange when rank 0 has given it up; later ones work."""
    group = (0, 1)
    if network.rank == 1:
        network.store.wait(["given up"], timedelta(seconds=patience(60)))
    try:
        network.all_reduce(torch.ones(5), group, "first").wait(1.0 if network.rank == 0 else patience(20))
        outcome = "delivered"
    except PeerLostError as lost:
        outcome = f"{lost.ranks} {lost}"
        network.store.set("given up", "")
    after = network.all_reduce(torch.tensor([float(network.rank)]), group, "second").wait(patience(20))
    return outcome, after.tolist()


def deadlines(network: TorchNetwork, _: str) -> Any:
    """What replica 0 is told of others that come late, die, or call with another size, while it waits in slices."""
    seen: dict[str, Any] = {}
    packet, everyone = torch.full((network.rank + 1,), network.rank, dtype=torch.uint8), network.members()
    if network.rank < 2:
        late = network.exchange(packet, everyone, "late")
    if network.rank == 0:
        seen["late"] = _told(late, until=(2, 3))
        network.store.set("go", "on")
    network.store.wait(["go"])
    if network.rank > 1:
        late = network.exchange(packet, everyone, "late")
    seen["packets"] = {rank: sent.tolist() for rank, sent in late.wait(patience(20)).items()}
    if network.rank < 2:
        unequal = network.all_reduce(torch.ones(1 << (17 + network.rank)), (0, 1), "unequal")
        if network.rank == 0:
            mixed: Pending[Any] = network.all_reduce(torch.ones(100), (0, 1), "kinds")
        else:
            mixed = network.exchange(packet, (0, 1), "kinds")
        seen["unequal"] = [_told(pending, (1 - network.rank,)) for pending in (unequal, mixed)]
        seen["after"] = network.all_reduce(torch.ones(3), (0, 1), "after").wait(patience(20)).tolist()
    if network.rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    if network.rank == 0:
        dead = network.exchange(packet, (0, 3), "dead")
        seen["dead"] = _told(dead, until=(3,), words="lost replica 3")
    return seen


def _told(pending: Pending[Any], until: tuple[int, ...], words: str = "") -> str:
    """What a short wait says, again and again until it says that just these are lost, in these words."""
    ends = time.monotonic() + patience(20)
    while time.monotonic() < ends:
        try:
            return f"delivered {pending.wait(0.2)}"
        except PeerLostError as lost:
            told = str(lost)
            if lost.ranks == until and words in told:
                return told
    return f"never: {told}"


REFUSED: dict[str, Callable[[TorchNetwork], object]] = {
    "in no island": lambda network: network.of_islands([(1,), (2,)]),
    "no islands": lambda network: network.of_islands([]),
    "in two islands": lambda network: network.of_islands([(0, 1), (1, 2)]),
    "an empty island": lambda network: network.of_islands([(0,), ()]),
    "unknown island": lambda network: network.of_islands([(0,), (5,)]),
    "not among": lambda network: network.among([1]),
    "among none": lambda network: network.among([]),
    "unknown among": lambda network: network.among([0, 7]),
    "twice among": lambda network: network.among([0, 1, 1]),
}


def refused(network: TorchNetwork, _: str) -> Any:
    """What process 0 of three is told about seats that there are not."""
    told = {}
    for name, wrong in REFUSED.items() if network.rank == 0 else ():
        try:
            wrong(network)
        except UserError as error:
            told[name] = str(error)
    return told


def death(network: TorchNetwork, _: str) -> Any:
    """Rank 2 kills itself in the middle of training; the others train to the end."""
    if network.rank == 2:
        network.advance = lambda: os.kill(os.getpid(), signal.SIGKILL) if dies() else None  # type: ignore[method-assign]
        steps = 0

        def dies() -> bool:
            nonlocal steps
            steps += 1
            return steps == 6

    result = replica(METHODS["noloco"], steps=12)(network)
    return [(round.round, round.group, round.outcome, round.reason) for round in result.rounds]


if __name__ == "__main__":
    case, argument, out = sys.argv[1:4]
    torch.set_num_threads(1)
    network = TorchNetwork.from_env(starting=patience(20))
    observed = globals()[case](network, argument)
    torch.save(observed, Path(out) / f"{network.rank}.pt")
    os._exit(0)  # a process group that others may still be using is not taken apart
