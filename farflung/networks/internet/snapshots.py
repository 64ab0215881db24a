"""Where a run stands, for those who come to it: served by every peer, fetched in pieces from several."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from farflung.networks.base import State
from farflung.networks.internet.frames import (
    Frame,
    FrameError,
    entry,
    read_frame,
    read_payload,
    write_frame,
    write_payload,
)
from farflung.networks.internet.host import UNREACHABLE
from farflung.networks.internet.members import Member
from farflung.networks.internet.post import SLOWEST, Lost
from farflung.networks.internet.swarm import PROMPT_SECONDS, Line, Refused, Swarm, accepted

PIECE = 1 << 22
PIECES = 512
"""A piece has at least PIECE bytes, and there are at most so many pieces."""
KEPT_SECONDS = 120.0
"""How long a snapshot that nobody asks for is kept."""
SOURCES = 3
"""Peers that a snapshot is fetched from at a time, with two pieces from each under way."""
AHEAD = 1000
"""Steps that a state may be ahead of where most peers say they are."""
FRESH_SECONDS = 60.0
"""How long a peer may take to come to the end of its step, and make one."""


@dataclass
class Snapshot:
    """A state as bytes; `manifest` says what they are."""

    manifest: Frame
    content: memoryview
    used: float


class Snapshots:
    """Serves this peer's state, and fetches others'; but for `due` and `give`, all runs in the swarm's thread."""

    def __init__(self, swarm: Swarm, largest: int, stall: float) -> None:
        self._swarm = swarm
        self.largest = largest
        self._stall = stall
        self._kept: dict[str, Snapshot] = {}
        self._wanted: list[asyncio.Future[Frame]] = []
        swarm.handlers["state"] = self._on_state
        swarm.handlers["piece"] = self._on_piece

    @property
    def due(self) -> bool:
        """Whether somebody waits for a snapshot."""
        return bool(self._wanted)

    def give(self, state: State) -> None:
        """Takes a copy of the state, at the end of a step, for those who wait."""
        content, described = _packed(state.tensors)
        self._swarm.submit(self._keep(content, {"facts": state.facts, "tensors": described}))

    async def fetch(self, alike: bool, tell: Callable[[str], None]) -> State:
        """The state of a live peer; pieces come from several, and from others when some fail. Raises Lost.

        Where peers are `alike`, only from those with the same bits; else each piece may be another peer's.
        """
        sources = await self._sources(alike)
        manifest = sources[0][1]
        size, piece = manifest["size"], manifest["piece"]
        content = torch.empty(size, dtype=torch.uint8)
        view = content.numpy().data
        left = list(range(len(manifest["digests"])))[::-1]
        total, told = len(left), time.monotonic()

        async def work(source: Member, theirs: Frame) -> None:
            nonlocal told
            while left:
                number = left.pop()
                into = view[number * piece : min(size, (number + 1) * piece)]
                try:
                    await self._fetch_piece(source, theirs, number, into)
                except (*UNREACHABLE, Refused, FrameError):
                    left.append(number)
                    return
                if time.monotonic() - told > 5:
                    told = time.monotonic()
                    tell(f"fetching the run's state: {100 * (total - len(left)) // total} % of {size / 1e6:.0f} MB")

        while left:
            before = len(left)
            await asyncio.gather(*(work(*source) for source in sources for _ in range(2)))
            if left and len(left) == before:
                raise Lost("none of the peers that have the run's state goes on sending it")
            if left:
                sources = [
                    s for s in await self._sources(alike) if not alike or s[1]["id"] == manifest["id"]
                ] or sources
        return State(_unpacked(content, manifest["tensors"]), manifest["facts"])

    async def _sources(self, alike: bool) -> list[tuple[Member, Frame]]:
        """Live peers and what they have, the furthest first. Raises Lost."""
        members = self._swarm.members.training()
        request = {"kind": "state"}
        answers = await asyncio.gather(
            *(self._swarm.ask(member, request, FRESH_SECONDS) for member in members[: 2 * SOURCES]),
            return_exceptions=True,
        )
        found = [
            (member, answer)
            for member, answer in zip(members, answers, strict=False)
            if isinstance(answer, dict) and self._is_sound(answer)
        ]
        if not found:
            raise Lost("no peer has the run's state to give")
        found.sort(key=lambda source: -int(source[1]["facts"].get("step", 0)))
        like = found[0][1]
        same = "id" if alike else "tensors"
        return [source for source in found if source[1][same] == like[same]][:SOURCES]

    def _is_sound(self, manifest: Frame) -> bool:
        try:
            return self._describes_a_state(manifest)
        except (TypeError, ValueError):  # what is told is of no such form
            return False

    def _describes_a_state(self, manifest: Frame) -> bool:
        size, piece, digests = (manifest.get(name) for name in ("size", "piece", "digests"))
        if not (isinstance(size, int) and isinstance(piece, int) and isinstance(digests, list) and piece >= PIECE):
            return False
        tensors, facts = manifest.get("tensors"), manifest.get("facts")
        if not isinstance(tensors, list) or not isinstance(facts, dict) or not isinstance(manifest.get("id"), str):
            return False
        if not 0 <= size <= self.largest or any(int(length) < 0 for _, length in tensors):
            return False
        step = facts.get("step")
        if not isinstance(step, int) or not 0 <= step <= self._swarm.members.lead_at_most() + AHEAD:
            return False
        return len(digests) == -(-size // piece) and sum(4 * int(length) for _, length in tensors) == size

    async def _fetch_piece(self, member: Member, manifest: Frame, number: int, into: memoryview) -> None:
        async with self._swarm.line(member) as line:
            await write_frame(line.writer, {"kind": "piece", "id": manifest["id"], "number": number})
            async with asyncio.timeout(PROMPT_SECONDS):
                accepted(await read_frame(line.reader))
            await read_payload(line.reader, into, self._stall, SLOWEST)
        if await asyncio.to_thread(_digest, into) != manifest["digests"][number]:
            self._swarm.guard.strike(member.peer, "bad piece", "a piece of its state is not what it announced")
            raise FrameError("a piece is not what was announced")

    async def _on_state(self, line: Line, _: Frame) -> None:
        manifest = self._freshest() or await self._made()
        async with asyncio.timeout(PROMPT_SECONDS):
            await write_frame(line.writer, manifest)

    def _freshest(self) -> Frame | None:
        now = time.monotonic()
        self._kept = {name: kept for name, kept in self._kept.items() if now - kept.used < KEPT_SECONDS}
        own = self._swarm.about
        for kept in self._kept.values():
            if kept.manifest["facts"].get("until", 0) > own["step"]:
                return kept.manifest
        return None

    async def _made(self) -> Frame:
        if not self._swarm.about["trains"]:
            raise Refused("this peer does not train")
        made = asyncio.get_running_loop().create_future()
        self._wanted.append(made)
        try:
            async with asyncio.timeout(FRESH_SECONDS):
                manifest: Frame = await made
        except TimeoutError:
            raise Refused("this peer has not come to the end of a step in time") from None
        finally:
            if made in self._wanted:
                self._wanted.remove(made)
        return manifest

    async def _keep(self, content: Tensor, described: Frame) -> None:
        wanted, self._wanted = self._wanted, []
        view = content.numpy().data
        piece = max(PIECE, -(-len(view) // PIECES))
        digests = await asyncio.to_thread(
            lambda: [_digest(view[begin : begin + piece]) for begin in range(0, len(view), piece)]
        )
        name = hashlib.sha256("".join(digests).encode()).hexdigest()[:32]
        manifest = {"id": name, "size": len(view), "piece": piece, "digests": digests, **described}
        self._kept[name] = Snapshot(manifest, view, time.monotonic())
        while len(self._kept) > 2:
            del self._kept[next(iter(self._kept))]
        for made in wanted:
            if not made.done():
                made.set_result(manifest)

    async def _on_piece(self, line: Line, frame: Frame) -> None:
        kept = self._kept.get(entry(frame, "id", str))
        if kept is None:
            raise Refused("this snapshot is kept no longer")
        kept.used = time.monotonic()
        piece, number = kept.manifest["piece"], entry(frame, "number", int)
        if not 0 <= number < len(kept.manifest["digests"]):
            raise FrameError("there is no such piece")
        await write_frame(line.writer, {"go": True})
        with contextlib.suppress(*UNREACHABLE):
            await write_payload(line.writer, kept.content[number * piece : (number + 1) * piece], self._stall)
            async with asyncio.timeout(self._stall):
                await line.reader.read(1)  # until it has all: to close now would cut off what is under way


def _packed(tensors: dict[str, Tensor]) -> tuple[Tensor, list[Any]]:
    """Float32 tensors as bytes, and their names and lengths."""
    described: list[Any] = [[name, tensor.numel()] for name, tensor in tensors.items()]
    flat = torch.cat([tensor.detach().flatten().to("cpu", torch.float32) for tensor in tensors.values()])
    return flat.view(torch.uint8), described


def _unpacked(content: Tensor, described: list[Any]) -> dict[str, Tensor]:
    lengths = [int(length) for _, length in described]
    parts = torch.split(content.view(torch.float32), lengths)
    return {str(name): part for (name, _), part in zip(described, parts, strict=True)}


def _digest(content: memoryview) -> str:
    return hashlib.sha256(content).hexdigest()
