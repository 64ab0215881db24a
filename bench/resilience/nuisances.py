"""What does a run make of a peer that stands still, a full disk, a clock that is off, a read-only folder?
On the internet network, in namespaces: a process stopped for 30 s, a disk of 16 MB filled up, a clock off by an hour,
a folder that cannot be written; the run is to go on, and each fault to be told in a clear line. Takes four minutes,
as root.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from bench.lib.hardship import CLOCK, Check, Hardship, check, checks, running
from bench.lib.store import Store
from bench.lib.table import Part
from farflung.events import CheckpointEvent, RoundEvent, StepEvent, WarningEvent
from farflung.testing.hosts import unavailable
from farflung.testing.peers import PeerProcess

needs = unavailable


@dataclass(frozen=True)
class Options(Hardship):
    peers: int = 4
    """Peers, of which the last is the one that cannot begin."""
    refusals: bool = True
    """Whether to see what a peer says that cannot begin."""


SMOKE = Options(peers=3, step_ms=20, pace=0.03, refusals=False)


def run(options: Options, store: Store) -> Iterator[Part]:
    with running(options, store, "nuisance") as (_, peers):
        *training, refused = peers
        with small_disk(training[-1].folder):
            peers.start(len(training))
            options.wait(15)
            rows = [*stand_still(options, training[1], [training[0], *training[2:]]), *full_disk(options, training[-1])]
            if options.refusals:
                rows += refusals(refused)
            for peer in peers:
                peer.kill()
    yield checks(rows)


@contextlib.contextmanager
def small_disk(folder: Path, room_mb: int = 16) -> Iterator[None]:
    """A folder with little room."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={room_mb}m", "tmpfs", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False)


def stand_still(options: Options, still: PeerProcess, others: list[PeerProcess]) -> list[Check]:
    assert still.process is not None  # `ip netns exec` becomes the peer's own process
    os.kill(still.process.pid, signal.SIGSTOP)
    stood = time.time()
    options.wait(30)
    os.kill(still.process.pid, signal.SIGCONT)
    awake = time.time()
    options.wait(40)
    meanwhile = [len(peer.since(StepEvent, stood)) - len(peer.since(StepEvent, awake)) for peer in others]
    met = sum(event.outcome == "averaged" for event in still.since(RoundEvent, awake))
    return [
        check(
            "a peer stopped for 30 s: the others' steps",
            str(meanwhile),
            "the run goes on",
            min(meanwhile, default=0) > 60 * options.pace,
        ),
        check("its rounds in the 40 s after", str(met), "it comes back", met > 0),
    ]


def full_disk(options: Options, peer: PeerProcess) -> list[Check]:
    filler = peer.folder / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:  # the peer writes meanwhile, too
        while free(peer.folder) > 100_000:
            file.write(bytes(50_000))
    options.wait(25)
    said = [event.message for event in peer.events(WarningEvent) if "no checkpoint" in event.message]
    told = check("a full disk", said[-1][:80] if said else "nothing said", "a clear message", bool(said) and peer.lives)
    filler.unlink()
    before = len(peer.events(CheckpointEvent))
    options.wait(15)
    after = len(peer.events(CheckpointEvent))
    return [told, check("checkpoints once there is room again", f"{after - before}", "nothing lost", after > before)]


def free(folder: Path) -> int:
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def refusals(peer: PeerProcess) -> list[Check]:
    clock = said_by(peer, {CLOCK: "3600"})
    folder = said_by(peer, {}, "--out", "/proc/farflung")
    return [
        check("a clock off by an hour", clock[:120], "a clear message", "clock is 3600 s ahead" in clock),
        check("a read-only folder", folder[:120], "a clear message", "choose another folder" in folder),
    ]


def said_by(peer: PeerProcess, env: Mapping[str, str], *arguments: str) -> str:
    """The last line of a peer that does not get as far as training."""
    peer.start(*arguments, env=env)
    assert peer.process is not None
    peer.process.wait(60)
    return peer.log.read_text().splitlines()[-1]
