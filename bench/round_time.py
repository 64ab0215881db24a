"""How long a round takes on a slow link: NoLoCo in pairs and DiLoCo among all, beside the link's own limit.

    sudo python bench/round_time.py [--parameters 5000000] [--rate-mbit 100] [--replicas 4]

Real processes on hosts in network namespaces of this machine (see netlab.py).
"""

from __future__ import annotations

import contextlib
import sys
import time
from dataclasses import dataclass
from statistics import median

import torch
import tyro

from farflung import methods
from farflung.networks import PeerLost, TorchNetwork

WARM_UP, MEASURED = 1, 5


@dataclass(frozen=True)
class Options:
    parameters: int = 5_000_000
    """Float32 parameters."""
    rate_mbit: float = 100.0
    """Each host's link, each way."""
    replicas: int = 4
    """Hosts."""


def replica(method: str, parameters: int) -> None:
    """Holds rounds in which nothing is computed; prints the median of their seconds, and the bytes sent in one."""
    network = TorchNetwork.from_env(deadline=60)
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(parameters))])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    seconds: list[float] = []
    with getattr(methods, method)(every=1).attach(model, optimizer, network):
        for number in range(WARM_UP + MEASURED):
            network.exchange(torch.zeros(1, dtype=torch.uint8), network.members(), f"all ready {number}").wait(60)
            before, began = network.traffic.bytes_sent, time.monotonic()
            optimizer.step()
            seconds.append(time.monotonic() - began)
    print(median(seconds[WARM_UP:]), network.traffic.bytes_sent - before)
    with contextlib.suppress(PeerLost):  # nobody leaves while others still need its packets
        network.exchange(torch.zeros(1, dtype=torch.uint8), network.members(), "leaving").wait(10)


def main(options: Options) -> None:
    from netlab import NetLab

    message = 4 * options.parameters
    print(
        f"{options.parameters:,} float32 parameters, {options.replicas} hosts at {options.rate_mbit:g} Mbit/s each way"
    )
    print(f"{'round':24} {'seconds':>8} {'line rate':>9} {'ratio':>6} {'MB sent':>8}")
    with NetLab(options.replicas, options.rate_mbit) as lab:
        for method, share in (("noloco", 1.0), ("diloco", 2 * (options.replicas - 1) / options.replicas)):
            outputs = lab.torch_everywhere([__file__, "--replica", method, str(options.parameters)], timeout=300)
            slowest = max(float(output.split()[0]) for output in outputs)
            limit = share * message * 8e-6 / options.rate_mbit
            who = "pairs" if method == "noloco" else f"all {options.replicas}"
            sent = int(outputs[0].split()[1]) / 1e6
            print(f"{f'{method}, {who}':24} {slowest:8.2f} {limit:9.2f} {slowest / limit:6.2f} {sent:8.1f}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--replica"]:
        replica(sys.argv[2], int(sys.argv[3]))
    else:
        main(tyro.cli(Options, description=__doc__))
