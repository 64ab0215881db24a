"""Which way to average without an all-reduce learns most, and bears most?
NoLoCo, GASLoC, factored gossip and DiLoCo in pairs, beside DiLoCo among all, the yardstick: Muon inside, learning
rates that one search with one budget has found at 8 replicas. Then the same with more replicas, with data that are
unlike (each replica has always the same part), with links of which some are much slower, and where one or two replicas
miss each round, others each time. Hours are simulated. Takes about two hours on two cores with three seeds; what is
made is kept, so that it can be stopped and goes on.
"""

from __future__ import annotations

import math
import random
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from bench.lib.runs import Runs, around, in_words, regime
from bench.lib.search import AXES, WITH_MUON, tune
from bench.lib.store import Result, Settings, Store
from bench.lib.table import Part, Table
from bench.lib.training import outcome

METHODS: dict[str, Settings] = {
    "noloco": {"method": "noloco"},
    "gasloc": {"method": "gasloc"},
    "factored-gossip": {"method": "factored-gossip"},
    "diloco, in pairs": {"method": "diloco", "group_size": 2},
    "diloco, among all": {"method": "diloco"},
}
CASES: dict[str, Settings] = {
    "8": {"replicas": 8},
    "16": {"replicas": 16},
    "32": {"replicas": 32},
    "16, unlike data": {"replicas": 16, "shares": "apart"},
    "16, uneven links": {"replicas": 16, "uneven": 1.0},
    "16, 1 missing": {"replicas": 16, "missing": 1},
    "16, 2 missing": {"replicas": 16, "missing": 2},
}
"""What is asked of each; uneven: the deviation of the links' rates, by factors of e; missing: in each round."""
STEP_S = 0.1
SLOW = 5.0, 20.0
"""Mbit/s and ms of a link, over which a pair's round takes 0.9 s and one of eight 1.5 s."""
FAST = 100_000.0, 0.01
"""Of one where somebody misses each round: exchanges take no time, so that who misses one is not ahead of others."""


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


SMOKE = Options(steps=4, every=2, seeds=(0,), budget=1, methods=("noloco",), cases=("8", "16, 1 missing"))


def made(settings: Settings, seed: int) -> Result:
    """One run under its conditions."""
    given = dict(settings)
    missing, uneven = given.pop("missing", 0), given.pop("uneven", 0.0)
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "conditions.toml"
        path.write_text(conditions(given, seed, missing, uneven))
        return outcome(given | {"conditions": str(path), "deadline": 5.0}, seed)


def conditions(settings: Settings, seed: int, missing: int, uneven: float) -> str:
    """Links; and who is cut off from amid the steps before a round until amid those after it, but for the last one."""
    draw, (mbps, latency_ms) = random.Random(seed), FAST if missing else SLOW
    table = f"step_ms = {1000 * STEP_S}\nbandwidth_mbps = {mbps}\nlatency_ms = {latency_ms}\n"
    table += f"bandwidth_sigma = {uneven}\nseed = {seed}\n"
    for number in range(settings["steps"] // settings["every"] - 1 if missing else 0):
        from_s, until_s = (settings["every"] * STEP_S * (number + amid) for amid in (0.5, 1.5))
        for gone in draw.sample(range(settings["replicas"]), missing):
            table += f"[[cuts]]\nreplicas = [{gone}]\nfrom_s = {from_s}\nuntil_s = {until_s}\n"
    return table


def run(options: Options, store: Store) -> Iterator[Part]:
    with Runs(store, common(options), made) as runs, ThreadPoolExecutor(len(options.methods)) as threads:
        searches = {
            name: threads.submit(
                tune, runs, name, CASES["8"] | METHODS[name], options.budget, options.seeds[0], AXES, WITH_MUON
            )
            for name in options.methods
        }
        tuned = {name: search.result() for name, search in searches.items()}
        rows = [tuned[name] | CASES[case] for case in options.cases for name in options.methods]
        for future in [future for settings in rows for future in runs.start_all(settings, options.seeds)]:
            future.result()
    for parts in tables(store, options).values():
        yield from parts


def common(options: Options) -> Settings:
    """What all rows have in common."""
    return regime(options.steps, options.model) | {"inner": "muon", "every": options.every}


def tables(store: Store, options: Options) -> dict[str, list[Part]]:
    """Each method's losses in each case, how far apart its replicas end and how long it takes; and what it sends."""
    names = [name for name in options.methods if name in store.chosen]
    found = {
        name: {
            case: [*store.results(common(options) | store.chosen[name] | CASES[case]).values()]
            for case in options.cases
        }
        for name in names
    }

    yardstick, first = found.get(options.methods[-1], {}), options.cases[0]
    columns = [case for case in options.cases if yardstick.get(case)]
    of_slow = [case for case in columns if "missing" not in CASES[case]]

    def table(title: str, cell: Callable[[list[Result], list[Result]], str], columns: list[str] = columns) -> Table:
        rows = [
            (name, *(cell(found[name][case], yardstick[case]) if found[name][case] else "" for case in columns))
            for name in names
        ]
        return Table(dict.fromkeys(("replicas", *columns), ""), rows, title)

    sent = [
        (name, mean_of("bytes_sent", 1e6 * CASES[first]["replicas"], 1)(found[name][first], []), searched(store, name))
        for name in names
        if found[name][first]
    ]
    return {
        "gossip": [table(f"loss after {options.steps} steps (beside {options.methods[-1]})", loss("validation_loss"))],
        "gossip averaged": [table("loss of the mean of all replicas' weights", loss("validation_loss_averaged"))],
        "gossip apart": [table("how far apart replicas end", mean_of("weight_spread", 1, 4))],
        "gossip hours": [table("simulated hours", mean_of("seconds", 3600, 4), of_slow)],
        "gossip sent": [Table(dict.fromkeys(("", "MB a replica", "tuned to"), ""), sent)],
    }


def loss(key: str) -> Callable[[list[Result], list[Result]], str]:
    """A cell with mean and deviation, and by how much the mean is above another's; what is not finite is infinite."""

    def cell(own: list[Result], yardstick: list[Result]) -> str:
        losses, others = ([one.get(key) or math.inf for one in results] for results in (own, yardstick))
        return f"{around(losses)} ({mean(losses) / mean(others) - 1:+.1%})"

    return cell


def mean_of(key: str, unit: float, digits: int) -> Callable[[list[Result], list[Result]], str]:
    """A cell with the mean of one of the results' figures, in some unit."""
    return lambda own, _: f"{mean(one.get(key) or 0 for one in own) / unit:.{digits}f}"


def searched(store: Store, name: str) -> str:
    """What the search has found for a method, in words."""
    return in_words({axis.name: store.chosen[name][axis.name] for axis in AXES if axis.name in store.chosen[name]})
