"""Does a run outlive its first peer?
On the internet network, in namespaces: the peer that the ticket leads to dies for good, the others are to train on,
and a newcomer to join with the ticket that another peer keeps. Takes two minutes, as root.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from bench.lib.hardship import Hardship, check, checks, running
from bench.lib.store import Store
from bench.lib.table import Part
from farflung.events import RoundEvent, StepEvent
from farflung.testing.hosts import unavailable

needs = unavailable


@dataclass(frozen=True)
class Options(Hardship):
    peers: int = 4
    """Peers, the newcomer among them."""


SMOKE = Options(peers=3, step_ms=20, pace=0.05)


def run(options: Options, store: Store) -> Iterator[Part]:
    with running(options, store, "first") as (_, peers):
        *founders, newcomer = peers
        others = founders[1:]
        peers.start(len(founders))
        options.wait(15)
        founders[0].kill()
        before = [len(peer.events(StepEvent)) for peer in others]
        began = time.time()
        newcomer.start(ticket=others[0].folder / "run.ticket")
        peers.wait_for_steps([newcomer], 1)
        took = time.time() - began
        options.wait(20)
        met = [event for event in newcomer.events(RoundEvent) if event.outcome == "averaged"]
        more = [len(peer.events(StepEvent)) - b for peer, b in zip(others, before, strict=True)]
    yield checks(
        [
            check("the first peer killed: a newcomer trains after", f"{took:.1f} s", "it joins by another", True),
            check(
                "steps of the others since; the newcomer's rounds",
                f"{more}; {len(met)}",
                "the run goes on",
                min(more) > 20 and bool(met),
            ),
        ]
    )
