"""Seconds a round, as the simulator predicts them and as real processes take on links of that rate.

    sudo python bench/predicted.py [--parameters 5000000] [--rates 50 200] [--replicas 4]

Real processes on hosts in network namespaces of this machine (see netlab.py). An inner step is a sleep, as on a GPU
that leaves the CPU alone. The prediction knows the rate, the step, the method and the shapes, and what a round takes
of this machine's cores (inner steps, encoding, decoding, outer steps), which is measured first, in one process.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import torch
import tyro

from farflung import Method, methods
from farflung.networks import Conditions, Network, PeerLostError, Simulation, TorchNetwork
from farflung.networks.simulator import HEADERS
from farflung.outer import message_bytes
from farflung.planner.timing import Timer

EVERY, SIDE, WARM_UP = 10, 500, 2

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


def replica(name: str, parameters: int, step_ms: float, rounds: int) -> None:
    """Prints the mean seconds of a round; replicas that only meet in pairs end at different times."""
    torch.set_num_threads(1)
    network = TorchNetwork.from_env(starting=120)
    print(rounds_on(network, name, parameters, step_ms, rounds))
    with contextlib.suppress(PeerLostError):
        network.exchange(torch.zeros(1, dtype=torch.uint8), network.members(), "leaving").wait(60)


def rounds_on(network: Network, name: str, parameters: int, step_ms: float, rounds: int) -> float:
    """The mean seconds of a round, by the wall, after some that warm up."""
    torch.manual_seed(0)
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.randn(SIDE, SIDE)) for _ in range(parameters // SIDE**2)])
    torch.manual_seed(network.rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    for parameter in model:
        parameter.grad = torch.randn_like(parameter)
    method = METHODS[name]()
    every = method.schedule.every or 1
    with method.attach(model, optimizer, network, deadline_s=120):
        for step in range(every * (WARM_UP + rounds)):
            if step == every * WARM_UP:
                network.exchange(torch.zeros(1, dtype=torch.uint8), network.members(), "begin").wait(120)
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
    shapes = [(SIDE, SIDE)] * (options.parameters // SIDE**2)
    conditions = Conditions(bandwidth_mbps=rate, latency_ms=0.1, step_ms=options.step_ms, headers=HEADERS)

    def seconds(rounds: int) -> float:
        sizes = cache(partial(message_bytes, method, shapes))
        return Timer(method, sizes, conditions, options.replicas, rounds, 120, work).run().seconds

    return (seconds(WARM_UP + options.rounds) - seconds(WARM_UP)) / options.rounds


def main(options: Options) -> None:
    from netlab import NetLab

    print(
        f"{options.parameters:,} parameters, {options.replicas} hosts, steps of {options.step_ms:g} ms, every={EVERY}"
    )
    print(f"{'link':>12} {'method':10} {'work':>10} {'predicted':>10} {'measured':>10} {'apart':>7}")
    print(f"{'Mbit/s':>12} {'':10} {'s a round':>10} {'s a round':>10} {'s a round':>10} {'%':>7}")
    torch.set_num_threads(1)
    work = {name: work_seconds(name, options) for name in METHODS}
    for rate in options.rates:
        with NetLab(options.replicas, rate) as lab:
            for name in METHODS:
                arguments = [__file__, "--replica", name]
                arguments += [str(options.parameters), str(options.step_ms), str(options.rounds)]
                measured = max(float(output) for output in lab.torch_everywhere(arguments, timeout=600))
                expected = predicted(name, options, rate, work[name])
                apart = 100 * (expected / measured - 1)
                print(
                    f"{rate:12g} {name:10} {work[name]:10.3f} {expected:10.3f} {measured:10.3f} {apart:+7.1f}",
                    flush=True,
                )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--replica"]:
        replica(sys.argv[2], int(sys.argv[3]), float(sys.argv[4]), int(sys.argv[5]))
    else:
        main(tyro.cli(Options, description=__doc__))
