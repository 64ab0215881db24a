"""What do an outer step's own time and memory come to, on the CPU?
One replica alone, so nothing is on the wire; the physical limit is copying the bytes that a round must touch: it
reads the weights and the anchor and writes the message, then reads message, anchor and velocity and writes anchor,
velocity and weights, nine passes, as many as 4.5 copies. Takes a minute.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from torch import Tensor, nn

from bench.lib.store import Store
from bench.lib.table import Cell, Part, Table
from farflung import Method
from farflung.networks import SimulatedNetwork
from farflung.outer import Everyone, GossipNesterov, OuterFactory, OuterOptimizer, Schedule

PASSES = 9
REPEATS = 7


@dataclass(frozen=True)
class Options:
    parameters: int = 100_000_000
    """Float32 parameters, in 100 tensors."""


SMOKE = Options(parameters=100_000)


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
    gc.collect()
    storages = [t.untyped_storage() for t in gc.get_objects() if type(t) in (Tensor, nn.Parameter)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def measure(outer: OuterFactory, parameters: int) -> tuple[float, float, float]:
    """Seconds a round, and the copies of the parameters it keeps, between rounds and in one."""
    model = nn.ParameterList([nn.Parameter(torch.randn(parameters // 100)) for _ in range(100)])
    before = tensor_bytes()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)  # without gradients its step does nothing
    looking: list[bool] = []
    in_round: list[int] = []

    def watched(parameters: list[Tensor]) -> torch.optim.Optimizer:
        """The outer optimizer, at whose steps a round holds most: anchor, state and message."""
        made = outer(parameters)
        name = "step_with" if isinstance(made, OuterOptimizer) else "step"
        step = getattr(made, name)

        def stepping(*arguments: object) -> None:
            if looking:
                in_round.append(tensor_bytes())
            step(*arguments)

        setattr(made, name, stepping)
        return made

    method = Method(Schedule(every=1), Everyone(), outer=watched)
    with method.attach(model, optimizer, SimulatedNetwork.alone()):
        optimizer.step()
        seconds = timed(optimizer.step)
        kept = tensor_bytes()
        looking.append(True)
        optimizer.step()
    copy = 4 * parameters
    return seconds, (kept - before) / copy, (in_round[-1] - before) / copy


def run(options: Options, store: Store) -> Iterator[Part]:
    copying = seconds_of_a_copy(options.parameters) * PASSES / 2
    yield f"{options.parameters:,} float32 parameters, {torch.get_num_threads()} threads"
    yield f"copying the bytes that a round must touch: {copying:.3f} s"
    nesterov = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True, fused=True)

    def row(name: str, outer: OuterFactory) -> tuple[Cell, ...]:
        seconds, kept, most = measure(outer, options.parameters)
        return name, seconds, seconds / copying, kept, most

    columns = {"outer optimizer": "", "seconds": ".3f", "ratio": ".2f", "copies kept": ".2f"}
    yield Table(
        columns | {"copies in a round": ".2f"},
        (row(name, outer) for name, outer in (("noloco", GossipNesterov), ("diloco", nesterov))),
    )
