"""How long a round takes on a slow link, for dense and compressed messages, beside the link's own limit.

    sudo python bench/round_time.py [--parameters 5000000] [--rate-mbit 100] [--replicas 4] [--pause 0]

Real processes on hosts in network namespaces of this machine (see netlab.py). NoLoCo's go in pairs, DiLoCo's among
all. No training hides a round: its whole time is measured, encoding and decoding included. Line rate is for the bytes
that the link carried, with headers, acknowledgements and what was sent again; MB sent are those of the packets alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median

import torch
import tyro

from farflung import Method, methods
from farflung.codecs import ErrorFeedback, Modulo, Quantize
from farflung.networks import PeerLostError, TorchNetwork
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
    pause: float = 0.0
    """Seconds between rounds, in which connections are idle."""


METHODS: dict[str, Callable[[], Method]] = {
    "noloco": lambda: methods.noloco(every=1),
    "noloco, modulo4": lambda: methods.noloco(every=1, codec=Modulo(bits=4)),
    "noloco, modulo3": lambda: methods.noloco(every=1, codec=Modulo(bits=3)),
    "nolocox": lambda: replace(methods.nolocox(every=1, adapt=False), schedule=Schedule(every=1)),
    "diloco": lambda: methods.diloco(every=1),
    "diloco, ef-int4": lambda: methods.diloco(every=1, codec=ErrorFeedback(Quantize(bits=4))),
}


def carried() -> int:
    """Bytes that this host's link has sent, headers and acknowledgements included."""
    command = ["tc", "-s", "-j", "qdisc", "show", "dev", os.environ["GLOO_SOCKET_IFNAME"]]
    return int(json.loads(subprocess.run(command, capture_output=True, check=True).stdout)[0]["bytes"])


def replica(method: str, parameters: int, pause: float) -> None:
    """Holds rounds in which little is computed; prints the median of their seconds, and the bytes of the last one."""
    torch.set_num_threads(1)
    network = TorchNetwork.from_env(starting=60)
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
            time.sleep(pause)
            carried_before = carried()
            network.exchange(torch.zeros(1, dtype=torch.uint8), network.members(), f"all ready {number}").wait(60)
            before, began = network.traffic.bytes_sent, time.monotonic()
            optimizer.step()
            seconds.append(time.monotonic() - began)
        on_link = carried() - carried_before
    print(median(seconds[WARM_UP:]), network.traffic.bytes_sent - before, on_link)
    with contextlib.suppress(PeerLostError):  # nobody leaves while others still need its packets
        network.exchange(torch.zeros(1, dtype=torch.uint8), network.members(), "leaving").wait(10)


def main(options: Options) -> None:
    from netlab import NetLab

    print(
        f"{options.parameters:,} float32 parameters, {options.replicas} hosts at {options.rate_mbit:g} Mbit/s each way"
    )
    print(f"{'round':24} {'seconds':>8} {'line rate':>9} {'over':>6} {'ratio':>6} {'MB sent':>8}")
    with NetLab(options.replicas, options.rate_mbit) as lab:
        for method in METHODS:
            outputs = lab.torch_everywhere(
                [__file__, "--replica", method, str(options.parameters), str(options.pause)], timeout=300
            )
            slowest, sent, on_link = (
                max(column) for column in zip(*(map(float, o.split()) for o in outputs), strict=True)
            )
            limit = on_link * 8e-6 / options.rate_mbit
            print(
                f"{method:24} {slowest:8.3f} {limit:9.3f} {slowest - limit:6.3f} {slowest / limit:6.2f} "
                f"{sent / 1e6:8.2f}",
                flush=True,
            )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--replica"]:
        replica(sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
    else:
        main(tyro.cli(Options, description=__doc__))
