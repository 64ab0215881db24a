"""What share of its speed does a run keep when its replicas die again and again?
`farflung train --independent` with 8 replicas on this machine, of which one is killed with -9 every 60 s, then every
15 s, and comes back; to reach are 95 % and 85 % of the tokens a second undisturbed, and the loss of the same tokens
undisturbed, within 2 %. torchft's DiLoCo does the same beside it, in an environment of its own, which needs the
internet once. Takes an hour and a half; `--minutes 2` gives a first impression.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from bench.lib.hardship import Check, check, checks
from bench.lib.mortals import Mortals, Standing, started
from bench.lib.store import Store
from bench.lib.table import Part

REACH = {60.0: 0.95, 15.0: 0.85}
"""The share of the undisturbed tokens a second to reach, by the seconds between two deaths."""
STARTING_S = 300.0
POLL_S = 0.2
BATCH, LENGTH = 4, 64


@dataclass(frozen=True)
class Options:
    minutes: float = 10.0
    """How long replicas are killed."""
    between: tuple[float, ...] = (60.0, 15.0)
    """Seconds between two deaths."""
    peers: int = 8
    """Replicas."""
    step_ms: float = 500.0
    """What one inner step takes: it computes for a small part of that, and sleeps."""
    contenders: tuple[str, ...] = ("farflung diloco", "farflung noloco", "torchft diloco")
    """Who trains, and by which method."""


SMOKE = Options(minutes=0.1, between=(3.0,), peers=2, step_ms=50, contenders=("farflung diloco",))


@dataclass(frozen=True)
class Ran:
    """What has come of a run, from when all of its replicas trained."""

    tokens: int
    """In all, with those that replicas which came late at the start have not trained on."""
    seconds: float
    speed: float
    loss: float
    deaths: int


def run(options: Options, store: Store) -> Iterator[Part]:
    yield (
        f"{options.peers} replicas on one machine, each step stretched to {options.step_ms:g} ms, so that what is "
        "measured is what deaths cost the run, and not how its processes share the cores"
    )
    for contender in options.contenders:
        rows: list[Check] = []
        for between in options.between:
            rows += compared(options, store, contender, between)
        yield checks(rows, contender)


def compared(options: Options, store: Store, contender: str, between: float) -> Iterator[Check]:
    """One run with deaths, and one of as many tokens without."""
    steps = round(options.minutes * 60e3 / options.step_ms)
    disturbed = measured(options, store, contender, steps, between)
    calm = measured(options, store, contender, max(1, round(disturbed.tokens / (options.peers * BATCH * LENGTH))))
    share, change = disturbed.speed / calm.speed, disturbed.loss / calm.loss - 1
    reach = REACH.get(between, 0.0)
    yield check(
        f"one killed every {between:g} s, {disturbed.deaths} in {disturbed.seconds:.0f} s: tokens/s",
        f"{disturbed.speed:.0f} of {calm.speed:.0f}, {share:.1%}",
        f"{reach:.0%}",
        share >= reach,
    )
    what = f"{disturbed.loss:.4f}, {calm.loss:.4f}, {change:+.1%}"
    yield check("validation loss, beside the same tokens undisturbed", what, "within 2 %", abs(change) < 0.02)


def measured(options: Options, store: Store, contender: str, steps: int, between: float | None = None) -> Ran:
    """A run of so many steps, in which a replica is killed now and then if `between` says how often."""
    library, _, method = contender.partition(" ")
    settings: dict[str, Any] = {"method": method, "replicas": options.peers, "steps": steps, "every": 20}
    settings |= {"inner": "adamw", "lr": 3e-3, "model": "micro", "batch_size": BATCH, "sequence_length": LENGTH}
    settings |= {"max_tokens": 4_000_000, "eval_every": max(1, steps), "eval_sequences": 64, "deadline": 20.0}
    with started(library, store.scratch / library, settings, options.step_ms) as mortals:
        first = all_train(mortals, options.peers)
        late = options.peers * first.step * BATCH * LENGTH - sum(first.tokens)
        began, deaths = time.monotonic(), until_the_end(mortals, steps, between)
        seconds = time.monotonic() - began
        tokens = sum(mortals.standing().tokens)
        return Ran(tokens + late, seconds, (tokens - sum(first.tokens)) / seconds, mortals.loss(), deaths)


def all_train(mortals: Mortals, replicas: int) -> Standing:
    """Waits for all replicas' first steps. Raises TimeoutError."""
    ends = time.monotonic() + STARTING_S
    while len((now := mortals.standing()).tokens) < replicas:
        if time.monotonic() > ends:
            raise TimeoutError(f"not all replicas train; see {mortals.folder}")
        mortals.tend()
        time.sleep(POLL_S)
    return now


def until_the_end(mortals: Mortals, steps: int, between: float | None) -> int:
    """Waits for the last step, and kills meanwhile; how often. Raises TimeoutError where the run stands still."""
    chance, deaths, step = random.Random(0), 0, 0
    moved = killed = time.monotonic()
    while (now := mortals.standing().step) < steps:
        if now > step:
            step, moved = now, time.monotonic()
        elif time.monotonic() - moved > STARTING_S:
            raise TimeoutError(f"the run stands still; see {mortals.folder}")
        if between and time.monotonic() - killed >= between:
            killed = time.monotonic()
            mortals.kill(chance)
            deaths += 1
        mortals.tend()
        time.sleep(POLL_S)
    return deaths
