"""Which way to average without an all-reduce learns most, and bears most?
NoLoCo, GASLoC, factored gossip and DiLoCo in pairs, beside DiLoCo among all, the yardstick: Muon inside, learning
rates that one search with one budget has found at 8 replicas. Then the same with more replicas, with data that are
unlike (each replica has always the same part), with links of which some are much slower, and where one or two replicas
are cut off in each round. Hours are simulated. Takes about two hours on two cores with three seeds; what is made is
kept, so that it can be stopped and goes on.
"""

from __future__ import annotations

import math
import random
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from bench.lib.runs import Runs, around, in_words, regime
from bench.lib.search import AXES, WITH_MUON, tune
from bench.lib.store import Result, Settings, Store
from bench.lib.table import Cell, Part, Table
from bench.lib.training import outcome

METHODS: dict[str, Settings] = {
    "NoLoCo": {"method": "noloco"},
    "GASLoC": {"method": "gasloc"},
    "factored gossip": {"method": "factored-gossip"},
    "DiLoCo in pairs": {"method": "diloco", "group_size": 2},
    "DiLoCo among all": {"method": "diloco"},
}
CASES: dict[str, Settings] = {
    "8": {"replicas": 8},
    "16": {"replicas": 16},
    "32": {"replicas": 32},
    "16, unlike data": {"replicas": 16, "shares": "apart"},
    "16, uneven links": {"replicas": 16, "uneven": 1.0},
    "16, 1 lost a round": {"replicas": 16, "lost": 1},
    "16, 2 lost a round": {"replicas": 16, "lost": 2},
}
"""What is asked of each; uneven: the deviation of the links' rates, by factors of e; lost: cut off, in each round."""
STEP_S, MBPS, LATENCY_MS = 0.1, 5, 20
"""Of a step, and of a link, over which a round of all takes about a second."""


@dataclass(frozen=True)
class Options:
    steps: int = 800
    """Inner steps of each replica."""
    every: int = 10
    """Inner steps between rounds."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """One run of each row for each; the search uses the first."""
    budget: int = 4
    """Runs that the search of each method may make."""
    methods: tuple[str, ...] = tuple(METHODS)
    """Which to compare."""
    cases: tuple[str, ...] = tuple(CASES)
    """What to ask of them."""
    model: str = "micro"
    """What is trained."""


SMOKE = Options(steps=4, every=2, seeds=(0,), budget=1, methods=("NoLoCo",), cases=("8", "16, 1 lost a round"))


def made(settings: Settings, seed: int) -> Result:
    """One run under its conditions."""
    given = dict(settings)
    lost, uneven = given.pop("lost", 0), given.pop("uneven", 0.0)
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "conditions.toml"
        path.write_text(conditions(given, seed, lost, uneven))
        return outcome(given | {"conditions": str(path), "deadline": 5.0}, seed)


def conditions(settings: Settings, seed: int, lost: int, uneven: float) -> str:
    """Links, and who is cut off from the middle between two rounds to the next middle, others each time."""
    draw, round_s = random.Random(seed), settings["every"] * STEP_S
    table = f"step_ms = {1000 * STEP_S}\nbandwidth_mbps = {MBPS}\nlatency_ms = {LATENCY_MS}\n"
    table += f"bandwidth_sigma = {uneven}\nseed = {seed}\n"
    for number in range(settings["steps"] // settings["every"] if lost else 0):
        gone, began = draw.sample(range(settings["replicas"]), lost), (number + 0.5) * round_s
        table += f"[[cuts]]\nreplicas = {gone}\nfrom_s = {began}\nuntil_s = {began + round_s}\n"
    return table


def run(options: Options, store: Store) -> Iterator[Part]:
    common = regime(options.steps, options.model) | {"inner": "muon", "every": options.every}
    with Runs(store, common, made) as runs, ThreadPoolExecutor(len(options.methods)) as threads:
        searches = {
            name: threads.submit(
                tune, runs, name, CASES["8"] | METHODS[name], options.budget, options.seeds[0], AXES, WITH_MUON
            )
            for name in options.methods
        }
        tuned = {name: search.result() for name, search in searches.items()}
        for case in options.cases:
            for name in options.methods:
                runs.start_all(tuned[name] | CASES[case], options.seeds)
        for case in options.cases:
            yield Table(COLUMNS, list(rows(runs, tuned, case, options)), f"{case} replicas, {options.steps} steps")


COLUMNS = {
    "method": "",
    "loss": "",
    "to the last row": "+.1%",
    "replicas apart": ".4f",
    "MB a replica": ".1f",
    "simulated h": ".3f",
    "rounds": ".0f",
    "tuned to": "",
}


def rows(runs: Runs, tuned: dict[str, Settings], case: str, options: Options) -> Iterator[tuple[Cell, ...]]:
    """Each method's, in one case; a loss that is not finite counts as infinite."""
    found = {name: list(runs.on_seeds(tuned[name] | CASES[case], options.seeds).values()) for name in tuned}
    losses = {name: [one["validation_loss"] or math.inf for one in results] for name, results in found.items()}
    yardstick = mean(list(losses.values())[-1])
    for name, results in found.items():
        apart, sent, seconds, rounds = (
            mean(one.get(key) or 0 for one in results) for key in ("weight_spread", "bytes_sent", "seconds", "rounds")
        )
        searched = {axis.name: tuned[name][axis.name] for axis in AXES if axis.name in tuned[name]}
        beside, megabytes = mean(losses[name]) / yardstick - 1, sent / CASES[case]["replicas"] / 1e6
        yield name, around(losses[name]), beside, apart, megabytes, seconds / 3600, rounds, in_words(searched)
