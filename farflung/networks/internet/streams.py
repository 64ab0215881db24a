"""An open stream between two members, and what is said on it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from farflung.networks.internet.frames import Frame, plain
from farflung.networks.internet.members import Member

PROMPT_SECONDS = 8.0
"""How soon a peer that is there answers what needs no thought."""


class RequestRefusedError(Exception):
    """A peer does not want what it was sent; says why."""


@dataclass
class PeerStream:
    """An open stream to a member."""

    member: Member
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


Handler = Callable[[PeerStream, Frame], Awaitable[None]]
"""Answers one request of a member; raises FrameError when it is not as it must be."""


def accepted(frame: Frame) -> Frame:
    """An answer. Raises RequestRefusedError when it is none."""
    if "refused" in frame:
        why = frame["refused"]
        raise RequestRefusedError(plain(why) if isinstance(why, str) else "it does not say why")
    return frame
