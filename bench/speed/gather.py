"""How long do the processes of an island take to gather whole cells at their keepers, and to scatter them again?
Real processes on one machine, each with its rows of every matrix and one core's work at a time; the limit is copying
the same bytes through shared memory: each process writes what it sends, reads what it receives, and copies what it
keeps of its own. Medians of the slowest process. Takes a minute.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
import torch.distributed as dist

from bench.lib.replica import shapes
from bench.lib.store import Store
from bench.lib.table import Cell, Part, Table
from farflung.cells import Shape, cells_among
from farflung.hooks.shared_memory import regions
from farflung.hooks.swaps import swapped
from farflung.networks import TorchNetwork
from farflung.networks.settings import NetworkSettings
from farflung.outer.keepers import Keeper
from farflung.pipeline import Mesh
from farflung.pipeline.groups import ProcessGroups
from farflung.pipeline.layout import IslandLayout
from farflung.testing.hosts import LOOPBACK, torch_everywhere

DEADLINE = 300.0


@dataclass(frozen=True)
class Options:
    parameters: int = 100_000_000
    """Float32 parameters of the whole model, in matrices of 500 rows."""
    shards: int = 4
    """Processes of the island."""
    repeats: int = 7
    """Times that each is measured, after one that warms up."""


SMOKE = Options(parameters=2_000_000, repeats=1)


def copying(numel: int, group: dist.ProcessGroup) -> Callable[[], None]:
    """Sends as many values through shared memory as a process gathers, and as it has rows of."""
    own, size = group.rank(), group.size()
    share = numel // size**2
    shared = [region.view(torch.float32) for region in regions(4 * share * size, group) or ()]
    source, target = torch.randn(share * size), torch.zeros(share * size)

    def work() -> None:
        for other in range(size):
            if other != own:
                shared[own][other * share :][:share].copy_(source[other * share :][:share])
        dist.barrier(group)
        for other in range(size):
            place = target[other * share :][:share]
            place.copy_(source[own * share :][:share] if other == own else shared[other][own * share :][:share])

    return work


def process(parameters: int, repeats: int) -> None:
    """Prints the medians of the slowest process's seconds, by what it does."""
    waits = NetworkSettings(starting=60, deadline=DEADLINE)
    network = TorchNetwork.from_env(starting=waits.starting)
    count, own = dist.get_world_size(), network.process
    groups = ProcessGroups(network, Mesh.alike(1, 1, count), waits, False, torch.device("cpu"))
    found = cells_among([[shape] for shape in shapes(parameters)])
    outline = {piece.parameter: piece.shape for cell in found for piece in cell.pieces}
    local = {name: torch.randn(shape).chunk(count)[own].clone() for name, shape in outline.items()}
    works = {"copying": copying(parameters, groups.island)}
    for name, layout in layouts(groups, outline).items():
        keepers = layout.keepers(found)
        keeper = Keeper(found, keepers, layout)
        flat = torch.zeros(sum(cell.numel for cell in found if keepers[cell.name] == own))
        works[f"{name}, gather"] = partial(keeper.gather, local, flat)
        works[f"{name}, scatter"] = partial(keeper.scatter, flat, local)
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(1 + repeats):
        for name, work in works.items():
            dist.barrier(groups.island)
            began = time.perf_counter()
            work()
            taken = torch.tensor(time.perf_counter() - began)
            dist.all_reduce(taken, dist.ReduceOp.MAX, groups.island)
            seconds[name].append(float(taken))
    if own == 0:
        print(json.dumps({name: median(taken[1:]) for name, taken in seconds.items()}))


def layouts(groups: ProcessGroups, outline: dict[str, Shape]) -> dict[str, IslandLayout]:
    """By how their processes swap."""
    owned = [outline.keys()] * groups.shape.shards
    through_memory, in_messages = (IslandLayout(groups, outline, owned, gateway=False) for _ in range(2))
    in_messages.swap = partial(swapped, group=groups.island)  # type: ignore[method-assign]
    return {"in messages": in_messages, "through memory": through_memory}


def run(options: Options, store: Store) -> Iterator[Part]:
    arguments = ["-m", __name__, str(options.parameters), str(options.repeats)]
    told = torch_everywhere([LOOPBACK] * options.shards, arguments, timeout_s=2 * DEADLINE)[0]
    seconds = json.loads(told)
    limit = 2 * seconds["copying"]

    def row(way: str) -> tuple[Cell, ...]:
        gather, scatter = seconds[f"{way}, gather"], seconds[f"{way}, scatter"]
        return way, gather, scatter, gather + scatter, limit, (gather + scatter) / limit

    columns = {"swapped": "", "gather s": ".3f", "scatter s": ".3f", "both s": ".3f", "copying s": ".3f"}
    ways = dict.fromkeys(name.partition(",")[0] for name in seconds if name != "copying")
    title = f"{options.parameters:,} float32 parameters, {options.shards} processes of one thread"
    yield Table(columns | {"ratio": ".2f"}, map(row, ways), title)


if __name__ == "__main__":
    process(int(sys.argv[1]), int(sys.argv[2]))
