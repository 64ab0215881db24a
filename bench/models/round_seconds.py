"""How well does the simulator predict the seconds of a round?
The baseline is real processes on hosts in network namespaces, on links of that rate, where an inner step is a sleep,
as on a GPU that leaves the CPU alone. The prediction knows the rate, the step, the method and the shapes, and what a
round takes of this machine's cores (inner steps, encoding, decoding, outer steps), which is measured first, in one
process. Takes five minutes, as root.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial

import torch

from bench.lib.replica import all_ready, leave, model_of, shapes
from bench.lib.store import Store
from bench.lib.table import Cell, Part, Table
from farflung import Method, methods
from farflung.cells import cells_among
from farflung.networks import Conditions, Network, Simulation, TorchNetwork
from farflung.networks.simulator.conditions import HEADERS
from farflung.outer import message_bytes
from farflung.planner.timing import Timer
from farflung.testing.hosts import NetLab, torch_everywhere, unavailable

needs = unavailable

EVERY, WARM_UP = 10, 2

METHODS: dict[str, Callable[[], Method]] = {
    "ddp": methods.ddp,
    "diloco": lambda: methods.diloco(every=EVERY),
    "noloco": lambda: methods.noloco(every=EVERY),
    "dilocox": lambda: methods.dilocox(every=EVERY, adapt=False),
}


@dataclass(frozen=True)
class Options:
    parameters: int = 5_000_000
    """Float32 parameters, in square matrices."""
    rates: tuple[float, ...] = (50.0, 200.0)
    """Each host's link, each way, megabits a second."""
    replicas: int = 4
    """Hosts."""
    step_ms: float = 100.0
    """An inner step."""
    rounds: int = 6
    """Rounds that are measured, after two that warm up."""
    methods: tuple[str, ...] = tuple(METHODS)
    """What to predict and measure."""


SMOKE = Options(parameters=250_000, rates=(100.0,), replicas=2, step_ms=1.0, rounds=1, methods=("noloco",))


def replica(name: str, parameters: int, step_ms: float, rounds: int) -> None:
    """Prints the mean seconds of a round; replicas that only meet in pairs end at different times."""
    network = TorchNetwork.from_env(starting=120)
    print(rounds_on(network, name, parameters, step_ms, rounds))
    leave(network)


def rounds_on(network: Network, name: str, parameters: int, step_ms: float, rounds: int) -> float:
    """The mean seconds of a round, by the wall, after some that warm up."""
    model, optimizer = model_of(parameters, network.rank)
    method = METHODS[name]()
    every = method.schedule.every or 1
    with method.attach(model, optimizer, network, deadline_s=120):
        for step in range(every * (WARM_UP + rounds)):
            if step == every * WARM_UP:
                all_ready(network, "begin")
                began = time.monotonic()
            time.sleep(step_ms / 1000)
            optimizer.step()
    return (time.monotonic() - began) / rounds


def work_seconds(name: str, options: Options) -> float:
    """What a round takes of each host's share of this machine's cores: all replicas' work, one after the other."""
    simulation = Simulation(options.replicas, Conditions(step_ms=0))
    wall = max(simulation.run(lambda network: rounds_on(network, name, options.parameters, 0.0, 3)))
    return wall / min(os.cpu_count() or 1, options.replicas)


def predicted(name: str, options: Options, rate: float, work: float) -> float:
    """The mean seconds of a round, of rounds that are not the first."""
    method = METHODS[name]()
    conditions = Conditions(bandwidth_mbps=rate, latency_ms=0.1, step_ms=options.step_ms, headers=HEADERS)

    def seconds(rounds: int) -> float:
        sizes = cache(partial(message_bytes, method, cells_among([[shape] for shape in shapes(options.parameters)])))
        return Timer(method, sizes, conditions, options.replicas, rounds, 120, work).run().seconds

    return (seconds(WARM_UP + options.rounds) - seconds(WARM_UP)) / options.rounds


def run(options: Options, store: Store) -> Iterator[Part]:
    torch.set_num_threads(1)
    work = {name: work_seconds(name, options) for name in options.methods}

    def rows() -> Iterator[tuple[Cell, ...]]:
        for rate in options.rates:
            with NetLab(options.replicas, rate) as lab:
                for name in options.methods:
                    numbers = [str(options.parameters), str(options.step_ms), str(options.rounds)]
                    outputs = torch_everywhere(lab.hosts, ["-m", __name__, name, *numbers], timeout_s=600)
                    measured, expected = max(map(float, outputs)), predicted(name, options, rate, work[name])
                    yield rate, name, work[name], expected, measured, 100 * (expected / measured - 1)

    columns = {"Mbit/s": "g", "method": "", "work, s a round": ".3f", "predicted, s a round": ".3f"}
    columns |= {"measured, s a round": ".3f", "apart, %": "+.1f"}
    about = (
        f"{options.parameters:,} parameters, {options.replicas} hosts, steps of {options.step_ms:g} ms, every={EVERY}"
    )
    yield Table(columns, rows(), about)


if __name__ == "__main__":
    replica(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]))
