"""How much of an exchange training hides, on links where an exchange takes 0.7 of the steps between rounds.

    sudo python bench/overlap.py [--parameters 5000000] [--rate-mbit 100] [--replicas 4]

Real processes on hosts in network namespaces of this machine (see netlab.py). First each method's rounds are timed
without overlap; then steps are made so long that such an exchange takes 0.7 of a round, and delayed by a whole round.
An inner step is a sleep, as on a GPU that leaves the CPU alone.
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
from farflung.codecs import ErrorFeedback, LowRank, Quantize
from farflung.networks import PeerLostError, TorchNetwork
from farflung.outer import Round, Schedule

EVERY, ROUNDS, SHARE = 10, 8, 0.7

METHODS: dict[str, Callable[[], Method]] = {
    "noloco": lambda: methods.noloco(every=EVERY, delay=EVERY),
    "nolocox": lambda: methods.nolocox(every=EVERY, adapt=False),
    "diloco": lambda: methods.diloco(every=EVERY, delay=EVERY),
    "dilocox": lambda: methods.dilocox(
        every=EVERY, codec=ErrorFeedback(LowRank(rank=64) | Quantize(bits=4)), adapt=False
    ),
}


@dataclass(frozen=True)
class Options:
    parameters: int = 5_000_000
    """Float32 parameters."""
    rate_mbit: float = 100.0
    """Each host's link, each way."""
    replicas: int = 4
    """Hosts."""
    methods: tuple[str, ...] = tuple(METHODS)
    """What to measure."""


def replica(name: str, parameters: int, step_seconds: float) -> None:
    """Prints the medians of a round's seconds of exchange, of waiting for it, and of decoding what came.

    Without steps there is no delay.
    """
    torch.set_num_threads(1)
    network = TorchNetwork.from_env(starting=60)
    torch.manual_seed(0)
    side = 500
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.randn(side, side)) for _ in range(parameters // side**2)])
    torch.manual_seed(network.rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    for parameter in model:
        parameter.grad = torch.randn_like(parameter)
    method = METHODS[name]()
    if not step_seconds:
        method = replace(method, schedule=Schedule(every=EVERY))
    rounds: list[Round] = []
    with method.attach(model, optimizer, network, on_round=rounds.append):
        for step in range(EVERY * ROUNDS):
            if step % EVERY == 0:  # replicas that drift apart would wait for each other, not for the link
                with contextlib.suppress(PeerLostError):
                    network.exchange(torch.zeros(1, dtype=torch.uint8), network.members(), f"step {step}").wait(60)
            time.sleep(step_seconds)
            optimizer.step()
    measured = rounds[1:-1]  # the first warms up; leaving lands the last at once
    exchange = median(round.finished - round.started for round in measured)
    blocked = median(max(0.0, round.finished - round.waited_from) for round in measured)
    decoding = median(round.landed - max(round.waited_from, round.finished) for round in measured)
    print(exchange, blocked, decoding)
    with contextlib.suppress(PeerLostError):
        network.exchange(torch.zeros(1, dtype=torch.uint8), network.members(), "leaving").wait(10)


def main(options: Options) -> None:
    from netlab import NetLab

    print(f"{options.parameters:,} parameters, {options.replicas} hosts at {options.rate_mbit:g} Mbit/s, every={EVERY}")
    print(
        f"{'method':10} {'alone':>8} {'of H steps':>10} {'overlapped':>10} {'blocked':>8} {'hidden':>7} {'decoding':>9}"
    )
    with NetLab(options.replicas, options.rate_mbit) as lab:

        def measure(method: str, step_seconds: float) -> list[float]:
            """The slowest host's exchange, waiting and decoding."""
            arguments = [__file__, "--replica", method, str(options.parameters), str(step_seconds)]
            outputs = [output.split() for output in lab.torch_everywhere(arguments, timeout=300)]
            return [max(map(float, column)) for column in zip(*outputs, strict=True)]

        for method in options.methods:
            alone = measure(method, 0.0)[0]
            step = alone / SHARE / EVERY
            exchange, blocked, decoding = measure(method, step)
            print(
                f"{method:10} {alone:8.3f} {alone / (step * EVERY):10.2f} {exchange:10.3f} {blocked:8.4f} "
                f"{1 - blocked / exchange:7.1%} {decoding:9.4f}",
                flush=True,
            )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--replica"]:
        replica(sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
    else:
        main(tyro.cli(Options, description=__doc__))
