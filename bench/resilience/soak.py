"""Does a run bear everything, for long?
On the internet network, in namespaces: every 20 seconds one trouble in turn: a peer is killed, one stands still, some
are cut off, a disk is full, the daemon dies, or one of each kind of attacker comes; then the same steps undisturbed.
The learning rate is constant; both runs are judged at the last step that all have come to. Takes 35 minutes, as root.
"""

from __future__ import annotations

import itertools
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from bench.lib.attacker import KINDS
from bench.lib.hardship import Check, Hardship, check, checks, running
from bench.lib.processes import children
from bench.lib.store import Settings, Store
from bench.lib.table import Part
from bench.resilience.nuisances import free, small_disk
from farflung.events import EvaluationEvent, RoundEvent, StepEvent, WarningEvent
from farflung.report.read import mean
from farflung.testing.hosts import Host, NetLab, unavailable
from farflung.testing.peers import PeerProcess, PeerProcesses

needs = unavailable

TROUBLE_SECONDS = 12.0
"""How long one lasts."""


@dataclass(frozen=True)
class Options(Hardship):
    minutes: float = 20.0
    """How long there are troubles."""
    undisturbed: bool = True
    """Whether to train the same steps undisturbed, too."""
    undisturbed_step_ms: float = 100.0
    """What a step takes then: nothing hinders it, so it need not last as long."""


SMOKE = Options(peers=3, step_ms=50, pace=0.1, minutes=0.5, undisturbed=False)  # the others join within it


def run(options: Options, store: Store) -> Iterator[Part]:
    steps = max(60, round(options.minutes * 60e3 / options.step_ms))
    everything: Settings = {"steps": steps, "eval_every": max(20, steps // 20), "warmup": 0, "lr_final": 1.0}
    count = options.peers
    with running(options, store, "soak", peers=count + 1, **everything) as (lab, peers), ExitStack() as disks:
        training = list(peers)[:-1]
        disks.enter_context(small_disk(training[-1].folder, 64))
        peers.start(count)
        options.wait(60)
        before, begun = [memory(peer) for peer in training], [starts(peer) for peer in training]
        troubles = list(trouble(options, lab, peers, steps))
        options.wait(20)
        gone = [peer.folder.name for peer in training if not peer.lives and not ended(peer, steps)]
        grown = {
            peer.folder.name: memory(peer) - held
            for peer, held, begin in zip(training, before, begun, strict=True)
            if peer.lives and starts(peer) == begin
        }
        warned = sum(len(peer.events(WarningEvent)) for peer in training)
        rounds = [event.outcome for peer in training for event in peer.events(RoundEvent)]
        finish(training, options)
        learnt = Learnt.of(training)  # before the small disk goes, and with it what is on it
    averaged = f"{rounds.count('averaged')} of {len(rounds)}; {warned}"
    rows = [*borne(troubles, gone, grown)]
    if options.undisturbed:
        rows.append(beside_undisturbed(options, store, learnt, everything))
    yield checks([*rows, check("rounds that averaged; warnings", averaged, "", True)])


def borne(troubles: list[str], gone: list[str], grown: dict[str, float]) -> Iterator[Check]:
    most = max(grown.values(), default=0.0)
    told = ", ".join(f"{name} {mb:+.0f}" for name, mb in grown.items())
    yield check(f"{len(troubles)} troubles: peers that stopped", ", ".join(gone) or "none", "none", not gone)
    yield check("memory since the first minute, MB, of those never restarted", told, "+20", most <= 20)


@dataclass(frozen=True)
class Learnt:
    """What peers have come to: their mean loss at each step at which all were judged, and tokens of all."""

    losses: dict[int, float]
    tokens: int

    @classmethod
    def of(cls, peers: Iterable[PeerProcess]) -> Self:
        each = [{event.step: event.score for event in peer.events(EvaluationEvent)} for peer in peers]
        common = set[int].intersection(*(set(losses) for losses in each))
        means = {step: mean([losses[step] for losses in each]) for step in common}
        losses = {step: math.nan if loss is None else loss for step, loss in means.items()}
        return cls(losses, sum(peer.events(StepEvent)[-1].tokens for peer in peers))


def beside_undisturbed(options: Options, store: Store, learnt: Learnt, everything: Settings) -> Check:
    if not learnt.losses:
        return check("validation loss", "no step at which all were judged", "2 %", False)
    step = max(learnt.losses)
    quick = replace(options, step_ms=min(options.step_ms, options.undisturbed_step_ms))
    with running(quick, store, "calm", **{**everything, "steps": step + 20}) as (_, peers):
        peers.start(options.peers)
        peers.wait(120 * options.minutes)
        calm = Learnt.of(peers)
    loss, undisturbed = learnt.losses[step], calm.losses[step]
    change = loss / undisturbed - 1
    measured = f"{loss:.4f}, {undisturbed:.4f}, {change:+.1%}; {learnt.tokens / calm.tokens:.0%} of the tokens"
    return check(f"validation loss at step {step}, undisturbed", measured, "2 %", change <= 0.02)


def trouble(options: Options, lab: NetLab, peers: PeerProcesses, steps: int) -> Iterator[str]:
    """Makes one trouble after the other, each to the next peer; what it was."""
    training: list[PeerProcess] = list(peers)[:-1]
    kinds: list[Callable[[int], str]] = [
        lambda victim: killed(options, training[victim]),
        lambda victim: still(options, training[victim]),
        lambda victim: cut(options, lab, victim, len(training)),
        lambda victim: daemon_killed(options, training[victim]),
        lambda _: full_disk(options, training[-1]),
        *(lambda _, kind=kind: attacked(options, kind, lab.hosts[-1], peers) for kind in KINDS),
    ]
    ends = time.time() + 60 * options.minutes
    # The first peer is spared, so that at least one is never restarted, and the last, whose disk is small.
    victims = itertools.cycle(range(1, max(2, len(training) // 2)))
    for number, kind in enumerate(itertools.cycle(kinds)):
        if time.time() > ends or all(ended(peer, steps) for peer in training):
            return
        what = kind(next(victims))
        print(f"{number:4} {what}", file=sys.stderr, flush=True)
        yield what
        options.wait(20 - TROUBLE_SECONDS)


def killed(options: Options, peer: PeerProcess) -> str:
    peer.kill()
    options.wait(5)
    peer.start()
    options.wait(TROUBLE_SECONDS - 5)
    return f"{peer.folder.name} killed"


def still(options: Options, peer: PeerProcess) -> str:
    assert peer.process is not None
    os.kill(peer.process.pid, signal.SIGSTOP)
    options.wait(TROUBLE_SECONDS)
    os.kill(peer.process.pid, signal.SIGCONT)
    return f"{peer.folder.name} stood still"


def cut(options: Options, lab: NetLab, victim: int, count: int) -> str:
    off = {victim, (victim + 1) % count}
    lab.part(off)
    options.wait(TROUBLE_SECONDS)
    lab.heal()
    return f"{off} cut off"


def daemon_killed(options: Options, peer: PeerProcess) -> str:
    assert peer.process is not None
    for pid in children(peer.process.pid):
        if "p2pd" in Path(f"/proc/{pid}/cmdline").read_text():
            os.kill(pid, signal.SIGKILL)
    options.wait(TROUBLE_SECONDS)
    return f"the daemon of {peer.folder.name} killed"


def full_disk(options: Options, peer: PeerProcess) -> str:
    filler = peer.folder / "filler"
    try:
        with filler.open("wb", buffering=0) as file:
            while free(peer.folder) > 50_000:
                file.write(bytes(50_000))
    except OSError:
        pass  # it is full
    options.wait(TROUBLE_SECONDS)
    filler.unlink()
    return f"the disk of {peer.folder.name} full"


def attacked(options: Options, kind: str, host: Host, peers: PeerProcesses) -> str:
    where = [str(peers.ticket_path), str(peers.folder / f"{kind}.key"), host.address]
    seconds = str(options.pace * TROUBLE_SECONDS)
    attacker = host.popen([sys.executable, "-m", "bench.lib.attacker", kind, *where, seconds])
    attacker.wait(60 + 10 * TROUBLE_SECONDS)
    return f"attacked by a {kind}{'' if attacker.returncode == 0 else ', which failed'}"


def finish(training: list[PeerProcess], options: Options) -> None:
    """Lets the peers come to their last step, if they do soon."""
    ends = time.time() + 240 * options.pace
    while any(peer.lives for peer in training) and time.time() < ends:
        time.sleep(1)


def ended(peer: PeerProcess, steps: int) -> bool:
    """Whether a peer has come to its last step."""
    return max((event.step for event in peer.events(StepEvent)), default=0) >= steps


def starts(peer: PeerProcess) -> int:
    assert peer.process is not None
    return peer.process.pid


def memory(peer: PeerProcess) -> float:
    """What a peer's process and its daemon hold, in MB."""
    assert peer.process is not None
    held = 0.0
    for pid in (peer.process.pid, *children(peer.process.pid)):
        held += int(Path(f"/proc/{pid}/status").read_text().partition("VmRSS:")[2].split()[0]) / 1024
    return held
