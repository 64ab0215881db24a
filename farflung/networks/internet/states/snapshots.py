"""The state that a late replica downloads: served by every peer, in pieces."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from weakref import WeakValueDictionary

from torch import Tensor

from farflung.networks.base import SharedState
from farflung.networks.internet.contact.host import UNREACHABLE
from farflung.networks.internet.contact.peers import Peers
from farflung.networks.internet.contact.streams import PeerStream, RequestRefusedError
from farflung.networks.peers.believing import sketches_of
from farflung.networks.peers.frames import Frame, digest, entry, whole, write_payload
from farflung.networks.peers.manifests import described, pieces_of
from farflung.networks.peers.member import MOST_STAGES
from farflung.networks.peers.packing import packed

KEPT_SECONDS = 120.0
"""How long a snapshot that nobody asks for is kept."""
SNAPSHOTS = 2
"""How many are kept at most; each is as large as the anchors and what the outer optimizer keeps."""
AT_A_TIME = 4
"""Pieces and sketches that a member is given at a time: each takes a thread to make, and lies in memory until it reads
it, which it need not do."""
FRESH_SECONDS = 60.0
"""Longest wait for a peer to end its step and make a snapshot."""


@dataclass
class Snapshot:
    """A state as pieces of bytes; `manifest` says what they are, `stage` of which part of the model.

    With `core`, it is for peers that hold the core only.
    """

    manifest: Frame
    pieces: list[memoryview]
    used: float
    stage: int
    core: bool = False


class Snapshots:
    """Serves this peer's state; but for `due` and `give`, all runs in the peers' thread."""

    def __init__(self, peers: Peers, stall_s: float) -> None:
        self._peers = peers
        self._stall_s = stall_s
        self._kept: dict[str, Snapshot] = {}
        self._wanted: list[tuple[asyncio.Future[Frame], bool]] = []
        """Who waits, and whether for the core only."""
        self._turns = WeakValueDictionary[str, asyncio.Semaphore]()
        self._copying = asyncio.Lock()
        self.lent: Callable[[int], SharedState | None] = lambda stage: None
        """The copy of another stage's state, if this peer has one."""
        peers.handlers["state"] = self._on_state
        peers.handlers["piece"] = self._on_piece
        peers.handlers["sketch"] = self._on_sketch

    @property
    def due(self) -> bool:
        """Whether somebody waits for a snapshot."""
        return bool(self._wanted)

    def give(self, state: SharedState) -> None:
        """Takes a copy of the state, at the end of a step, for those who wait."""
        background = self._peers.background
        for core in {core for _, core in tuple(self._wanted)}:
            background.look_after(background.submit(self._keep(*described(state, core), core)))

    async def _on_state(self, stream: PeerStream, frame: Frame) -> None:
        stage, core = frame.get("stage", self._peers.info["stage"]), frame.get("core") is True
        if stage == self._peers.info["stage"]:
            manifest = self._held(frame.get("held")) or self._freshest(core) or await self._made(core)
        else:
            async with self._copying:  # a copy at a time, however many ask
                manifest = self._held(frame.get("held")) or await self._copied(whole(stage, MOST_STAGES))
        await self._answer(stream, json.dumps(manifest, separators=(",", ":")).encode())

    async def _on_sketch(self, stream: PeerStream, frame: Frame) -> None:
        pieces, seed = self._asked(frame).pieces, entry(frame, "seed", str)
        async with self._turn(stream):
            sketches = await asyncio.to_thread(sketches_of, pieces, seed)
            await self._answer(stream, sketches.numpy().tobytes())

    def _turn(self, stream: PeerStream) -> asyncio.Semaphore:
        """Held while a member is answered."""
        return self._turns.setdefault(stream.member.peer, asyncio.Semaphore(AT_A_TIME))

    async def _answer(self, stream: PeerStream, content: bytes) -> None:
        await stream.tell({"size": len(content)})
        await write_payload(stream.writer, memoryview(content), self._stall_s)
        await stream.hear_the_end(self._stall_s)

    def _held(self, names: object) -> Frame | None:
        """A snapshot that a peer has fetched a part of, if it is still kept."""
        self._forget()
        for name, kept in self._kept.items():
            if isinstance(names, list) and name in names:
                kept.used = time.monotonic()
                return kept.manifest
        return None

    def _freshest(self, core: bool) -> Frame | None:
        own = self._peers.info
        for kept in reversed(self._kept.values()):
            if (kept.stage, kept.core) == (own["stage"], core) and kept.manifest["facts"].get("until", 0) > own["step"]:
                return kept.manifest
        return None

    def _asked(self, frame: Frame) -> Snapshot:
        """The snapshot of a request. Raises RequestRefusedError."""
        kept = self._kept.get(entry(frame, "id", str))
        if kept is None:
            raise RequestRefusedError("this snapshot is kept no longer")
        kept.used = time.monotonic()
        return kept

    async def _made(self, core: bool) -> Frame:
        if not self._peers.info["trains"]:
            raise RequestRefusedError("this peer does not train")
        made = asyncio.get_running_loop().create_future()
        self._wanted.append((made, core))
        try:
            async with asyncio.timeout(FRESH_SECONDS):
                manifest: Frame = await made
        except TimeoutError:
            raise RequestRefusedError("this peer has not come to the end of a step in time") from None
        finally:
            self._wanted = [waits for waits in self._wanted if waits[0] is not made]
        return manifest

    async def _keep(self, content: Tensor, described: Frame, core: bool = False) -> None:
        wanted = [made for made, only in self._wanted if only is core]
        self._wanted = [waits for waits in self._wanted if waits[1] is not core]
        manifest = await self._made_of(content, described, self._peers.info["stage"], core)
        for made in wanted:
            if not made.done():
                made.set_result(manifest)

    async def _copied(self, stage: int) -> Frame:
        """What this peer keeps of a stage that it does not serve. Raises RequestRefusedError."""
        if (state := await asyncio.to_thread(self.lent, stage)) is None:
            raise RequestRefusedError(f"this peer has no copy of stage {stage}")
        return await self._made_of(*described(state), stage)

    async def _made_of(self, content: Tensor, described: Frame, stage: int, core: bool = False) -> Frame:
        view = content.numpy().data
        pieces = [view[piece] for piece in pieces_of([length for _, length in described["tensors"]])]
        digests = await asyncio.to_thread(lambda: [digest(piece) for piece in pieces])
        name = hashlib.sha256("".join(digests).encode()).hexdigest()[:32]
        manifest = {"id": name, "digests": digests, **described}
        self._kept[name] = Snapshot(manifest, pieces, time.monotonic(), stage, core)
        while len(self._kept) > SNAPSHOTS:  # the one that a newcomer is in the midst of stays
            del self._kept[min(self._kept, key=lambda name: self._kept[name].used)]
        self._peers.background.spawn(self._forget_in_time(name))
        return manifest

    async def _forget_in_time(self, name: str) -> None:
        while name in self._kept:
            await asyncio.sleep(KEPT_SECONDS)
            self._forget()

    def _forget(self) -> None:
        """Drops what nobody has asked for lately: it takes as much memory as the anchors, and more."""
        now = time.monotonic()
        self._kept = {name: kept for name, kept in self._kept.items() if now - kept.used < KEPT_SECONDS}

    async def _on_piece(self, stream: PeerStream, frame: Frame) -> None:
        pieces = self._asked(frame).pieces
        piece = pieces[whole(frame.get("number"), len(pieces) - 1)]
        async with self._turn(stream):
            with contextlib.suppress(*UNREACHABLE):
                await self._answer(stream, await asyncio.to_thread(packed, piece))
