"""Does a run survive peers that are killed again and again?
On the internet network, in namespaces: a peer is killed with -9 every 20 s and comes back 5 s later; the baseline is
the same tokens undisturbed. Takes twenty minutes, as root.
"""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from bench.lib.hardship import Hardship, check, checks, running
from bench.lib.store import Settings, Store
from bench.lib.table import Part
from farflung.events import EvaluationEvent, RoundEvent, StartEvent, StepEvent
from farflung.report.read import mean
from farflung.testing.hosts import unavailable
from farflung.testing.peers import PeerProcess, PeerProcesses

needs = unavailable


@dataclass(frozen=True)
class Options(Hardship):
    seconds: float = 600.0
    """How long peers are killed."""
    undisturbed: bool = True
    """Whether to train on the same tokens undisturbed, too."""


SMOKE = Options(peers=2, step_ms=50, seconds=30, undisturbed=False)  # the second joins, and comes back, within it


def run(options: Options, store: Store) -> Iterator[Part]:
    steps = max(20, round(options.seconds * 1e3 / options.step_ms))
    everything: Settings = {"steps": steps, "eval_every": max(20, steps // 5)}
    with running(options, store, "kill", **everything) as (_, peers):
        peers.start(options.peers)
        gaps = kill_some(peers, options)
        peers.wait(120)
    rows = [
        check(
            f"{len(gaps)} kills in {options.seconds:.0f} s: longest without a step",
            f"{max(gaps, default=0.0):.1f} s",
            "the run never stops",
            max(gaps, default=0.0) < 5,
        )
    ]
    disturbed = final_loss(peers)
    if options.undisturbed:
        share = sum(peer.events(StepEvent)[-1].tokens for peer in peers) / (options.peers * steps * 1024)
        with running(options, store, "calm", **{**everything, "steps": round(steps * share)}) as (_, calm):
            calm.start(options.peers)
            calm.wait(2 * options.seconds)
        undisturbed = final_loss(calm)
        change = disturbed / undisturbed - 1
        what = f"{disturbed:.4f}, {undisturbed:.4f}, {change:+.1%}"
        rows.append(
            check("validation loss, beside the same tokens undisturbed", what, "within 2 %", abs(change) < 0.02)
        )
    longest = max((e.landed - e.waited_from for peer in peers for e in peer.events(RoundEvent)), default=0.0)
    rows.append(check("longest wait in a round", f"{longest:.1f} s", "20 s (the deadline)", longest <= 20))
    lost = sum(repeated(peer) for peer in peers)
    rows.append(check("steps that survivors trained twice or lost", f"{lost}", "0", lost == 0))
    yield checks(rows)


def kill_some(peers: PeerProcesses, options: Options) -> list[float]:
    """Kills one after the other until the run is over; the seconds without a step of anyone, each time."""
    chance, gaps = random.Random(0), []
    while all(peer.lives for peer in peers):
        options.wait(15)
        if not all(peer.lives for peer in peers):
            break
        victim = chance.choice(list(peers))
        victim.kill()
        options.wait(5)
        gaps.append(newest(peers))
        victim.start()
    return gaps


def newest(peers: Iterable[PeerProcess]) -> float:
    """How many seconds ago any peer has written its last event."""
    return min(time.time() - path.stat().st_mtime for peer in peers for path in peer.folder.glob("events/*.jsonl"))


def final_loss(peers: Iterable[PeerProcess]) -> float:
    """The mean of their last evaluations; NaN if one was not finite."""
    last = [evaluations[-1] for peer in peers if (evaluations := peer.events(EvaluationEvent))]
    loss = mean([evaluation.score for evaluation in last])
    return math.nan if loss is None else loss


def repeated(peer: PeerProcess) -> int:
    """Steps after which a peer, without a new start between them, had not trained on more tokens than before."""
    steps = peer.events(StepEvent)
    starts = {event.at for event in peer.events(StartEvent)}
    return sum(
        b.tokens < a.tokens + 1024 for a, b in itertools.pairwise(steps) if not any(a.at <= at <= b.at for at in starts)
    )
