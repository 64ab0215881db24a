"""What do machines that train a mixture's routers send each other, and what share of their time does it take?
Eight hosts in network namespaces with a router each, on links of 100 Mbit/s, split a text of eight hidden sources as
`farflung mixture split` does under torchrun. The physical limit is line rate for the bytes that the formula gives: two
for each sequence and router of one's own, to each other machine. Seconds of telling count from when all are ready,
those of the work are a machine's own processor time. Takes eight minutes, as root.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from bench.lib.replica import all_ready, leave
from bench.lib.sources import sources
from bench.lib.store import Store
from bench.lib.table import Part, Table
from farflung.mixtures.settings import SplitSettings
from farflung.mixtures.split import split
from farflung.networks import TorchNetwork
from farflung.networks.base import Finished, Group, Packets, Pending
from farflung.testing.hosts import NetLab, torch_everywhere, unavailable

needs = unavailable


@dataclass(frozen=True)
class Options:
    machines: int = 8
    """Hosts, and routers."""
    rate_mbit: float = 100.0
    """Each host's link, each way."""
    letters: int = 1_000_000
    """Of each source."""
    rounds: int = 8
    """In which routers learn."""
    router_sequences: int = 2048
    """That each router gets in a round."""
    router: str = "micro"
    """Their model."""
    lr: float = 4e-3
    """Theirs."""


SMOKE = Options(machines=2, letters=20_000, rounds=1, router_sequences=32, lr=1e-3)


class Timed(TorchNetwork):
    """Times exchanges, and counts their bytes: of scores, and of weights."""

    def __init__(self, *seat: Any, **named: Any) -> None:
        super().__init__(*seat, **named)
        self.seconds, self.bytes = defaultdict[str, float](float), Counter[str]()

    def exchange(self, packet: Tensor, group: Group, key: str) -> Pending[Packets]:
        """See Network; it is over when this returns."""
        super().exchange(packet[:1], group, f"{key}, ready").wait(SplitSettings.deadline)
        what, before, began = "weights" if key.endswith("weights") else "scores", self.traffic.bytes_sent, self.now()
        found = super().exchange(packet, group, key).wait(SplitSettings.deadline)
        self.seconds[what] += self.now() - began
        self.bytes[what] += self.traffic.bytes_sent - before
        return Finished(found, self.now())


def machine(folder: Path, told: str) -> None:
    """Splits the text in a folder with the others; prints what it took."""
    options = Options(**json.loads(told))
    network = Timed.from_env(starting=60)
    assert isinstance(network, Timed)
    settings = SplitSettings(
        data=tuple(sorted(map(str, folder.glob("*.txt")))),
        out=folder / f"mix-{network.rank}",
        experts=options.machines,
        rounds=options.rounds,
        router_sequences=options.router_sequences,
        router=options.router,
        lr=options.lr,
    )
    began = time.process_time()
    mixture = split(settings, network, lambda _: None)
    worked = time.process_time() - began
    scored = options.rounds * settings.round_sequences + sum(map(sum, mixture.dealt)) + sum(mixture.held_out)
    print(json.dumps({"scored": scored, "worked": worked, "bytes": network.bytes, "seconds": network.seconds}))
    all_ready(network, "all have told")
    leave(network)


def run(options: Options, store: Store) -> Iterator[Part]:
    folder = store.scratch / "texts"
    folder.mkdir(parents=True, exist_ok=True)
    for number, source in enumerate(sources(options.machines, options.letters, 0)):
        (folder / f"{number}.txt").write_bytes(source.text.tobytes())
    with NetLab(options.machines, options.rate_mbit) as lab:
        arguments = ["-m", __name__, str(folder), json.dumps(asdict(options))]
        outputs = torch_everywhere(lab.hosts, arguments, timeout_s=1800)
    found = [json.loads(output) for output in outputs]
    worked = max(one["worked"] for one in found)
    formula = {"scores": 2 * found[0]["scored"] * (options.machines - 1), "weights": None}
    lines = []
    for what, expected in formula.items():
        sent = max(one["bytes"][what] for one in found)
        seconds = max(one["seconds"][what] for one in found)
        limit = sent * 8e-6 / options.rate_mbit
        lines.append((what, expected, sent, seconds, limit, 100 * seconds / (worked + seconds)))
    columns = {"": "", "formula": ",.0f", "bytes sent": ",.0f", "seconds": ".2f", "line rate": ".2f", "%": ".2f"}
    hosts = f"{options.machines} hosts at {options.rate_mbit:g} Mbit/s"
    title = f"{hosts}; {found[0]['scored']:,} sequences scored; a machine works for {worked:.0f} s"
    yield Table(columns, lines, title)


if __name__ == "__main__":
    machine(Path(sys.argv[1]), sys.argv[2])
