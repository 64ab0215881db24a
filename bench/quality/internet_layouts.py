"""Do islands of unlike shapes train the same on the internet as peers of one process?
Four peers in one run, of one process, two stages, two shards and both, beside four of one process with the same keys,
and so the same numbers, data and pairs: the largest difference of their last weights, and of any step's loss. Members
come and go there, so runs whose rounds had other members are told as such. A codec that rounds makes a large difference
of the smallest: beside it is what four simulated peers of one process come to when they sum microbatches in another
order. Takes twenty minutes on two cores.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from bench.lib.shapes import WHOLE, ended, keys_in, shaped
from bench.lib.store import Store
from bench.lib.table import Cell, Part, Table
from bench.lib.training import simulate
from farflung.events import RoundEvent, StepEvent
from farflung.pipeline import IslandShape
from farflung.pipeline.settings import IslandSettings
from farflung.report.read import Run, read_run
from farflung.testing.hosts import LOOPBACK
from farflung.training import checkpoint
from farflung.training.resharding import whole_weights

EVERY = 5


@dataclass(frozen=True)
class Options:
    rounds: tuple[str, ...] = (
        *("diloco float32", "diloco ef-lowrank16-int4", "diloco ef-topk5"),
        *("noloco float32", "noloco modulo4", "noloco ef-lowrank16-int4", "noloco ef-topk5"),
    )
    """Methods, each with its codec."""
    count: int = 10
    """Rounds of each run, one each five steps."""
    step_ms: float = 1000.0
    """What one inner step takes; between rounds all peers are to hear from all, which they do each three seconds."""
    model: str = "micro"
    """What is trained."""
    islands: str = "1x1 2x1 1x2 2x2"
    """Stages x shards of each peer."""

    @property
    def shapes(self) -> tuple[IslandShape, ...]:
        """The peers' shapes."""
        return tuple(IslandSettings(islands=self.islands).shapes())


SMOKE = Options(rounds=("noloco modulo4",), count=1, islands="1x1 2x1")


@dataclass(frozen=True)
class Replica:
    """What a replica has come to."""

    losses: list[tuple[int, float | None]]
    """With the steps that it counted."""
    rounds: list[tuple[int, tuple[int, ...]]]
    """With the members of each."""
    weights: Mapping[str, Tensor]


def replica_of(run: Run, number: int, steps: int) -> Replica:
    """What a replica that has ended has come to."""
    return Replica(
        [(event.step, event.loss) for event in run.of(number, StepEvent)],
        [(event.round, tuple(event.group)) for event in run.of(number, RoundEvent)],
        whole_weights(checkpoint.parts_of(run.folder, steps, number)),
    )


def settings_of(options: Options, rounds: str) -> dict[str, Any]:
    """Of all runs with a method and its codec."""
    method, codec = rounds.split()
    steps = options.count * EVERY
    settings = {"model": options.model, "method": method, "codec": codec, "every": EVERY, "steps": steps}
    settings |= {"batch_size": 8, "sequence_length": 32, "microbatches": 4, "inner": "adamw", "log_every": 1}
    return settings | {"eval_every": steps, "eval_sequences": 8, "checkpoint_every": 0}


def trained(options: Options, store: Store, rounds: str, shapes: tuple[IslandShape, ...]) -> list[Replica]:
    """The replicas of one run on the internet, by number."""
    settings, steps = settings_of(options, rounds), options.count * EVERY
    folder = store.scratch / f"{rounds.replace(' ', '-')}-{sum(shape.processes for shape in shapes)}"
    keys = keys_in(store.scratch / "keys", len(shapes))
    with shaped(folder, [LOOPBACK] * len(shapes), shapes, keys, options.step_ms, settings) as peers:
        runs = [read_run(ended(peer, 120 + steps * options.step_ms / 100).folder) for peer in peers]
        return [replica_of(run, run.replicas[0], steps) for run in runs]


def of_another_order(options: Options, store: Store, rounds: str) -> tuple[float, float]:
    """The differences between simulated replicas of four and of two microbatches."""
    settings, steps, found = settings_of(options, rounds), options.count * EVERY, []
    for parts in (4, 2):
        folder = store.scratch / f"{rounds.replace(' ', '-')}-in-{parts}"
        run = simulate(folder, **settings | {"microbatches": parts, "replicas": len(options.shapes)}).run
        found.append([replica_of(run, number, steps) for number in run.replicas])
    return difference(*found)


def other_members(unlike: list[Replica], alike: list[Replica], count: int, rounds: str) -> str:
    """Where two runs did not have all members in all rounds, and cannot be compared."""
    full = len(unlike) if rounds.startswith("diloco") else 2
    for number, (one, other) in enumerate(zip(unlike, alike, strict=True)):
        steps = [list(range(1, count * EVERY + 1))] * 2
        if [[step for step, _ in each.losses] for each in (one, other)] != steps:
            return f"replica {number} skipped steps"
        for mine, theirs in zip(one.rounds, other.rounds, strict=False):
            if mine != theirs or len(mine[1]) < full:
                return f"replica {number}, round {mine[0]}: {len(mine[1])} and {len(theirs[1])} members"
        if not len(one.rounds) == len(other.rounds) == count:
            return f"replica {number}: {len(one.rounds)} and {len(other.rounds)} rounds"
    return ""


def difference(unlike: list[Replica], alike: list[Replica]) -> tuple[float, float]:
    """The largest of any step's loss, and of any weight."""
    loss = weight = 0.0
    for one, other in zip(unlike, alike, strict=True):
        pairs = zip(one.losses, other.losses, strict=True)
        loss = max(loss, *(abs((mine or 0.0) - (theirs or 0.0)) for (_, mine), (_, theirs) in pairs))
        assert one.weights.keys() == other.weights.keys()
        weight = max(weight, *(float((one.weights[n] - other.weights[n]).abs().max()) for n in one.weights))
    return loss, weight


def run(options: Options, store: Store) -> Iterator[Part]:
    pair = options.shapes, (WHOLE,) * len(options.shapes)

    def rows() -> Iterator[tuple[Cell, ...]]:
        for rounds in options.rounds:
            unlike, alike = (trained(options, store, rounds, shapes) for shapes in pair)
            if why := other_members(unlike, alike, options.count, rounds):
                yield rounds, None, None, None, None, None, f"not compared: {why}"
                continue
            differences = *difference(unlike, alike), *of_another_order(options, store, rounds)
            yield rounds, alike[0].losses[-1][1], *differences, "all members in all rounds"

    columns = {"rounds": "", "last loss": ".4f", "largest difference of a loss": ".1e", "of a weight": ".1e"}
    title = (
        f"{options.model}: stages x shards {options.islands} beside as many 1x1, {options.count} rounds, every={EVERY}"
    )
    columns |= {"in another order: of a loss": ".1e", "of a weight by that": ".1e"}
    yield Table(columns | {"rounds had": ""}, rows(), title)
