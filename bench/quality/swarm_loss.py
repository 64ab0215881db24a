"""What does a swarm learn beside an island, by its ways to step, and by what crosses its boundaries?
Real peers. Local steps on random routes beside an island's `--routes random`; steps after each microbatch, with stashed
weights and with weights looked ahead, beside steps taken together, after the same samples, passes stretched by
sleeping; bytes a token, and the time to a given loss over links of 20 Mbit/s (as root). Takes an hour.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from bench.lib.store import Store
from bench.lib.swarms import Seating, judged, losses, swarm, timed
from bench.lib.table import Part, Table
from farflung.events import LearntEvent, StepEvent
from farflung.testing.hosts import unavailable
from farflung.testing.peers import PeerProcess


@dataclass(frozen=True)
class Options:
    parts: tuple[str, ...] = ("routes", "steps", "boundaries")
    """Which of its questions are asked."""
    seeds: int = 3
    """Seeds of the runs beside an island's."""
    steps: int = 300
    """Steps of a head and of an island."""
    samples: int = 4800
    """That steps after each microbatch, and steps taken together, learn from."""
    pass_ms: float = 120.0
    """What a microbatch takes a peer there, both passes."""
    boundaries: tuple[str, ...] = ("float32", "int8", "subspace32")
    """What crosses."""
    loss: float = 3.0
    """Of training, the mean of the last 20 steps, to be reached over slow links."""
    rate_mbit: float = 20.0
    """Each of these links, each way; 0 takes the loopback."""


needs = unavailable
SMOKE = Options(("routes",), seeds=1, steps=10)
COMMON: dict[str, Any] = {"max_tokens": 4_000_000, "lr": 3e-3, "method": "noloco", "every": 20}
ENDS_S = 900.0
"""How long one run may take."""
LATELY = 20
"""Steps of which the mean loss counts."""


def run(options: Options, store: Store) -> Iterator[Part]:
    for part in options.parts:
        yield PARTS[part](options, store)


def routes(options: Options, store: Store) -> Table:
    """Two peers of each of two stages, beside two replicas of two stages."""
    settings = {**COMMON, "model": "micro", "steps": options.steps, "batch_size": 8, "microbatches": 4}
    settings |= {"sequence_length": 32, "eval_sequences": 64}
    seats = [Seating(stage, permuted=True) for stage in (0, 1, 0, 1)]

    def of_swarm(seed: int) -> float:
        with swarm(store, "routes", seats, **settings, seed=seed) as peers:
            peers.wait(ENDS_S)
            return judged(peers)

    def of_island(seed: int) -> float:
        out = store.scratch / f"island-{seed}"
        more = {"stages": 2, "replicas": 2, "routes": "random", "seed": seed, "eval_every": 100_000, "out": out}
        flags = [text for name, value in {**settings, **more}.items() for text in _flag(name, value)]
        done = subprocess.run([sys.executable, "-m", "farflung", "train", *flags], capture_output=True, timeout=ENDS_S)
        if done.returncode:
            raise RuntimeError(done.stderr.decode()[-1000:])
        return float(json.loads(Path(out, "summary.json").read_text())["validation_loss"])

    def rows() -> Iterator[tuple[str, float, float | None, str]]:
        for what, made in (("swarm, local steps, permutations", of_swarm), ("island, --routes random", of_island)):
            found = [made(seed) for seed in range(options.seeds)]
            yield what, mean(found), stdev(found) if len(found) > 1 else None, " ".join(f"{one:.4f}" for one in found)

    return Table({"": "", "validation loss": ".4f", "deviation": ".4f", "seeds": ""}, rows(), "routes")


def _flag(name: str, value: object) -> list[str]:
    return [f"--{name.replace('_', '-')}", str(value)]


SAMPLES, TOGETHER = 2, 8
"""Of a microbatch; microbatches of a step that all take together."""
WAYS: dict[str, tuple[dict[str, Any], bool]] = {
    "synchronous": ({"stepping": "synchronous", "batch_size": SAMPLES * TOGETHER, "microbatches": TOGETHER}, False),
    "asynchronous, stash": ({"stepping": "asynchronous", "batch_size": SAMPLES}, False),
    "asynchronous, look-ahead": ({"stepping": "asynchronous", "batch_size": SAMPLES}, True),
}


def steps(options: Options, store: Store) -> Table:
    """Four stages with a peer each; with several there would be rounds besides."""
    common = {**COMMON, "model": "tiny", "sequence_length": 64, "eval_sequences": 32, "method": "local", "every": None}

    def rows() -> Iterator[tuple[str, int, float, float, float]]:
        for what, (way, ahead) in WAYS.items():
            seats = [Seating(stage, options.pass_ms, look_ahead=ahead) for stage in range(4)]
            count = options.samples // way["batch_size"]
            with swarm(store, "steps", seats, **{**common, **way, "steps": count}) as peers:
                peers.wait(ENDS_S)
                busy = [_busy([e for _, _, e in timed(peer)], options.pass_ms / 1e3) for peer in peers]
                yield what, count, judged(peers), min(busy), max(busy)

    columns = {"": "", "steps": "d", "validation loss": ".4f", "least busy stage": ".1%", "busiest": ".1%"}
    return Table(columns, rows(), f"{options.samples} samples, 4 stages")


def _busy(events: list[Any], pass_s: float) -> float:
    """The share of its time, but for the first and last tenth, in which a peer computed."""
    told = [(e.at, sum(len(one) - 2 for one in e.microbatches)) for e in events if isinstance(e, LearntEvent)]
    told = told[len(told) // 10 : -max(1, len(told) // 10)]
    return sum(count for _, count in told[1:]) * pass_s / (told[-1][0] - told[0][0])


def boundaries(options: Options, store: Store) -> Table:
    """Four stages with a peer each, on slow links."""
    settings = {**COMMON, "model": "tiny", "sequence_length": 128, "method": "local", "every": None}
    settings |= {"batch_size": 4, "microbatches": 2, "steps": 100_000}
    tokens = settings["batch_size"] * settings["sequence_length"]

    def rows() -> Iterator[tuple[str, float, float, float | None]]:
        for boundary in options.boundaries:
            seats = [Seating(stage) for stage in range(4)]
            with swarm(store, "boundaries", seats, options.rate_mbit, **settings, boundary=boundary) as peers:
                needed, count = _time_to(options.loss, peers[0])
                last = peers[0].events(StepEvent)[-1]
                crossed = last.boundary_bytes / (last.step * tokens)
                yield boundary, crossed, count / needed * tokens, needed if needed < ENDS_S else None

    columns = {"boundary": "", "bytes a token": ".1f", "tokens/s": ".0f", f"s to loss {options.loss:g}": ".0f"}
    return Table(columns, rows(), f"links of {options.rate_mbit:g} Mbit/s, 4 stages")


def _time_to(loss: float, peer: PeerProcess) -> tuple[float, int]:
    """Seconds from the first step until the mean loss of the last few steps is so low, and the steps of them."""
    ends = time.monotonic() + ENDS_S
    while True:
        lately: deque[float] = deque(maxlen=LATELY)
        found = losses(peer)
        for number, (at, one) in enumerate(found):
            lately.append(one)
            if len(lately) == LATELY and mean(lately) <= loss:
                return at - found[0][0], number
        if time.monotonic() > ends:
            return ENDS_S, len(found)
        time.sleep(2)


PARTS: dict[str, Callable[[Options, Store], Table]] = {"routes": routes, "steps": steps, "boundaries": boundaries}
