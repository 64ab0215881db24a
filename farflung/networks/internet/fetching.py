"""Downloading a run's state, in pieces from several peers; a peer that gives a false one is not asked again."""

from __future__ import annotations

import asyncio
import time
from collections import Counter

import torch

from farflung.networks.base import PeerLostError, SharedState
from farflung.networks.internet.frames import FrameError, read_payload
from farflung.networks.internet.host import UNREACHABLE
from farflung.networks.internet.manifests import Manifest, digest, manifest_of, piece_of
from farflung.networks.internet.members import Member
from farflung.networks.internet.peers import Peers
from farflung.networks.internet.snapshots import FRESH_SECONDS
from farflung.networks.internet.streams import RequestRefusedError
from farflung.networks.internet.transport import SLOWEST

SOURCES = 3
"""Peers that a state is fetched from at a time, with two pieces from each under way."""
AHEAD = 1000
"""Steps that a state may be ahead of the median step."""

Source = tuple[Member, Manifest]


class Download:
    """A state whose pieces are being downloaded."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self.givers: set[int] = set()
        self.content = torch.empty(manifest.size, dtype=torch.uint8)
        self.left = list(range(len(manifest.digests)))[::-1]

    def room(self, number: int) -> memoryview:
        """Where a piece goes."""
        return piece_of(self.content.numpy().data, number)

    def state(self) -> SharedState:
        """The whole."""
        names, lengths = zip(*self.manifest.tensors, strict=True)
        parts = torch.split(self.content.view(torch.float32), list(lengths))
        tensors = dict(zip(names, parts, strict=True))
        return SharedState(tensors, {"step": self.manifest.step}, tuple(sorted(self.givers)))


class Fetching:
    """Downloads others' states; all methods but `refuse` run in the peers' thread.

    No state of more than `largest` bytes is taken; after `stall_s` seconds without a byte, a piece is given up.
    """

    def __init__(self, peers: Peers, largest: int, stall_s: float) -> None:
        self.largest = largest
        self._peers = peers
        self._stall_s = stall_s
        self._told = time.monotonic()
        self._refused: set[str] = set()

    async def fetch(self, identical: bool) -> SharedState:
        """The state of a live peer; pieces come from several, and from others when some fail. Raises PeerLostError.

        Where peers are `identical`, only from those with the same bits; else pieces may come from different peers.
        """
        download, failures, silent = None, Counter[str](), set[str]()
        while True:
            sources = await self._sources(identical, failures, silent)
            if download is None or not download.manifest.like(sources[0][1], identical):
                download = Download(sources[0][1])
            delivered = await self._fill(download, sources, failures)
            if not download.left:
                return download.state()
            silent |= {source.peer for source, _ in sources} - delivered

    def refuse(self, member: Member, kind: str, why: str) -> None:
        """Excludes a peer that gave a false state; it is not asked again."""
        self._refused.add(member.peer)
        self._peers.guard.strike(member.peer, kind, f"{member.described}: {why}")

    async def _sources(self, identical: bool, failures: Counter[str], silent: set[str]) -> list[Source]:
        """Live peers with the same state, those that failed least first, then the furthest. Raises PeerLostError."""
        passed_over = self._refused | silent
        members = [member for member in self._peers.members.training() if member.peer not in passed_over]
        for begin in range(0, len(members), 2 * SOURCES):
            asked = members[begin : begin + 2 * SOURCES]
            answers = await asyncio.gather(*(self._described(member) for member in asked))
            found = [(member, answer) for member, answer in zip(asked, answers, strict=True) if answer]
            if found:
                found.sort(key=lambda source: (failures[source[0].peer], -source[1].step))
                return [source for source in found if source[1].like(found[0][1], identical)][:SOURCES]
        ranks = [member.rank for member in self._peers.members.training()]
        raise PeerLostError(ranks, f"no peer has the run's state {'that can be used' if passed_over else 'to give'}")

    async def _described(self, member: Member) -> Manifest | None:
        try:
            told = await self._peers.ask(member, {"kind": "state"}, FRESH_SECONDS)
            return manifest_of(told, self.largest, self._peers.members.median_step_at_most() + AHEAD)
        except FrameError as error:
            self.refuse(member, "bad state", str(error))
        except (*UNREACHABLE, RequestRefusedError):
            pass
        return None

    async def _fill(self, download: Download, sources: list[Source], failures: Counter[str]) -> set[str]:
        """Fetches what is left, as far as the sources go on; those that delivered something."""
        delivered: set[str] = set()

        async def work(source: Member, theirs: Manifest) -> None:
            while download.left:
                number = download.left.pop()
                try:
                    await self._fetch_piece(source, theirs, number, download.room(number))
                except (*UNREACHABLE, RequestRefusedError, FrameError):
                    download.left.append(number)
                    failures[source.peer] += 1
                    return
                delivered.add(source.peer)
                self._tell_progress(download)

        download.givers |= {member.rank for member, _ in sources}
        await asyncio.gather(*(work(*source) for source in sources for _ in range(2)))
        return delivered

    async def _fetch_piece(self, member: Member, manifest: Manifest, number: int, into: memoryview) -> None:
        async with self._peers.stream(member) as stream:
            await stream.tell({"kind": "piece", "id": manifest.id, "number": number})
            await stream.hear()
            await read_payload(stream.reader, into, self._stall_s, SLOWEST)
        if await asyncio.to_thread(digest, into) != manifest.digests[number]:
            fault = "a piece of its state is not what it announced"
        elif not await asyncio.to_thread(_finite, into):
            fault = "a piece of its state is not finite"
        else:
            return
        self.refuse(member, "bad piece", fault)
        raise FrameError(fault)

    def _tell_progress(self, download: Download) -> None:
        if time.monotonic() - self._told > 5:
            self._told = time.monotonic()
            total = len(download.manifest.digests)
            share = 100 * (total - len(download.left)) // total
            self._peers.tell(f"fetching the run's state: {share} % of {download.manifest.size / 1e6:.0f} MB")


def _finite(content: memoryview) -> bool:
    return bool(torch.isfinite(torch.frombuffer(content, dtype=torch.float32)).all())
