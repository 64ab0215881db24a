"""An open stream between two members, and the frames on it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from farflung.networks.peers.frames import Frame, plain, read_frame, write_frame
from farflung.networks.peers.member import Member

PROMPT_SECONDS = 8.0
"""Longest wait for a simple answer."""


class RequestRefusedError(Exception):
    """A peer has refused a request; says why."""


@dataclass
class PeerStream:
    """An open stream to a member; `tell` and `hear` raise TimeoutError."""

    member: Member
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def tell(self, frame: Frame, seconds: float = PROMPT_SECONDS) -> None:
        """Sends a frame."""
        async with asyncio.timeout(seconds):
            await write_frame(self.writer, frame)

    async def hear(self, seconds: float = PROMPT_SECONDS) -> Frame:
        """The next frame. Raises RequestRefusedError when that is a refusal."""
        async with asyncio.timeout(seconds):
            return accepted(await read_frame(self.reader))

    async def hear_the_end(self, seconds: float) -> None:
        """Waits until the other has received everything; closing earlier would cut it off."""
        async with asyncio.timeout(seconds):
            await self.reader.read(1)


Handler = Callable[[PeerStream, Frame], Awaitable[None]]
"""Answers one request of a member; raises FrameError when it is not as it must be."""


def accepted(frame: Frame) -> Frame:
    """An answer. Raises RequestRefusedError when it is none."""
    if "refused" in frame:
        why = frame["refused"]
        raise RequestRefusedError(plain(why) if isinstance(why, str) else "it does not say why")
    return frame
