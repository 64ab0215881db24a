"""How long does a round through a folder take, and how many requests does it make?
Peers in this process meet in a folder, in pairs and all together, and average a message; the store is a folder of this
machine unless `--at` names another. The time is the slowest peer's; requests are those of a peer and round, with beats
and removals. Then a NoLoCo round of two hosts in namespaces, through a WebDAV server on a third (nginx where it is
installed, else wsgidav), beside line rate: what a packet takes one way. A round goes up and down. Takes four minutes,
the second part as root.
"""

from __future__ import annotations

import json
import math
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

import torch

from bench.lib.folders import Nginx, WebDav, missing
from bench.lib.replica import model_of
from bench.lib.store import Store
from bench.lib.table import Cell, Part, Table
from farflung import methods
from farflung.codecs import Modulo
from farflung.networks import Group, Party, PeerLostError, Pending
from farflung.networks.folder import FolderNetwork, Identity, Presence, newcomer_info
from farflung.networks.peers.ticket import Ticket, read_ticket
from farflung.planner.folder import Folder, passage
from farflung.testing.hosts import NetLab, run_everywhere
from farflung.testing.waiting import until

DEADLINE = 120.0


@dataclass(frozen=True)
class Options:
    at: str = ""
    """The folder's URL, as `farflung invite --at` takes it; a folder of this machine unless given."""
    peers: tuple[int, ...] = (2, 8, 64)
    """Peers of a run."""
    values: int = 100_000
    """Values of a message, of 4 bytes."""
    rounds: int = 5
    """Rounds of each, after one to begin with; the median counts."""
    pause: float = 3.0
    """Seconds of training between two rounds."""
    parts: tuple[str, ...] = ("requests", "rate")
    """What to measure."""
    parameters: int = 5_000_000
    """Float32 parameters of the model whose rounds are beside line rate."""
    rate_mbit: float = 100.0
    """Each host's link, each way; the server's is a hundred times as fast."""


SMOKE = Options(peers=(2,), rounds=1, values=1000, pause=0.1, parts=("requests",))
METHODS = {
    "noloco": lambda: methods.noloco(every=1),
    "noloco, modulo4": lambda: methods.noloco(every=1, codec=Modulo(bits=4)),
}


def begun(url: str, keys: Path, count: int) -> list[FolderNetwork]:
    """So many peers of one run, who know each other."""
    ticket = Ticket.new("bench", {}).at((url,))
    networks = []
    for number in range(count):
        info = newcomer_info(ticket, f"peer-{number}") | {"trains": True}
        identity = Identity(keys / f"{count}-{number}.key")
        networks.append(FolderNetwork(Presence(ticket, identity, info, print, DEADLINE / 4), DEADLINE))
    for network in networks:
        network.peers.look(time.monotonic())
    return networks


def groups(networks: list[FolderNetwork], pairs: bool, number: int) -> dict[int, Group]:
    """Whom each wants to meet in a round."""
    ranks = [network.rank for network in networks]
    random.Random(number).shuffle(ranks)
    parts = [ranks[at : at + 2] for at in range(0, len(ranks), 2)] if pairs else [ranks]
    return {rank: tuple(sorted(part)) for part in parts for rank in part}


def round_of(networks: list[FolderNetwork], pairs: bool, number: int, values: int) -> tuple[float, float]:
    """The seconds that a round of all takes, and the share that met somebody."""
    wanted, key, began = groups(networks, pairs, number), f"{number} of {pairs}", time.monotonic()

    def meet(network: FolderNetwork) -> Pending[bool]:
        def averaged(party: Party) -> bool:
            if not party.group:
                return False
            try:
                network.all_reduce(torch.ones(values), party.group, f"{key}, mean").wait(DEADLINE)
            except PeerLostError:  # it left just when the other came
                return False
            return len(party.group) > 1

        return network.meet(wanted[network.rank], key, number, 1.0, "", averaged)

    pending = [meet(network) for network in networks]
    met = sum(one.wait(DEADLINE) for one in pending)
    return time.monotonic() - began, met / len(networks)


def requests(options: Options) -> Table:
    """Requests and seconds of rounds among peers in this process."""
    rows = []
    for count in options.peers:
        for pairs in (True, False)[: 1 if count == 2 else 2]:
            with tempfile.TemporaryDirectory() as scratch:
                networks = begun(options.at or (Path(scratch) / "store").as_uri(), Path(scratch), count)
                try:
                    told = [round_of(networks, pairs, 0, options.values)]
                    before = sum(network.traffic.requests for network in networks)
                    for number in range(1, options.rounds + 1):
                        time.sleep(options.pause)
                        told.append(round_of(networks, pairs, number, options.values))
                    requests = sum(network.traffic.requests for network in networks) - before
                finally:
                    for network in networks:
                        network.close()
                who = "pairs" if pairs else "all"
                seconds, met = zip(*told[1:], strict=True)
                rows.append((count, who, mean(met), median(seconds), requests / count / options.rounds))
    columns = {"peers": "d", "meet": "", "met": ".0%", "seconds": ".2f", "requests a peer and round": ".1f"}
    return Table(columns, rows, f"{4e-6 * options.values:g} MB a message, median of {options.rounds} rounds")


def peer(name: str, folder: Path, number: int, parameters: int, rounds: int) -> None:
    """Holds rounds in which little is computed; prints the seconds of each that met, and the bytes of one."""
    ticket = read_ticket(folder / "run.ticket")
    info = newcomer_info(ticket, f"peer-{number}") | {"trains": True}
    network = FolderNetwork(Presence(ticket, Identity(folder / f"{number}.key"), info, print, DEADLINE / 4), DEADLINE)
    until(lambda: len(network.members()) == 2, DEADLINE, "the other peer")
    model, optimizer = model_of(parameters, number, lr=1e-3)
    outcomes, seconds = list[str](), list[float]()
    with METHODS[name]().attach(model, optimizer, network, on_round=lambda round: outcomes.append(round.outcome)):
        for turn in range(1 + rounds):
            (folder / f"{turn} {number}").touch()
            until(lambda: all((folder / f"{turn} {one}").exists() for one in range(2)), DEADLINE, "it")  # noqa: B023
            before, began = network.traffic.bytes_sent, time.monotonic()
            optimizer.step()
            seconds.append(time.monotonic() - began if outcomes[-1] == "averaged" else math.inf)
            sent = network.traffic.bytes_sent - before
    network.close()
    print(json.dumps({"seconds": seconds[1:], "sent": sent}))


def webdav() -> type[WebDav]:
    """The server on the third host."""
    return WebDav if missing("nginx") else Nginx


def at_rate(options: Options, name: str) -> tuple[Cell, ...]:
    """A method's row: the median of a round's seconds, of the slower of both, beside line rate one way."""
    with NetLab(3, options.rate_mbit, {2: 100 * options.rate_mbit}) as lab, tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        with webdav()(folder / "files", lab.hosts[2]) as server:
            Ticket.new("bench", {}).at((server.url,)).write(folder / "run.ticket")
            outputs = run_everywhere(
                lab.hosts[:2],
                lambda number: [
                    *(sys.executable, "-m", __name__, name, scratch, str(number)),
                    *(str(options.parameters), str(options.rounds)),
                ],
                lambda number: {"OMP_NUM_THREADS": "1", **server.environment},
                timeout_s=300,
            )
    told = [json.loads(output.splitlines()[-1]) for output in outputs]
    seconds = median(max(both) for both in zip(*(one["seconds"] for one in told), strict=True))
    limit = max(one["sent"] for one in told) * 8e-6 / options.rate_mbit
    return name, seconds, limit, seconds / limit, limit * options.rate_mbit / 8


def run(options: Options, store: Store) -> Iterator[Part]:
    if "requests" in options.parts:
        yield requests(options)
        size, prices = 4.0 * options.values, Folder()
        for count in options.peers:
            one = passage(count, [1.0], size)
            cost = 10_000 * prices.price(one.writes, one.reads, one.down)
            asked = 10_000 * prices.price(one.writes, one.reads, 0.0)
            what = f"{cost:.2f} {prices.currency} at S3's list prices, {asked:.2f} of it for requests"
            yield f"10,000 rounds of all {count}, a peer, by the planner: {what}"
    if "rate" in options.parts:
        about = f"{options.parameters:,} float32 parameters, two hosts at {options.rate_mbit:g} Mbit/s each way"
        about += f", {webdav().kind}"
        columns = {"round": "", "seconds": ".2f", "line rate, one way": ".2f", "ratio": ".2f", "MB sent": ".2f"}
        yield Table(columns, [at_rate(options, name) for name in METHODS], about)


if __name__ == "__main__":
    name, folder, *numbers = sys.argv[1:]
    peer(name, Path(folder), *map(int, numbers))
