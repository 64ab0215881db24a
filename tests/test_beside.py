"""What a thread does of a round beside training: on the CPU, where any tensor's work can be done so."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from patience import patience, until

from farflung.networks import PeerLostError
from farflung.networks.transfer import GONE, RealNetwork, Transfer
from farflung.outer.beside import Beside, SideStream
from farflung.outer.exchange import start_beside


class Alone(RealNetwork):
    """A replica whose exchanges the test ends."""

    rank = 0

    def address(self, rank: int) -> str:
        return f"replica {rank}"


@pytest.fixture
def transfer() -> Transfer[int]:
    return Transfer(Alone(), (0, 1))


def beside(start: Callable[[], Transfer[int]]) -> Beside[int]:
    made = Beside(start, SideStream().following(torch.zeros(1)), time.monotonic)
    made.begin()
    return made


def test_what_has_come_is_made_ready_before_anybody_waits(transfer: Transfer[int]) -> None:
    threads, told = [], []

    def start() -> Transfer[int]:
        threads.append(threading.current_thread())
        told.append(torch.is_grad_enabled())
        return transfer

    pending = beside(start)
    until(lambda: bool(threads), 10)
    assert not pending.done()
    transfer.finish(7)
    until(pending.done, 10)
    assert pending.wait(0.0) == pending.wait(0.0) == 7
    assert pending.finished_at == transfer.finished_at
    assert threads != [threading.current_thread()] and told == [False]


def test_who_waits_gives_the_deadline_and_what_is_known_of_the_others(transfer: Transfer[int]) -> None:
    pending = beside(lambda: transfer)
    with pytest.raises(PeerLostError, match=r"replica 1 did not deliver within 0\.2 s"):
        pending.wait(0.2)
    gone = GONE.set(lambda: True)
    began = time.monotonic()
    try:
        with pytest.raises(PeerLostError):
            beside(lambda: transfer).wait(patience(100))
    finally:
        GONE.reset(gone)
    assert time.monotonic() - began < patience(50)


def test_what_cannot_be_started_is_told_to_who_waits() -> None:
    def start() -> Transfer[int]:
        raise ValueError("no such codec")

    pending = beside(start)
    until(pending.done, 10)
    with pytest.raises(ValueError, match="no such codec"):
        pending.wait(1.0)
    assert pending.finished_at <= time.monotonic()


def test_an_exchange_beside_training_knows_its_compression_error_once_it_was_started() -> None:
    transfer: Transfer[int] = Transfer(Alone(), (0, 1))
    exchange = start_beside(lambda: (transfer, 0.25), nullcontext, 1.5, time.monotonic)  # type: ignore[arg-type]
    transfer.finish(3)
    assert exchange.result.wait(patience(10)) == 3
    assert (exchange.started_s, exchange.compression_error) == (1.5, 0.25)
