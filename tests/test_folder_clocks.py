"""Peers in a folder whose clocks are far from each other's do no harm to each other's objects."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
from folder_seats import seats

from farflung.networks.folder import FolderNetwork, presence, states
from farflung.networks.folder.sealing import Kind


def silent(network: FolderNetwork) -> FolderNetwork:
    """A member whose beats do not come between."""
    network.peers._over.set()
    network.peers._thread.join()
    return network


def test_one_whose_clock_is_hours_ahead_removes_what_it_has_seen_for_long_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with seats((tmp_path / "store").as_uri(), tmp_path, 1) as run:
        one = silent(run.open[0])
        said = one.peers.said
        one.peers.notes.post(Kind.PIECE, lambda **who: replace(said(**who), subject=b"of a state  "), [b"a piece"])
        clock = time.time
        monkeypatch.setattr(time, "time", lambda: clock() + 3 * 3600)
        ahead = silent(run.sit("ahead"))

        def left() -> set[Kind]:
            ahead.peers._tidy(ahead.peers.look(time.monotonic()))
            there = one.peers.notes.look(time.monotonic()).written
            return {written.note.kind for written in there if written.note.rank == one.rank}

        assert left() == {Kind.BEAT, Kind.PIECE}
        monkeypatch.setattr(presence, "CLOSED_SECONDS", 0.0)
        assert left() == {Kind.PIECE}
        monkeypatch.setattr(states, "KEPT_SECONDS", 0.0)
        assert left() == set()


def test_one_whose_clock_is_hours_ahead_takes_nothing_of_the_others_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with seats((tmp_path / "store").as_uri(), tmp_path, 1) as run:
        one = silent(run.open[0])
        clock = time.time
        with monkeypatch.context() as patch:
            patch.setattr(time, "time", lambda: clock() + 3 * 3600)
            ahead = run.sit("ahead")
        one.peers.beat()
        monkeypatch.setattr(time, "time", lambda: clock() + 3 * 3600)
        run.leave(ahead)
        there = [written.note for written in one.peers.notes.look(time.monotonic()).written]
        assert one.peers._beat and one.peers._beat.note in there and not one.refused


@pytest.mark.parametrize("hours", [3, -3])
def test_one_whose_clock_is_hours_off_is_told_once_and_the_others_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hours: int
) -> None:
    with seats((tmp_path / "store").as_uri(), tmp_path, 2) as run:
        others = [silent(network) for network in run.open]
        clock = time.time
        with monkeypatch.context() as patch:
            patch.setattr(time, "time", lambda: clock() + 3600 * hours)
            off = silent(run.sit("off"))
        for _ in range(4):
            for network in others:
                network.peers.beat()
                network.peers.look(time.monotonic())
            with monkeypatch.context() as patch:
                patch.setattr(time, "time", lambda: clock() + 3600 * hours)
                off.peers.beat()
                off.peers.look(time.monotonic())
        told = [line for line in run.told if "clock is" in line]
        where = "ahead of" if hours > 0 else "behind"
        assert len(told) == 1 and f"s {where} the other peers'; set it" in told[0]
        assert 10_700 < float(told[0].split("clock is ")[1].split()[0]) < 10_900


def test_one_that_stood_still_before_it_wrote_makes_nobody_doubt_the_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with seats((tmp_path / "store").as_uri(), tmp_path, 2) as run:
        one, other = (silent(network) for network in run.open)
        clock = time.time
        with monkeypatch.context() as patch:
            patch.setattr(time, "time", lambda: clock() - 300)
            other.peers.beat()
        for _ in range(3):
            one.peers.look(time.monotonic())
            other.peers.beat()
        assert not run.told
