"""How a newcomer finds the first members: it calls the peers of its ticket until one answers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from farflung.errors import UserError, counted
from farflung.networks.internet.contact.handshake import StrangerError
from farflung.networks.internet.contact.streams import RequestRefusedError
from farflung.networks.peers.addresses import peers_at
from farflung.networks.peers.member import Member
from farflung.networks.peers.ticket import NobodyAnswersError

if TYPE_CHECKING:
    from farflung.networks.internet.contact.peers import Peers

KNOCK_SECONDS, TELL_SECONDS = 2.0, 10.0
"""How often a newcomer calls the peers of its ticket, and when it tells that nobody has answered yet."""

LOOKING_SECONDS = 20.0
"""How long one that only looks at the run calls: somebody sits before it and waits."""

AT_FIRST_SECONDS = 5.0
"""How long one that can begin alone calls the peers of its ticket."""


async def find_members(peers: Peers, addresses: Sequence[str], deadline_s: float) -> None:
    """Calls the peers at a ticket's addresses until one answers, or somebody comes. Raises UserError."""
    if not addresses:
        raise NobodyAnswersError("the ticket has no addresses; ask a peer for its newer ticket (RUN/run.ticket)")
    loop = asyncio.get_running_loop()
    looks = not peers.info["listed"]
    deadline_s = min(deadline_s, LOOKING_SECONDS) if looks else deadline_s
    began, told = loop.time(), looks
    while not (peers.members.proven() or await _knock(peers, addresses, loop.time() - began > TELL_SECONDS)):
        if loop.time() - began > deadline_s:
            raise NobodyAnswersError(
                f"the ticket leads to {counted(len(addresses), 'address')}, where nobody has answered for "
                f"{deadline_s:.0f} s; the run may be over; if not, ask a peer for its newer ticket (RUN/run.ticket), "
                "and see that this machine reaches it"
            )
        if loop.time() - began > TELL_SECONDS and not told:
            told = True
            places = counted(len(addresses), "address")
            peers.tell(f"nobody answers yet at the ticket's {places}; this peer calls for {deadline_s:.0f} s")
        await asyncio.sleep(KNOCK_SECONDS)


async def find_members_if_any(peers: Peers, addresses: Sequence[str]) -> None:
    """Calls the peers at a ticket's addresses once: a run that begins again here may go on there. Raises UserError."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(AT_FIRST_SECONDS):
            await _knock(peers, addresses, late=False)


async def _knock(peers: Peers, addresses: Sequence[str], late: bool) -> bool:
    """Calls the peers of the ticket once; whether one answers. Raises UserError where that is of no use."""
    others = [peer for peer in peers_at(addresses) if peer != peers.identity.peer]
    answers = await asyncio.gather(*map(peers.handshake, others), return_exceptions=True)
    if any(isinstance(answer, Member) for answer in answers):
        return True
    for answer in answers:
        if isinstance(answer, UserError):
            raise answer
        if isinstance(answer, RequestRefusedError):
            raise UserError(f"the run's peers refuse this one: {answer}") from answer
    strangers = any("protocols not supported" in str(one) or isinstance(one, StrangerError) for one in answers)
    if strangers and late:
        raise UserError(
            "the peers at the ticket's addresses are not of this run, or the ticket's secret is wrong; "
            "ask for a new ticket"
        )
    return False
