"""How peers stay known to each other: each renews its record, reads the others', and looks for lost peers."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING

from farflung.errors import UserError
from farflung.networks.internet.directory import Directory
from farflung.networks.internet.frames import FrameError, plain
from farflung.networks.internet.handshake import CLOCK_SECONDS
from farflung.networks.internet.host import UNREACHABLE
from farflung.networks.internet.members import BEAT_SECONDS, Member
from farflung.networks.internet.streams import RequestRefusedError

if TYPE_CHECKING:
    from farflung.networks.internet.peers import Peers


class Heartbeat:
    """This peer's; all methods run in the peers' thread.

    Args:
        peers: told of what was heard.
        directory: where records are kept.
        listed: whether this peer has one.
    """

    def __init__(self, peers: Peers, directory: Directory, listed: bool) -> None:
        self._peers = peers
        self._directory = directory
        self._listed = listed
        self._failure = ""
        self._clock_gap = time.time() - time.monotonic()

    async def beat(self) -> None:
        """Publishes this peer's record, and reads the others'; tells a failure once, and the next beat tries again."""
        failure, info = "", self._peers.info
        info["beat"] += 1
        try:
            async with asyncio.timeout(4 * BEAT_SECONDS):
                if self._listed:
                    await self._directory.write(info)
                for member in await self._directory.read():
                    self._peers.members.hear(member)
        except UNREACHABLE:
            pass  # the next one may reach them
        except Exception as error:
            failure = plain(f"this peer cannot tell others of itself, or hear of them: {error!r}")
        if failure and failure != self._failure:
            self._peers.tell(failure)
        self._failure = failure

    async def go_on(self) -> None:
        """Beats for ever."""
        sought: dict[int, float] = {}
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            self._watch_the_clock()
            await self.beat()
            for member in self._peers.members.missing():
                if time.monotonic() >= sought.get(member.rank, 0.0):
                    sought[member.rank] = time.monotonic() + 2 * BEAT_SECONDS
                    self._peers.background.spawn(self._seek(member))

    async def _seek(self, member: Member) -> None:
        """Calls a lost peer at its old addresses: after a partition nobody else would."""
        with contextlib.suppress(*UNREACHABLE, RequestRefusedError, FrameError, UserError):
            await self._peers.handshake(member.peer)
            await self._directory.introduce(member)

    def _watch_the_clock(self) -> None:
        gap = time.time() - time.monotonic()
        if abs(gap - self._clock_gap) > CLOCK_SECONDS:
            moved = gap - self._clock_gap
            self._peers.tell(
                f"this machine's clock has jumped by {moved:+.0f} s; set it right, or peers lose sight of it"
            )
            self._clock_gap = gap
