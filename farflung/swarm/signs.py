"""Signs of life: who works on what another peer waits for says so every few seconds, so that silence is a fault."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

from farflung.networks.internet.contact.host import UNREACHABLE
from farflung.networks.internet.contact.streams import PeerStream
from farflung.networks.peers.frames import Frame

EVERY_SECONDS = 3.0
"""Between two signs."""
SIGN: Frame = {"works": True}


@contextlib.contextmanager
def works(stream: PeerStream) -> Iterator[asyncio.Task[None]]:
    """Gives signs while the context lasts, or until the task is cancelled: nothing else may be written meanwhile."""
    signs = asyncio.ensure_future(_signs(stream))
    try:
        yield signs
    finally:
        signs.cancel()


async def heard(stream: PeerStream, silent_s: float) -> Frame:
    """The next frame that is no sign. Raises TimeoutError where nothing comes for `silent_s` seconds; see `hear`."""
    while (frame := await stream.hear(silent_s)) == SIGN:
        pass
    return frame


async def _signs(stream: PeerStream) -> None:
    with contextlib.suppress(*UNREACHABLE):  # who waits for the other's frames hears of it
        while True:
            await asyncio.sleep(EVERY_SECONDS)
            await stream.tell(SIGN)
