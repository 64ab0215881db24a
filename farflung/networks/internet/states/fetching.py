"""Downloading a run's state, in pieces from several peers; a peer that gives a false one is not asked again."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor

from farflung.networks.base import PeerLostError, SharedState
from farflung.networks.internet.contact.host import UNREACHABLE
from farflung.networks.internet.contact.peers import Peers
from farflung.networks.internet.contact.streams import PROMPT_SECONDS, PeerStream, RequestRefusedError
from farflung.networks.internet.states.downloads import Download, Kept
from farflung.networks.internet.states.snapshots import FRESH_SECONDS
from farflung.networks.peers.believing import (
    STRETCHES,
    Believed,
    Source,
    by_majority,
    by_spread,
    largest_group,
    signs_for,
)
from farflung.networks.peers.frames import (
    SLOWEST,
    Frame,
    FrameError,
    parsed,
    read_payload,
    reading,
    whole,
)
from farflung.networks.peers.manifests import LONGEST, Manifest, manifest_of
from farflung.networks.peers.member import Member
from farflung.networks.peers.packing import longest, unpack

ASKED = 15
"""Peers that are asked of the state, drawn at random: each makes a copy of its own to answer."""


class Fetching:
    """Downloads others' states; all methods but `refuse` and `accept` run in the peers' thread.

    No state of more than `largest` bytes is taken; after `stall_s` seconds without a byte, a piece is given up. What
    has come is kept in a folder, if one is given, until the state was taken. It is the state of what this peer trains,
    or of another `stage`.
    """

    def __init__(
        self, peers: Peers, largest: int, stall_s: float, folder: Path | None, stage: int | None = None
    ) -> None:
        self.largest = largest
        self._stage = stage
        self._peers = peers
        self._stall_s = stall_s
        self._kept = Kept(folder)
        self._told = 0.0
        self._refused: set[str] = set()

    async def fetch(self, identical: bool) -> SharedState:
        """The state of live peers; pieces come from several, and from others when some fail. Raises PeerLostError.

        Where peers are `identical`, only from those with the same bits; else pieces may come from different peers.
        """
        download, failures, silent = None, Counter[str](), set[str]()
        self._told = time.monotonic()
        while True:
            believed = await self._believed(identical, silent)
            believed.sources.sort(key=lambda source: failures[source[0].peer])
            first = believed.sources[0][1]
            if download is None or download.manifest.tensors != first.tensors:
                download = Download(first)
            await asyncio.to_thread(download.go_on, believed.sources, self._kept, believed.holds_piece)
            delivered = await self._fill(download, believed, failures)
            if not download.left:
                return download.state()
            silent |= {source.peer for source, _ in download.sources} - delivered

    def accept(self) -> None:
        """Forgets what has come of a state that was taken."""
        self._kept.clear()

    def refuse(self, member: Member, kind: str, why: str) -> None:
        """Excludes a peer that gave a false state; it is not asked again."""
        self._refused.add(member.peer)
        self._peers.guard.strike(member.peer, kind, f"{member.described}: {why}")

    async def _believed(self, identical: bool, silent: set[str]) -> Believed:
        """Live peers whose states can be taken, best first; who tells what cannot be is refused. Raises PeerLostError.

        Of three or more that answer, none is believed alone; of two or one, who has gone furthest.
        """
        heard = await self._heard(silent)
        like = largest_group(heard, lambda manifest: manifest.tensors)
        if len(heard) < 3:
            believed = Believed([source for source in heard if source[1].like(heard[0][1], identical)])
            if identical and len(believed.sources) < len(heard):
                self._tell_of_two(*heard)
            return believed
        if len(like) == 1:
            raise PeerLostError([member.rank for member, _ in heard], "no two peers say the same of the run's state")
        believed = (by_majority(like) if identical else None) or await self._near(like)
        for member in believed.false:
            self.refuse(member, "bad state", "its state is not that of the others")
        if not believed.sources:
            raise PeerLostError([member.rank for member, _ in like], "no peer shows that its state is near the others'")
        if identical:
            believed.sources = largest_group(believed.sources, lambda manifest: manifest.digests)
        return believed

    def _tell_of_two(self, one: Source, other: Source) -> None:
        self._peers.tell(
            f"{one[0].described} and {other[0].described} have different states of the run; the first one's is taken: "
            "join again when a third peer trains to know whom to believe"
        )

    async def _heard(self, silent: set[str]) -> list[Source]:
        """Live peers and what they say of their states: what is kept of first, then the furthest."""
        passed_over = self._refused | silent
        members = [one for one in self._holders() if one.peer not in passed_over]
        random.SystemRandom().shuffle(members)
        held = self._kept.snapshots()
        for begin in range(0, len(members), ASKED):
            asked = members[begin : begin + ASKED]
            answers = await asyncio.gather(*(self._described(member, held) for member in asked))
            if found := [(member, answer) for member, answer in zip(asked, answers, strict=True) if answer]:
                return sorted(found, key=lambda source: (source[1].id not in held, -source[1].step))
        ranks = [member.rank for member in self._peers.members.training(self._stage)]
        raise PeerLostError(ranks, f"no peer has the run's state {'that can be used' if passed_over else 'to give'}")

    def _holders(self) -> list[Member]:
        """Those that train it, and hold what this peer does; where nobody does, other stages' peers, for copies."""
        members = self._peers.members
        copies = [one for one in members.in_good_standing() if "serves" in one.facts]
        return members.holding(members.core_only, self._stage) or copies

    async def _near(self, sources: list[Source]) -> Believed:
        """Those of some with the same tensors who lie near each other, by sketches."""
        if len(sources) < 3:
            return Believed(sources)
        seed, lengths = os.urandom(16).hex(), [one.stop - one.start for one in sources[0][1].pieces]
        answers = await asyncio.gather(*(self._sketched(member, theirs, seed) for member, theirs in sources))
        told = [(source, answer) for source, answer in zip(sources, answers, strict=True) if answer is not None]
        signs = await asyncio.to_thread(signs_for, seed, lengths)
        return by_spread([source for source, _ in told], [answer for _, answer in told], signs)

    async def _described(self, member: Member, held: list[str]) -> Manifest | None:
        """What a peer says of its state, as it was when it was `held` for this peer before, or is now."""
        try:
            stage = self._peers.info["stage"] if self._stage is None else self._stage
            part = {"core": True} if self._peers.members.core_only else {}
            told = await self._asked(member, {"kind": "state", "held": held, "stage": stage, **part}, LONGEST)
            return manifest_of(parsed(told), self.largest, self._peers.members.furthest_step())
        except FrameError as error:
            self.refuse(member, "bad state", str(error))
        except (*UNREACHABLE, RequestRefusedError):
            pass
        return None

    async def _sketched(self, member: Member, theirs: Manifest, seed: str) -> Tensor | None:
        """The sketches of a peer's pieces; None when there are none."""
        size = 8 * STRETCHES * len(theirs.pieces)
        try:
            told = await self._asked(member, {"kind": "sketch", "id": theirs.id, "seed": seed}, size)
            return _sketches_in(told, len(theirs.pieces))
        except FrameError as error:
            self.refuse(member, "bad state", str(error))
        except (*UNREACHABLE, RequestRefusedError):
            pass
        return None

    async def _asked(self, member: Member, request: Frame, largest: int) -> bytes:
        """The answer to a request, of at most so many bytes."""
        async with asyncio.timeout(FRESH_SECONDS), self._peers.stream(member) as stream:
            await stream.tell(request)
            return bytes(await self._answer(stream, largest, FRESH_SECONDS))

    async def _answer(self, stream: PeerStream, largest: int, prompt_s: float = PROMPT_SECONDS) -> bytearray:
        """What comes after its length."""
        content = bytearray(whole((await stream.hear(prompt_s)).get("size"), largest))
        await read_payload(stream.reader, memoryview(content), self._stall_s, SLOWEST)
        return content

    async def _fill(self, download: Download, believed: Believed, failures: Counter[str]) -> set[str]:
        """Fetches what is left, as far as the sources go on; those that delivered something."""
        delivered: set[str] = set()

        async def work(source: Member, theirs: Manifest) -> None:
            while download.left:
                number = download.left.pop()
                try:
                    await self._fetch_piece(source, theirs, number, download.room(number))
                    await self._check_piece((source, theirs), number, download.room(number), believed)
                except (*UNREACHABLE, RequestRefusedError, FrameError):
                    download.left.append(number)
                    failures[source.peer] += 1
                    return
                await asyncio.to_thread(download.came, number, theirs.digests[number], self._kept)
                delivered.add(source.peer)
                self._tell_progress(download)

        await asyncio.gather(*(work(*source) for source in download.sources for _ in range(2)))
        return delivered

    async def _fetch_piece(self, member: Member, manifest: Manifest, number: int, into: memoryview) -> None:
        async with self._peers.stream(member) as stream:
            await stream.tell({"kind": "piece", "id": manifest.id, "number": number})
            told = await self._answer(stream, longest(len(into)))
        try:
            await asyncio.to_thread(unpack, told, into)
        except FrameError as error:
            self.refuse(member, "bad piece", str(error))
            raise

    async def _check_piece(self, source: Source, number: int, content: memoryview, believed: Believed) -> None:
        """Refuses a peer whose piece is none of a state. Raises FrameError."""
        member, manifest = source
        fault = await asyncio.to_thread(manifest.fault, number, content)
        if not fault and not await asyncio.to_thread(believed.holds_piece, number, content):
            fault = "a piece of its state is not near the others'"
        if not fault:
            return
        self.refuse(member, "bad piece", fault)
        raise FrameError(fault)

    def _tell_progress(self, download: Download) -> None:
        if time.monotonic() - self._told > 5:
            self._told = time.monotonic()
            size = download.manifest.size / 1e6
            self._peers.tell(f"fetching the run's state: {download.share:.0f} % of {size:.3g} MB")


@reading("a state's sketches")
def _sketches_in(told: bytes, pieces: int) -> Tensor:
    """The sketches of so many pieces. Raises FrameError when they are none."""
    sketches = torch.frombuffer(bytearray(told), dtype=torch.float64).view(pieces, STRETCHES)
    if not sketches.isfinite().all():
        raise FrameError("a state's sketches are not finite")
    return sketches
