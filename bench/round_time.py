"""How long a round takes on a slow link, for dense and compressed messages, beside the link's own limit.

    sudo python bench/round_time.py [--parameters 5000000] [--rate-mbit 100] [--replicas 4]

Real processes on hosts in network namespaces of this machine (see netlab.py). NoLoCo's go in pairs, DiLoCo's among
all. Nothing is overlapped: a round's whole time is measured, encoding and decoding included.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median

import torch
import tyro

from farflung import Method, methods
from farflung.codecs import ErrorFeedback, Modulo, Quantize
from farflung.networks import PeerLost, TorchNetwork
from farflung.outer import Schedule

WARM_UP, MEASURED = 1, 5


@dataclass(frozen=True)
class Options:
    parameters: int = 5_000_000
    """Float32 parameters."""
    rate_mbit: float = 100.0
    """Each host's link, each way."""
    replicas: int = 4
    """Hosts."""


METHODS: dict[str, Callable[[], Method]] = {
    "noloco": lambda: methods.noloco(every=1),
    "noloco, modulo4": lambda: methods.noloco(every=1, codec=Modulo(bits=4)),
    "noloco, modulo3": lambda: methods.noloco(every=1, codec=Modulo(bits=3)),
    "nolocox": lambda: replace(methods.nolocox(every=1, adapt=False), schedule=Schedule(every=1)),
    "diloco": lambda: methods.diloco(every=1),
    "diloco, ef-int4": lambda: methods.diloco(every=1, codec=ErrorFeedback(Quantize(bits=4))),
}


def replica(method: str, parameters: int) -> None:
    """Holds rounds in which little is computed; prints the median of their seconds, and the bytes sent in one."""
    torch.set_num_threads(1)
    network = TorchNetwork.from_env(deadline=60)
    torch.manual_seed(0)
    side = 500
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.randn(side, side)) for _ in range(parameters // side**2)])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    torch.manual_seed(network.rank)
    for parameter in model:
        parameter.grad = torch.randn_like(parameter)  # so that replicas move apart, each its own way
    seconds: list[float] = []
    with METHODS[method]().attach(model, optimizer, network):
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

    print(
        f"{options.parameters:,} float32 parameters, {options.replicas} hosts at {options.rate_mbit:g} Mbit/s each way"
    )
    print(f"{'round':24} {'seconds':>8} {'line rate':>9} {'ratio':>6} {'MB sent':>8}")
    with NetLab(options.replicas, options.rate_mbit) as lab:
        for method in METHODS:
            outputs = lab.torch_everywhere([__file__, "--replica", method, str(options.parameters)], timeout=300)
            slowest = max(float(output.split()[0]) for output in outputs)
            sent = max(int(output.split()[1]) for output in outputs)
            limit = sent * 8e-6 / options.rate_mbit
            print(f"{method:24} {slowest:8.2f} {limit:9.2f} {slowest / limit:6.2f} {sent / 1e6:8.2f}", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--replica"]:
        replica(sys.argv[2], int(sys.argv[3]))
    else:
        main(tyro.cli(Options, description=__doc__))
