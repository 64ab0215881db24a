"""Peers in real processes of the command line, on loopback."""

from __future__ import annotations

from pathlib import Path

from patience import patience, until
from processes import free_port
from warm import Python

from farflung.events import RoundEvent, StepEvent
from farflung.report.read import E, Run

SETTINGS = [
    *("--model", "micro", "--every", 10, "--batch-size", 2, "--sequence-length", 32, "--eval-sequences", 4),
    *(
        "--eval-every",
        50,
        "--log-every",
        1,
        "--checkpoint-every",
        20,
        "--max-tokens",
        200_000,
        "--deadline",
        patience(15),
    ),
]


class Swarm:
    """Peers in processes of their own, in one folder; `program` is what Python runs."""

    def __init__(self, folder: Path, *program: object) -> None:
        self.folder, self.program = folder, program or ("-m", "farflung")
        self.port = free_port()
        self.processes: list[Python] = []

    def start(self, *arguments: object, log: str) -> Python:
        files = {"out": self.folder / f"{log}.out", "err": self.folder / f"{log}.err"}
        process = Python(*self.program, *arguments, "--listen", "127.0.0.1", cwd=self.folder, **files)
        self.processes.append(process)
        return process

    def invite(self, *settings: object, steps: int = 100_000) -> Python:
        """The first peer, which trains; its ticket comes to run.ticket."""
        arguments = ("invite", "--name", "test", "--train", "--port", self.port, *SETTINGS, "--steps", steps)
        process = self.start(*arguments, "--out", "first", *settings, log="first")
        until(lambda: "[settings]" in (self.folder / "first.out").read_text())
        (self.folder / "run.ticket").write_text((self.folder / "first.out").read_text())
        return process

    def join(self, name: str, *arguments: object, ticket: str = "run.ticket") -> Python:
        return self.start("join", ticket, "--out", name, *arguments, log=name)

    def events(self, name: str, kind: type[E]) -> list[E]:
        run = Run(self.folder / name)
        run.refresh()
        return [event for replica in run.replicas for event in run.of(replica, kind)]

    def step(self, name: str) -> int:
        return int(max((event.step for event in self.events(name, StepEvent)), default=0))

    def averaged(self, name: str) -> int:
        return [event.outcome for event in self.events(name, RoundEvent)].count("averaged")

    def said(self, name: str) -> str:
        return (self.folder / f"{name}.err").read_text()

    def told(self, name: str) -> str:
        """What it has printed, apart from what it says."""
        return (self.folder / f"{name}.out").read_text()
