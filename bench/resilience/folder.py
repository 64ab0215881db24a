"""Do peers that meet in a folder learn as on the internet, and bear what befalls them and their store?
On real servers of this machine: a shared disk, S3 (moto's), WebDAV (wsgidav, nginx) and SFTP (asyncssh's, OpenSSH's),
as far as they are installed. First, each method's loss beside the internet network's; then peers killed with -9 every
20 s, the store away for a minute, all stopped, and the run ended by others who have the folder alone. Takes an hour.
"""

from __future__ import annotations

import itertools
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.lib import hardship
from bench.lib.folders import FOLDERS, Disk, missing, unavailable
from bench.lib.hardship import Check, check, checks
from bench.lib.store import Store
from bench.lib.table import Part, Table
from bench.resilience.killed import final_loss, newest
from farflung import methods
from farflung.events import EvaluationEvent, RoundEvent, StepEvent
from farflung.networks.folder.sealing import Kind, SealError, Seals
from farflung.networks.internet import Identity
from farflung.networks.peers.ticket import read_ticket
from farflung.testing.hosts import LOOPBACK, free_port
from farflung.testing.peers import PeerProcess, PeerProcesses
from farflung.testing.waiting import until

needs = unavailable


@dataclass(frozen=True)
class Options:
    stores: tuple[str, ...] = tuple(FOLDERS)
    """Which stores."""
    methods: tuple[str, ...] = ("noloco", "diloco", "nolocox", "streaming-diloco")
    """Which methods, of which the first one is that of the disturbed runs."""
    peers: int = 4
    """Peers."""
    steps: int = 300
    """Inner steps of each undisturbed run."""
    step_ms: float = 100.0
    """What one inner step takes."""
    seconds: float = 240.0
    """How long peers are killed, with the store away in the middle; 0 for no disturbed runs."""
    away: float = 60.0
    """How long it is away."""
    internet: bool = True
    """Whether to train on the internet network, too."""
    calm: bool = True
    """Whether to train undisturbed."""


SMOKE = Options(("disk",), ("diloco",), peers=2, steps=200, step_ms=50, seconds=0, internet=False)


CALM_SHARE = 0.2
"""The part of a disturbed run's steps that are left for the next day, where steps take no longer than they should."""
STOPPED = 130
"""What a command ends with that was asked to stop."""


@contextmanager
def peers_of(options: Options, folder: Path, server: Disk | None, **settings: Any) -> Iterator[PeerProcesses]:
    """A run's peers, not started yet, on this machine; without a store they meet on the internet network."""
    shutil.rmtree(folder, ignore_errors=True)
    everything = {"model": "micro", "every": 10, "eval_every": 10, "checkpoint_every": 20, "log_every": 1}
    everything |= {"steps": options.steps, "deadline": 20.0, **settings}
    environment = [f"{name}={value}" for name, value in (server.environment if server else {}).items()]
    command = ("env", *environment, sys.executable, "-m", hardship.__name__, str(options.step_ms))
    hosts = [LOOPBACK] * options.peers
    with PeerProcesses(folder, hosts, free_port(), everything, [command] * options.peers) as made:
        if server:
            made.ticket = made.ticket.at((server.url,))
            made.ticket.write(made.ticket_path)
        yield made


def begin(peers: PeerProcesses) -> None:
    """Starts all at once, so that they train alike from the first step; returns when all do."""
    for number, peer in enumerate(peers):
        peer.start(*(() if number else ("--first",)))
    peers.wait_for_steps(peers, 1)


def alike(peers: Sequence[PeerProcess]) -> tuple[int, int]:
    """How often peers that had been in the same rounds so far had the same weights after one; and how often such were.

    Who has once averaged with others than they did, or trained on alone, starts from other weights than they do.
    """
    weights: dict[tuple[Any, ...], list[bytes]] = {}
    for peer in peers:
        after = {event.step: event.weights for event in peer.events(EvaluationEvent)}
        so_far: tuple[Any, ...] = (min((event.step for event in peer.events(StepEvent)), default=0),)
        for round in peer.events(RoundEvent):
            so_far += ((round.round, tuple(round.group) if round.outcome == "averaged" else peer.folder.name),)
            if round.started_step in after:
                weights.setdefault(so_far, []).append(after[round.started_step])
    together = [found for found in weights.values() if len(found) > 1]
    return sum(len(set(found)) == 1 for found in together), len(together)


def left(server: Disk, peers: PeerProcesses) -> dict[str, int]:
    """How many objects of each kind are there after a run."""
    seals = Seals(read_ticket(peers.ticket_path).secret, Identity(peers.folder / "left.key"))
    found: dict[str, int] = {}
    for name in server.left():
        try:
            kind = seals.note(name)[0].kind.name
        except SealError:
            kind = "unknown"
        found[kind] = found.get(kind, 0) + 1
    return found


def as_asked(found: dict[str, int]) -> bool:
    """Whether nothing is left but the run's state."""
    return set(found) <= {Kind.STATE.name, Kind.PIECE.name}


@contextmanager
def served(name: str, folder: Path) -> Iterator[Disk | None]:
    """A new store of a kind; none for what is not a store."""
    shutil.rmtree(folder, ignore_errors=True)
    kind = FOLDERS.get(name)
    if kind is None:
        yield None
        return
    with kind(folder / "files") as server:
        yield server


def calm(options: Options, store: Store, method: str, name: str) -> tuple[str | float, ...]:
    """An undisturbed run's row: loss, rounds, in how many of them members were left alike, and what is left behind."""
    place = store.scratch / f"{method}-{name}"
    with served(name, store.scratch / "store") as server, peers_of(options, place, server, method=method) as peers:
        begin(peers)
        peers.wait(120 + options.steps * options.step_ms / 100)
        rounds = [event for peer in peers for event in peer.events(RoundEvent)]
        met = sum(event.outcome == "averaged" for event in rounds) / max(1, len(rounds))
        recipe = getattr(methods, method.replace("-", "_"))()
        whole = recipe.topology.identical and recipe.schedule.fragments == 1 and not recipe.schedule.delay
        there = left(server, peers) if server else {}
        same = "{} of {}".format(*alike(list(peers))) if whole else ""  # others are never alike in all of their weights
        return method, name, final_loss(peers), met, same, "" if as_asked(there) else str(there)


def steps_of(options: Options) -> int:
    """The inner steps of a disturbed run, and of the undisturbed one beside it."""
    return round((options.seconds + options.away) / (1 - CALM_SHARE) * 1e3 / options.step_ms)


def undisturbed(options: Options, store: Store) -> float:
    """The loss after a run on this machine's disk in which nothing happens."""
    settings = {"method": options.methods[0], "steps": steps_of(options)}
    place = store.scratch / "undisturbed"
    with served("disk", store.scratch / "store") as server, peers_of(options, place, server, **settings) as peers:
        begin(peers)
        peers.wait(patience_of(options))
        return final_loss(peers)


def patience_of(options: Options) -> float:
    """How long a whole run may take."""
    return 300 + 10 * (options.seconds + options.away)


def disturbed(options: Options, store: Store, name: str, usual: float) -> Iterator[Check]:
    """Peers die and come back, the store is away for a while, all stop, and others end the run from the folder alone.

    `usual` is the loss after an undisturbed run.
    """
    place = store.scratch / f"disturbed-{name}"
    settings = {"method": options.methods[0], "steps": steps_of(options)}
    with served(name, store.scratch / "store") as server:
        assert server
        with peers_of(options, place, server, **settings) as peers:
            begin(peers)
            gaps, back = disturb(peers, server, options)
            longest, kills = max(gaps), len(gaps) - 1
            yield check(f"{name}: {kills} kills; longest without a step", f"{longest:.1f} s", "5 s", longest < 5)
            yield check(f"{name}: rounds meet again after it was away", f"{back:.0f} s", "60 s", back <= 60)
            codes = stopped(peers)
            yield check(f"{name}: how all end that are stopped", str(codes), "none fails", not any(codes))
            there, reached = left(server, peers), max(last_step(peer) for peer in peers)
            yield check(f"{name}: left behind", str(there), "the state alone", bool(there) and as_asked(there))
            yield from next_day(options, peers, server, reached, usual)


def disturb(peers: PeerProcesses, server: Disk, options: Options) -> tuple[list[float], float]:
    """Kills one peer every 20 s, with the store away in the middle, however long each takes to come back.

    Returns the seconds without a step of anybody at each kill and in the end of that time, and after how long somebody
    met others again.
    """
    victims = itertools.cycle(peers)
    gaps = killed(peers, victims, options.seconds / 2)
    server.pause()
    time.sleep(options.away)
    gaps.append(newest(peers))
    server.resume()
    back = met_again(list(peers), 120.0)
    return gaps + killed(peers, victims, options.seconds / 2), back


def killed(peers: PeerProcesses, victims: Iterator[PeerProcess], seconds: float) -> list[float]:
    """Kills one peer after the other; the seconds without a step of anybody at each kill."""
    gaps, ends = list[float](), time.monotonic() + seconds
    while time.monotonic() < ends:
        victim = next(victims)
        victim.kill()
        time.sleep(5)
        gaps.append(newest(peers))
        victim.start()
        time.sleep(15)
        until(lambda: newest([victim]) < 1, 120, f"{victim.folder.name} to come back")  # noqa: B023
    return gaps


def met_again(peers: list[PeerProcess], seconds: float) -> float:
    """How long it takes until somebody meets others; infinite where that takes longer than some seconds."""
    now = time.time()
    while time.time() - now < seconds:
        if any(event.outcome == "averaged" for peer in peers if peer.lives for event in peer.since(RoundEvent, now)):
            return time.time() - now
        time.sleep(1)
    return float("inf")


def stopped(peers: PeerProcesses) -> list[int]:
    """Asks all to stop; what each ended with."""
    for peer in peers:
        if peer.process and peer.lives:
            peer.process.send_signal(signal.SIGTERM)
    peers.wait(120)
    ended = [peer.process.returncode for peer in peers if peer.process]
    return [0 if code in (STOPPED, -signal.SIGTERM) else code for code in ended]


def last_step(peer: PeerProcess) -> int:
    """The last step that a peer tells of."""
    return max((event.step for event in peer.events(StepEvent)), default=0)


def next_day(options: Options, peers: PeerProcesses, server: Disk, reached: int, usual: float) -> Iterator[Check]:
    """Others, who have nothing but the ticket, go on to the end of the run, of which a step had been reached."""
    new = [
        PeerProcess(peer.host, peer.folder.with_name(f"new-{peer.folder.name}"), peer.ticket, command=peer.command)
        for peer in peers
    ]
    try:
        for peer in new:
            peer.start()
        for peer in new:
            assert peer.process
            peer.process.wait(patience_of(options))
        begun = min(event.step for peer in new for event in peer.events(StepEvent))
        good = begun >= reached - 60
        yield check("the next day, from the folder alone", f"step {begun}", f"near step {reached}", good)
        loss = final_loss(new)
        what = f"loss after {steps_of(options)} steps, beside an undisturbed run's"
        change = loss / usual - 1
        yield check(what, f"{loss:.4f}, {usual:.4f}, {change:+.1%}", "within 2%", abs(change) <= 0.02)
        there = left(server, peers)
        yield check("left behind then", str(there), "the state alone", as_asked(there))
    finally:
        for peer in new:
            peer.kill()


def run(options: Options, store: Store) -> Iterator[Part]:
    for name in filter(missing, options.stores):
        yield f"{name} is not tried: {missing(name)}"
    stores = [name for name in options.stores if not missing(name)]
    places = ["internet", *stores] if options.internet else stores
    columns = {"method": "", "through": "", "loss": ".4f", "met": ".0%", "always together: alike": "", "left": ""}
    rows = (calm(options, store, method, name) for method in options.methods for name in places)
    if options.calm:
        yield Table(columns, rows, f"{options.peers} peers, {options.steps} steps")
    if options.seconds:
        usual = undisturbed(options, store)
        yield checks(row for name in stores for row in disturbed(options, store, name, usual))
