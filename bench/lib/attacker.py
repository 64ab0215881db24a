"""One that means a run ill for a while, in a process of its own.

python -m bench.lib.attacker KIND TICKET KEY ADDRESS SECONDS
"""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from farflung.networks.internet import Identity, Ticket, read_ticket
from farflung.networks.internet.contact.host import UNREACHABLE
from farflung.networks.internet.contact.streams import PeerStream, RequestRefusedError
from farflung.networks.peers.frames import FrameError
from farflung.networks.peers.member import signed
from farflung.testing.liars import Liar, Stranger, as_a_stranger, manifest_of

MESSAGES = 20
"""That a stranger sends before it looks at the time."""


def stranger(ticket: Ticket, key: Path, address: str, until: float) -> None:
    """Garbage from one without the secret."""

    async def bombard(one: Stranger) -> None:
        while time.time() < until:
            await one.bombard(MESSAGES)

    as_a_stranger(ticket, bombard)


def forger(liar: Liar) -> Iterator[None]:
    """Packets in another's name, too large, or sent again."""
    lies: list[dict[str, Any]] = [{"sender": 1}, {"size": 1 << 40}, {"run": "another"}, {}, {"to": 7}]
    while True:
        for lie in lies:
            liar.tells(liar.header(**lie), bytes(8))
            yield


def gossip(liar: Liar) -> Iterator[None]:
    """Records that are garbage, and of peers that do not exist."""
    for begin in itertools.count(0, 40):
        ghosts = []
        for number in range(begin, begin + 40):
            identity = Identity(Path(f"{liar.peers.identity.path}-{number}"))
            place = f"/ip4/10.77.0.{number % 250}/tcp/1/p2p/{identity.peer}"
            ghosts.append(signed(identity, {**liar.peers.info, "addresses": [place], "trains": True, "step": 10**9}))
        for content in (json.dumps(ghosts).encode(), b"[" * 60_000, bytes(1 << 24)):
            liar.spread(zlib.compress(content))
            yield


def guest(liar: Liar) -> Iterator[None]:
    """Junk rounds, groups without itself, and no patience in rounds that others hold."""
    own, victim = liar.peers.identity.rank, liar.victim.rank
    request = {"kind": "meet", "step": 1, "weight": 1e9, "lineage": "x", "shuns": [], "patience": 0.0}
    while True:
        for wants in ([victim], [own, victim], [own, victim, 1, 2], []):
            key = random.choice([f"junk {random.random()}", f"round {random.randrange(500)} of fragment 0"])
            with contextlib.suppress(TimeoutError, FrameError):
                liar.tells({**request, "wants": wants, "key": key})
            yield


def host(liar: Liar) -> Iterator[None]:
    """Answers each meeting with a lie: whoever asks is behind, or its group is endless."""

    async def on_meet(stream: PeerStream, _: Any) -> None:
        lies = {"weights": [], "behind": True}, {"weights": [[stream.member.rank, 1.0], [5, 1e300]], "behind": False}
        await stream.tell(random.choice(lies))

    liar.peers.handlers["meet"] = on_meet
    liar.peers.info.update(trains=True, step=10**9, rate=1e5)
    while True:
        time.sleep(0.5)
        yield


def donor(liar: Liar) -> Iterator[None]:
    """Serves newcomers a state of all 123.0 that is far ahead."""
    content = b"\x00\x00\xf6\x42" * 1000
    liar.serve(manifest_of(content, [("anchor 0", 1000)], step=10**6, until=10**6 + 1), content)
    liar.peers.info.update(step=10**6, rate=1.0)
    while True:
        time.sleep(0.5)
        yield


MEMBERS: dict[str, Callable[[Liar], Iterator[None]]] = {
    kind.__name__: kind for kind in (forger, gossip, guest, host, donor)
}
KINDS = ("stranger", *MEMBERS)


def main(kind: str, ticket: str, key: str, address: str, seconds: str) -> None:
    until, read = time.time() + float(seconds), read_ticket(Path(ticket))
    if kind == "stranger":
        stranger(read, Path(key), address, until)
        return
    liar = Liar(read, Path(key), read.settings_hash, address)
    try:
        for _ in MEMBERS[kind](liar):
            if time.time() > until:
                return
            with contextlib.suppress(*UNREACHABLE, RequestRefusedError):
                time.sleep(0.05)
    finally:
        liar.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
