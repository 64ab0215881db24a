"""A peer that only calls the others of its run, says when and by which way it has reached each, and measures links.

    python -m bench.lib.caller '{"ticket": …, "key": …, "port": …, "announce": […], "first": …}'

It says that it is ready, and begins with the first line that comes; each later line is the rank of a peer to measure.
What it says is JSON, a line each: {"ready": RANK}, {"joined": SECONDS}, {"met": RANK, "way": …, "seconds": …} whenever
a way to a peer changes, {"measured": RANK, "up": MB/s, "down": MB/s} or {"measured": RANK, "failed": why}.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

from farflung.errors import UserError
from farflung.networks.internet import Identity, ListenAddress, Peers, newcomer_info, read_ticket
from farflung.networks.internet.contact.host import UNREACHABLE
from farflung.networks.internet.contact.streams import RequestRefusedError
from farflung.networks.internet.examination import answer_probes, measured
from farflung.networks.peers.frames import FrameError
from farflung.networks.peers.member import Member

FAULTS = (*UNREACHABLE, RequestRefusedError, FrameError, UserError)
START_S, MEASURE_S = 60.0, 60.0
LOOK_S = 0.5


def say(**told: Any) -> None:
    print(json.dumps(told), flush=True)


class Caller:
    """Calls all that it hears of until they answer; its methods but `measure` run in the peers' thread."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._began = time.monotonic()
        self._reached: set[int] = set()
        self._ways: dict[int, str] = {}

    async def call_all(self) -> None:
        """For ever."""
        called: set[int] = set()
        while True:
            for member in self._peers.members.all():
                if member.rank not in called:
                    called.add(member.rank)
                    self._peers.background.spawn(self._call(member))
            await self._tell_ways()
            await asyncio.sleep(LOOK_S)

    async def _call(self, member: Member) -> None:
        while member.rank not in self._reached:
            try:
                await self._peers.handshake(member.peer)
                self._reached.add(member.rank)
            except FAULTS:
                await asyncio.sleep(LOOK_S)

    async def _tell_ways(self) -> None:
        connections = await self._peers._host.p2p.list_peers()
        for rank in self._reached:
            member = self._peers.members.by_rank[rank]
            addresses = [str(a) for found in connections if str(found.peer_id) == member.peer for a in found.addrs]
            ways = {"relay" if "p2p-circuit" in address else "direct" for address in addresses}
            way = min(ways, default="gone")  # packets take a direct one where there is one
            if self._ways.get(rank) != way:
                self._ways[rank] = way
                say(met=rank, way=way, seconds=time.monotonic() - self._began)

    def measure(self, rank: int) -> None:
        member = self._peers.members.by_rank.get(rank)
        if member is None:
            say(measured=rank, failed="never heard of")
            return
        try:
            up, down = self._peers.background.run(measured(self._peers, member), MEASURE_S)
            say(measured=rank, up=up / 8, down=down / 8)
        except FAULTS as error:
            say(measured=rank, failed=str(error) or type(error).__name__)


def main(told: dict[str, Any]) -> None:
    ticket = read_ticket(Path(told["ticket"]))
    local = ListenAddress("0.0.0.0", told["port"], tuple(told["announce"]))
    peers = Peers(ticket, Identity(Path(told["key"])), local, newcomer_info(ticket), first=told["first"])
    answer_probes(peers)
    say(ready=peers.identity.rank)
    sys.stdin.readline()
    caller = Caller(peers)
    peers.start(START_S)
    say(joined=time.monotonic() - caller._began)
    peers.background.submit(caller.call_all())
    for line in sys.stdin:
        caller.measure(int(line))
    peers.close()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
