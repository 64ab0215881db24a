"""What happens to a run on the internet when everything goes wrong that can.

    sudo python bench/chaos.py [--cases kill first partition slow join nuisance] [--seconds 600] [--out chaos]

Real `farflung join` processes, a run folder each, on hosts in network namespaces of this machine with links of their
own (see netlab.py). Each peer's step is stretched to a fixed time, as if it computed longer: so many on few cores would
otherwise only show how they wait for the machine. What lying peers can do is in bench/attacks.py.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import tyro
from netlab import NetLab

from farflung.events import CheckpointEvent, EvaluationEvent, RoundEvent, StartEvent, StepEvent, WarningEvent
from farflung.networks.internet import Identity, Ticket
from farflung.report.read import E, Run

Case = Literal["kill", "first", "partition", "slow", "join", "nuisance"]
PORT = 4600


@dataclass(frozen=True)
class Options:
    cases: tuple[Case, ...] = ("kill", "first", "partition", "slow", "join", "nuisance")
    """What to go through."""
    seconds: float = 600.0
    """How long the case with killed peers lasts; the others last a part of it."""
    peers: int = 8
    """Peers."""
    rate_mbit: float = 100.0
    """Each host's link, each way."""
    step_ms: float = 250.0
    """What one inner step takes."""
    delay: int = 0
    """In the case with slow peers: steps that a round may take while training goes on."""
    out: Path = Path("chaos")
    """Where run folders go."""


@dataclass
class Peer:
    """One peer's process, on a host of its own."""

    lab: NetLab
    number: int
    out: Path
    ticket: Path
    step_ms: float
    process: subprocess.Popen[str] | None = None
    born: list[float] = field(default_factory=list)

    @property
    def folder(self) -> Path:
        return self.out / f"peer-{self.number}"

    def start(self, *arguments: str, ticket: Path | None = None) -> None:
        """Joins, or comes back."""
        host = self.lab.hosts[self.number]
        log = (self.out / f"peer-{self.number}.log").open("a")
        self.born.append(time.time())
        self.process = host.popen(
            [
                *(sys.executable, __file__, "--peer", str(self.step_ms), str(ticket or self.ticket)),
                *("--listen", host.address, "--port", str(PORT), "--out", str(self.folder), *arguments),
            ],
            {"OMP_NUM_THREADS": "1"},
            stdout=log,
            stderr=log,
        )

    def kill(self) -> None:
        """As a power failure would: the process, and the daemon that is its child with it."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def since(self, kind: type[E], moment: float) -> list[E]:
        """What has happened since a moment of the wall clock, by when it began."""
        start = self.events(StartEvent)[-1]
        origin = start.clock - start.at
        return [e for e in self.events(kind) if origin + getattr(e, "started", e.at) > moment]

    def events(self, kind: type[E]) -> list[E]:
        """What it says has happened."""
        run = Run(self.folder)
        run.refresh()
        return [event for replica in run.replicas for event in run.of(replica, kind)]


class Swarm:
    """All peers of one case, and the ticket that leads to the first."""

    def __init__(self, lab: NetLab, options: Options, name: str, slow: dict[int, float] | None = None, **settings: Any):
        self.out = options.out / name
        shutil.rmtree(self.out, ignore_errors=True)
        first = Identity(self.out / "peer-0" / "peer.key").peer
        common = {"model": "micro", "every": 20, "eval_every": 100, "checkpoint_every": 20, "log_every": 1}
        ticket = Ticket.new(name, {**common, "steps": 100_000, "deadline": 20.0, **settings})
        ticket = ticket.at((f"/ip4/{lab.hosts[0].address}/tcp/{PORT}/p2p/{first}",))
        path = self.out / "run.ticket"
        ticket.write(path)
        self.peers = [
            Peer(lab, number, self.out, path, (slow or {}).get(number, options.step_ms))
            for number in range(len(lab.hosts))
        ]

    def start(self, count: int) -> None:
        """Starts the first, and the others when it is there; returns when all train."""
        self.peers[0].start("--first")
        self.wait_for_steps(self.peers[:1], 1)
        for peer in self.peers[1:count]:
            peer.start()
        self.wait_for_steps(self.peers[:count], 1)

    def wait_for_steps(self, peers: list[Peer], steps: int, timeout: float = 180) -> None:
        """Until each has trained so many steps."""
        ends = time.time() + timeout
        while not all(len(peer.events(StepEvent)) >= steps for peer in peers):
            if time.time() > ends:
                raise TimeoutError(f"not all peers train; see the logs in {self.out}")
            time.sleep(0.2)

    def end(self) -> None:
        for peer in self.peers:
            peer.kill()

    def wait(self, timeout: float) -> None:
        """Until all have come to the run's last step."""
        for peer in self.peers:
            if peer.process:
                peer.process.wait(timeout)


def tell(what: str, measured: str, wanted: str, good: bool) -> None:
    print(f"{what:52} {measured:>34}   {wanted:24} {'ok' if good else 'MISSED'}", flush=True)


def longest_wait(peers: list[Peer]) -> float:
    """The longest that a peer stood waiting in one round, in seconds."""
    return max((e.landed - e.waited_from for peer in peers for e in peer.events(RoundEvent)), default=0.0)


def final_loss(peers: list[Peer]) -> float:
    losses = [evaluations[-1].validation_loss for peer in peers if (evaluations := peer.events(EvaluationEvent))]
    return sum(losses) / len(losses)


def rate(peers: list[Peer], begin: float, end: float) -> float:
    """Tokens a second that peers trained on between two moments of the wall clock."""
    total = 0.0
    for peer in peers:
        steps = peer.since(StepEvent, begin)
        later = len(peer.since(StepEvent, end))
        steps = steps[: len(steps) - later]
        total += (steps[-1].tokens - steps[0].tokens) / (steps[-1].at - steps[0].at)
    return total


def kill(options: Options) -> None:
    """A peer is killed every 20 s, and comes back 5 s later; beside the same tokens undisturbed."""
    steps = round(options.seconds * 1e3 / options.step_ms)
    everything = {"steps": steps, "eval_every": max(20, steps // 5)}
    chance = random.Random(0)
    with NetLab(options.peers, options.rate_mbit) as lab:
        swarm = Swarm(lab, options, "kill", **everything)
        try:
            swarm.start(options.peers)
            kills, gaps = 0, []
            while all(peer.process and peer.process.poll() is None for peer in swarm.peers):
                time.sleep(15)
                if any(peer.process and peer.process.poll() is not None for peer in swarm.peers):
                    break
                victim = chance.choice(swarm.peers)
                victim.kill()
                kills += 1
                time.sleep(5)
                gaps.append(newest(swarm.peers))
                victim.start()
            swarm.wait(120)
        finally:
            swarm.end()
        tokens = sum(peer.events(StepEvent)[-1].tokens for peer in swarm.peers)
    share = tokens / (options.peers * steps * 1024)
    with NetLab(options.peers, options.rate_mbit) as lab:
        calm = Swarm(lab, options, "undisturbed", **{**everything, "steps": round(steps * share)})
        try:
            calm.start(options.peers)
            calm.wait(2 * options.seconds)
        finally:
            calm.end()
    disturbed, undisturbed = final_loss(swarm.peers), final_loss(calm.peers)
    tell(
        f"{kills} kills in {options.seconds:.0f} s: longest without a step",
        f"{max(gaps):.1f} s",
        "the run never stops",
        max(gaps) < 5,
    )
    change = disturbed / undisturbed - 1
    tell(
        "  validation loss, beside the same tokens undisturbed",
        f"{disturbed:.4f}, {undisturbed:.4f}, {change:+.1%}",
        "within 2 %",
        abs(change) < 0.02,
    )
    wait = longest_wait(swarm.peers)
    tell("  longest wait in a round", f"{wait:.1f} s", "20 s (the deadline)", wait <= 20)
    lost = sum(repeated(peer) for peer in swarm.peers)
    tell("  steps that survivors trained twice or lost", f"{lost}", "0", lost == 0)


def newest(peers: list[Peer]) -> float:
    """How many seconds ago any peer has written its last event."""
    return min(time.time() - path.stat().st_mtime for p in peers for path in p.folder.glob("events/*.jsonl"))


def repeated(peer: Peer) -> int:
    """Steps after which a peer, without a new start between them, had not trained on more tokens than before."""
    steps = peer.events(StepEvent)
    starts = {event.at for event in peer.events(StartEvent)}
    return sum(
        b.tokens < a.tokens + 1024 for a, b in itertools.pairwise(steps) if not any(a.at <= at <= b.at for at in starts)
    )


def first(options: Options) -> None:
    """The first peer dies for good; a newcomer joins with the ticket that another peer keeps."""
    with NetLab(4, options.rate_mbit) as lab:
        swarm = Swarm(lab, options, "first")
        try:
            swarm.start(3)
            time.sleep(15)
            swarm.peers[0].kill()
            before = [len(peer.events(StepEvent)) for peer in swarm.peers[1:3]]
            began = time.time()
            swarm.peers[3].start(ticket=swarm.peers[1].folder / "run.ticket")
            swarm.wait_for_steps(swarm.peers[3:], 1)
            took = time.time() - began
            time.sleep(20)
            met = [e for e in swarm.peers[3].events(RoundEvent) if e.outcome == "averaged"]
            more = [len(peer.events(StepEvent)) - b for peer, b in zip(swarm.peers[1:3], before, strict=True)]
        finally:
            swarm.end()
    tell("the first peer killed: a newcomer trains after", f"{took:.1f} s", "it joins by another", True)
    tell(
        "  steps of the others since; the newcomer's rounds",
        f"{more}; {len(met)}",
        "the run goes on",
        min(more) > 20 and len(met) > 0,
    )


def partition(options: Options) -> None:
    """Half of the peers are cut off for a minute."""
    half = options.peers // 2
    with NetLab(options.peers, options.rate_mbit) as lab:
        swarm = Swarm(lab, options, "partition", eval_every=20)
        try:
            swarm.start(options.peers)
            time.sleep(60)
            usual = spread(swarm.peers)
            lab.part(range(half))
            cut = time.time()
            time.sleep(60)
            apart = spread(swarm.peers)
            steps = [len(p.since(StepEvent, cut + 20)) for p in swarm.peers]
            averaged = [sum(e.outcome == "averaged" for e in p.since(RoundEvent, cut + 20)) for p in swarm.peers]
            lab.heal()
            healed = time.time()
            rounds_needed, together = None, float("nan")
            while time.time() < healed + 120 and rounds_needed is None:
                time.sleep(2)
                together = spread(swarm.peers)
                done = [len(p.since(RoundEvent, healed)) for p in swarm.peers]
                if together <= 1.1 * usual and mixed(swarm.peers, half, healed):
                    rounds_needed = max(done)
        finally:
            swarm.end()
    tell(
        "partition of 60 s: steps in each half meanwhile",
        f"{min(steps[:half])}, {min(steps[half:])}",
        "both train on",
        min(steps) > 20,
    )
    tell(
        "  rounds averaged in each half meanwhile",
        f"{sum(averaged[:half])}, {sum(averaged[half:])}",
        "both train on",
        min(sum(averaged[:half]), sum(averaged[half:])) > 0,
    )
    tell("  consensus distance before, apart, together again", f"{usual:.3g}, {apart:.3g}, {together:.3g}", "", True)
    tell(
        "  rounds from healing until it is as before",
        f"{rounds_needed}",
        "10",
        rounds_needed is not None and rounds_needed <= 10,
    )


def spread(peers: list[Peer]) -> float:
    """The last consensus distance of all peers, by the samples that their evaluations write down."""
    import base64

    import numpy as np

    samples = []
    for peer in peers:
        evaluations = peer.events(EvaluationEvent)
        if evaluations:
            samples.append(np.frombuffer(base64.b64decode(evaluations[-1].sample), dtype="<f4"))
    return float(np.sqrt(np.stack(samples).astype(np.float64).var(axis=0).mean()))


def mixed(peers: list[Peer], half: int, since: float) -> bool:
    """Whether peers of both halves have averaged with each other since a moment."""
    ranks = [int(next((p.folder / "events").glob("*.jsonl")).stem.rpartition("-")[2]) for p in peers]
    side = {rank: number < half for number, rank in enumerate(ranks)}
    return any(len({side.get(rank) for rank in e.group}) > 1 for p in peers for e in p.since(RoundEvent, since))


def slow(options: Options) -> None:
    """One peer computes four times slower, then one has a tenth of the bandwidth; the others beside without it."""
    seconds = options.seconds / 8
    speeds: dict[str, float] = {}
    settings = {"method": "noloco", "model": "tiny", "batch_size": 1, "every": 40, "delay": options.delay}
    for name, count, paces, rates in (
        ("without", 7, {}, {}),
        ("one peer 4 times slower", 8, {7: 4 * options.step_ms}, {}),
        ("one peer with a tenth of the bandwidth", 8, {}, {7: options.rate_mbit / 10}),
    ):
        with NetLab(count, options.rate_mbit, rates) as lab:
            swarm = Swarm(lab, options, f"slow-{len(speeds)}", paces, **settings)
            try:
                swarm.start(count)
                time.sleep(10)
                began = time.time()
                time.sleep(seconds)
                speeds[name] = rate(swarm.peers[:7], began, time.time())
            finally:
                swarm.end()
    base = speeds.pop("without")
    for name, speed in speeds.items():
        tell(
            f"{name}: the others' tokens/s",
            f"{speed:.0f} of {base:.0f}, {speed / base:.1%}",
            "95 %",
            speed / base >= 0.95,
        )


def nuisance(options: Options) -> None:
    """A peer stands still for 30 s; one's disk is full; one's clock is off by an hour; a folder is read-only."""
    with NetLab(4, options.rate_mbit) as lab:
        swarm = Swarm(lab, options, "nuisance")
        disk = swarm.peers[2].folder
        disk.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(disk)], check=True)
        try:
            swarm.start(3)
            time.sleep(15)
            still, others = swarm.peers[1], [swarm.peers[0], swarm.peers[2]]
            inner = child_of(still)
            os.kill(inner, signal.SIGSTOP)
            stood = time.time()
            time.sleep(30)
            os.kill(inner, signal.SIGCONT)
            awake = time.time()
            time.sleep(40)
            meanwhile = [len(p.since(StepEvent, stood)) - len(p.since(StepEvent, awake)) for p in others]
            met = sum(e.outcome == "averaged" for e in still.since(RoundEvent, awake))
            tell("a peer stopped for 30 s: the others' steps", str(meanwhile), "the run goes on", min(meanwhile) > 60)
            tell("  its rounds in the 40 s after", str(met), "it comes back", met > 0)

            (disk / "filler").write_bytes(bytes(20_000_000)[: free(disk) - 100_000])
            time.sleep(25)
            said = [e.message for e in swarm.peers[2].events(WarningEvent) if "no checkpoint" in e.message]
            trains = swarm.peers[2].process is not None and swarm.peers[2].process.poll() is None
            tell("a full disk", said[-1][:80] if said else "nothing said", "a clear message", bool(said) and trains)
            (disk / "filler").unlink()
            before = len(swarm.peers[2].events(CheckpointEvent))
            time.sleep(15)
            after = len(swarm.peers[2].events(CheckpointEvent))
            tell("  checkpoints once there is room again", f"{after - before}", "nothing lost", after > before)

            clock = said_by(swarm.peers[3], {"FARFLUNG_BENCH_CLOCK": "3600"})
            tell("a clock off by an hour", clock[:120], "a clear message", "clock is 3600 s ahead" in clock)
            folder = said_by(swarm.peers[3], {}, "--out", "/proc/farflung")
            tell("a read-only folder", folder[:120], "a clear message", "choose another folder" in folder)
        finally:
            swarm.end()
            subprocess.run(["umount", str(disk)], check=False)


def child_of(peer: Peer) -> int:
    """The peer's own process; `ip netns exec` becomes it."""
    assert peer.process is not None
    return peer.process.pid


def free(folder: Path) -> int:
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def said_by(peer: Peer, env: dict[str, str], *arguments: str) -> str:
    """The last line that a peer says which does not get as far as training."""
    os.environ.update(env)
    try:
        peer.start(*arguments)
        assert peer.process is not None
        peer.process.wait(60)
    finally:
        for name in env:
            del os.environ[name]
    return (peer.out / f"peer-{peer.number}.log").read_text().splitlines()[-1]


def join(options: Options) -> None:
    """A peer comes late to a model of 100 million parameters."""
    model = options.out / "model-100m"
    write_model(model)
    settings = {"model": str(model), "batch_size": 1, "sequence_length": 16, "eval_sequences": 1, "eval_every": 100_000}
    settings |= {"checkpoint_every": 0, "every": 60, "deadline": 120.0, "method": "noloco"}
    with NetLab(3, options.rate_mbit) as lab:
        swarm = Swarm(lab, options, "join", dict.fromkeys(range(3), 1500.0), **settings)
        try:
            swarm.start(2)
            swarm.wait_for_steps(swarm.peers[:2], 40, timeout=300)
            calm = rate(swarm.peers[:2], time.time() - 30, time.time())
            while not all(peer.events(RoundEvent) for peer in swarm.peers[:2]):
                time.sleep(0.5)  # only then is there an outer momentum to fetch
            began = time.time()
            swarm.peers[2].start()
            swarm.wait_for_steps(swarm.peers[2:], 1, timeout=400)
            took = time.time() - began
            serving = rate(swarm.peers[:2], began, time.time())
            values = swarm.peers[2].events(StartEvent)[0].parameters
        finally:
            swarm.end()
    limit = values * 8 * 8e-6 / options.rate_mbit
    tell(
        f"late join, {values / 1e6:.0f} M parameters: trains after",
        f"{took:.0f} s, {took / limit:.2f} x",
        f"1.2 x {limit:.0f} s",
        took / limit <= 1.2,
    )
    tell("  speed of those that serve it", f"{serving / calm:.1%}", "90 %", serving / calm >= 0.9)


def write_model(folder: Path) -> None:
    """The configuration of a Llama of 100 million parameters, as a folder that AutoConfig loads."""
    from transformers import LlamaConfig

    if not folder.exists():
        LlamaConfig(
            vocab_size=257,
            hidden_size=768,
            intermediate_size=2048,
            num_hidden_layers=14,
            num_attention_heads=12,
            num_key_value_heads=12,
            max_position_embeddings=128,
            tie_word_embeddings=True,
        ).save_pretrained(folder)


CASES: dict[Case, Callable[[Options], None]] = {
    "kill": kill,
    "first": first,
    "partition": partition,
    "slow": slow,
    "join": join,
    "nuisance": nuisance,
}


def paced_peer(step_ms: float, arguments: list[str]) -> None:
    """`farflung join`, with each step stretched to a fixed time."""
    from farflung.cli import main as command
    from farflung.pipeline.island import Alone

    gradients, clock = Alone.gradients, time.time
    off = float(os.environ.get("FARFLUNG_BENCH_CLOCK", "0"))
    if off:
        time.time = lambda: clock() + off

    def stretched(island: Alone, step: int) -> tuple[float, str]:
        began = time.monotonic()
        result = gradients(island, step)
        time.sleep(max(0.0, step_ms / 1e3 - (time.monotonic() - began)))
        return result

    Alone.gradients = stretched  # type: ignore[method-assign]
    sys.argv = ["farflung", "join", *arguments]
    command()


def main(options: Options) -> None:
    print(f"{options.peers} peers, links of {options.rate_mbit:g} Mbit/s, steps of {options.step_ms:g} ms\n")
    print(f"{'what':52} {'measured':>34}   {'to reach':24}")
    for case in options.cases:
        CASES[case](options)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--peer"]:
        paced_peer(float(sys.argv[2]), sys.argv[3:])
    else:
        main(tyro.cli(Options, description=__doc__))
