"""Peers of a run on the internet that are islands of given shapes, have keys of their own and step at one time.

    python -m bench.lib.shapes STEP_MS PROCESSES FOLDER ARGUMENTS     `farflung join` in one of so many processes

Many processes on few cores would drift apart, and their rounds would show how they miss each other. So each step takes
a fixed time, and ends in all processes at once: each leaves a file for it in the folder, and waits for the others'.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from farflung.files import event_files
from farflung.networks.internet import Identity
from farflung.pipeline import IslandShape
from farflung.testing.hosts import Host, free_port
from farflung.testing.peers import PeerProcess, write_ticket
from farflung.testing.waiting import until
from farflung.training.terminal import BEGIN_WITH

WHOLE = IslandShape()
LONGEST_STEP_S = 120.0
FIRST_STEPS = 5
"""They take twice as long, so that all hear before the first round that the others train."""


def keys_in(folder: Path, count: int) -> list[Path]:
    """So many keys, made where there are none: peers that have the same ones are the same replicas."""
    return [Identity(folder / f"{number}.key").path for number in range(count)]


@contextmanager
def shaped(
    folder: Path,
    hosts: Sequence[Host],
    shapes: Sequence[IslandShape],
    keys: Sequence[Path],
    step_ms: float,
    settings: Mapping[str, Any],
) -> Iterator[list[PeerProcess]]:
    """A run's peers, each on its host, of its shape, with its key; they begin together, and leave nobody behind."""
    shutil.rmtree(folder, ignore_errors=True)
    port, apart = free_port(), len({host.address for host in hosts}) == len(hosts)
    ticket = folder / "run.ticket"
    write_ticket(ticket, keys[0], hosts[0].address, port, folder.name, **settings)
    begin, processes = {BEGIN_WITH: str(len(shapes))}, sum(shape.processes for shape in shapes)
    peers = []
    try:
        for number, (host, shape, key) in enumerate(zip(hosts, shapes, keys, strict=True)):
            peer = PeerProcess(host, folder / f"replica-{number}", ticket, port if apart or not number else 0)
            peer = replace(peer, command=_command(shape, step_ms, processes, folder))
            peer.folder.mkdir(parents=True)
            shutil.copy(key, peer.folder / "peer.key")
            divided = ["--stages", str(shape.stages), "--shard", str(shape.shards)] if shape.processes > 1 else []
            peer.start(*divided, *([] if number else ["--first"]), env=begin)
            peers.append(peer)
            if not number:
                until(lambda: event_files(peers[0].folder) or not peers[0].lives, 180, f"the start of {peer.folder}")
        yield peers
    finally:
        for peer in peers:
            peer.kill()


def ended(peer: PeerProcess, timeout_s: float) -> PeerProcess:
    """A peer that has come to the run's last step. Raises RuntimeError, with what it has said, where it has not."""
    assert peer.process is not None
    if peer.process.wait(timeout_s):
        raise RuntimeError(f"{peer.folder}: {peer.log.read_text()[-2000:]}")
    return peer


def _command(shape: IslandShape, step_ms: float, among: int, folder: Path) -> Sequence[str]:
    """What starts a peer's processes, before its ticket: for an island torchrun, so that all of them keep step."""
    own = ("-m", "bench.lib.shapes", str(step_ms), str(among), str(folder / "steps"))
    if shape == WHOLE:
        return (sys.executable, *own)
    processes = ("--nproc-per-node", str(shape.processes), "--master-addr", "127.0.0.1")
    return (sys.executable, "-m", "torch.distributed.run", *processes, "--master-port", str(free_port()), *own)


def keep_step(island: Any, seconds: float, folder: Path, processes: int) -> None:
    """Lets each step of such islands take so long at least, and until all of the run's processes are at its end."""
    gradients = island.gradients

    def in_step(self: Any, step: int) -> tuple[float, str]:
        ends = time.monotonic() + seconds * (2 if step < FIRST_STEPS else 1)
        result: tuple[float, str] = gradients(self, step)
        time.sleep(max(0.0, ends - time.monotonic()))
        there = folder / str(step)
        there.mkdir(parents=True, exist_ok=True)
        (there / str(os.getpid())).touch()
        until(lambda: len(list(there.iterdir())) >= processes, LONGEST_STEP_S, f"the others' step {step}")
        return result

    island.gradients = in_step


def main(step_ms: float, processes: int, folder: Path, arguments: list[str]) -> None:
    """`farflung join`, in step with the others."""
    from farflung.cli import main as command
    from farflung.pipeline.divided import DividedIsland
    from farflung.pipeline.island import WholeIsland

    for island in (WholeIsland, DividedIsland):
        keep_step(island, step_ms / 1e3, folder, processes)
    sys.argv = ["farflung", "join", *arguments]
    command()


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
