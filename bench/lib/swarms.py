"""Swarms of real `farflung join` processes, whose passes are stretched as if their machines computed longer.

python -m bench.lib.swarms '{"pass_ms": 100, …}' ARGUMENTS     `farflung join`, as that Seating says
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.lib.store import Store
from farflung.events import Event, LearntEvent, StartEvent, StepEvent, events_in
from farflung.testing.hosts import LOOPBACK, Host, NetLab, free_port
from farflung.testing.peers import PeerProcess, PeerProcesses
from farflung.testing.waiting import until
from farflung.training.forks import BY_PEERS, import_ahead, run_module, starting
from farflung.training.terminal import BEGIN_WITH

PORT = 4600
FORWARD = 1 / 3
"""The forward pass's share of a microbatch's seconds."""
BEGINS_S = 600.0
"""How long a swarm may take until all its peers train: they import at the same time."""
COMMON = {"model": "tiny", "every": 20, "eval_every": 100_000, "checkpoint_every": 20, "log_every": 1, "deadline": 30.0}


class WarmHost(Host):
    """This machine's loopback, whose processes are forks of one that has imported what they need."""

    def popen(self, arguments: list[str], env: Mapping[str, str] | None = None, **options: Any) -> Any:
        """See Host; of `python -m MODULE …`."""
        context = import_ahead((*BY_PEERS, "farflung.networks.internet", "farflung.swarm.island"))
        _, _, *told = arguments
        process = context.Process(target=run_module, args=(dict(env or {}), told, Path(options["stdout"].name)))
        with starting():
            process.start()
        return Forked(process)


@dataclass
class Forked:
    """A fork, with what is needed here of subprocess.Popen."""

    process: Any

    @property
    def pid(self) -> int:
        """Its number."""
        return int(self.process.pid)

    @property
    def returncode(self) -> int | None:
        """How it ended, if it has."""
        code: int | None = self.process.exitcode
        return code

    def poll(self) -> int | None:
        """See Popen."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int | None:
        """See Popen."""
        self.process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("a peer", timeout or 0.0)
        return self.returncode

    def kill(self) -> None:
        """See Popen."""
        self.process.kill()


@dataclass(frozen=True)
class Seating:
    """One peer: its stage, what a microbatch takes it, both passes, and what else is unlike a user's."""

    stage: int
    pass_ms: float = 0.0
    max_mb: float = 0.0
    """Of data that the process may hold (RLIMIT_DATA); 0 sets no limit."""
    permuted: bool = False
    """Whether microbatches take NoLoCo's random routes, and not the throughput's."""
    look_ahead: bool = False
    """Whether it computes with the weights that it expects when the gradient comes."""


@contextmanager
def swarm(
    store: Store, name: str, seats: Sequence[Seating], rate_mbit: float = 0.0, **settings: Any
) -> Iterator[PeerProcesses]:
    """Peers that all train, on links of their own where a rate is given, else on loopback. A None is no setting."""
    shutil.rmtree(store.scratch / name, ignore_errors=True)
    given = {**COMMON, "swarm": True, "stages": 1 + max(seat.stage for seat in seats), **settings}
    everything = {name: value for name, value in given.items() if value is not None}
    commands = [(sys.executable, "-m", __name__, json.dumps(dataclasses.asdict(seat))) for seat in seats]
    with _hosts(len(seats), rate_mbit) as hosts:
        port = PORT if rate_mbit else free_port()
        with PeerProcesses(store.scratch / name, hosts, port, everything, commands) as peers:
            for peer, seat in zip(peers, seats, strict=True):
                peer.folder.mkdir(parents=True, exist_ok=True)
                (peer.folder / "stage").write_text(f"{seat.stage}\n")  # as if it had served that before
            mates = Counter(seat.stage for seat in seats)
            together = [
                {BEGIN_WITH: str(mates[seat.stage])} for seat in seats
            ]  # else a short run is over before all came
            peers[0].start("--first", env=together[0])
            until((peers[0].folder / "run.ticket").exists, BEGINS_S, "the first peer")
            for peer, env in zip(list(peers)[1:], together[1:], strict=True):
                peer.start(env=env)
            peers.wait_for_steps(peers, 1, BEGINS_S)
            yield peers


@contextmanager
def _hosts(count: int, rate_mbit: float) -> Iterator[Sequence[Host]]:
    if not rate_mbit:
        yield [WarmHost(LOOPBACK.namespace, LOOPBACK.interface, LOOPBACK.address)] * count
        return
    with NetLab(count, rate_mbit) as lab:
        yield lab.hosts


def keep_events(peer: PeerProcess) -> None:
    """Keeps what a dead peer's events were: it goes on from a checkpoint, and what came after that is no more."""
    kept = peer.folder / "lives"
    kept.mkdir(exist_ok=True)
    for file in peer.folder.glob("events/*.jsonl"):
        shutil.copy(file, kept / f"{len(list(kept.iterdir()))}-{file.name}")


def lived(peer: PeerProcess) -> Iterator[tuple[float, Event]]:
    """All that has happened to a peer, also what it has lost since, and when."""
    seen: set[bytes] = set()
    for file in [*sorted((peer.folder / "lives").glob("*")), *peer.folder.glob("events/*.jsonl")]:
        origin = 0.0
        for line in file.read_bytes().splitlines():
            for event in events_in(line, str(file))[0]:
                if isinstance(event, StartEvent):
                    origin = (event.clock or 0.0) - event.at
                if line not in seen:
                    yield origin + event.at, event
            seen.add(line)


def timed(peer: PeerProcess) -> Iterator[tuple[float, int, Event]]:
    """What has happened to a peer: moments of the wall clock, the stage that it served, and what it was."""
    served = [(int(path.name.rpartition("-")[2]), path) for path in sorted(peer.folder.glob("earlier/*-stage-[0-9]*"))]
    served.append((int((peer.folder / "stage").read_text()), peer.folder))
    for stage, file in [(stage, file) for stage, folder in served for file in folder.glob("events/*.jsonl")]:
        origin = 0.0
        for event in events_in(file.read_bytes().rpartition(b"\n")[0], str(file))[0]:
            if isinstance(event, StartEvent):
                origin = (event.clock or 0.0) - event.at
            yield origin + event.at, stage, event


Names = Counter[tuple[int, ...]]


def learnt(peers: PeerProcesses, stage: int, begin: float = 0.0, end: float = float("inf")) -> Names:
    """How often a stage counts each microbatch, by the ledgers of all that have served it between two moments."""
    found: Names = Counter()
    for peer in peers:
        for at, served, event in timed(peer):
            if served == stage and begin < at <= end and isinstance(event, LearntEvent):
                for sign, told in ((1, event.microbatches), (-1, event.unlearnt or [])):
                    for stream, step, *numbers in told:
                        for number in numbers:
                            found[stream, step, number] += sign
    return found


def lives(peer: PeerProcess, deaths: Sequence[float]) -> list[tuple[float, float]]:
    """From when until when a peer trained, by the moments of its deaths."""
    began = [at for at, event in lived(peer) if isinstance(event, StartEvent)]
    return [(at, min(end for end in [*deaths, float("inf")] if end > at)) for at in began]


def losses(peer: PeerProcess) -> list[tuple[float, float]]:
    """A peer's training losses, and when it had them."""
    return [(at, e.loss) for at, _, e in timed(peer) if isinstance(e, StepEvent) and e.loss is not None]


def judged(peers: PeerProcesses) -> float:
    """The validation loss of a swarm that has ended, whose first peer is a head."""
    return float(json.loads((peers[0].folder / "summary.json").read_text())["validation_loss"])


def seated(seating: Seating, arguments: list[str]) -> None:
    """`farflung join` with a peer's seating."""
    if seating.max_mb:
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (int(seating.max_mb * 1e6),) * 2)
        threading.stack_size(1 << 19)  # 8 MB else, which count though no thread uses them
    from farflung.cli import main as command
    from farflung.swarm import seat
    from farflung.swarm.routers import PermutationRouter
    from farflung.swarm.work import StageWork

    if seating.pass_ms:
        StageWork.forward = _stretched(StageWork.forward, FORWARD * seating.pass_ms / 1e3)  # type: ignore[method-assign]
        StageWork.backward = _stretched(StageWork.backward, (1 - FORWARD) * seating.pass_ms / 1e3)  # type: ignore[method-assign]
    if seating.permuted:
        seat.ThroughputRouter = lambda: PermutationRouter((), seating.stage + 1, 0)  # type: ignore[misc, assignment, attr-defined]
    if seating.look_ahead:
        _look_ahead()
    sys.argv = ["farflung", "join", *arguments]
    command()


def _stretched(compute: Any, seconds: float) -> Any:
    def stretched(self: Any, *arguments: Any) -> Any:
        began = time.monotonic()
        try:
            return compute(self, *arguments)
        finally:
            time.sleep(max(0.0, seconds - (time.monotonic() - began)))

    return stretched


def _look_ahead() -> None:
    """Has a stage compute at w + τ·d: d its steps' mean change, τ the steps until the gradient comes (AsyncMesh)."""
    from farflung.swarm.seat import Seat
    from farflung.swarm.work import StageWork

    plain, advance, begun = StageWork._weights, StageWork.advance, Seat.__init__
    steps: dict[str, int] = {}
    changes: dict[str, Any] = {}
    before: dict[str, Any] = {}

    def begin(self: Any, *arguments: Any, **named: Any) -> None:
        begun(self, *arguments, **named)
        steps["late"] = self.stages - 1 - self.stage

    def advanced(self: Any) -> None:
        for name, one in self._parameters.items():
            now = one.detach().clone()
            if name in before:
                changes[name] = 0.1 * (now - before[name]) + 0.9 * changes.get(name, 0.0 * now)
            before[name] = now
        advance(self)

    def weights(self: Any) -> Any:
        if self._stash:
            return self._stash
        for name, one in plain(self).items():
            if name in changes:
                one.data.add_(changes[name], alpha=steps["late"])
        return self._stash

    Seat.__init__, StageWork.advance, StageWork._weights = begin, advanced, weights  # type: ignore[method-assign]


if __name__ == "__main__":
    seated(Seating(**json.loads(sys.argv[1])), sys.argv[2:])
