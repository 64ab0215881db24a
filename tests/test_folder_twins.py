"""Two processes that take part in a run in a folder with the same key, as when a command is given twice."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from folder_seats import seats

from farflung.errors import UserError
from farflung.networks.folder import presence
from farflung.networks.folder.sealing import Kind


def test_the_second_of_two_with_one_key_leaves_and_takes_nothing_of_the_first_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(presence, "CLOCK_SECONDS", 0.0)
    with seats((tmp_path / "store").as_uri(), tmp_path, 1) as run:
        (first,) = run.open
        first.peers.notes.post(Kind.PACKET, first.peers.said, [b"a packet"])
        second = run.sit("peer-0")
        for network in run.open:
            network.peers._over.set()  # no beat comes between
            network.peers._thread.join()
        second.peers._tidy(second.peers.look(time.monotonic()))
        first.peers.beat()
        second.peers.look(time.monotonic())
        with pytest.raises(UserError, match="another process takes part with the same key"):
            second.members()
        run.leave(second)
        there = [one.note for one in first.peers.look(time.monotonic()).written]
        assert {note.kind for note in there} == {Kind.BEAT, Kind.PACKET}
        assert {note.session for note in there} == {first.peers.notes.session}
        assert not first.refused
