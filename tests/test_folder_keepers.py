"""Who keeps the run's state in a folder comes and goes: one whole state stays there, and one core."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from folder_seats import Seats, seats
from patience import patience, until

from farflung.networks import SharedState
from farflung.networks.folder import FolderNetwork
from farflung.networks.folder.sealing import Kind
from farflung.networks.folder.states import KEPT_SECONDS
from farflung.networks.peers.manifests import described


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
    smallest, *others = run.by_rank("one", "other", "another")
    second, third = map(run.sit, others)
    run.look()
    saves(second, 10)
    first = run.sit(smallest)
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


def gives(network: FolderNetwork, step: int, value: float) -> None:
    """One that lies keeps whatever it wants, whoever is to keep the state."""
    state = {"core": torch.full((5,), value), "rest": torch.full((2000,), value)}
    states = network._states
    states._write(*described(SharedState(state, {"step": step, "history": "h"}), False), [states.kept.whole])


def test_one_that_keeps_a_state_of_a_step_that_cannot_be_has_no_other_removed(run: Seats) -> None:
    smaller, larger = run.by_rank("one", "other")
    honest, other = run.sit(larger), run.sit("another")
    saves(honest, 50)
    liar = run.sit(smaller)
    run.look()
    gives(liar, 10**9, 1.0)
    for network in (honest, other):
        network.peers._tidy(network.peers.look(time.monotonic()))
    assert kept(run)[honest.rank, 50]


def test_a_state_that_was_refused_is_not_taken_again_though_its_writer_has_gone(run: Seats) -> None:
    honest = run.sit("honest")
    saves(honest, 50, core=False)
    liar = run.sit("liar")
    run.look()
    gives(liar, 60, 1.0)
    run.leave(honest)
    run.leave(liar)
    new = run.sit("new", trains=False)
    state = new.fetch(True).wait(patience(20))
    assert state is not None and state.givers == (liar.rank,)
    new.reject(state, "its values are none of this model's")
    state = new.fetch(True).wait(patience(20))
    assert state is not None and state.givers == (honest.rank,) and state.facts["step"] == 50
    assert new.behind(0) == 50


def test_a_state_that_is_not_finite_is_passed_over(run: Seats) -> None:
    honest, liar = run.sit("honest"), run.sit("liar")
    saves(honest, 50, core=False)
    gives(liar, 60, math.nan)
    run.leave(honest)
    run.leave(liar)
    new = run.sit("new", trains=False)
    state = new.fetch(True).wait(patience(20))
    assert state is not None and state.givers == (honest.rank,)
    assert new.refused["bad piece"] == 1


def test_one_that_keeps_a_state_of_a_time_to_come_has_no_other_removed(
    run: Seats, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, liar = run.sit("honest"), run.sit("liar")
    saves(honest, 50)
    in_time = time.time
    monkeypatch.setattr("farflung.networks.folder.notes.time.time", lambda: in_time() + 1e6)
    gives(liar, 10, 1.0)
    monkeypatch.undo()
    run.leave(honest)
    run.leave(liar)
    new = run.sit("new")
    new.peers.look(time.monotonic())
    now = time.monotonic()
    monkeypatch.setattr(time, "time", lambda: in_time() + 2 * KEPT_SECONDS)
    monkeypatch.setattr(time, "monotonic", lambda: now + 2 * KEPT_SECONDS)
    new._states._tidy(new.peers.notes.last)
    assert not new.peers.notes._leaving
