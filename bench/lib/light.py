"""Light peers: whole peers of the internet network that train nothing, several in one process, led from outside.

    python -m bench.lib.light TICKET FOLDER FROM COUNT PORT

runs peers FROM to FROM + COUNT - 1, which listen on loopback; peer 0 begins the run at PORT. Each line of JSON on its
standard input is answered by one: `round` (all meet in pairs), `state` (what they cost and know), `newcomer` (one more
joins).
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from farflung.networks.internet import Identity, InternetNetwork, ListenAddress, Peers, newcomer_info, read_ticket
from farflung.outer.topologies import RandomGroups, group_of

TICKS = os.sysconf("SC_CLK_TCK")
TICK_SECONDS = 1.0
"""What a step takes that these peers only count."""


class Light:
    """Some peers of a run."""

    def __init__(self, ticket: Path, folder: Path, first: int, count: int, port: int) -> None:
        self.ticket, self.folder, self.port = read_ticket(ticket), folder, port
        self.peers = [self.join(number) for number in range(first, first + count)]
        self.began = time.time()
        threading.Thread(target=self.tick, daemon=True).start()

    def join(self, number: int) -> InternetNetwork:
        identity = Identity(self.folder / f"{number}.key")
        local = ListenAddress("127.0.0.1", 0 if number else self.port)
        info = {**newcomer_info(self.ticket), "trains": True, "rate": 1 / TICK_SECONDS, "step": self.step()}
        peers = Peers(self.ticket, identity, local, info, lambda _: None, first=not number)
        return InternetNetwork(peers, largest=1 << 20, deadline=60)

    def step(self) -> int:
        """By the clock, as if all trained at one speed."""
        return int(time.time() % 100_000 / TICK_SECONDS)

    def tick(self) -> None:
        while True:
            for peer in self.peers:
                peer.peers.info.update(step=self.step())
            time.sleep(TICK_SECONDS)

    def round(self, number: int, step: int) -> list[tuple[float, int]]:
        """How long each waited for its group, and how many were in it."""

        def meet(peer: InternetNetwork) -> tuple[float, int]:
            key, began = f"round {number} of fragment 0", time.monotonic()
            groups = RandomGroups().groups(peer.members(), key)
            wanted = group_of(peer.rank, groups) if groups else ()
            size: int = peer.meet(wanted, key, step, 1.0, "", lambda party: len(party.group)).wait(60)
            return time.monotonic() - began, size

        with ThreadPoolExecutor(len(self.peers)) as pool:
            return list(pool.map(meet, self.peers))

    def state(self) -> dict[str, Any]:
        """CPU seconds, memory in MB, and how many others each peer counts on."""
        daemons = [peer.peers._host.p2p._child.pid for peer in self.peers]
        processes = [os.getpid(), *daemons]
        return {
            "cpu": sum(map(cpu_seconds, processes)),
            "daemons": sum(map(memory_mb, daemons)),
            "process": memory_mb(os.getpid()),
            "known": [len(peer.members()) - 1 for peer in self.peers],
        }

    def newcomer(self, number: int) -> dict[str, float]:
        """How long one more takes to join, and whom it then knows; it leaves again."""
        began = time.monotonic()
        peer = self.join(number)
        took = time.monotonic() - began
        known = len(peer.members()) - 1
        peer.close()
        return {"seconds": took, "known": known}

    def close(self) -> None:
        for peer in self.peers:
            peer.close()


def cpu_seconds(pid: int) -> float:
    """What a process has computed so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def memory_mb(pid: int) -> float:
    """What a process holds that is its own: pages that it shares with others are counted once by no one."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return sum(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Private_")) / 1024


def main(ticket: str, folder: str, first: str, count: str, port: str) -> None:
    light = Light(Path(ticket), Path(folder), int(first), int(count), int(port))
    asked: dict[str, Callable[..., Any]] = {"round": light.round, "state": light.state, "newcomer": light.newcomer}
    print(json.dumps({"ready": int(count)}), flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        print(json.dumps(asked[question.pop("do")](**question)), flush=True)
    light.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
