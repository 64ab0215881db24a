"""The outer step's own time and memory on the CPU, beside copying the bytes that it must touch.

    python bench/outer_step.py [--parameters 100000000]

One replica alone, so nothing is on the wire. A round must read the weights and the anchor and write the message; then
read message, anchor and velocity and write anchor, velocity and weights: nine passes, as many as 4.5 copies.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
import tyro
from torch import Tensor, nn

from farflung.methods import Method
from farflung.networks import SimulatedNetwork
from farflung.outer import Everyone, GossipNesterov, OuterFactory, Schedule

PASSES = 9
REPEATS = 7


@dataclass(frozen=True)
class Options:
    parameters: int = 100_000_000
    """Float32 parameters, in 100 tensors."""


def timed(work: Callable[[], object]) -> float:
    seconds = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return median(seconds)


def seconds_of_a_copy(parameters: int) -> float:
    source, target = torch.randn(parameters), torch.zeros(parameters)
    return timed(lambda: target.copy_(source))


def tensor_bytes() -> int:
    """What all tensors that Python knows of hold."""
    storages = [t.untyped_storage() for t in gc.get_objects() if type(t) in (Tensor, nn.Parameter)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def measure(name: str, outer: OuterFactory, parameters: int) -> tuple[str, float, float, float]:
    """A method's name, seconds a round, and the copies of the parameters it keeps, between rounds and in one."""
    model = nn.ParameterList([nn.Parameter(torch.randn(parameters // 100)) for _ in range(100)])
    before = tensor_bytes()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)  # without gradients its step does nothing
    in_round: list[int] = []
    method = Method(Schedule(every=1), Everyone(), outer=outer)
    with method.attach(model, optimizer, SimulatedNetwork.alone()) as loop:
        optimizer.step()
        seconds = timed(optimizer.step)
        original = loop._wait_for  # the moment at which a round holds most
        loop._wait_for = lambda flight: (original(flight), in_round.append(tensor_bytes()))[0]
        optimizer.step()
        del loop._wait_for
    copy = 4 * parameters
    return name, seconds, (tensor_bytes() - before) / copy, (in_round[0] - before) / copy


def main(options: Options) -> None:
    copying = seconds_of_a_copy(options.parameters) * PASSES / 2
    print(f"{options.parameters:,} float32 parameters, {torch.get_num_threads()} threads")
    print(f"copying the bytes that a round must touch: {copying:.3f} s")
    print(f"{'outer optimizer':16} {'seconds':>8} {'ratio':>6} {'copies kept':>12} {'copies in a round':>18}")
    nesterov = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True, fused=True)
    for name, outer in (("noloco", GossipNesterov), ("diloco", nesterov)):
        name, seconds, kept, most = measure(name, outer, options.parameters)
        print(f"{name:16} {seconds:8.3f} {seconds / copying:6.2f} {kept:12.2f} {most:18.2f}")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
