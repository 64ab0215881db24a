"""Offences of peers: refused, counted, and in the end punished with a ban; and partners that do not deliver."""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence

from farflung.durations import duration
from farflung.networks.peers.frames import plain

STRIKES = 3
"""So many offences within BAN_SECONDS ban a peer for as long."""
BAN_SECONDS = 600.0
MISSED = 3
"""Who does not deliver so many times in a row, while others do, is nobody's partner for as long."""
STREAMS_PER_PEER, STREAMS = 64, 1024
FEW = 4
"""Members with fewer streams get theirs while there are any; those with more leave half of them to these."""
UNPROVEN_PER_PEER, UNPROVEN = 4, 256
"""Streams of those who have not proven that they are members: however many come, members are served."""


class Guard:
    """Counts offences by kind, and remembers whom to ban; `tell` is told in one line when somebody is."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self.refused: Counter[str] = Counter()
        self._tell = tell
        self._strikes: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=STRIKES))
        self._banned: dict[str, float] = {}
        self._forgiven: dict[str, float] = {}
        self._missed: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=MISSED))
        self._delivered = -BAN_SECONDS
        """When anybody has delivered last."""
        self._streams: Counter[str] = Counter()
        self._unproven: Counter[str] = Counter()

    def refuse(self, kind: str) -> None:
        """Counts an offence of an unknown sender, such as a stranger."""
        self.refused[kind] += 1

    def strike(self, peer: str, kind: str, why: str) -> None:
        """Counts an offence of a member; the third within ten minutes bans it."""
        self.refused[kind] += 1
        now = time.monotonic()
        self._forget(now - BAN_SECONDS)
        strikes = self._strikes[peer]
        strikes.append(now)
        often = len(strikes) == STRIKES and now - strikes[0] < BAN_SECONDS
        if often and not self.bans(peer) and peer not in self._forgiven:
            self._banned[peer] = now
            self._tell(f"peer {peer[-8:]} is banned for {duration(BAN_SECONDS)}: {plain(why)}")

    def delivered(self, peer: str) -> None:
        """A partner in a round has delivered what it had to."""
        self._missed.pop(peer, None)
        self._delivered = time.monotonic()

    def missed(self, peer: str) -> None:
        """A partner in a round has not."""
        now = time.monotonic()
        self._forget(now - BAN_SECONDS)
        self._missed[peer].append(now)

    def forgive(self, peer: str) -> None:
        """Ends a peer's ban, and bans it for nothing for as long as a ban lasts."""
        self._banned.pop(peer, None)
        self._missed.pop(peer, None)
        self._forgiven[peer] = time.monotonic()

    def _forget(self, before: float) -> None:
        """Drops what was long ago, or those with many keys would fill the memory."""
        for times in (self._strikes, self._missed):
            for long_ago in [peer for peer, lately in times.items() if lately[-1] < before]:
                del times[long_ago]
        for moments in (self._banned, self._forgiven):
            for long_ago in [peer for peer, moment in moments.items() if moment < before]:
                del moments[long_ago]

    def bans(self, peer: str) -> bool:
        """Whether a peer is banned."""
        return time.monotonic() - self._banned.get(peer, -BAN_SECONDS) < BAN_SECONDS

    def shuns(self, peer: str) -> bool:
        """Whether a peer is banned, or has not delivered again and again while others did."""
        missed: Sequence[float] = self._missed.get(peer, ())
        in_vain = len(missed) == MISSED and missed[0] < self._delivered
        return self.bans(peer) or (in_vain and time.monotonic() - missed[-1] < BAN_SECONDS)

    def admit(self, peer: str, proven: bool) -> bool:
        """Whether a peer may have one more stream open; `release` ends it."""
        streams, each, all_together = self._of(proven)
        if streams[peer] >= FEW:
            all_together //= 2
        if self.bans(peer) or streams[peer] >= each or streams.total() >= all_together:
            self.refused["banned peer" if self.bans(peer) else "too many streams"] += 1
            return False
        streams[peer] += 1
        return True

    def release(self, peer: str, proven: bool) -> None:
        """A stream that was admitted so has ended."""
        streams, _, _ = self._of(proven)
        streams[peer] -= 1
        if not streams[peer]:
            del streams[peer]

    def _of(self, proven: bool) -> tuple[Counter[str], int, int]:
        if proven:
            return self._streams, STREAMS_PER_PEER, STREAMS
        return self._unproven, UNPROVEN_PER_PEER, UNPROVEN
