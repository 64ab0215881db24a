"""How long does a round take on a slow link, for dense and compressed messages?
Real processes on hosts in network namespaces, NoLoCo's in pairs and DiLoCo's among all, with no training to hide a
round: its whole time is measured, encoding and decoding included. The physical limit is line rate for the bytes that
the link carried, with headers, acknowledgements and what was sent again; MB sent are those of the packets alone.
Takes two minutes, as root.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from statistics import median

from bench.lib.replica import all_ready, leave, model_of
from bench.lib.store import Store
from bench.lib.table import Cell, Part, Table
from farflung import Method, methods
from farflung.codecs import ErrorFeedback, Modulo, Quantize
from farflung.networks import TorchNetwork
from farflung.outer import Schedule
from farflung.testing.hosts import NetLab, torch_everywhere, unavailable

needs = unavailable

WARM_UP = 1


METHODS: dict[str, Callable[[], Method]] = {
    "noloco": lambda: methods.noloco(every=1),
    "noloco, modulo4": lambda: methods.noloco(every=1, codec=Modulo(bits=4)),
    "noloco, modulo3": lambda: methods.noloco(every=1, codec=Modulo(bits=3)),
    "nolocox": lambda: replace(methods.nolocox(every=1, adapt=False), schedule=Schedule(every=1)),
    "diloco": lambda: methods.diloco(every=1),
    "diloco, ef-int4": lambda: methods.diloco(every=1, codec=ErrorFeedback(Quantize(bits=4))),
}


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
    rounds: int = 5
    """Rounds that are measured, after one that warms up."""
    methods: tuple[str, ...] = tuple(METHODS)
    """What to measure."""


SMOKE = Options(parameters=250_000, replicas=2, rounds=2, methods=("noloco, modulo4",))


def carried() -> int:
    """Bytes that this host's link has sent, headers and acknowledgements included."""
    command = ["tc", "-s", "-j", "qdisc", "show", "dev", os.environ["GLOO_SOCKET_IFNAME"]]
    return int(json.loads(subprocess.run(command, capture_output=True, check=True).stdout)[0]["bytes"])


def replica(method: str, parameters: int, rounds: int, pause: float) -> None:
    """Holds rounds in which little is computed; prints the median of their seconds, and the bytes of the last one."""
    network = TorchNetwork.from_env(starting=60)
    model, optimizer = model_of(parameters, network.rank, lr=1e-3)
    seconds: list[float] = []
    with METHODS[method]().attach(model, optimizer, network):
        for number in range(WARM_UP + rounds):
            time.sleep(pause)
            carried_before = carried()
            all_ready(network, f"all ready {number}")
            before, began = network.traffic.bytes_sent, time.monotonic()
            optimizer.step()
            seconds.append(time.monotonic() - began)
        on_link = carried() - carried_before
    print(median(seconds[WARM_UP:]), network.traffic.bytes_sent - before, on_link)
    leave(network)


def run(options: Options, store: Store) -> Iterator[Part]:
    with NetLab(options.replicas, options.rate_mbit) as lab:

        def row(method: str) -> tuple[Cell, ...]:
            arguments = [method, str(options.parameters), str(options.rounds), str(options.pause)]
            outputs = torch_everywhere(lab.hosts, ["-m", __name__, *arguments], timeout_s=300)
            columns = zip(*(map(float, output.split()) for output in outputs), strict=True)
            slowest, sent, on_link = map(max, columns)
            limit = on_link * 8e-6 / options.rate_mbit
            return method, slowest, limit, slowest - limit, slowest / limit, sent / 1e6

        columns = {"round": "", "seconds": ".3f", "line rate": ".3f", "over": ".3f", "ratio": ".2f", "MB sent": ".2f"}
        hosts = f"{options.replicas} hosts at {options.rate_mbit:g} Mbit/s each way"
        yield Table(columns, map(row, options.methods), f"{options.parameters:,} float32 parameters, {hosts}")


if __name__ == "__main__":
    replica(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
