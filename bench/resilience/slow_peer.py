"""Does one slow peer hold up the others?
On the internet network, in namespaces: one peer computes four times slower, then one has a tenth of the bandwidth; to
reach are 95 % of the tokens a second that the others train on without it. Takes ten minutes, as root.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from bench.lib.hardship import Check, Hardship, check, checks, running
from bench.lib.hardship import rate as tokens_per_second
from bench.lib.store import Settings, Store
from bench.lib.table import Part
from farflung.testing.hosts import unavailable

needs = unavailable


@dataclass(frozen=True)
class Options(Hardship):
    seconds: float = 75.0
    """How long each speed is measured."""
    delay: int = 0
    """Steps that a round may take while training goes on."""
    every: int = 20
    """Inner steps between rounds."""
    cases: int = 2
    """1 leaves out the peer with little bandwidth."""
    model: str = "tiny"
    """What is trained."""


SMOKE = Options(peers=2, step_ms=20, pace=0.1, seconds=1, cases=0, model="micro")


def run(options: Options, store: Store) -> Iterator[Part]:
    last = options.peers - 1
    settings: Settings = {"method": "noloco", "model": options.model, "batch_size": 1, "every": options.every}
    settings |= {"delay": options.delay}
    slow = [
        ("one peer 4 times slower", {"paces": {last: 4 * options.step_ms}}),
        ("one peer with a tenth of the bandwidth", {"rates": {last: options.rate_mbit / 10}}),
    ][: options.cases]

    def speed(name: str, **peculiar: Any) -> float:
        with running(options, store, name, **peculiar, **settings) as (_, peers):
            peers.start(len(peers))
            options.wait(10)
            began = time.time()
            time.sleep(options.seconds)
            return tokens_per_second(list(peers)[:last], began, time.time())

    base = speed("without", peers=last)

    def row(what: str, peculiar: dict[str, dict[int, float]]) -> Check:
        found = speed("with", **peculiar)
        measured = f"{found:.0f} of {base:.0f}, {found / base:.1%}"
        return check(f"{what}: the others' tokens/s", measured, "95 %", found / base >= 0.95)

    yield checks([row(*case) for case in slow], f"tokens/s of {last} peers without a slow one: {base:.0f}")
