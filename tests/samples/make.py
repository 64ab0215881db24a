"""Writes the samples of the formats as they are now: python tests/samples/make.py N, with the next N that is free."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from farflung.events import (
    CheckpointEvent,
    JoinedEvent,
    LearntEvent,
    StartEvent,
    StepEvent,
    TextEvent,
    WarningEvent,
    events_in,
    line_of,
)
from farflung.networks.internet import Identity, ListenAddress, Peers, Ticket, newcomer_info
from farflung.networks.internet.contact.handshake import Handshake
from farflung.networks.peers.frames import Frame, read_frame, write_frame

HERE = Path(__file__).parent
SETTINGS = {
    "network": "simulated",
    "replicas": 2,
    "steps": 4,
    "every": 2,
    "delay": 1,
    "codec": "ef-int8",
    "model": "model",
    "data": "text.txt",
    "sequence-length": 8,
    "batch-size": 2,
    "max-tokens": 3000,
    "eval-every": 2,
    "eval-sequences": 2,
    "checkpoint-every": 2,
    "log-every": 1,
    "warmup": 0,
    "tail-average": 0.5,
}


def run_folder(folder: Path) -> None:
    flags = [word for name, value in SETTINGS.items() for word in (f"--{name}", str(value))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "farflung", "train", *flags, "--out", folder.name]
    subprocess.run(command, cwd=HERE, check=True, env=environment)
    (folder / "report.html").unlink()
    shutil.rmtree(folder / "checkpoints" / "step-000004")
    for path in folder.glob("events/*"):
        path.write_text(re.sub('"host": "[^"]*"', '"host": "here"', path.read_text()))


def events(path: Path, run: Path) -> None:
    found, _ = events_in((run / "events" / "replica-0.jsonl").read_bytes(), "")
    found = [*found[:6], next(event for event in found if isinstance(event, CheckpointEvent)), found[-1]]
    found[0] = StartEvent(**{**vars(found[0]), "network": "internet", "clock": 1.75e9})
    found[1] = StepEvent(**{**vars(found[1]), "refused": {"stranger": 3}, "peak_memory": 1 << 30})
    found[1:1] = [JoinedEvent(step=0, at=0.1, seconds=0.1), WarningEvent(step=0, at=0.1, message="round 1: peer lost")]
    found.insert(4, LearntEvent(step=1, at=0.12, microbatches=[[7, 3, 0, 1], [9, 3, 1]], unlearnt=[[7, 2, 1]]))
    found.insert(-1, TextEvent(step=2, at=0.3, text="The quick brown …\n<b>fox</b>"))
    found.insert(-1, TextEvent(step=2, at=0.3, text="letters", picture="aVZCT1I="))
    path.write_bytes(b"".join(line_of(event) + b"\n" for event in found))


def handshake(folder: Path) -> None:
    """What two peers say to each other first, in order, by whom."""
    folder.mkdir()
    ticket = Ticket.new("sample", {"model": "micro"})
    ticket.write(folder / "ticket")
    with tempfile.TemporaryDirectory() as keys:
        asker, answerer = (Identity(Path(keys) / name) for name in ("asker", "answerer"))
    frames = asyncio.run(said(ticket, asker, answerer))
    (folder / "frames.jsonl").write_text("".join(f"{json.dumps(frame)}\n" for frame in frames))


async def said(ticket: Ticket, asker: Identity, answerer: Identity) -> list[Frame]:
    """The frames of a handshake."""
    frames: list[Frame] = []

    class Writer:
        def __init__(self, to: asyncio.StreamReader) -> None:
            self.to = to

        def write(self, data: bytes) -> None:
            frames.append(json.loads(data[4:]))
            self.to.feed_data(data)

        async def drain(self) -> None:
            pass

    info = newcomer_info(ticket) | {"host": "here"}
    peers = [Peers(ticket, identity, ListenAddress(), info) for identity in (asker, answerer)]
    one, other = (Handshake(ticket, each.identity.peer, each.info, each.record) for each in peers)
    to_asker, to_answerer = asyncio.StreamReader(), asyncio.StreamReader()
    opening = asyncio.create_task(one.open(answerer.peer, (to_asker, Writer(to_answerer))))  # type: ignore[arg-type]
    hello = await read_frame(to_answerer)
    await other.answer(hello, asker.peer, (to_answerer, Writer(to_asker)))  # type: ignore[arg-type]
    await write_frame(Writer(to_asker), peers[1].record())  # type: ignore[arg-type]
    await opening
    return frames


if __name__ == "__main__":
    number = sys.argv[1]
    run_folder(HERE / f"run-{number}")
    events(HERE / f"events-{number}.jsonl", HERE / f"run-{number}")
    handshake(HERE / f"handshake-{number}")
