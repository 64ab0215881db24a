"""What does a swarm of real peers bear: deaths, an empty stage, little memory, unlike speeds?
Real peers on loopback, whose passes are stretched by sleeping, so that what is measured is the swarm and not how its
processes share the cores. Peers killed with -9 every 20 s and back 5 s later, beside what the living could do and the
same tokens undisturbed; a stage's last peer killed; peers that may hold a third of what the whole model needs; stages
of unlike peers beside what the slowest stage can do. Takes an hour; `--minutes 2` gives a first impression of deaths.
"""

from __future__ import annotations

import math
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.lib.hardship import Check, check, checks
from bench.lib.store import Store
from bench.lib.swarms import Seating, judged, keep_events, learnt, lived, lives, swarm, timed
from bench.lib.table import Part
from farflung.events import Event, LearntEvent, StepEvent, events_in
from farflung.testing.peers import PeerProcess, PeerProcesses
from farflung.testing.waiting import until
from farflung.workloads.tokenizers import Bytes


@dataclass(frozen=True)
class Options:
    parts: tuple[str, ...] = ("deaths", "empty stage", "memory", "speeds")
    """Which of its questions are asked."""
    minutes: float = 10.0
    """How long peers are killed."""
    stages: int = 4
    """Stages of the swarm whose peers die, with two peers each."""
    pass_ms: float = 600.0
    """What a microbatch takes a peer of speed 1, both passes."""
    model: str = "tiny"
    """Where memory is not the question."""
    large_stages: int = 16
    """Layers of the model where memory is the question, as wide as 1024; each is a stage with one peer."""
    measured_s: float = 120.0
    """How long speeds are measured."""


SMOKE = Options(("deaths",), minutes=0.1, stages=2, pass_ms=50, model="micro")
BETWEEN_S, AWAY_S = 20.0, 5.0
"""Seconds from one death to the next, and until the dead peer is started again."""
BATCH: dict[str, Any] = {"batch_size": 8, "microbatches": 4, "sequence_length": 64, "lr": 3e-3, "max_tokens": 4_000_000}
NAMES = BATCH["microbatches"]
EVERY = 5
"""Steps from one checkpoint to the next, where peers die."""
ENDS_S = 300.0
"""How long a swarm may take to end once its heads have taken their last step, or to recover."""


def run(options: Options, store: Store) -> Iterator[Part]:
    for part in options.parts:
        yield checks(PARTS[part](options, store), part)


def deaths(options: Options, store: Store) -> Iterator[Check]:
    """One peer killed now and then: never the last of its stage, which is another question."""
    seats = [Seating(number % options.stages, options.pass_ms) for number in range(2 * options.stages)]
    speed = 2e3 / options.pass_ms
    steps = max(10, round(options.minutes * 60 * speed / 2 / NAMES))
    with swarm(store, "deaths", seats, model=options.model, steps=steps, checkpoint_every=EVERY, **BATCH) as peers:
        began = time.time()
        died = _killed(peers, options.stages, steps)
        ended = time.time()
        _end(peers)
        rows = [learnt(peers, stage) for stage in range(options.stages)]
        last = [peers[number] for number, seat in enumerate(seats) if seat.stage == options.stages - 1]
        during = sum(_count(event) for peer in last for at, event in lived(peer) if began < at <= ended)
        could = _could(peers, died, began, ended, options) or math.nan
        disturbed = judged(peers)
    share, took = during / could, ended - began
    what = f"{sum(map(len, died.values()))} deaths in {took:.0f} s: microbatches/s beside what the living could do"
    yield check(what, f"{during / took:.2f} of {could / took:.2f}, {share:.0%}", "80%", share >= 0.8)
    twice = sum(1 for row in rows for count in row.values() if count not in (0, 1))
    yield check("microbatches counted twice in a stage", f"{twice} of {len(rows[0])}", "0", not twice)
    lost = [sum((rows[0] - row).values()) for row in rows[1:]]
    told = " ".join(map(str, lost))
    what = f"learnt by a head, and lost with the dead of stages 1, 2 … since their checkpoints, of {len(rows[0])}"
    yield check(what, told, f"{NAMES * EVERY} a death", max(lost) <= NAMES * EVERY * sum(map(len, died.values())))
    calm_steps = max(2, round(sum(rows[-1].values()) / 2 / NAMES))
    with swarm(store, "calm", seats, model=options.model, steps=calm_steps, checkpoint_every=EVERY, **BATCH) as peers:
        _end(peers, options.minutes * 90 + ENDS_S)
        calm = judged(peers)
    change = disturbed / calm - 1
    what = "validation loss, beside the same tokens undisturbed"
    yield check(what, f"{disturbed:.4f}, {calm:.4f}, {change:+.1%}", "within 2%", abs(change) < 0.02)


def _killed(peers: PeerProcesses, stages: int, steps: int) -> dict[int, list[float]]:
    """Kills one after the other until the heads are near their last step; when, by their numbers."""
    chance, died = random.Random(0), dict[int, list[float]]()
    last = time.time()
    heads = [peers[number] for number in range(0, len(peers), stages)]
    while _furthest(heads) < 0.95 * steps:
        time.sleep(0.2)
        whole = [n for n in range(len(peers)) if peers[n].lives and _trains(peers[(n + stages) % (2 * stages)])]
        if time.time() - last < BETWEEN_S or not whole:
            continue
        victim, last = chance.choice(whole), time.time()
        died.setdefault(victim, []).append(last)
        peers[victim].kill()
        keep_events(peers[victim])
        time.sleep(AWAY_S)
        peers[victim].start()
    return died


def _trains(peer: PeerProcess) -> bool:
    """Whether a peer has come back from its last death."""
    return peer.lives and any(time.time() - file.stat().st_mtime < BETWEEN_S for file in peer.folder.glob("events/*"))


def _count(event: Event) -> int:
    return sum(len(one) - 2 for one in event.microbatches) if isinstance(event, LearntEvent) else 0


def _furthest(peers: Iterable[PeerProcess]) -> int:
    return max((event.step for peer in peers for event in peer.events(StepEvent)[-1:]), default=0)


def _could(peers: PeerProcesses, died: dict[int, list[float]], began: float, ended: float, options: Options) -> float:
    """The microbatches that the slowest stage could do at each moment with those of its peers that lived, in all."""
    spans = [(n % options.stages, *one) for n, peer in enumerate(peers) for one in lives(peer, died.get(n, []))]
    moments = sorted({began, ended, *(t for _, *span in spans for t in span if began < t < ended)})
    total = 0.0
    for begin, end in pairwise(moments):
        there = [sum(a <= begin and end <= b for one, a, b in spans if one == stage) for stage in range(options.stages)]
        total += (end - begin) * min(there) * 1e3 / options.pass_ms
    return total


def _end(peers: PeerProcesses, patience_s: float = ENDS_S) -> None:
    peers.wait(patience_s)
    failed = [peer.log for peer in peers if peer.process and peer.process.returncode]
    if failed:
        raise RuntimeError(f"a peer has failed; see {failed[0]}")


def empty_stage(options: Options, store: Store) -> Iterator[Check]:
    """A stage's only peer killed for good, where the others have two."""
    seats = [Seating(stage, options.pass_ms / 2) for stage in (0, 1, 2, 0, 1)]
    every = 10
    settings = {**BATCH, "model": "tiny", "steps": 100_000, "checkpoint_every": every}
    with swarm(store, "empty", seats, **settings) as peers:
        until(lambda: _furthest(peers) > 3 * every, ENDS_S, "the first steps")
        killed = time.time()
        had = max(event.step for event in peers[2].events(StepEvent))
        peers[2].kill()
        until(lambda: learnt(peers, 2, killed), ENDS_S, "the stage served again")
        again, step = min(
            (at, e.step)
            for p in peers
            for at, stage, e in timed(p)
            if stage == 2 and at > killed and e.kind == "learnt"
        )
    yield check(
        "a stage's last peer killed: until the run goes on", f"{again - killed:.0f} s", "60 s", again - killed < 60
    )
    yield check("steps of that stage lost", f"{had - step + 1}", f"{every} (a copy's)", had - step + 1 <= every)


def memory(options: Options, store: Store) -> Iterator[Check]:
    """Peers that each may hold a third of what the whole model needs."""
    from transformers import LlamaConfig

    config = {"hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 2816, "vocab_size": Bytes.size}
    LlamaConfig(num_hidden_layers=options.large_stages, **config).save_pretrained(store.scratch / "large")
    given: dict[str, Any] = {
        "model": str(store.scratch / "large"),
        "batch_size": 2,
        "microbatches": 2,
        "sequence_length": 32,
        "lr": 1e-3,
        "inner": "adamw",
    }
    given |= {"max_tokens": 200_000, "eval_sequences": 2, "steps": 12, "method": "local", "every": None}
    found = _alone(given, store.scratch / "alone")
    if found.failed:
        raise RuntimeError(f"the whole model does not train: {found.said}")
    whole = found.peak_mb
    seats = [Seating(stage, max_mb=whole / 3) for stage in range(options.large_stages)]
    with swarm(store, "memory", seats, **given) as peers:
        _end(peers, 2 * ENDS_S)
        losses = [event.loss for event in peers[0].events(StepEvent) if event.loss is not None]
    what = f"one process with all of a model takes {whole:.0f} MB; {options.large_stages} peers that may hold a third"
    told = f"loss {losses[0]:.2f} to {losses[-1]:.2f}, each held to {whole / 3:.0f} MB"
    yield check(what, told, "trains", losses[-1] < losses[0])
    alone = _alone(given, store.scratch / "limited", whole / 3)
    yield check("one process with the whole model, under the same limit", alone.said, "is refused", alone.failed)


@dataclass(frozen=True)
class _Alone:
    """How a run in one process ended."""

    peak_mb: float
    failed: bool
    said: str


def _alone(given: dict[str, Any], out: Path, most_mb: float = 0.0) -> _Alone:
    """Trains the whole model in one process, which may hold so much (RLIMIT_DATA), if that is limited."""
    flags = [text for name, value in given.items() if value is not None for text in _flag(name, value)]
    limit = f"resource.setrlimit(resource.RLIMIT_DATA, ({int(most_mb * 1e6)},) * 2)" if most_mb else "pass"
    code = f"""import resource
{limit}
from farflung.cli import main
main()
"""
    command = [sys.executable, "-c", code, "train", "--replicas", "1", *flags, "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2 * ENDS_S)
    said = (done.stderr.strip().splitlines() or ["nothing"])[-1][:100]
    steps = (event for file in out.glob("events/*") for event in events_in(file.read_bytes(), str(file))[0])
    peak = max((event.peak_memory or 0 for event in steps if isinstance(event, StepEvent)), default=0)
    return _Alone(peak / 1e6, done.returncode != 0, said)


def _flag(name: str, value: object) -> list[str]:
    return [f"--{name.replace('_', '-')}", str(value)]


def speeds(options: Options, store: Store) -> Iterator[Check]:
    """Stages of unlike peers; and unlike stages of equal peers."""
    slow = options.pass_ms * 4
    unlike = [Seating(stage, slow / speed) for speed in (1, 1, 2, 4) for stage in range(4)]
    yield _speed(store, options, unlike, "4 stages of peers with speeds 1:1:2:4", 0.85)
    alike = [Seating(stage, slow) for stage, count in enumerate((3, 4, 6, 3)) for _ in range(count)]
    yield _speed(store, options, alike, "stages of 3, 4, 6, 3 peers", 0.9)


def _speed(store: Store, options: Options, seats: Sequence[Seating], what: str, reach: float) -> Check:
    stages = 1 + max(seat.stage for seat in seats)
    bound = min(sum(1e3 / seat.pass_ms for seat in seats if seat.stage == stage) for stage in range(stages))
    with swarm(store, "speeds", seats, **{**BATCH, "model": options.model, "steps": 100_000}) as peers:
        time.sleep(options.measured_s / 4)
        began = time.time()
        time.sleep(options.measured_s)
        ended = time.time()
        done = sum(learnt(peers, stages - 1, began, ended).values()) / (ended - began)
    return check(
        f"{what}: microbatches/s",
        f"{done:.2f} of {bound:.2f}, {done / bound:.0%}",
        f"{reach:.0%}",
        done >= reach * bound,
    )


PARTS: dict[str, Callable[[Options, Store], Iterable[Check]]] = {
    "deaths": deaths,
    "empty stage": empty_stage,
    "memory": memory,
    "speeds": speeds,
}
