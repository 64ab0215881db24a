"""Do islands of unlike shapes train the same on the internet as peers of one process?
Four peers in one run, of one process, two stages, two shards and both, beside four of one process with the same keys,
and so the same numbers, data and pairs: the largest difference of their last weights, and of any step's loss. Members
come and go there, so runs whose rounds had other members are told as such. Takes twelve minutes on two cores.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from bench.lib.shapes import PAIRED, WHOLE, ended, keys_in, shaped
from bench.lib.store import Store
from bench.lib.table import Cell, Part, Table
from farflung.events import RoundEvent, StepEvent
from farflung.pipeline import IslandShape
from farflung.testing.hosts import LOOPBACK
from farflung.testing.peers import PeerProcess
from farflung.training import checkpoint
from farflung.training.resharding import whole_weights

EVERY = 5
UNLIKE = (WHOLE, IslandShape(stages=2), IslandShape(shards=2), PAIRED)


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


SMOKE = Options(rounds=("noloco modulo4",), count=2)


@dataclass(frozen=True)
class Replica:
    """What a replica has come to."""

    losses: list[tuple[int, float | None]]
    """With the steps that it counted."""
    rounds: list[tuple[int, tuple[int, ...]]]
    """With the members of each."""
    weights: Mapping[str, Tensor]


def replica_of(peer: PeerProcess, steps: int) -> Replica:
    """What a peer that has ended has come to."""
    told, rounds = peer.events(StepEvent), peer.events(RoundEvent)
    return Replica(
        [(event.step, event.loss) for event in told],
        [(event.round, tuple(event.group)) for event in rounds],
        whole_weights(checkpoint.parts_of(peer.folder, steps, told[0].replica)),
    )


def trained(options: Options, store: Store, rounds: str, shapes: tuple[IslandShape, ...]) -> list[Replica]:
    """The replicas of one run, by number."""
    method, codec = rounds.split()
    steps = options.count * EVERY
    settings: dict[str, Any] = {"model": options.model, "method": method, "codec": codec, "every": EVERY}
    settings |= {"steps": steps, "batch_size": 8, "sequence_length": 32, "microbatches": 4, "inner": "adamw"}
    settings |= {"log_every": 1, "eval_every": steps, "eval_sequences": 8, "checkpoint_every": 0}
    folder = store.scratch / f"{method}-{codec}-{sum(shape.processes for shape in shapes)}"
    keys = keys_in(store.scratch / "keys", len(shapes))
    with shaped(folder, [LOOPBACK] * len(shapes), shapes, keys, options.step_ms, settings) as peers:
        return [replica_of(ended(peer, 120 + steps * options.step_ms / 100), steps) for peer in peers]


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
    def rows() -> Iterator[tuple[Cell, ...]]:
        for rounds in options.rounds:
            unlike, alike = (trained(options, store, rounds, shapes) for shapes in (UNLIKE, (WHOLE,) * len(UNLIKE)))
            if why := other_members(unlike, alike, options.count, rounds):
                yield rounds, None, None, None, f"not compared: {why}"
                continue
            loss, weight = difference(unlike, alike)
            yield rounds, alike[0].losses[-1][1], loss, weight, "all members in all rounds"

    shapes = ", ".join(f"{shape.stages}x{shape.shards}" for shape in UNLIKE)
    columns = {"rounds": "", "last loss": ".4f", "largest difference of a loss": ".1e", "of a weight": ".1e"}
    title = f"{options.model}: stages x shards {shapes} beside four 1x1, {options.count} rounds, every={EVERY}"
    yield Table(columns | {"rounds had": ""}, rows(), title)
