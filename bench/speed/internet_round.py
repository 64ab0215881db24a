"""How long does a NoLoCo round take between two peers on the internet, beside hivemind's averager?
Real processes on hosts in network namespaces, over encrypted libp2p streams; nothing is overlapped, so a round's
whole time is measured, meeting, encoding, signing and checking included. Rounds and hivemind's own averages take
turns on the same link; hivemind's search for partners is not counted. Line rate is the physical limit. Takes three
minutes, as root.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from bench.lib.contenders import hivemind_dht, hivemind_mean
from bench.lib.replica import all_ready, model_of
from bench.lib.store import Store
from bench.lib.table import Cell, Part, Table
from farflung import methods
from farflung.codecs import Modulo
from farflung.networks import Network
from farflung.testing.hosts import NetLab, run_everywhere, unavailable
from farflung.testing.peers import join_network, write_ticket
from farflung.testing.waiting import until

needs = unavailable

WARM_UP, PORT = 1, 4777
LONGEST_SECONDS = 30
METHODS = {
    "noloco": lambda: methods.noloco(every=1),
    "noloco, modulo4": lambda: methods.noloco(every=1, codec=Modulo(bits=4)),
}
"""Beside each, hivemind averages as many float32 values as they are."""


@dataclass(frozen=True)
class Options:
    parameters: int = 5_000_000
    """Float32 parameters."""
    rate_mbit: float = 100.0
    """Each host's link, each way."""
    rounds: int = 10
    """Rounds that are measured, after one that warms up."""
    methods: tuple[str, ...] = tuple(METHODS)
    """What to measure."""


SMOKE = Options(parameters=250_000, rounds=1, methods=("noloco",))


def peer(name: str, folder: Path, number: int, address: str, options: Options) -> None:
    """Holds rounds in which little is computed, in turns with hivemind's; prints the seconds of each, and the bytes."""
    method = METHODS[name]()
    network = join_network(folder, number, address, PORT, deadline_s=60)
    until(lambda: len(network.members()) == 2, 60, "the other peer")
    model, optimizer = model_of(options.parameters, number, lr=1e-3)
    outcomes: list[str] = []
    ours, theirs = [], []
    with hivemind_dht(folder, number, address, PORT + 1) as dht:
        mean = hivemind_mean(dht, [torch.randn(options.parameters)], 2)
        with method.attach(model, optimizer, network, on_round=lambda round: outcomes.append(round.outcome)):
            for turn in range(WARM_UP + options.rounds):
                together(network, folder / f"begun {turn}")
                before, began = network.traffic.bytes_sent, time.monotonic()
                optimizer.step()
                ours.append(time.monotonic() - began if outcomes[-1] == "averaged" else math.inf)
                sent = network.traffic.bytes_sent - before
                theirs.append(averaged(mean, network, folder / f"met {turn}"))
        print(json.dumps({"ours": ours[WARM_UP:], "theirs": theirs[WARM_UP:], "sent": sent}))
        together(network, folder / "the end")
        mean.shutdown()
    network.close()


def averaged(mean: Any, network: Network, met: Path) -> float:
    """The seconds of one of hivemind's averages, once its search for partners, with a clock of its own, has ended."""
    time.sleep(2)  # both forget the last group
    control = mean.step(wait=False, require_trigger=True, timeout=60)
    with contextlib.suppress(TimeoutError):
        until(lambda: control.stage.name == "AWAITING_TRIGGER", LONGEST_SECONDS, "hivemind's partner")
    together(network, met)
    began = time.monotonic()
    try:
        control.allow_allreduce()
        control.result(LONGEST_SECONDS)
    except Exception:  # on a busy machine some fail in ways of their own: such a turn does not count
        control.cancel()
        return math.inf
    return time.monotonic() - began


def together(network: Network, here: Path) -> None:
    """Waits until both peers have come so far, however long one takes, and lets them go on at the same moment."""
    Path(f"{here} {network.rank}").touch()
    until(lambda: all(Path(f"{here} {rank}").exists() for rank in network.members()), 120, "the other peer")
    all_ready(network, here.name, 60)


def run(options: Options, store: Store) -> Iterator[Part]:
    about = f"{options.parameters:,} float32 parameters, two hosts at {options.rate_mbit:g} Mbit/s each way"
    columns = {"round": "", "seconds": ".2f", "line rate": ".2f", "ratio": ".2f", "MB sent": ".2f"}
    columns |= {"hivemind": ".2f", "faster in": ""}
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
            timeout_s=400,
        )
    told = [json.loads(output.splitlines()[-1]) for output in outputs]
    ours, theirs = (
        [max(both) for both in zip(*(peer[who] for peer in told), strict=True)] for who in ("ours", "theirs")
    )
    turns = [(own, other) for own, other in zip(ours, theirs, strict=True) if other < math.inf]
    faster = f"{sum(own < other for own, other in turns)} of {len(turns)}"
    limit = max(peer["sent"] for peer in told) * 8e-6 / options.rate_mbit
    seconds = median(ours)
    sent = limit * options.rate_mbit / 8
    return name, seconds, limit, seconds / limit, sent, median(theirs), faster


if __name__ == "__main__":
    name, folder, number, address, parameters, rounds = sys.argv[1:]
    peer(name, Path(folder), int(number), address, Options(parameters=int(parameters), rounds=int(rounds)))
