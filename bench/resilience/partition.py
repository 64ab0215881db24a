"""Does a run that is cut in two train on in both halves, and grow together again?
On the internet network, in namespaces: half of the peers are cut off for a minute; to reach are 10 rounds from
healing until the consensus distance is what it was before. Takes five minutes, as root.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from bench.lib.hardship import Hardship, check, checks, running
from bench.lib.store import Store
from bench.lib.table import Part
from farflung.events import EvaluationEvent, RoundEvent, StepEvent
from farflung.testing.hosts import unavailable
from farflung.testing.peers import PeerProcesses

needs = unavailable


@dataclass(frozen=True)
class Options(Hardship):
    pass


SMOKE = Options(peers=2, step_ms=20, pace=0.03)


def run(options: Options, store: Store) -> Iterator[Part]:
    half = options.peers // 2
    with running(options, store, "partition", eval_every=20) as (lab, peers):
        peers.start(options.peers)
        peers.wait_for_steps(peers, 20)
        options.wait(60)
        usual = spread(peers)
        lab.part(range(half))
        settled = time.time() + options.pace * 20
        options.wait(60)
        apart = spread(peers)
        steps = [len(peer.since(StepEvent, settled)) for peer in peers]
        averaged = [sum(e.outcome == "averaged" for e in peer.since(RoundEvent, settled)) for peer in peers]
        lab.heal()
        rounds_needed, together = together_again(peers, options, usual)
    both = sum(averaged[:half]), sum(averaged[half:])
    yield checks(
        [
            check(
                "partition of 60 s: steps in each half meanwhile",
                f"{min(steps[:half])}, {min(steps[half:])}",
                "both train on",
                min(steps) > 20,
            ),
            check("rounds averaged in each half meanwhile", f"{both[0]}, {both[1]}", "both train on", min(both) > 0),
            check("spread before, apart, together again", f"{usual:.3g}, {apart:.3g}, {together:.3g}", "", True),
            check(
                "rounds from healing until it is as before",
                f"{rounds_needed}",
                "10",
                rounds_needed is not None and rounds_needed <= 10,
            ),
        ]
    )


def together_again(peers: PeerProcesses, options: Options, usual: float) -> tuple[int | None, float]:
    """The rounds from now until the spread is as usual and the halves have met, if they do; and the spread then."""
    healed, together = time.time(), float("nan")
    while time.time() < healed + 120 * options.pace:
        options.wait(2)
        together = spread(peers)
        done = [len(peer.since(RoundEvent, healed)) for peer in peers]
        if together <= 1.1 * usual and mixed(peers, healed):
            return max(done), together
    return None, together


def spread(peers: PeerProcesses) -> float:
    """The last consensus distance of all peers, by the samples that their evaluations write down."""
    last = [evaluations[-1].sample for peer in peers if (evaluations := peer.events(EvaluationEvent))]
    samples = [np.frombuffer(base64.b64decode(sample), dtype="<f4") for sample in last]
    return float(np.sqrt(np.stack(samples).astype(np.float64).var(axis=0).mean()))


def mixed(peers: PeerProcesses, since: float) -> bool:
    """Whether peers of both halves have averaged with each other since a moment."""
    ranks = [int(next((p.folder / "events").glob("*.jsonl")).stem.rpartition("-")[2]) for p in peers]
    side = {rank: number < len(peers) // 2 for number, rank in enumerate(ranks)}
    return any(len({side.get(rank) for rank in e.group}) > 1 for p in peers for e in p.since(RoundEvent, since))
