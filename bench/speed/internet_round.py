"""How long does a NoLoCo round take between two peers on the internet?
Real processes on hosts in network namespaces, over encrypted libp2p streams; nothing is overlapped, so a round's
whole time is measured, meeting, encoding, signing and checking included. Beside line rate, the physical limit, and
hivemind's own averager on the same link. Takes two minutes, as root.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

from bench.lib.contenders import hivemind_dht, hivemind_mean
from bench.lib.replica import all_ready, model_of
from bench.lib.store import Store
from bench.lib.table import Cell, Part, Table
from farflung import methods
from farflung.codecs import Modulo
from farflung.testing.hosts import NetLab, run_everywhere, unavailable
from farflung.testing.peers import join_network, write_ticket
from farflung.testing.waiting import until

needs = unavailable

WARM_UP, PORT = 1, 4777
METHODS = {
    "noloco": lambda: methods.noloco(every=1),
    "noloco, modulo4": lambda: methods.noloco(every=1, codec=Modulo(bits=4)),
}


@dataclass(frozen=True)
class Options:
    parameters: int = 5_000_000
    """Float32 parameters."""
    rate_mbit: float = 100.0
    """Each host's link, each way."""
    rounds: int = 5
    """Rounds that are measured, after one that warms up."""
    methods: tuple[str, ...] = (*METHODS, "hivemind averager")
    """What to measure."""


SMOKE = Options(parameters=250_000, rounds=1, methods=("noloco",))


def peer(method: str, folder: Path, number: int, address: str, options: Options) -> None:
    """Holds rounds in which little is computed; prints the median of their seconds, and the bytes sent in one."""
    network = join_network(folder, number, address, PORT, deadline_s=60)
    until(lambda: len(network.members()) == 2, 60, "the other peer")
    model, optimizer = model_of(options.parameters, number, lr=1e-3)
    seconds: list[float] = []
    outcomes: list[str] = []
    with METHODS[method]().attach(model, optimizer, network, on_round=lambda round: outcomes.append(round.outcome)):
        for ready in range(WARM_UP + options.rounds):
            all_ready(network, f"all ready {ready}", 60)
            before, began = network.traffic.bytes_sent, time.monotonic()
            optimizer.step()
            seconds.append(time.monotonic() - began)
    averaged = [s for s, outcome in zip(seconds, outcomes, strict=True) if outcome == "averaged"][WARM_UP:]
    assert len(averaged) >= options.rounds - 1, outcomes
    print(median(averaged), network.traffic.bytes_sent - before)
    time.sleep(1)
    network.close()


def averager(folder: Path, number: int, address: str, options: Options) -> None:
    """The same with hivemind's averager, whose group of two meets by its own matchmaking."""
    torch.set_num_threads(1)
    with hivemind_dht(folder, number, address, PORT + 1) as dht:
        mean = hivemind_mean(dht, [torch.randn(options.parameters)], 2)
        seconds = []
        for _ in range(WARM_UP + options.rounds):
            time.sleep(2)
            control = mean.step(wait=False, require_trigger=True, timeout=60)
            while control.stage.name != "AWAITING_TRIGGER":
                time.sleep(0.005)  # its search for partners has a clock of its own, and is not measured
            began = time.monotonic()
            control.allow_allreduce()
            control.result(60)
            seconds.append(time.monotonic() - began)
        print(median(seconds[WARM_UP:]), 4 * options.parameters)
        time.sleep(2)
        mean.shutdown()


def run(options: Options, store: Store) -> Iterator[Part]:
    about = f"{options.parameters:,} float32 parameters, two hosts at {options.rate_mbit:g} Mbit/s each way"
    columns = {"round": "", "seconds": ".2f", "line rate": ".2f", "ratio": ".2f", "MB sent": ".2f"}
    yield Table(columns, (row(options, name) for name in options.methods), about)


def row(options: Options, name: str) -> tuple[Cell, ...]:
    with NetLab(2, options.rate_mbit) as lab, tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_ticket(folder / "run.ticket", folder / "0.key", lab.hosts[0].address, PORT, name="bench")
        outputs = run_everywhere(
            lab.hosts,
            lambda number: [
                *(sys.executable, "-m", __name__, name, scratch, str(number), lab.hosts[number].address),
                *(str(options.parameters), str(options.rounds)),
            ],
            lambda number: {"OMP_NUM_THREADS": "1", "HIVEMIND_LOGLEVEL": "CRITICAL"},
            timeout_s=180,
        )
    slowest = max(float(output.split()[0]) for output in outputs)
    sent = max(int(output.split()[1]) for output in outputs)
    limit = sent * 8e-6 / options.rate_mbit
    return name, slowest, limit, slowest / limit, sent / 1e6


if __name__ == "__main__":
    name, folder, number, address, parameters, rounds = sys.argv[1:]
    options = Options(parameters=int(parameters), rounds=int(rounds))
    if name in METHODS:
        peer(name, Path(folder), int(number), address, options)
    else:
        averager(Path(folder), int(number), address, options)
