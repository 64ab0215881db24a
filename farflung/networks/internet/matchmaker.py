"""Who takes part in a round: any peer can be its host, which makes groups of the peers that come to it.

The round's name and the members determine its host; a host that is not there is skipped. A host sends one that comes on
to a better one, where each knows only a part of the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
import time
from collections import OrderedDict, defaultdict, deque
from collections.abc import Collection, Sequence
from dataclasses import replace

from farflung.errors import UserError
from farflung.networks.base import BESIDE, HOSTS_AGREE, Group, Party
from farflung.networks.internet.contact.host import UNREACHABLE
from farflung.networks.internet.contact.peers import Peers
from farflung.networks.internet.contact.streams import PROMPT_SECONDS, PeerStream, RequestRefusedError
from farflung.networks.internet.gathering import (
    GRACE_SECONDS,
    SHUNNED,
    Guest,
    Rendezvous,
    bring_together,
    circle_of,
    guest_of,
    leave_alone,
    make_pairs,
    open_group,
    party_of,
    refuse_all,
    send_on,
    shun_each_other,
)
from farflung.networks.peers.frames import Frame, FrameError, entry
from farflung.networks.peers.guard import BAN_SECONDS, MISSED
from farflung.networks.peers.member import Member, arrives, member_in
from farflung.networks.peers.members import KNOWN

CALL_SECONDS = 0.3
"""How long a host waits before it calls those who have not come."""
CALLED, CALL_AGAIN_SECONDS = 32, 2.0
"""Missing peers that a host calls in a round at most, and how long it then leaves each of them alone."""
LOOK_SECONDS = 0.1
"""Seconds between two checks whether missing peers can still come."""
RENDEZVOUS_KEPT = 256
VISITS = 16
"""Rounds at which a peer can be at a time."""
HOSTS_TRIED, VISITED = 3, 6
"""Hosts of its own choice to which a peer goes for a round, and visits in all, with those to which it is sent on."""
HOSTS_NO_MORE = "it does not train, so that others do not come to it"
CROWD_SECONDS = 0.5
"""How long those who want a pair wait for each other where a peer knows only a part of the run."""


class Matchmaker:
    """Finds this peer's group in each round, and hosts others' rounds. All methods run in the peers' thread."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._called: dict[int, float] = {}
        self._silent: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=MISSED))
        """When hosts that have answered nothing since were asked in vain, or have sent this peer on in vain."""
        self._said_kept: dict[int, set[int]] = {}
        """Which hosts have said that others keep one that this peer shuns."""
        self._rendezvous: OrderedDict[str, Rendezvous] = OrderedDict()
        peers.handlers["meet"] = self._on_meet

    async def meet(
        self, wanted: Group, key: str, step: int, weight: float, anchor_digest: str, patience_s: float
    ) -> Party:
        """The group of those who came to a round; see Network. Never fails: at worst this peer stays alone."""
        request = {"wants": list(wanted), "key": key, "step": step, "weight": weight, "lineage": anchor_digest}
        request |= {"patience": patience_s, "shuns": self._peers.members.shunned()[:SHUNNED]}
        hosts, asked, alone = deque(self._hosts(key, wanted)[:HOSTS_TRIED]), list[int](), "unreachable"
        for forgotten in self._silent.keys() - self._peers.members.by_rank.keys():
            del self._silent[forgotten]
        silent = [host for host in self._silent if self._asked_in_vain(host)]  # nobody shall send this peer on to these
        while hosts and len(asked) < VISITED:
            asked.append(hosts.popleft())
            if asked[-1] == self._peers.identity.rank:
                return await self._at_home(request, weight)
            self._send_on(key, asked[-1])
            found = await self._visit(asked[-1], {"kind": "meet", **request, "asked": asked + silent})
            if isinstance(found, Party):
                return found
            if isinstance(found, str):
                alone = found
            elif found is not None:
                hosts.extendleft((asked[-1], found))  # back to this one if the better one is not there
        return Party((), {}, alone=alone)

    def _send_on(self, key: str, host: int) -> None:
        """Sends guests on to a better host, of whom this peer has learnt since, and to whom it goes itself."""
        better = self._peers.members.by_rank.get(host)
        if better is None or _turn(key, host) >= _turn(key, self._peers.identity.rank) or key not in self._rendezvous:
            return
        send_on(self._rendezvous[key], host, better.record)

    async def _visit(self, host: int, request: Frame) -> Party | int | str | None:
        """The group of a round at another host, or a better host, or a word of ALONE; None if it is not there."""
        if host not in self._may_host(request["key"], request["wants"]):
            return None  # it has been gone for too long meanwhile
        member = self._peers.members.by_rank[host]
        try:
            answer = await self._peers.ask(member, request, request["patience"] + PROMPT_SECONDS)
            if "better" in answer:
                return await self._better(answer, request["key"], host)
            self._silent.pop(host, None)
            self._forgive(answer, host)
            return replace(party_of(answer, self._peers.identity.rank, request["weight"]), host=host)
        except FrameError as error:
            self._peers.guard.strike(member.peer, "bad answer", str(error))
        except RequestRefusedError:
            return "refused"  # it is there
        except UNREACHABLE as error:
            self._peers.members.failed(host)
            if isinstance(error, TimeoutError):
                self._silent[host].append(time.monotonic())
        return None

    async def _better(self, answer: Frame, key: str, host: int) -> int:
        """Gets to know the host to which another one sends this peer on. Raises FrameError if that is no better."""
        better = member_in(entry(answer, "better", dict))
        if _turn(key, better.rank) >= _turn(key, host):
            raise FrameError("a host sends this peer on to one that is no better")
        if better.rank not in self._peers.members.by_rank:
            try:
                await self._peers.handshake(better.peer, better.addresses)
            except (*UNREACHABLE, RequestRefusedError, FrameError, UserError):
                self._silent[host].append(time.monotonic())
        return better.rank

    async def _at_home(self, request: Frame, weight: float) -> Party:
        """The group of a round that this peer hosts itself."""
        own = self._peers.identity.rank
        try:
            answer = await self._welcome(*guest_of(request, own))
            self._forgive(answer, own)
            return replace(party_of(answer, own, weight), host=own)
        except TimeoutError:
            return Party((), {})
        except RequestRefusedError:
            return Party((), {}, alone="refused")

    def _forgive(self, answer: Frame, host: int) -> None:
        """Forgives those that others keep in their groups, when this peer itself or two hosts say so.

        It would else have no part in their rounds: who wrongs one alone could shut it out.
        """
        kept, shunned = answer.get("kept"), self._peers.members.shunned()
        self._said_kept = {rank: self._said_kept.get(rank, set()) for rank in shunned}
        for rank, said in self._said_kept.items():
            if not isinstance(kept, list) or rank not in kept:
                continue
            said.add(host)
            if len(said) >= HOSTS_AGREE or host == self._peers.identity.rank:
                self._peers.guard.forgive(self._peers.members.by_rank[rank].peer)

    def _hosts(self, key: str, wanted: Collection[int] = ()) -> list[int]:
        """Who may host a round, in the order in which they are to be asked: last, those that keep others waiting."""
        hosts = self._may_host(key, wanted)
        return sorted(hosts, key=lambda rank: (self._asked_in_vain(rank), _turn(key, rank)))

    def _may_host(self, key: str, wanted: Collection[int]) -> list[int]:
        """Those who train; beside a round, those who have met there, be it news or not that they train."""
        if BESIDE not in key:
            return self._expected()
        there = {member.rank for member in self._peers.members.in_good_standing()} | {self._peers.identity.rank}
        return sorted(there.intersection(wanted))

    def _asked_in_vain(self, host: int) -> bool:
        """Whether a host has not answered again and again; it is asked last for a while."""
        asked: Sequence[float] = self._silent.get(host, ())
        return len(asked) == MISSED and time.monotonic() - asked[-1] < BAN_SECONDS

    def _expected(self) -> list[int]:
        return [member.rank for member in self._peers.members.training()] + [self._peers.identity.rank]

    async def _on_meet(self, stream: PeerStream, frame: Frame) -> None:
        if not stream.member.listed or stream.member.door_of is not None:
            raise RequestRefusedError("the others do not know of it")  # and would wait for it in vain
        if not self._peers.info["trains"]:
            raise RequestRefusedError(HOSTS_NO_MORE)
        guest, key = guest_of(frame, stream.member.rank)
        here = (self._peers.identity.rank, guest.rank, *guest.asked)
        if guest.asked and (first := next(iter(self._hosts(key, guest.wants)), guest.rank)) not in here:
            await stream.tell({"better": self._peers.members.by_rank[first].record})
            return
        welcome = asyncio.ensure_future(self._welcome(guest, key))
        left = asyncio.ensure_future(stream.reader.read(1))
        try:
            await asyncio.wait([welcome, left], return_when=asyncio.FIRST_COMPLETED)
            if welcome.done():
                answer = welcome.result()
                with contextlib.suppress(*UNREACHABLE):
                    await stream.tell(answer)
        finally:
            welcome.cancel()
            left.cancel()
            await asyncio.wait([welcome, left])  # until then nobody else may read

    async def _welcome(self, guest: Guest, key: str) -> Frame:
        """Admits a peer, and yields its group in the end. Raises RequestRefusedError and TimeoutError."""
        rank = guest.rank
        self._peers.members.heard_step(rank, guest.step)
        rendezvous = self._rendezvous_of(key)
        if rank in rendezvous.waiting or rank in rendezvous.gone:
            raise RequestRefusedError("it came to this round before")
        if sum(rank in other.waiting for other in self._rendezvous.values()) >= VISITS:
            raise RequestRefusedError("it is at too many rounds at a time")
        rendezvous.waiting[rank] = guest
        rendezvous.changed.set()
        if rendezvous.settling is None or rendezvous.settling.done():
            rendezvous.settling = self._peers.background.spawn(self._settle_until_all_have_gone(rendezvous))
            self._peers.background.spawn(self._call_missing(rendezvous))
        try:
            async with asyncio.timeout_at(guest.until + 2 * GRACE_SECONDS):
                return await guest.answer
        finally:
            rendezvous.waiting.pop(rank, None)

    def _rendezvous_of(self, key: str) -> Rendezvous:
        rendezvous = self._rendezvous.setdefault(key, Rendezvous())
        self._rendezvous.move_to_end(key)
        over = [old for old, other in self._rendezvous.items() if old != key and not other.waiting]
        for old in over[: max(0, len(self._rendezvous) - RENDEZVOUS_KEPT)]:
            del self._rendezvous[old]
        return rendezvous

    async def _call_missing(self, rendezvous: Rendezvous) -> None:
        """Asks those who have not come how far they are: some are dead, and the last news is that they train."""
        await asyncio.sleep(CALL_SECONDS)
        now = time.monotonic()
        self._called = {rank: at for rank, at in self._called.items() if now - at < CALL_AGAIN_SECONDS}
        wanted = {rank for guest in rendezvous.waiting.values() for rank in guest.wants}
        missing = sorted(wanted - rendezvous.waiting.keys() - rendezvous.gone)
        members = [member for rank in missing if (member := self._peers.members.by_rank.get(rank)) and member.alive]
        await asyncio.gather(*map(self._call, random.sample(members, min(CALLED, len(members)))))

    async def _call(self, member: Member) -> None:
        if member.rank not in self._called:
            self._called[member.rank] = time.monotonic()
            await self._peers.still_there(member)

    async def _settle_until_all_have_gone(self, rendezvous: Rendezvous) -> None:
        """Settles a round whenever somebody has come, and now and then."""
        while rendezvous.waiting:
            rendezvous.changed.clear()
            if not self._peers.info["trains"]:
                refuse_all(rendezvous, HOSTS_NO_MORE)
            self._settle(rendezvous)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_SECONDS):
                    await rendezvous.changed.wait()

    def _settle(self, rendezvous: Rendezvous) -> None:
        """Makes groups of guests that need not wait for anybody else."""
        waiting = rendezvous.waiting
        for guest in list(waiting.values()):
            wanted = [waiting.get(rank) for rank in guest.wants]
            if guest.rank in waiting and wanted and all(one and one.wants == guest.wants for one in wanted):
                group = [waiting[rank] for rank in guest.wants]
                if len(group) != 2 or not shun_each_other(*group):
                    bring_together(group, rendezvous)
        now = asyncio.get_running_loop().time()
        free = [guest for guest in waiting.values() if self._free(guest, rendezvous, now)]
        for guest in free:
            if len(guest.wants) > 2 and guest.rank in waiting:
                open_group(circle_of(guest, waiting), free, rendezvous, now)
        pairs = [guest for guest in free if len(guest.wants) <= 2 and guest.rank in waiting]
        for left in make_pairs(pairs, rendezvous):
            if left.until <= now or not self._anybody(left, rendezvous):
                leave_alone(left, rendezvous)

    def _free(self, guest: Guest, rendezvous: Rendezvous, now: float) -> bool:
        """Whether nobody whom a guest wants to meet can still come, or it waits no longer."""
        crowded = len(guest.wants) <= 2 and len(self._peers.members.by_rank) >= KNOWN
        until = min(guest.until, guest.came + CROWD_SECONDS) if crowded else guest.until
        return until <= now or not self._any_comes(guest.wants, guest, rendezvous)

    def _anybody(self, guest: Guest, rendezvous: Rendezvous) -> bool:
        """Whether a guest may still find a partner, among those here or expected."""
        there = any(other is not guest and not shun_each_other(other, guest) for other in rendezvous.waiting.values())
        return there or self._any_comes(frozenset(self._expected()), guest, rendezvous)

    def _any_comes(self, ranks: frozenset[int], guest: Guest, rendezvous: Rendezvous) -> bool:
        """Whether one of those that have not come can still do so while a guest waits."""
        return any(self._comes(rank, guest) for rank in ranks.difference(rendezvous.waiting, rendezvous.gone))

    def _comes(self, rank: int, guest: Guest) -> bool:
        """Whether one that has not come can still do so while a guest waits."""
        left = guest.until - asyncio.get_running_loop().time()
        info = self._peers.info
        if guest.beside and rank not in guest.wants:
            return False
        if rank == self._peers.identity.rank:
            return bool(info["trains"]) and (guest.beside or arrives(info["step"], info["rate"], guest.step, left))
        member = self._peers.members.by_rank.get(rank)
        if member is None or not member.alive or rank in guest.shuns:
            return False
        if guest.beside:  # it trains, even where no news of that has come yet
            return not member.stalled
        return member.trains and member.arrives(guest.step, left)


def _turn(key: str, rank: int) -> bytes:
    """The less it is, the sooner a peer is asked to be a round's host."""
    return hashlib.sha256(f"{key} {rank}".encode()).digest()
