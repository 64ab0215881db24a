"""What do peers cost each other as they become more?
Whole peers of the internet network that train nothing, in one network namespace: what each sends, computes and holds
while it only hears of the others, how long pairs take to meet, and what a newcomer waits. Takes 15 minutes, as root.
"""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from bench.lib.hardship import check, checks
from bench.lib.store import Store
from bench.lib.table import Part, Table
from farflung.networks.internet import Identity, Ticket
from farflung.testing.hosts import Host, NetLab, unavailable

needs = unavailable
PORT = 4700
IN_A_PROCESS = 16
ENOUGH = 16
"""Members that a newcomer needs to know to train as well as with all."""


@dataclass(frozen=True)
class Options:
    peers: tuple[int, ...] = (8, 32, 64, 128)
    """Sizes of the swarm."""
    settle_s: float = 60.0
    """Seconds before it is measured."""
    measure_s: float = 60.0
    """Seconds for which the peers only talk."""
    rounds: int = 10
    """Rounds, five seconds apart."""


SMOKE = Options(peers=(2, 4), settle_s=3, measure_s=3, rounds=2)


@dataclass(frozen=True)
class Size:
    """What was measured of one swarm, a peer."""

    peers: int
    bytes_sent: float
    """A second, headers included."""
    core: float
    memory_mb: float
    known: float
    met_s: list[float]
    met: float
    """The part of all visits that ended in a pair."""
    joined_s: float
    joined_known: int


def run(options: Options, store: Store) -> Iterator[Part]:
    sizes: list[Size] = []

    def rows() -> Iterator[Sequence[str | float | None]]:
        for count in options.peers:
            sizes.append(measured(count, options, store))
            one = sizes[-1]
            middle, last = statistics.median(one.met_s), statistics.quantiles(one.met_s, n=20)[-1]
            yield (
                *(one.peers, one.bytes_sent / 1e3, one.core, one.memory_mb, one.known),
                *(middle, last, one.met, one.joined_s, one.joined_known),
            )

    columns = {"peers": ".0f", "kB/s sent": ".2f", "of a core": ".2%", "MB": ".1f", "known": ".1f"}
    columns |= {"met, s": ".2f", "95%": ".2f", "in pairs": ".1%", "joined, s": ".2f", "knew": ".0f"}
    yield Table(columns, rows(), "a peer that trains nothing, beside so many others")
    yield checks(reached(sizes))


def reached(sizes: list[Size]) -> Iterator[tuple[str, str, str, str]]:
    """The largest swarm beside what is asked of it, and what more would cost by its law."""
    last = sizes[-1]
    at = f"at {last.peers} peers"
    yield check(f"sent {at}", f"{last.bytes_sent / 1e3:.2f} kB/s", "3 kB/s", last.bytes_sent <= 3e3)
    yield check(f"computed {at}", f"{last.core:.2%} of a core", "0.5%", last.core <= 0.005)
    met = statistics.quantiles(last.met_s, n=20)[-1]
    yield check(f"time to meet {at}, 95%", f"{met:.2f} s", "2 s", met <= 2)
    yield check(f"visits that end in a pair {at}", f"{last.met:.1%}", "98%", last.met >= 0.98)
    joined = f"{last.joined_s:.2f} s, {last.joined_known} known"
    yield check(f"a newcomer knows {ENOUGH} {at}", joined, "5 s", last.joined_s <= 5 and last.joined_known >= ENOUGH)
    if len(sizes) > 1:
        constant, slope = law(sizes)
        told = f"{constant / 1e3:.2f} + {slope / 1e3:.2f} log2 N kB/s"
        more = ", ".join(f"{(constant + slope * math.log2(n)) / 1e3:.2f} at {n}" for n in (1000, 10_000))
        bound = 1.2 * (constant + slope * math.log2(last.peers))
        yield check("growth", f"{told}: {more}", "no more than log N", last.bytes_sent <= bound)


def law(sizes: Sequence[Size]) -> tuple[float, float]:
    """The line through the traffic by the logarithm of the number of peers: its constant, and its slope."""
    slope, constant = statistics.linear_regression(
        [math.log2(one.peers) for one in sizes], [one.bytes_sent for one in sizes]
    )
    return constant, slope


def measured(count: int, options: Options, store: Store) -> Size:
    folder = store.scratch / f"swarm-{count}"
    folder.mkdir(parents=True, exist_ok=True)
    first = Identity(folder / "0.key")
    Ticket.new("swarm", {}).at((f"/ip4/127.0.0.1/tcp/{PORT}/p2p/{first.peer}",)).write(folder / "run.ticket")
    with NetLab(1, 1000.0) as lab, swarm(lab.hosts[0], folder, count) as processes:
        time.sleep(options.settle_s)
        before, sent, began = ask(processes, do="state"), sent_bytes(lab.hosts[0]), time.monotonic()
        time.sleep(options.measure_s)
        seconds = time.monotonic() - began
        sent, after = sent_bytes(lab.hosts[0]) - sent, ask(processes, do="state")
        visits: list[tuple[float, int]] = []
        for number in range(options.rounds):
            step = int(time.time() % 100_000) + 1
            visits += [visit for told in ask(processes, do="round", number=number, step=step) for visit in told]
            time.sleep(5)
        (newcomer,) = ask(processes[:1], do="newcomer", number=count)
    pairs = [seconds for seconds, size in visits if size == 2]
    computed = sum(now["cpu"] - then["cpu"] for now, then in zip(after, before, strict=True))
    held = sum(state["daemons"] + state["process"] for state in after)
    known = statistics.mean(known for state in after for known in state["known"])
    return Size(
        peers=count,
        bytes_sent=sent / seconds / count,
        core=computed / seconds / count,
        memory_mb=held / count,
        known=known,
        met_s=pairs or [math.inf, math.inf],
        met=len(pairs) / len(visits),
        joined_s=newcomer["seconds"],
        joined_known=newcomer["known"],
    )


@contextmanager
def swarm(host: Host, folder: Any, count: int) -> Iterator[list[subprocess.Popen[str]]]:
    """Processes of light peers; the first begins the run."""
    processes: list[subprocess.Popen[str]] = []
    try:
        for first in range(0, count, IN_A_PROCESS):
            here = min(IN_A_PROCESS, count - first)
            words = [folder / "run.ticket", folder, first, here, PORT]
            command = [sys.executable, "-m", "bench.lib.light", *map(str, words)]
            processes.append(host.popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
            heard(processes[-1])
        yield processes
    finally:
        for process in processes:
            assert process.stdin
            process.stdin.close()
        for process in processes:
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


def ask(processes: Sequence[subprocess.Popen[str]], **question: Any) -> list[Any]:
    """What each process answers."""
    for process in processes:
        assert process.stdin
        process.stdin.write(json.dumps(question) + "\n")
        process.stdin.flush()
    return [heard(process) for process in processes]


def heard(process: subprocess.Popen[str]) -> Any:
    assert process.stdout
    line = process.stdout.readline()
    if not line:
        raise RuntimeError("a process of light peers has died")
    return json.loads(line)


def sent_bytes(host: Host) -> int:
    """What has passed the loopback of a host."""
    lines = subprocess.run(
        ["ip", "netns", "exec", host.namespace, "cat", "/proc/net/dev"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    (loopback,) = [line for line in lines if line.strip().startswith("lo:")]
    return int(loopback.split()[9])
