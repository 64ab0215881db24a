"""Who keeps the run's state in a folder comes and goes: one whole state stays there, and one core."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from folder_seats import Seats, seats
from patience import until

from farflung.networks import SharedState
from farflung.networks.folder import FolderNetwork
from farflung.networks.folder.sealing import Kind


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Seats]:
    with seats(f"memory://{tmp_path.name}-{time.monotonic_ns()}/run", tmp_path, 0) as made:
        yield made


def saves(network: FolderNetwork, step: int, core: bool = True) -> None:
    """It does with its state what a replica does with each checkpoint."""
    network.peers.info["step"] = step
    state = {"core": torch.full((5,), float(step)), "rest": torch.rand(2000)}
    beside = frozenset({"rest"} if core else ())
    network.give(SharedState(state, {"step": step, "history": "h"}, beside=beside))
    until(lambda: not network._states._writing or network._states._writing[-1].done())


def kept(run: Seats) -> Counter[tuple[int, int]]:
    """The writers and steps of the states that are there."""
    looks = run.sit("onlooker", trains=False, listed=False)
    there = looks.peers.look(time.monotonic()).written
    run.leave(looks)
    states = Counter((one.note.rank, one.note.step) for one in there if one.note.kind == Kind.STATE)
    pieces = {one.note.rank for one in there if one.note.kind == Kind.PIECE}
    assert pieces <= {rank for rank, _ in states}, "pieces of no state"
    return states


def three(run: Seats) -> list[FolderNetwork]:
    """Three peers, by rank: each keeps the state where those before it are not there."""
    ranks = sorted((run.sit(f"peer {number}") for number in range(3)), key=lambda one: one.rank)
    run.look()
    return ranks


@pytest.mark.parametrize("core", [True, False])
def test_one_that_has_gone_leaves_its_state_until_the_next_has_kept_a_later_one(run: Seats, core: bool) -> None:
    first, second, third = three(run)
    saves(first, 10, core)
    assert kept(run) == {(first.rank, 10): 1 + core}
    run.leave(first)
    assert kept(run) == {(first.rank, 10): 1 + core}, "it stays while there is no other"
    run.look()
    time.sleep(1.1)
    run.look()
    assert second.keeps
    saves(second, 5, core)
    second.peers._tidy(second.peers.look(time.monotonic()))
    assert kept(run) == {(first.rank, 10): 1 + core, (second.rank, 5): 1 + core}, "it is behind what was kept"
    saves(second, 20, core)
    second.peers._tidy(second.peers.look(time.monotonic()))
    assert kept(run) == {(second.rank, 20): 1 + core}
    run.leave(third)
    run.leave(second)
    assert kept(run) == {(second.rank, 20): 1 + core}


def test_one_that_keeps_the_state_no_more_takes_back_its_own(run: Seats) -> None:
    second, third = sorted((run.sit(f"peer {number}") for number in range(2)), key=lambda one: one.rank)
    run.look()
    saves(second, 10)
    names = (f"late {number}" for number in range(99))
    while (first := run.sit(next(names))).rank > second.rank:
        run.leave(first)
    run.look()
    second.peers._tidy(second.peers.look(time.monotonic()))
    assert kept(run) == {(second.rank, 10): 2}, "nobody else has kept one"
    saves(first, 10)
    second.peers._tidy(second.peers.look(time.monotonic()))
    assert kept(run) == {(first.rank, 10): 2}
    assert not second.refused, "nobody has removed anything of it"
    run.leave(first)
    run.leave(second)
    run.leave(third)
    assert kept(run) == {(first.rank, 10): 2}


def test_one_that_comes_back_and_goes_before_it_has_kept_anything_leaves_what_it_had_kept(run: Seats) -> None:
    first = run.sit("first")
    saves(first, 10)
    run.open.remove(first)  # killed: it takes nothing along
    first.peers._over.set()
    run.leave(run.sit("first"))
    assert kept(run) == {(first.rank, 10): 2}
    again = run.sit("first")
    saves(again, 11)
    run.leave(again)
    assert kept(run) == {(again.rank, 11): 2}
