"""How long a NoLoCo round takes between two peers on a slow link, beside hivemind's own averager on the same link.

    sudo python bench/internet_round.py [--parameters 5000000] [--rate-mbit 100]

Real processes on hosts in network namespaces of this machine (see netlab.py), over encrypted libp2p streams. Nothing
is overlapped: a round's whole time is measured, meeting, encoding, signing and checking included.
"""

from __future__ import annotations

import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
import tyro

from farflung import methods
from farflung.codecs import Modulo
from farflung.networks.internet import Identity, InternetNetwork, ListenAddress, Peers, Ticket, read_ticket

WARM_UP, MEASURED, PORT = 1, 5, 4777
METHODS = {
    "noloco": lambda: methods.noloco(every=1),
    "noloco, modulo4": lambda: methods.noloco(every=1, codec=Modulo(bits=4)),
}


@dataclass(frozen=True)
class Options:
    parameters: int = 5_000_000
    """Float32 parameters."""
    rate_mbit: float = 100.0
    """Each host's link, each way."""


def joined(folder: Path, number: int, address: str) -> InternetNetwork:
    """A peer's seat; who is not first tries until the first is there."""
    info = {"version": "1", "settings": "", "shapes": "", "host": f"host-{number}", "trains": True}
    local = ListenAddress(address, PORT)
    while True:
        try:
            identity, ticket = Identity(folder / f"{number}.key"), read_ticket(folder / "run.ticket")
            peers = Peers(ticket, identity, local, info, first=number == 0)
            return InternetNetwork(peers, largest=1 << 27, deadline=60)
        except ValueError:
            time.sleep(0.5)


def peer(method: str, folder: Path, number: int, address: str, parameters: int) -> None:
    """Holds rounds in which little is computed; prints the median of their seconds, and the bytes sent in one."""
    torch.set_num_threads(1)
    network = joined(folder, number, address)
    while len(network.members()) < 2:
        time.sleep(0.1)
    torch.manual_seed(0)
    side = 500
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.randn(side, side)) for _ in range(parameters // side**2)])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    torch.manual_seed(number)
    for parameter in model:
        parameter.grad = torch.randn_like(parameter)  # so that replicas move apart, each its own way
    seconds: list[float] = []
    with METHODS[method]().attach(model, optimizer, network, on_round=lambda round: outcomes.append(round.outcome)):
        for ready in range(WARM_UP + MEASURED):
            network.exchange(torch.zeros(1, dtype=torch.uint8), network.members(), f"all ready {ready}").wait(60)
            before, began = network.traffic.bytes_sent, time.monotonic()
            optimizer.step()
            seconds.append(time.monotonic() - began)
    averaged = [s for s, outcome in zip(seconds, outcomes, strict=True) if outcome == "averaged"][WARM_UP:]
    assert len(averaged) >= MEASURED - 1, outcomes
    print(median(averaged), network.traffic.bytes_sent - before)
    time.sleep(1)
    network.close()


outcomes: list[str] = []


def averager(folder: Path, number: int, address: str, parameters: int) -> None:
    """The same with hivemind's averager, whose group of two meets by its own matchmaking."""
    import hivemind

    torch.set_num_threads(1)
    meeting = folder / "hivemind"
    host = [f"/ip4/{address}/tcp/{PORT + 1}"]
    if number:
        while not meeting.exists():
            time.sleep(0.1)
    peers = meeting.read_text().split() if number else None
    dht = hivemind.DHT(initial_peers=peers, host_maddrs=host, start=True, nat_port_map=False, auto_nat=False)
    if not number:
        (folder / "new").write_text("\n".join(map(str, dht.get_visible_maddrs())))
        (folder / "new").rename(meeting)
    mean = hivemind.averaging.DecentralizedAverager(
        [torch.randn(parameters)],
        dht,
        prefix="bench",
        target_group_size=2,
        min_matchmaking_time=1.0,
        request_timeout=0.9,
        start=True,
    )
    seconds = []
    for _ in range(WARM_UP + MEASURED):
        time.sleep(2)
        control = mean.step(wait=False, require_trigger=True, timeout=60)
        while control.stage.name != "AWAITING_TRIGGER":
            time.sleep(0.005)  # its search for partners has a clock of its own, and is not measured
        began = time.monotonic()
        control.allow_allreduce()
        control.result(60)
        seconds.append(time.monotonic() - began)
    print(median(seconds[WARM_UP:]), 4 * parameters)
    time.sleep(2)
    mean.shutdown()
    dht.shutdown()


def main(options: Options) -> None:
    from netlab import NetLab

    print(f"{options.parameters:,} float32 parameters, two hosts at {options.rate_mbit:g} Mbit/s each way")
    print(f"{'round':24} {'seconds':>8} {'line rate':>9} {'ratio':>6} {'MB sent':>8}")
    for name in (*METHODS, "hivemind averager"):
        with NetLab(2, options.rate_mbit) as lab, tempfile.TemporaryDirectory() as scratch:
            first = Identity(Path(scratch, "0.key")).peer
            ticket = Ticket.new("bench", {}).at((f"/ip4/{lab.hosts[0].address}/tcp/{PORT}/p2p/{first}",))
            ticket.write(Path(scratch, "run.ticket"))
            outputs = lab.run_everywhere(
                lambda number: [
                    *(sys.executable, __file__, "--peer", name, scratch, str(number)),  # noqa: B023
                    *(lab.hosts[number].address, str(options.parameters)),
                ],
                lambda number: {"OMP_NUM_THREADS": "1", "HIVEMIND_LOGLEVEL": "CRITICAL"},
                timeout=180,
            )
        slowest = max(float(output.split()[0]) for output in outputs)
        sent = max(int(output.split()[1]) for output in outputs)
        limit = sent * 8e-6 / options.rate_mbit
        print(f"{name:24} {slowest:8.2f} {limit:9.2f} {slowest / limit:6.2f} {sent / 1e6:8.2f}", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--peer"]:
        name, folder, number, address, parameters = sys.argv[2:7]
        if name in METHODS:
            peer(name, Path(folder), int(number), address, int(parameters))
        else:
            averager(Path(folder), int(number), address, int(parameters))
    else:
        main(tyro.cli(Options, description=__doc__))
