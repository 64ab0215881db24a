"""Does training hide the exchange of an island that is one peer on the internet?
Two peers in network namespaces at 20 Mbit/s each way, of one process and of two stages of two shards, of which one is
on the network: the share of their exchanges that training hides (95 % are to be reached), and their bytes beside those
of two peers of one process (within 2 %). Steps take a fixed time and end together. Takes five minutes, as root.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bench.lib.shapes import WHOLE, ended, keys_in, shaped
from bench.lib.store import Store
from bench.lib.table import Cell, Part, Table
from bench.lib.training import save_llama
from farflung.events import RoundEvent
from farflung.pipeline import IslandShape
from farflung.report.read import read_run
from farflung.testing.hosts import Host, NetLab, unavailable
from farflung.testing.peers import PeerProcess

needs = unavailable

METHODS = {"nolocox": {}, "noloco": {"codec": "modulo4", "delay": 5}}
"""With what they are given; nolocox overlaps of itself."""
EVERY = 5


@dataclass(frozen=True)
class Options:
    rounds: int = 8
    """Rounds, of which the first and the last are not measured."""
    rate_mbit: float = 20.0
    """Each host's link, each way."""
    step_ms: float = 1000.0
    """What one inner step takes."""
    hidden_size: int = 256
    """Of the model, which has four layers."""
    methods: tuple[str, ...] = tuple(METHODS)
    """What to measure."""
    stages: int = 2
    """Of the island, each of two shards."""


SMOKE = Options(rounds=4, step_ms=300, hidden_size=32, methods=("nolocox",), stages=1)


@dataclass(frozen=True)
class Measured:
    """What a peer's rounds took, in seconds, and sent, in bytes."""

    rounds: int
    exchange: float
    blocked: float
    applying: float
    told: float
    """In one round."""
    carried: float
    """By its link, for each round, with what peers tell each other besides."""

    @property
    def hidden(self) -> float:
        """The share of the exchange for which training did not stand still."""
        return 1 - self.blocked / self.exchange if self.exchange else 0.0


def carried(host: Host) -> int:
    """Bytes that a host has sent."""
    path = Path("/sys/class/net") / host.interface / "statistics" / "tx_bytes"
    out, _ = host.popen(["cat", str(path)], stdout=-1).communicate(timeout=60)
    return int(out)


def measured(peer: PeerProcess, options: Options) -> Measured:
    """A peer that has ended. Its last round is left out: it is landed at once, since the run is over."""
    run = read_run(peer.folder)
    everything = [event for event in run.of(run.replicas[0], RoundEvent) if event.group]
    # Each process of an island has a door of its own.
    others = [event for part in run.parts.values() for event in part if isinstance(event, RoundEvent) and event.group]
    inside = [event for event in everything if event.round > 1 and event.step < options.rounds * EVERY]
    return Measured(
        len(inside),
        sum(event.finished - event.started for event in inside),
        sum(max(0.0, event.finished - event.waited_from) for event in inside),
        sum(event.landed - max(event.waited_from, event.finished) for event in inside),
        sum(event.bytes_sent for event in (*everything, *others)) / len(everything),
        carried(peer.host) / len(everything),
    )


def trained(options: Options, store: Store, method: str, shapes: tuple[IslandShape, ...]) -> list[Measured]:
    """What each peer of one run measured."""
    sizes = {"hidden_size": options.hidden_size, "intermediate_size": 4 * options.hidden_size, "num_hidden_layers": 4}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 257, "max_position_embeddings": 64}
    model = save_llama(store.scratch / f"model-{options.hidden_size}", **sizes, tie_word_embeddings=True)
    settings = {"model": model, "method": method, **METHODS[method], "every": EVERY, "steps": options.rounds * EVERY}
    settings |= {"batch_size": 4, "sequence_length": 16, "microbatches": 2, "log_every": 1, "inner": "adamw"}
    settings |= {"eval_every": 100_000, "eval_sequences": 4, "checkpoint_every": 0}
    folder = store.scratch / f"{method}-{sum(shape.processes for shape in shapes)}"
    keys = keys_in(store.scratch / "keys", len(shapes))
    with (
        NetLab(len(shapes), options.rate_mbit) as lab,
        shaped(folder, lab.hosts, shapes, keys, options.step_ms, settings) as peers,
    ):
        return [measured(ended(peer, 300 + options.rounds * EVERY * options.step_ms / 100), options) for peer in peers]


def run(options: Options, store: Store) -> Iterator[Part]:
    def rows() -> Iterator[tuple[Cell, ...]]:
        for method in options.methods:
            alike = trained(options, store, method, (WHOLE, WHOLE))
            unlike = trained(options, store, method, (WHOLE, IslandShape(options.stages, 2)))
            island = f"{options.stages}x2"
            shapes = ("1x1 beside 1x1",) * 2, (f"1x1 beside {island}", f"{island} beside 1x1")
            for names, members in zip(shapes, (alike, unlike), strict=True):
                for name, one, other in zip(names, members, alike, strict=True):
                    bytes_sent = (one.told / 1e6, one.told / other.told - 1, one.carried / other.carried - 1)
                    each = [seconds / max(1, one.rounds) for seconds in (one.exchange, one.blocked, one.applying)]
                    yield method, name, one.rounds, *each, one.hidden, *bytes_sent

    columns = {"method": "", "peer": "", "rounds": "d", "exchange, s": ".2f", "waited for": ".3f", "applying": ".3f"}
    columns |= {"hidden": ".1%", "MB a round": ".2f", "beside 1x1": "+.2%", "by the link": "+.2%"}
    title = f"2 peers at {options.rate_mbit:g} Mbit/s, every={EVERY}, steps of {options.step_ms:g} ms"
    yield Table(columns, rows(), title)
