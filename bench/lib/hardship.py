"""Peers of a run on the internet to which something happens: real `farflung join` processes on hosts of their own.

    python -m bench.lib.hardship STEP_MS ARGUMENTS     `farflung join`, with each step stretched to a fixed time

Steps are stretched as if a peer computed longer: so many on few cores would else only show how they wait for it.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from bench.lib.store import Store
from bench.lib.table import Table
from farflung.events import StepEvent
from farflung.testing.hosts import NetLab
from farflung.testing.peers import PeerProcess, PeerProcesses

PORT = 4600
CLOCK = "FARFLUNG_BENCH_CLOCK"
"""The environment variable that says by how many seconds a peer's clock is off."""

Check = tuple[str, str, str, str]


@dataclass(frozen=True)
class Hardship:
    """What all such benches can be told."""

    peers: int = 8
    """Peers."""
    rate_mbit: float = 100.0
    """Each host's link, each way."""
    step_ms: float = 250.0
    """What one inner step takes."""
    pace: float = 1.0
    """What all waits are multiplied by."""

    def wait(self, seconds: float) -> None:
        """Lets some time pass."""
        time.sleep(self.pace * seconds)


@contextmanager
def running(
    options: Hardship,
    store: Store,
    name: str,
    *,
    peers: int = 0,
    paces: Mapping[int, float] | None = None,
    rates: dict[int, float] | None = None,
    **settings: Any,
) -> Iterator[tuple[NetLab, PeerProcesses]]:
    """A run's peers, not started yet, each on a host of its own.

    `paces` are milliseconds a step of single peers, `rates` Mbit/s of single links.
    """
    common = {"model": "micro", "every": 20, "eval_every": 100, "checkpoint_every": 20, "log_every": 1}
    everything = {**common, "steps": 100_000, "deadline": 20.0, **settings}
    shutil.rmtree(store.scratch / name, ignore_errors=True)
    count = peers or options.peers
    steps = [(paces or {}).get(number, options.step_ms) for number in range(count)]
    commands = [(sys.executable, "-m", __name__, str(step)) for step in steps]
    with (
        NetLab(count, options.rate_mbit, rates) as lab,
        PeerProcesses(store.scratch / name, lab.hosts, PORT, everything, commands) as made,
    ):
        yield lab, made


def checks(rows: Iterable[Check], title: str = "") -> Table:
    """What was measured beside what was to be reached."""
    return Table(dict.fromkeys(("what", "measured", "to reach", ""), ""), rows, title)


def check(what: str, measured: str, wanted: str, good: bool) -> Check:
    """One row."""
    return what, measured, wanted, "ok" if good else "MISSED"


def rate(peers: Iterable[PeerProcess], begin: float, end: float, held_up: bool = True) -> float:
    """Tokens a second that peers trained on between two moments of the wall clock.

    With the time for which rounds held them up, or without it.
    """
    total = 0.0
    for peer in peers:
        steps = peer.since(StepEvent, begin)
        steps = steps[: len(steps) - len(peer.since(StepEvent, end))]
        if len(steps) > 1:
            first, last = steps[0], steps[-1]
            blocked = 0.0 if held_up else last.seconds_blocked - first.seconds_blocked
            total += (last.tokens - first.tokens) / (last.at - first.at - blocked)
    return total


def paced_peer(step_ms: float, arguments: list[str]) -> None:
    """`farflung join` with stretched steps, and perhaps a clock that is off."""
    from farflung.cli import main as command
    from farflung.pipeline.island import WholeIsland

    gradients, clock = WholeIsland.gradients, time.time
    off = float(os.environ.get(CLOCK, "0"))
    if off:
        time.time = lambda: clock() + off

    def stretched(self: WholeIsland, step: int) -> tuple[float, str]:
        began = time.monotonic()
        result = gradients(self, step)
        time.sleep(max(0.0, step_ms / 1e3 - (time.monotonic() - began)))
        return result

    WholeIsland.gradients = stretched  # type: ignore[method-assign]
    sys.argv = ["farflung", "join", *arguments]
    command()


if __name__ == "__main__":
    paced_peer(float(sys.argv[1]), sys.argv[2:])
