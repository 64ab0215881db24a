"""Does the gap to synchronous training close with length, and what makes it smaller?
Muon inside, learning rates along a line to nothing. At each length ddp, the baseline, and each way to send about a
hundredth of its bytes or less have the learning rate and weight decay that one search with one budget has found at
that length, on the first seed; a power law goes through the gaps. Then one part at a time is put into the first way,
with nothing tuned again: on one seed, so that it is a hint. Larger batches have rows and searches of their own. Takes
about seven hours on two cores, half of them for the longest runs; what is made is kept, so that it can be stopped and
goes on.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from statistics import mean

import numpy as np

from bench.lib.runs import Runs, around, changes, in_words, regime, sound
from bench.lib.search import AXES, WITH_MUON, Axis, tune
from bench.lib.store import Result, Settings, Store
from bench.lib.table import Part, Table
from bench.quality.frontier import Row
from bench.quality.gap import ended

MUON: Settings = {"inner": "muon", "lr_schedule": "linear", "lr_final": 0.0}
BEST: Settings = {"method": "diloco", "every": 4, "every_final": 16, "codec": "ef-int2"}
OUTER: Settings = {"outer_lr": 0.7, "outer_momentum": 0.5}
DDP = "ddp"
WAYS: dict[str, Settings] = {
    DDP: {"method": "ddp"},
    "diloco, ef-int2, every 4 to 16": BEST | OUTER,
    "noloco, modulo4, every 5": {"method": "noloco", "every": 5, "codec": "modulo4", **OUTER},
    "dilocox, every 50": {"method": "dilocox", "every": 50, "codec": "ef-lowrank18-int4", "adapt": False, **OUTER},
    "replicas that never meet": {"method": "local"},
}
"""All rows. The second is the best that `gap` has found; the next are as they were published, with codecs."""
PARTS: dict[str, Settings] = {
    "statistical levels": {"codec": "ef-stat2"},
    "lengths and directions averaged apart": {"fuse": "rda"},
    "MuLoCo's Muon": {"inner": "muloco"},
    "Muon's momentum 0.9": {"muon_momentum": 0.9},
    "Muon's momentum 0.975": {"muon_momentum": 0.975},
    "steps along the last mean step": {"muon_align": 0.5},
    "a slow momentum, averaged": {"slow_share": 0.5},
    "less of it": {"slow_share": 0.1},
    "one that forgets sooner": {"slow_share": 0.5, "slow_momentum": 0.99},
    "outer momentum that warms up": {"outer_momentum": 0.8, "outer_momentum_warmup": 400},
    "outer 0.9 and 0.8": {"outer_lr": 0.9, "outer_momentum": 0.8},
    "outer 1 and 0": {"outer_lr": 1.0, "outer_momentum": 0.0},
    "a late average": {"tail_average": 0.1},
    "no codec": {"codec": "float32"},
    "no codec, every 4 to the end": {"codec": "float32", "every_final": 4},
    "one value in twenty, every 2": {"codec": "ef-topk5-int2", "every": 2, "every_final": None},
    "0.975, a late average, and statistical levels": {"muon_momentum": 0.975, "tail_average": 0.1, "codec": "ef-stat2"},
}
"""What is put into the best way, one at a time; in the end what has helped there, and the codec with fewer bytes."""
OF_DDP = ("Muon's momentum 0.9", "Muon's momentum 0.975", "a late average")
"""Those of them that are put into ddp, too, so that what they do for both can be told from what they do for one."""
PLAIN: Settings = {"codec": "float32", "every_final": None, "outer_lr": 1.0, "outer_momentum": 0.0}
"""Means of whole weights and no outer optimizer: what is left is what rounds apart cost."""
BATCHED: dict[str, Settings] = {DDP: WAYS[DDP], "diloco, ef-int2, every 4 to 18": BEST | OUTER | {"every_final": 18}}
"""Rows of larger batches: ddp and the best way, at a hundredth of the bytes."""
SEARCHED = (AXES[0], Axis("weight_decay", step=1 / 4))


@dataclass(frozen=True)
class Options:
    steps: tuple[int, ...] = (200, 800, 3200, 12800)
    """Lengths, in inner steps of each replica."""
    ways: tuple[str, ...] = tuple(WAYS)
    """Which rows to make, of which ddp is one."""
    parts: tuple[str, ...] = tuple(PARTS)
    """What to put into the best way, and ddp, one at a time."""
    parts_at: tuple[int, ...] = (800, 3200)
    """The lengths at which."""
    rhythms: tuple[int, ...] = (1, 2, 4)
    """Steps between plain means in the best way, with nothing tuned again."""
    rhythms_at: int = 3200
    """The length at which."""
    batches: tuple[int, ...] = (32,)
    """Sequences of a step in the rows of larger batches, whose learning rates have a search of their own."""
    batches_at: tuple[int, ...] = (800, 3200)
    """The lengths at which."""
    batches_budget: int = 3
    """Runs that the search of each of these may make."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """One run of each tuned row for each; the search uses the first."""
    budget: int = 5
    """Runs that the search of each row may make."""
    searched_to: int = 3200
    """The longest length that is searched; longer ones keep what was found there."""
    model: str = "micro"
    """What is trained."""
    replicas: int = 8
    """Copies of the model."""

    def of(self, way: str, steps: int) -> Settings:
        """A row's settings before it is tuned."""
        return regime(steps, self.model, self.replicas) | MUON | WAYS[way]

    def batched(self, way: str, steps: int, batch: int) -> Settings:
        """The same, of a row of larger batches."""
        larger = {"batch_size": batch, "weight_decay": WITH_MUON["weight_decay"]}
        return regime(steps, self.model, self.replicas) | MUON | BATCHED[way] | larger


SMOKE = Options(
    steps=(2, 4),
    ways=tuple(WAYS)[:2],
    parts=tuple(PARTS)[:1],
    parts_at=(2,),
    rhythms=(1,),
    rhythms_at=2,
    batches=(2,),
    batches_at=(4,),
    batches_budget=1,
    seeds=(0,),
    budget=1,
    replicas=2,
)


def run(options: Options, store: Store) -> list[Part]:
    def row(way: str, steps: int) -> list[Future[Result]]:
        name, settings = name_of(way, steps), options.of(way, steps)
        if steps <= options.searched_to:
            return searched(name, settings, options.budget, SEARCHED)
        found = store.chosen_as(name_of(way, options.searched_to)) | settings
        store.choose(name, found)
        return runs.start_all(found, options.seeds)

    def larger(key: tuple[str, int, int]) -> list[Future[Result]]:
        return searched(batched(*key), options.batched(*key), options.batches_budget, AXES[:1])

    def searched(name: str, settings: Settings, budget: int, along: tuple[Axis, ...]) -> list[Future[Result]]:
        return runs.start_all(tune(runs, name, settings, budget, options.seeds[0], along, WITH_MUON), options.seeds)

    with Runs(store, {}) as runs, ThreadPoolExecutor(len(options.ways)) as threads:
        for steps in sorted(options.steps):
            for futures in list(threads.map(row, options.ways, [steps] * len(options.ways))):
                for future in futures:
                    future.result()
        found = [with_parts(store, options, steps) for steps in options.parts_at]
        started = [runs.start(one, options.seeds[0]) for settings in found for one in settings.values()]
        for settings in with_rhythms(store, options).values():
            started += runs.start_all(settings, options.seeds)
        for futures in threads.map(larger, product(BATCHED, options.batches_at, options.batches)):
            started += futures
        for future in started:
            future.result()
    return [part for parts in tables(store, options).values() for part in parts]


def name_of(way: str, steps: int) -> str:
    """What the store calls a tuned row."""
    return f"{way}, {steps} steps"


def with_parts(store: Store, options: Options, steps: int) -> dict[tuple[str, str], Settings]:
    """The best way and ddp as tuned, with one part each; by their names."""
    both = {list(WAYS)[1]: options.parts, DDP: [part for part in options.parts if part in OF_DDP]}
    found = {way: store.chosen[name_of(way, steps)] for way in both if name_of(way, steps) in store.chosen}
    return {(way, name): settings | PARTS[name] for way, settings in found.items() for name in both[way]}


def with_rhythms(store: Store, options: Options) -> dict[int, Settings]:
    """The best way as tuned, with plain means every so many steps."""
    best = store.chosen.get(name_of(list(WAYS)[1], options.rhythms_at), {})
    return {every: best | PLAIN | {"every": every} for every in options.rhythms} if best else {}


def batched(way: str, steps: int, batch: int) -> str:
    """What the store calls a row of larger batches."""
    return f"{way}, {steps} steps, batch {batch}"


def tuned(store: Store, way: str, steps: int) -> dict[int, Result]:
    """The results of a tuned row, by seed."""
    return finite(store.results(store.chosen.get(name_of(way, steps), {})))


def finite(results: dict[int, Result]) -> dict[int, Result]:
    """Those of runs that have not diverged.

    Their loss is that of the weights that they end with, an average; or where replicas never meet, the mean of each
    one's own.
    """
    averaged = ended(results)
    ends = {seed: averaged[seed] if one.get("rounds") else one for seed, one in results.items()}
    return sound(ends)


def measured(store: Store, options: Options) -> dict[tuple[str, int], dict[int, Result]]:
    """The results of each tuned row at each length at which there are some of ddp, too."""
    return {
        (way, steps): results
        for steps in options.steps
        for way in options.ways
        if (results := tuned(store, way, steps)) and tuned(store, DDP, steps)
    }


def tables(store: Store, options: Options) -> dict[str, list[Part]]:
    """The gaps by length, the laws through them, and what parts do."""
    found = measured(store, options)
    gaps = {key: changes(results, found[DDP, key[1]]) for key, results in found.items()}
    laws = [
        law(way, [(steps, mean(gaps[way, steps])) for steps in options.steps if gaps.get((way, steps))])
        for way in options.ways
        if way != DDP
    ]
    return {
        "length": [by_length(store, found, gaps)],
        "length laws": [Table(dict.fromkeys(("", "gap, %", "steps to 1 %"), ""), [one for one in laws if one])],
        "length parts": [by_part(store, options)],
        "length rhythms": [by_rhythm(store, options)],
        "length batches": [by_batch(store, options)],
    }


def by_length(
    store: Store, found: dict[tuple[str, int], dict[int, Result]], gaps: dict[tuple[str, int], list[float]]
) -> Table:
    lines = []
    for (way, steps), results in found.items():
        row = Row(way, store.chosen[name_of(way, steps)], results)
        chosen = {axis.name: row.settings[axis.name] for axis in SEARCHED}
        gap = "" if way == DDP else f"{around(gaps[way, steps], 2, '+')} %"
        rounds = "" if way == DDP else f"{mean(one['rounds'] for one in results.values()):.0f}"
        lines.append((str(steps), way, around(row.losses, 4), gap, rounds, row.times_fewer, in_words(chosen)))
    columns = ("steps", "method", "loss", "to ddp", "rounds", "fewer bytes", "tuned to")
    return Table(dict.fromkeys(columns, ""), lines)


def by_part(store: Store, options: Options) -> Table:
    columns = ("steps", "method", "part", "settings", "change of the loss, one seed", "to ddp", "fewer bytes")
    lines = [line for steps in options.parts_at for line in _with_each(store, options, steps)]
    return Table(dict.fromkeys(columns, ""), lines)


def _with_each(store: Store, options: Options, steps: int) -> Iterator[tuple[str, ...]]:
    seed, ddp = options.seeds[0], tuned(store, DDP, steps)
    for (way, name), settings in with_parts(store, options, steps).items():
        results = {key: one for key, one in finite(store.results(settings)).items() if key == seed}
        without = tuned(store, way, steps)
        if results and without and ddp:
            change, gap = changes(results, without)[0], changes(results, ddp)[0]
            fewer = Row(name, settings, results).times_fewer
            yield str(steps), way, name, in_words(PARTS[name]), f"{change:+.2f} %", f"{gap:+.2f} %", fewer


def by_rhythm(store: Store, options: Options) -> Table:
    ddp, lines = tuned(store, DDP, options.rhythms_at), []
    for every, settings in with_rhythms(store, options).items():
        results = {seed: one for seed, one in finite(store.results(settings)).items() if seed in ddp}
        if results:
            row = Row(f"every {every}", settings, results)
            gap = f"{around(changes(results, ddp), 2, '+')} %"
            lines.append((str(every), around(row.losses, 4), gap, row.times_fewer))
    return Table(dict.fromkeys(("steps between means", "loss", "to ddp", "fewer bytes"), ""), lines)


def by_batch(store: Store, options: Options) -> Table:
    """Losses with larger batches beside ddp's with the same."""
    lines = []
    for steps, batch in product(options.batches_at, options.batches):
        chosen = {way: store.chosen.get(batched(way, steps, batch), {}) for way in BATCHED}
        found = {way: finite(store.results(settings)) for way, settings in chosen.items()}
        for way, results in found.items():
            if results and found[DDP]:
                row = Row(way, chosen[way], results)
                gap = "" if way == DDP else f"{around(changes(results, found[DDP]), 2, '+')} %"
                rate = in_words({"lr": row.settings["lr"]})
                lines.append((str(steps), str(batch), way, around(row.losses, 4), gap, row.times_fewer, rate))
    columns = ("steps", "batch", "method", "loss", "to ddp", "fewer bytes", "tuned to")
    return Table(dict.fromkeys(columns, ""), lines)


def law(way: str, points: Sequence[tuple[int, float]], sought: float = 1.0) -> tuple[str, ...] | None:
    """The power law through a way's gaps in per cent, by least squares of logarithms, and where it is as sought."""
    positive = [(steps, gap) for steps, gap in points if gap > 0]
    if len(positive) < 2:
        return None
    steps, values = zip(*positive, strict=True)
    slope, start = np.polyfit(np.log(steps), np.log(values), 1)
    reached = f"{float(f'{math.exp((math.log(sought) - start) / slope):.2g}'):,.0f}" if slope < 0 else "never"
    return way, f"{math.exp(start):.3g} · steps^{slope:.2f}", reached
