"""How peers stay known to each other: each renews its record, reads the others', and looks for lost peers."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable

from farflung.errors import UserError
from farflung.networks.internet.background import Background
from farflung.networks.internet.directory import Directory
from farflung.networks.internet.frames import Frame, FrameError, plain
from farflung.networks.internet.handshake import CLOCK_SECONDS
from farflung.networks.internet.host import UNREACHABLE
from farflung.networks.internet.members import BEAT_SECONDS, Member, Members
from farflung.networks.internet.streams import RequestRefusedError


class Heartbeat:
    """This peer's; all methods run in the peers' thread.

    Args:
        directory: where records are kept.
        members: told of what was heard.
        handshake: calls a peer.
        background: where it looks for those that have gone.
        tell: told in one line when this peer is not heard, or its clock jumps.
    """

    def __init__(
        self,
        directory: Directory,
        members: Members,
        handshake: Callable[[str], Awaitable[Member]],
        background: Background,
        tell: Callable[[str], None],
    ) -> None:
        self._directory = directory
        self._members = members
        self._handshake = handshake
        self._background = background
        self._tell = tell
        self._failure = ""
        self._clock_gap = time.time() - time.monotonic()

    async def beat(self, info: Frame, listed: bool) -> None:
        """Publishes this peer's record, and reads the others'; tells a failure once, and the next beat tries again."""
        failure = ""
        info["beat"] += 1
        try:
            async with asyncio.timeout(4 * BEAT_SECONDS):
                if listed:
                    await self._directory.write(info)
                for member in await self._directory.read():
                    self._members.hear(member)
        except UNREACHABLE:
            pass  # the next one may reach them
        except Exception as error:
            failure = plain(f"this peer cannot tell others of itself, or hear of them: {error!r}")
        if failure and failure != self._failure:
            self._tell(failure)
        self._failure = failure

    async def go_on(self, info: Frame, listed: bool) -> None:
        """Beats for ever."""
        sought: dict[int, float] = {}
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            self._watch_the_clock()
            await self.beat(info, listed)
            for member in self._members.missing():
                if time.monotonic() >= sought.get(member.rank, 0.0):
                    sought[member.rank] = time.monotonic() + 2 * BEAT_SECONDS
                    self._background.spawn(self._seek(member))

    async def _seek(self, member: Member) -> None:
        """Calls a lost peer at its old addresses: after a partition nobody else would."""
        with contextlib.suppress(*UNREACHABLE, RequestRefusedError, FrameError, UserError):
            await self._handshake(member.peer)
            await self._directory.introduce(member)

    def _watch_the_clock(self) -> None:
        gap = time.time() - time.monotonic()
        if abs(gap - self._clock_gap) > CLOCK_SECONDS:
            moved = gap - self._clock_gap
            self._tell(f"this machine's clock has jumped by {moved:+.0f} s; set it right, or peers lose sight of it")
            self._clock_gap = gap
