"""Which peers meet through NAT and firewalls, by which way, how soon and how fast?
On the internet network, in namespaces: homes of six kinds, two of each, and a bootstrap node with a public address;
then homes that nobody can call, with that node alone. Takes four minutes, as root, with nft.
"""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import combinations_with_replacement
from pathlib import Path
from typing import Any, Self

from bench.lib.homes import KINDS, LET_OUT, OPEN, PORT, Home, Homes, unavailable
from bench.lib.store import ROOT, Store
from bench.lib.table import Cell, Part, Table
from farflung.networks.internet import Identity
from farflung.testing.peers import write_ticket

needs = unavailable

COLUMNS = dict.fromkeys(("one", "other", "meet"), "") | {"after s": ".0f", "MB/s": ".1f", "back": ".1f", "then": ""}
READY_S, MEASURED_S, END_S = 120.0, 90.0, 20.0


@dataclass(frozen=True)
class Options:
    kinds: tuple[str, ...] = tuple(KINDS)
    """Kinds of places; see bench/lib/homes.py."""
    settle_s: float = 60.0
    """Seconds that peers have to find each other, before links are measured."""
    rate_mbit: float = 100.0
    """Each home's link, each way."""
    alone: bool = True
    """Whether to look at those kinds, too, that nobody can call, with the bootstrap node as the only public peer."""


SMOKE = Options(kinds=("public", "cone"), settle_s=2, alone=False)


class Caller:
    """A `bench.lib.caller` in a home, and what it has said."""

    def __init__(self, home: Home, key: Path, ticket: Path, first: bool) -> None:
        self.kind, self.rank = home.kind, Identity(key).rank
        told = {"ticket": str(ticket), "key": str(key), "port": LET_OUT if first else PORT}
        told |= {"announce": home.announced, "first": first}
        command = [sys.executable, "-m", "bench.lib.caller", json.dumps(told)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with key.with_suffix(".log").open("w") as log:
            self.process = home.host.popen(command, {"OMP_NUM_THREADS": "1"}, cwd=ROOT, stderr=log, **pipes)
        self.ways: dict[int, list[tuple[str, float]]] = {}
        self._answers: queue.Queue[dict[str, Any]] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            told = json.loads(line)
            if "met" in told:
                self.ways.setdefault(told["met"], []).append((told["way"], told["seconds"]))
            else:
                self._answers.put(told)

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def hear(self, seconds: float) -> dict[str, Any]:
        """Raises queue.Empty."""
        return self._answers.get(timeout=seconds)

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def run(options: Options, store: Store) -> Iterator[Part]:
    yield Table(COLUMNS, met(options, store, options.kinds), "With public peers besides the bootstrap node")
    if options.alone:
        closed = [kind for kind in options.kinds if kind not in OPEN]
        yield Table(COLUMNS, met(options, store, closed), "With the bootstrap node as the only public peer")


def met(options: Options, store: Store, kinds: Sequence[str]) -> Iterator[list[Cell]]:
    """How each pair of kinds has met, once all have had the time."""
    with calling(options, store, kinds) as (ones, others):
        time.sleep(options.settle_s)
        for first, second in combinations_with_replacement(range(len(kinds)), 2):
            yield row(ones[first], others[second])


@contextmanager
def calling(options: Options, store: Store, kinds: Sequence[str]) -> Iterator[tuple[list[Caller], list[Caller]]]:
    """Two peers of each kind, which have begun to call each other; the bootstrap node has begun before."""
    with ExitStack() as leaving:
        homes = leaving.enter_context(Homes(["public", *kinds, *kinds], options.rate_mbit))
        ticket, keys = store.scratch / "run.ticket", [store.scratch / f"{number}.key" for number in range(len(homes))]
        write_ticket(ticket, keys[0], homes[0].seen, LET_OUT)
        callers = []
        for number, (home, key) in enumerate(zip(homes, keys, strict=True)):
            callers.append(leaving.enter_context(Caller(home, key, ticket, first=not number)))
        for caller in callers:
            caller.hear(READY_S)
        callers[0].tell("begin")
        callers[0].hear(READY_S)
        for caller in callers[1:]:
            caller.tell("begin")
        yield callers[1 : 1 + len(kinds)], callers[1 + len(kinds) :]
        for caller in callers:
            caller.end()


def row(one: Caller, other: Caller) -> list[Cell]:
    """How two have met, and how fast the way between them is."""
    ways = [*one.ways.get(other.rank, []), *other.ways.get(one.rank, [])]
    if not ways:
        return [one.kind, other.kind, "not at all", None, None, None, ""]
    direct = "direct" if OPEN & {one.kind, other.kind} else "hole"
    names = {"direct": direct, "relay": "relay", "gone": "gone"}
    (way, seconds), *later = sorted(ways, key=lambda way: way[1])
    link = measured(one, other)
    then = [f"{names[changed]} after {moment:.0f} s" for changed, moment in later if changed != way][:1]
    remarks = "; ".join([*then, *filter(None, [link.get("failed")])])
    return [one.kind, other.kind, names[way], seconds, link.get("up"), link.get("down"), remarks]


def measured(one: Caller, other: Caller) -> dict[str, Any]:
    one.tell(str(other.rank))
    while True:
        answer = one.hear(MEASURED_S)
        if answer.get("measured") == other.rank:
            return answer
