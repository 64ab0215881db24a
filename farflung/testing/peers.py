"""Peers of a run on the internet: its ticket, networks in this process, and `farflung join` in processes."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from farflung.events import StartEvent, StepEvent
from farflung.networks.internet import Identity, InternetNetwork, ListenAddress, Peers, Ticket, read_ticket
from farflung.report.read import E, Run
from farflung.testing.hosts import Host, Process
from farflung.testing.waiting import until


def write_ticket(path: Path, key: Path, address: str, port: int, name: str = "test", **settings: Any) -> Ticket:
    """Writes the ticket of a run whose first peer has its key in `key` and listens at an IPv4 address and port."""
    ticket = Ticket.new(name, settings).at((f"/ip4/{address}/tcp/{port}/p2p/{Identity(key).peer}",))
    ticket.write(path)
    return ticket


def join_network(
    folder: Path, number: int, address: str, port: int, deadline_s: float, fetched: Path | None = None
) -> InternetNetwork:
    """Joins the run whose ticket is FOLDER/run.ticket, as a member that trains; the first has its key in FOLDER/0.key.

    All but the first, which listens at `port`, wait until it is there. Raises TimeoutError. For `fetched`, see
    InternetNetwork.
    """
    opened = folder / "opened"
    if number:
        until(opened.exists, deadline_s, "the first peer")
    peers = Peers(
        read_ticket(folder / "run.ticket"),
        Identity(folder / f"{number}.key"),
        ListenAddress(address, 0 if number else port),
        {"version": "1", "settings": "", "shapes": "", "host": f"host-{number}", "trains": True},
        first=not number,
    )
    network = InternetNetwork(peers, largest=1 << 27, deadline=deadline_s, fetched=fetched)
    opened.touch()
    return network


@dataclass
class PeerProcess:
    """A `farflung join` on a host, with a run folder of its own; what it says goes to FOLDER.log."""

    host: Host
    folder: Path
    ticket: Path
    port: int = 0
    command: Sequence[str] = (sys.executable, "-m", "farflung", "join")
    process: Process | None = field(default=None, repr=False)

    def start(self, *arguments: str, ticket: Path | None = None, env: Mapping[str, str] | None = None) -> None:
        """Joins, or comes back."""
        where = ["--listen", self.host.address, "--port", str(self.port), "--out", str(self.folder)]
        with self.log.open("a") as log:
            self.process = self.host.popen(
                [*self.command, str(ticket or self.ticket), *where, *arguments],
                {"OMP_NUM_THREADS": "1", **(env or {})},
                stdout=log,
                stderr=log,
            )

    @property
    def log(self) -> Path:
        """What its processes have said."""
        return self.folder.with_name(f"{self.folder.name}.log")

    @property
    def lives(self) -> bool:
        """Whether its process runs."""
        return self.process is not None and self.process.poll() is None

    def kill(self) -> None:
        """As a power failure would: the process, and the daemon that is its child with it."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def events(self, kind: type[E]) -> list[E]:
        """What it says has happened, of one kind."""
        run = Run(self.folder)
        run.refresh()
        return [event for replica in run.replicas for event in run.of(replica, kind)]

    def since(self, kind: type[E], moment: float) -> list[E]:
        """What has happened since a moment of the wall clock, by when it began."""
        start = self.events(StartEvent)[-1]
        origin = (start.clock or 0.0) - start.at
        return [e for e in self.events(kind) if origin + getattr(e, "started", e.at) > moment]


class PeerProcesses:
    """Peers of one run, the first of which its ticket leads to; leaving the context kills them all.

    The folder gets the ticket and a run folder for each peer; each has a host. The first listens at the port, and so do
    others that have addresses of their own. Commands start each peer, before its ticket; `farflung join` unless given.
    """

    def __init__(
        self,
        folder: Path,
        hosts: Sequence[Host],
        port: int,
        settings: Mapping[str, Any],
        commands: Sequence[Sequence[str]] = (),
    ) -> None:
        self.folder = folder
        self.ticket_path = folder / "run.ticket"
        self.ticket = write_ticket(
            self.ticket_path, folder / "peer-0" / "peer.key", hosts[0].address, port, folder.name, **settings
        )
        self._peers = []
        for number, host in enumerate(hosts):
            own = port if number == 0 or host.address != hosts[0].address else 0
            peer = PeerProcess(host, folder / f"peer-{number}", self.ticket_path, own)
            self._peers.append(replace(peer, command=commands[number]) if commands else peer)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for peer in self._peers:
            peer.kill()

    def __getitem__(self, number: int) -> PeerProcess:
        return self._peers[number]

    def __len__(self) -> int:
        return len(self._peers)

    def __iter__(self) -> Iterator[PeerProcess]:
        return iter(self._peers)

    def start(self, count: int, timeout_s: float = 180) -> None:
        """Starts the first, and `count` - 1 others when it is there; returns when all train. Raises TimeoutError."""
        self[0].start("--first")
        self.wait_for_steps([self[0]], 1, timeout_s)
        for number in range(1, count):
            self[number].start()
        self.wait_for_steps(self._peers[:count], 1, timeout_s)

    def wait_for_steps(self, peers: Iterable[PeerProcess], steps: int, timeout_s: float = 180) -> None:
        """Until each of them has trained so many steps. Raises TimeoutError, or RuntimeError where one ends before."""
        chosen = list(peers)

        def trained(peer: PeerProcess) -> bool:
            lives = peer.lives  # asked before the events, of which it may write the last and end
            if len(peer.events(StepEvent)) >= steps:
                return True
            if not lives:
                raise RuntimeError(f"{peer.log} ends before step {steps}: {peer.log.read_text()[-500:]}")
            return False

        what = f"{steps} steps of each peer (see the logs in {self.folder})"
        until(lambda: all(trained(peer) for peer in chosen), timeout_s, what)

    def wait(self, timeout_s: float) -> None:
        """Until all that were started have come to the run's last step. Raises TimeoutError."""
        ends = time.monotonic() + timeout_s
        for peer in self._peers:
            if peer.process is None:
                continue
            try:
                peer.process.wait(max(0.1, ends - time.monotonic()))
            except subprocess.TimeoutExpired as error:
                raise TimeoutError(f"the run has not ended; see {peer.log}") from error
