"""What can strangers and lying members do to a run on the internet, and what does it do to them?
Two real `farflung join` processes train on loopback; a third process attacks one of them, first without the run's
secret, then as a member, with random bytes and with valid messages of which some bytes are changed. All is to be
refused, and the run to go on. Takes ten minutes.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.lib.hardship import Check, check, checks
from bench.lib.store import Store
from bench.lib.table import Part
from farflung.events import RoundEvent, StepEvent, WarningEvent
from farflung.networks.internet import Ticket
from farflung.testing.hosts import LOOPBACK, free_port
from farflung.testing.liars import Liar, as_a_stranger
from farflung.testing.peers import PeerProcess, PeerProcesses

LIES: dict[str, list[dict[str, Any]]] = {
    "a forged sender": [{"sender": 12345}],
    "a packet of 10 GB": [{"size": 10_000_000_000}],
    "a packet of another run": [{"run": "0" * 16}],
    "a packet that nobody awaits": [{}],
    "three lies, and then the truth": [{"to": 1}, {"to": 2}, {"to": 3}, {}],
}
"""What members try, each a new one: three lies and a peer is not listened to any more."""


@dataclass(frozen=True)
class Options:
    messages: int = 100_000
    """Random messages."""
    lies: tuple[str, ...] = tuple(LIES)
    """What members try."""
    rest_s: float = 10.0
    """Seconds to train before the attack, and half as many after it."""


SMOKE = Options(messages=20, lies=("a forged sender",), rest_s=0.2)


def run(options: Options, store: Store) -> Iterator[Part]:
    folder = store.scratch / "attacked"
    shutil.rmtree(folder, ignore_errors=True)
    settings = {"model": "micro", "every": 50, "steps": 1_000_000, "eval_every": 100_000, "log_every": 10}
    with PeerProcesses(folder, [LOOPBACK, LOOPBACK], free_port(), settings) as peers:
        peers.start(2)
        time.sleep(options.rest_s)
        yield checks(attack(options, peers.ticket, folder, peers[0]))


def attack(options: Options, ticket: Ticket, folder: Path, victim: PeerProcess) -> Iterator[Check]:
    before, began = memory(victim), time.time()
    first = as_a_stranger(ticket, lambda stranger: stranger.send(stranger.message()))
    yield check("a stranger asks for something", short(first), "", True)
    guess = as_a_stranger(ticket, lambda stranger: stranger.guess_the_secret())
    yield check("a wrong secret", short(guess), "refused", b"refused" in guess)
    found = as_a_stranger(ticket, lambda stranger: stranger.ask_for_peers())
    yield check("a stranger asks the daemon for peers", f"{len(found)} told", "0", not found)
    heard = as_a_stranger(ticket, lambda stranger: stranger.bombard(options.messages))
    what = f"{options.messages} random messages, {time.time() - began:.0f} s"
    yield check(what, f"{heard} answered otherwise than refused", "0", heard == 0)
    rounds = [event.outcome for event in victim.since(RoundEvent, began)]  # liars are members later, with their rounds
    met = rounds.count("averaged")
    yield check("rounds that averaged under them", f"{met} of {len(rounds)}", "95%", met >= 0.95 * len(rounds))
    yield from lies(options, ticket, folder)
    time.sleep(options.rest_s / 2)
    yield from meanwhile(victim, before)


def meanwhile(victim: PeerProcess, before: float) -> Iterator[Check]:
    """What the attack has done to the victim."""
    refused = [event.refused for event in victim.events(StepEvent) if event.refused]
    yield check("what the peer says of it", f"refused {refused[-1] if refused else {}}", "counted", bool(refused))
    banned = [event.message for event in victim.events(WarningEvent) if "banned" in event.message]
    yield check("the liar is banned, visibly", banned[-1] if banned else "no", "a clear message", bool(banned))
    grown = memory(victim) - before
    yield check("its memory meanwhile", f"{before:.0f} MB, then {grown:+.0f} MB", "100 MB", grown < 100)
    rounds = [event.outcome for event in victim.events(RoundEvent)]
    averaged, loss = rounds.count("averaged"), victim.events(StepEvent)[-1].loss
    measured = f"{averaged} of {len(rounds)} rounds averaged, loss {loss:.3f}"
    yield check("its run meanwhile", measured, "it goes on", averaged > 5)


def lies(options: Options, ticket: Ticket, folder: Path) -> Iterator[Check]:
    def told(number: str, tell: Callable[[Liar], list[dict[str, Any]]]) -> list[dict[str, Any]]:
        liar = Liar(ticket, folder / f"liar-{number}.key", ticket.settings_hash)
        try:
            return tell(liar)
        finally:
            liar.close()

    def row(what: str, answer: dict[str, Any]) -> Check:
        return check(what, short(json.dumps(answer).encode()), "refused", "refused" in answer)

    for what in options.lies:
        answers = told(what, lambda liar: [liar.tells(liar.header(**changes)) for changes in LIES[what]])  # noqa: B023
        yield row(what, answers[-1])
    unreadable = {"kind": "meet", "key": "x", "wants": "everyone"}
    forged, meet = told(
        "last", lambda liar: [liar.tells({**liar.header(), "signature": "00" * 64}), liar.tells(unreadable)]
    )
    yield row("a forged signature", forged)
    yield row("a request that cannot be read", meet)


def memory(peer: PeerProcess) -> float:
    """What a peer's process holds, in MB."""
    assert peer.process is not None
    status = Path(f"/proc/{peer.process.pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


def short(answer: bytes) -> str:
    return answer.decode(errors="replace").lstrip("\x00\x01").strip()[:64] or "no answer"
