"""How two peers prove to each other that they belong to the run, before either reads anything else."""

from __future__ import annotations

import contextlib
import re
import secrets
import socket
from typing import Any

from farflung.errors import UserError
from farflung.formats import PROTOCOL, package_version
from farflung.networks.internet.frames import Frame, FrameError, entry, number, reading, whole
from farflung.networks.internet.host import leads_to
from farflung.networks.internet.identity import Identity, peer_of, rank_of
from farflung.networks.internet.members import Member
from farflung.networks.internet.ticket import Ticket

CLOCK_SECONDS = 2.5
"""Clocks that differ by more make the DHT forget what it should know."""


OTHER_SHAPES = (
    "the model made here has other shapes than the run's; "
    "see that the model and tokenizer the ticket names are the same files and versions on both machines"
)


FACTS = ("loss", "tokens_per_second", "rounds", "refused")
"""What a peer tells those who look on: numbers."""
LARGEST_FACT = 1e15
FASTEST, FURTHEST = 1e6, 1 << 40
"""Steps a second, and steps, that nobody has."""
LAST_BEAT = 1 << 53
LAST_PROTOCOL = 1 << 16


class StrangerError(FrameError):
    """Who asks does not know the run's secret."""


class Admission:
    """One peer's side of the proof: both show that they know the secret, for these two peers and this moment.

    Ask, answer and proof are frames; what the peers say of themselves follows only then.
    """

    def __init__(self, ticket: Ticket, identity: Identity) -> None:
        self._ticket = ticket
        self._own = identity.peer

    def ask(self) -> Frame:
        """The first frame, of the one who opens."""
        return {"kind": "hello", "nonce": secrets.token_hex(16)}

    def answer(self, ask: Frame, peer: str) -> Frame:
        """The second, of the one who is asked: already a proof."""
        nonce = secrets.token_hex(16)
        return {"nonce": nonce, "proof": self._ticket.proof("answer", entry(ask, "nonce", str), nonce, peer, self._own)}

    def proof(self, ask: Frame, answer: Frame, peer: str) -> str:
        """The opener's, once the answer has convinced it. Raises StrangerError."""
        nonce = entry(answer, "nonce", str)
        if not self._ticket.proves(answer.get("proof"), "answer", ask["nonce"], nonce, self._own, peer):
            raise StrangerError("it does not know the run's secret")
        return self._ticket.proof("ask", nonce, ask["nonce"], self._own, peer)

    def check(self, ask: Frame, answer: Frame, proof: object, peer: str) -> None:
        """Whether the opener has convinced the one who is asked. Raises StrangerError."""
        if not self._ticket.proves(proof, "ask", answer["nonce"], ask["nonce"], peer, self._own):
            raise StrangerError("it does not know the run's secret")


def introduction(ticket: Ticket) -> Frame:
    """What one says of itself that does not train yet, and has no model."""
    return {
        "version": package_version(),
        "settings": ticket.settings_hash,
        "shapes": "",
        "host": socket.gethostname(),
        "trains": False,
    }


@reading("what a peer says of itself")
def member_of(about: Frame, peer: str) -> Member:
    """The member that a peer says it is. Raises FrameError when that cannot be."""
    public = entry(about, "public", str)
    if peer_of(public) != peer or entry(about, "rank", int) != rank_of(peer):
        raise FrameError("a peer's key is not its own")
    addresses = entry(about, "addresses", list)
    if len(addresses) > 32 or not all(isinstance(address, str) and leads_to(address, peer) for address in addresses):
        raise FrameError("an address that a peer says is its own is none")
    return Member(
        peer=peer,
        rank=rank_of(peer),
        public=public,
        session=entry(about, "session", str)[:64],
        host=re.sub(r"[^\w.-]", "?", entry(about, "host", str)[:64]),
        addresses=tuple(addresses),
        beat=whole(about.get("beat"), LAST_BEAT),
        step=whole(about.get("step"), FURTHEST),
        rate=number(about.get("rate"), most=FASTEST),
        trains=entry(about, "trains", bool),
        shapes=entry(about, "shapes", str)[:64],
        facts=_facts_in(entry(about, "facts", dict)),
    )


def _facts_in(told: Frame) -> dict[str, float]:
    facts = {}
    for name in FACTS:
        with contextlib.suppress(FrameError):
            number(told.get(name), -LARGEST_FACT, LARGEST_FACT)
            facts[name] = told[name]
    return facts


@reading("what a peer says of itself")
def disagreement(newcomer: Frame, run: Frame) -> str:
    """Why one cannot train with those of the run, and what it can do; "" when it can."""
    if (spoken := whole(newcomer.get("protocol", 0), LAST_PROTOCOL)) != PROTOCOL.version:
        remedy = "update farflung" if spoken < PROTOCOL.version else "use theirs"
        return (
            f"this is farflung {newcomer.get('version')!s:.20} with {PROTOCOL.name} {spoken}, the run's peers have "
            f"farflung {run['version']} with {PROTOCOL.version}; {remedy}: pip install farflung=={run['version']}"
        )
    if newcomer.get("settings") != run["settings"]:
        return "the ticket's settings are not the run's; ask for a new ticket, and do not edit it"
    if run["shapes"] and newcomer.get("shapes") and newcomer["shapes"] != run["shapes"]:
        return OTHER_SHAPES
    return ""


def check_clock(theirs: Any, asked: float, now: float) -> None:
    """Whether two clocks agree, by what the other's was between two moments of one's own. Raises UserError."""
    ahead = (asked + now) / 2 - float(theirs)
    if abs(ahead) > CLOCK_SECONDS + (now - asked) / 2:
        raise UserError(
            f"this machine's clock is {abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} the other peers'; "
            "set it, for example with: timedatectl set-ntp true"
        )
