"""Those who have come to a round at its host, and the groups that are made of them."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

from farflung.networks.base import ALONE, BESIDE, Party
from farflung.networks.internet.contact.streams import RequestRefusedError
from farflung.networks.peers.frames import Frame, FrameError, entry, name_in, number, reading, whole
from farflung.networks.peers.member import FURTHEST, LAST_RANK
from farflung.networks.peers.members import KNOWN, LOST
from farflung.networks.peers.weights import believed, with_common_anchors

LONGEST_PATIENCE_SECONDS = 600.0
GRACE_SECONDS = 4.0
"""How long a guest whose patience is over waits on for most of the others."""
WANTED, MOST = KNOWN + LOST + 1, 4096
"""Peers that one can know and want in its group, and peers of a group, at most."""
SHUNNED = 256
"""Peers at most of which a guest says that it takes none of their messages; a frame has room for few more."""


@dataclass(eq=False)
class Guest:
    """A peer that has come to a round."""

    rank: int
    wants: frozenset[int]
    step: int
    weight: float
    anchor_digest: str
    shuns: frozenset[int]
    """Those whose partner it will not be."""
    came: float
    until: float
    answer: asyncio.Future[Frame]
    asked: tuple[int, ...]
    """The hosts that it has asked; none where it cannot be sent on."""
    beside: bool
    """Whether it has met those that it wants in a round just now."""


@dataclass
class Rendezvous:
    """A round at its host."""

    waiting: dict[int, Guest] = field(default_factory=dict)
    gone: set[int] = field(default_factory=set)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    settling: asyncio.Task[None] | None = None
    met: float = -math.inf
    """When some last met here."""


@reading("a request to meet")
def guest_of(request: Frame, rank: int) -> tuple[Guest, str]:
    """Who asks to be let in, from now on, and the name of the round. Raises FrameError."""
    wants, shuns = entry(request, "wants", list), entry(request, "shuns", list)
    if len(wants) > WANTED or len(shuns) > SHUNNED:
        raise FrameError("a peer tells of too many others")
    loop, key = asyncio.get_running_loop(), name_in(request, "key")
    wanted = frozenset(whole(one, LAST_RANK) for one in wants)
    if wanted and rank not in wanted:
        raise FrameError("a peer wants a group without itself")
    guest = Guest(
        rank,
        wanted,
        whole(request.get("step"), FURTHEST),
        number(request.get("weight")),
        name_in(request, "lineage"),
        frozenset(whole(shunned, LAST_RANK) for shunned in shuns),
        loop.time(),
        loop.time() + min(number(request.get("patience")), LONGEST_PATIENCE_SECONDS),
        loop.create_future(),
        tuple(asked) if isinstance(asked := request.get("asked"), list) else (),
        BESIDE in key,
    )
    return guest, key


@reading("a host's answer")
def party_of(answer: Frame, own: int, weight: float) -> Party:
    """The party that a host says a peer is in. Raises FrameError when that cannot be.

    The own weight is not the host's to say.
    """
    told = entry(answer, "weights", list)
    if len(told) > MOST:
        raise FrameError("a host says that too many have come")
    weights = {whole(rank, LAST_RANK): number(heavy) for rank, heavy in told}
    if weights and own not in weights:
        raise FrameError("a host has left out who asked")
    if weights:
        weights[own] = weight
    weights = believed(weights)
    why = answer.get("alone")  # earlier releases say nothing of it
    alone = why if isinstance(why, str) and why in ALONE else Party.alone
    return Party(tuple(sorted(weights)), weights, bool(answer.get("behind")), alone=alone)


def circle_of(guest: Guest, waiting: dict[int, Guest]) -> list[Guest]:
    """Those that are here of the group that a guest wants, and whose groups overlap with it."""
    circle, ranks = {guest.rank: guest}, set(guest.wants)
    while more := [one for one in waiting.values() if one.rank not in circle and ranks & {one.rank, *one.wants}]:
        for one in more:
            circle[one.rank] = one
            ranks |= one.wants
    return list(circle.values())


def open_group(circle: list[Guest], free: list[Guest], rendezvous: Rendezvous, now: float) -> None:
    """Makes a group of those that are here of one, when most of them need not wait; one alone cannot say so."""
    idle = [guest for guest in circle if guest in free]
    if 2 * len(idle) > len(circle):
        bring_together(circle, rendezvous)
    elif late := [guest for guest in idle if guest.until + GRACE_SECONDS <= now]:
        bring_together(late, rendezvous)


def bring_together(guests: list[Guest], rendezvous: Rendezvous) -> None:
    """Makes a group of those who take each other's messages; the others stay alone.

    Whom half of them shun is left out. Who shuns one of those that are left would wait for its message in vain: it
    hears that the others keep that one.
    """
    against = Counter(rank for guest in guests for rank in guest.shuns)
    liked = {guest.rank for guest in guests if 2 * against[guest.rank] < len(guests)}
    together = {guest.rank: guest for guest in guests if guest.rank in liked and not guest.shuns & liked}
    if together:
        _group(list(together.values()), rendezvous)
    for guest in guests:
        if guest.rank not in together:
            alone = "shuns" if guest.rank in liked else "shunned"
            _group([guest], rendezvous, guest.shuns & together.keys(), alone)


def send_on(rendezvous: Rendezvous, host: int, record: Frame) -> None:
    """Tells those who have not been at a better host to go there."""
    for guest in list(rendezvous.waiting.values()):
        if guest.asked and host not in (guest.rank, *guest.asked) and not guest.answer.done():
            guest.answer.set_result({"better": record})
            del rendezvous.waiting[guest.rank]


def refuse_all(rendezvous: Rendezvous, why: str) -> None:
    """Has all go on to their next hosts."""
    for guest in rendezvous.waiting.values():
        if not guest.answer.done():
            guest.answer.set_exception(RequestRefusedError(why))
    rendezvous.waiting.clear()


def leave_alone(guest: Guest, rendezvous: Rendezvous) -> None:
    """Tells one that nobody is left for it, and why."""
    others = [other for other in rendezvous.waiting.values() if other is not guest]
    alone = Party.alone
    if any(other.rank in guest.shuns for other in others):
        alone = "shuns"
    elif any(guest.rank in other.shuns for other in others):
        alone = "shunned"
    elif others:  # who wait for partners of their own
        alone = "left over"
    elif len(rendezvous.gone) > 1:  # who stayed alone has gone, too
        alone = "late" if guest.came > rendezvous.met else "left over"
    _group([guest], rendezvous, alone=alone)


def make_pairs(guests: list[Guest], rendezvous: Rendezvous) -> list[Guest]:
    """Brings together two and two who do not shun each other; those that are left."""
    left: list[Guest] = []
    for guest in guests:
        for other in left:
            if not shun_each_other(guest, other):
                left.remove(other)
                bring_together([other, guest], rendezvous)
                break
        else:
            left.append(guest)
    return left


def shun_each_other(one: Guest, other: Guest) -> bool:
    """Whether one of two does not want to be the other's partner."""
    return one.rank in other.shuns or other.rank in one.shuns


def _group(guests: list[Guest], rendezvous: Rendezvous, kept: Collection[int] = (), alone: str = Party.alone) -> None:
    """Makes a group of those with the most common anchors, among equals with more work; the others are behind.

    Whom they shun may be `kept` by others. If it is one alone, says why.
    """
    if len(guests) > 1:
        rendezvous.met = asyncio.get_running_loop().time()
    weights = with_common_anchors((guest.rank, guest.anchor_digest, guest.weight) for guest in guests)
    for guest in guests:
        behind = guest.rank not in weights
        if not guest.answer.done():
            weighed = [] if behind else list(weights.items())
            guest.answer.set_result({"weights": weighed, "behind": behind, "kept": sorted(kept), "alone": alone})
        rendezvous.waiting.pop(guest.rank, None)
        rendezvous.gone.add(guest.rank)
