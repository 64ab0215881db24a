"""Groups of peers that stay the same: who gets a seat, and exchanges among them."""

from __future__ import annotations

import itertools
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from patience import patience, until

from farflung.durations import duration
from farflung.errors import UserError
from farflung.networks import PeerLostError
from farflung.networks.internet import (
    FixedGroup,
    Identity,
    ListenAddress,
    Peers,
    Ticket,
    fixed,
    newcomer_info,
    transport,
)
from farflung.networks.internet.contact import peers as contact
from farflung.networks.internet.examination import examine

T = TypeVar("T")
LARGEST = 1 << 20


class Machines:
    """Some that are to be a group, in this process."""

    def __init__(self, folder: Path, size: int) -> None:
        self.folder, self.size = folder, size
        self.told: list[str] = []
        self.numbers = itertools.count()
        self.ticket = Ticket.new("test", {})
        self.seats = [self.seat()]
        self.ticket = self.seats[0].invitation()

    def seat(self) -> FixedGroup:
        number = next(self.numbers)
        identity, local = Identity(self.folder / f"{number}.key"), ListenAddress("127.0.0.1")
        info = newcomer_info(self.ticket, f"machine-{number}")
        peers = Peers(self.ticket, identity, local, info, self.told.append, first=not number)
        return FixedGroup(peers, self.size, LARGEST, patience(60))

    def join(self) -> FixedGroup:
        self.seats.append(self.seat())
        return self.seats[-1]

    def each(self, work: Callable[[FixedGroup], T]) -> list[T]:
        """What each finds, all at a time."""
        with ThreadPoolExecutor(len(self.seats)) as pool:
            return [*pool.map(work, self.seats)]

    def gather(self) -> None:
        while len(self.seats) < self.size:
            self.join()
        self.each(lambda seat: seat.gather(patience(60), self.told.append))

    def close(self) -> None:
        for seat in self.seats:
            seat.close()


@pytest.fixture
def machines(tmp_path: Path, quick: None) -> Iterator[Callable[[int], Machines]]:
    made: list[Machines] = []

    def make(size: int) -> Machines:
        made.append(Machines(tmp_path, size))
        return made[-1]

    yield make
    for one in made:
        one.close()


def packet(size: int, value: int = 1) -> torch.Tensor:
    return torch.full((size,), value, dtype=torch.uint8)


def test_all_have_the_same_group_and_each_others_packets(machines: Callable[[int], Machines]) -> None:
    three = machines(3)
    three.gather()
    ranks = tuple(sorted(seat.rank for seat in three.seats))
    assert [seat.members() for seat in three.seats] == [ranks] * 3
    assert {"1 of 3 machines are there", "all 3 machines are there"} <= {*three.told}

    def swapped(seat: FixedGroup) -> dict[int, list[int]]:
        found = seat.exchange(packet(3, ranks.index(seat.rank)), ranks, "all").wait(patience(60))
        return {rank: one.tolist() for rank, one in found.items()}

    assert three.each(swapped) == [{rank: [place] * 3 for place, rank in enumerate(ranks)}] * 3
    assert [seat.traffic.bytes_sent for seat in three.seats] == [6] * 3


def test_links_within_a_group_can_be_examined(machines: Callable[[int], Machines]) -> None:
    two = machines(2)
    two.gather()
    assert [one.line for one in examine(two.seats[1].peers) if not one.good] == []


def test_who_comes_when_all_are_there_is_told_so(machines: Callable[[int], Machines]) -> None:
    two = machines(2)
    two.gather()
    late = two.join()
    with pytest.raises(UserError, match=r"^all 2 machines are there, and have begun without this one$"):
        late.gather(patience(60), two.told.append)
    assert len(two.seats[0].members()) == 2


def test_who_leaves_before_all_are_there_gives_its_seat_up(
    machines: Callable[[int], Machines], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fixed, "FREE_SECONDS", patience(0.5))
    three = machines(3)
    early = three.join()
    with pytest.raises(UserError, match=r"^2 of 3 machines have come in .*; start it again on all of them$"):
        early.gather(0, three.told.append)
    early.close()
    three.seats.remove(early)
    until(lambda: not three.seats[0]._lately())
    three.gather()
    assert early.rank not in three.seats[0].members()


def test_who_waits_is_told_when_the_first_has_gone(
    machines: Callable[[int], Machines], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fixed, "FREE_SECONDS", 0.5)
    three = machines(3)
    three.join()
    three.seats[0].close()
    with pytest.raises(UserError, match="the machine that has made the ticket has gone"):
        three.seats[1].gather(patience(60), three.told.append)


def test_one_may_come_to_an_exchange_long_after_another(machines: Callable[[int], Machines]) -> None:
    """A slow machine trains for longer than a transfer may stand still."""
    two = machines(2)
    two.gather()
    for seat in two.seats:
        seat._transport._stall_s = 0.5
    one, other = two.seats
    early = one.exchange(packet(5), one.members(), "late")
    time.sleep(2)
    assert [*other.exchange(packet(5), one.members(), "late").wait(patience(60))] == [*one.members()]
    assert early.wait(patience(60))


def test_whom_an_exchange_waits_for_is_told(
    machines: Callable[[int], Machines], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that answers, and sends nothing, may be slow, or hang."""
    three = machines(3)
    three.gather()
    first, other, late = three.seats
    monkeypatch.setattr(fixed, "TELL_SECONDS", 0.5)
    awaiting = [seat.exchange(packet(5), seat.members(), "late") for seat in (first, other)]
    gathered = len(three.told)
    until(lambda: len(three.told) > gathered + 3)
    limit = re.escape(duration(patience(60)))
    assert all(
        re.fullmatch(
            rf"still waiting for machine-2 \(...\): .* s so far, at most {limit}; look there whether it still works",
            line,
        )
        for line in three.told[gathered:]
    )
    late.exchange(packet(5), late.members(), "late").wait(patience(60))
    for exchange in awaiting:
        exchange.wait(patience(60))
    told = [*three.told]
    time.sleep(1.5)
    assert three.told == told


def test_who_has_everything_may_leave_at_once(machines: Callable[[int], Machines]) -> None:
    two = machines(2)
    two.gather()

    def last(seat: FixedGroup) -> int:
        size = LARGEST if seat is two.seats[0] else 1
        found = seat.exchange(packet(size), seat.members(), "last").wait(patience(60))
        seat.close()
        return sum(len(one) for one in found.values())

    assert two.each(last) == [LARGEST + 1] * 2


def test_a_packet_that_is_too_large_is_lost_at_once_and_names_its_sender(machines: Callable[[int], Machines]) -> None:
    two = machines(2)
    two.gather()
    one, other = two.seats
    awaiting = one.exchange(packet(1), one.members(), "large")
    until(lambda: one._transport._awaited)
    other.exchange(packet(LARGEST + transport.ROOM + 1), one.members(), "large")
    with pytest.raises(PeerLostError, match=r"^lost machine-1 \(...\): .* 2097153 bytes; at most 2097152 are taken$"):
        awaiting.wait(patience(60))


def test_a_machine_without_power_is_lost_though_nobody_says_so(
    machines: Callable[[int], Machines], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing closes its connections; it only answers no more."""
    two = machines(2)
    two.gather()
    one, other = two.seats
    monkeypatch.setattr(contact, "SILENT_SECONDS", 1.0)
    back = threading.Event()

    async def hang() -> None:
        back.wait()

    other.peers.background.submit(hang())
    try:
        with pytest.raises(PeerLostError, match=r"^lost machine-1 \(...\): it has gone$"):
            one.exchange(packet(5), one.members(), "in vain").wait(patience(60))
    finally:
        back.set()
