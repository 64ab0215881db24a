"""How much of an exchange does training hide?
Real processes on hosts in network namespaces; first each method's rounds are timed without overlap, the baseline,
then steps are made so long that such an exchange takes 0.7 of a round, and delayed by a whole round. An inner step is
a sleep, as on a GPU that leaves the CPU alone. Takes five minutes, as root.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from statistics import median

from bench.lib.replica import all_ready, leave, model_of
from bench.lib.store import Store
from bench.lib.table import Cell, Part, Table
from farflung import Method, methods
from farflung.codecs import ErrorFeedback, LowRank, Quantize
from farflung.networks import PeerLostError, TorchNetwork
from farflung.outer import Round, Schedule
from farflung.testing.hosts import NetLab, torch_everywhere, unavailable

needs = unavailable

EVERY, SHARE = 10, 0.7

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
    rounds: int = 8
    """Rounds, of which the first and the last are not measured."""


SMOKE = Options(parameters=250_000, replicas=2, methods=("noloco",), rounds=3)


def replica(name: str, parameters: int, rounds: int, step_seconds: float) -> None:
    """Prints the medians of a round's seconds of exchange, of waiting for it, and of decoding what came.

    Without steps there is no delay.
    """
    network = TorchNetwork.from_env(starting=60)
    model, optimizer = model_of(parameters, network.rank)
    method = METHODS[name]()
    if not step_seconds:
        method = replace(method, schedule=Schedule(every=EVERY))
    held: list[Round] = []
    with method.attach(model, optimizer, network, on_round=held.append):
        for step in range(EVERY * rounds):
            if step % EVERY == 0:  # replicas that drift apart would wait for each other, not for the link
                with contextlib.suppress(PeerLostError):
                    all_ready(network, f"step {step}", 60)
            time.sleep(step_seconds)
            optimizer.step()
    measured = held[1:-1]  # the first warms up; leaving applies the last at once
    exchange = median(round.finished - round.started for round in measured)
    blocked = median(max(0.0, round.finished - round.waited_from) for round in measured)
    decoding = median(round.landed - max(round.waited_from, round.finished) for round in measured)
    print(exchange, blocked, decoding)
    leave(network)


def run(options: Options, store: Store) -> Iterator[Part]:
    with NetLab(options.replicas, options.rate_mbit) as lab:

        def measure(method: str, step_seconds: float) -> list[float]:
            """The slowest host's exchange, waiting and decoding."""
            arguments = [method, str(options.parameters), str(options.rounds), str(step_seconds)]
            outputs = torch_everywhere(lab.hosts, ["-m", __name__, *arguments], timeout_s=300)
            return [max(map(float, column)) for column in zip(*map(str.split, outputs), strict=True)]

        def row(method: str) -> tuple[Cell, ...]:
            alone = measure(method, 0.0)[0]
            exchange, blocked, decoding = measure(method, alone / SHARE / EVERY)
            return method, alone, SHARE, exchange, blocked, 1 - blocked / exchange, decoding

        columns = {"method": "", "alone": ".3f", "of H steps": ".2f", "overlapped": ".3f", "blocked": ".4f"}
        columns |= {"hidden": ".1%", "decoding": ".4f"}
        hosts = f"{options.replicas} hosts at {options.rate_mbit:g} Mbit/s, every={EVERY}"
        yield Table(columns, map(row, options.methods), f"{options.parameters:,} parameters, {hosts}")


if __name__ == "__main__":
    replica(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
