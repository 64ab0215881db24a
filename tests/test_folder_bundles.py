"""Packets of many, bundled: each reads few objects, and the one who bundles need not be believed."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from folder_seats import mean_of, seats
from hypothesis import given
from hypothesis import strategies as st
from patience import patience

from farflung.networks import Group, Party
from farflung.networks.folder import FolderNetwork, bundles, packets
from farflung.networks.folder.bundles import Bundles, unbundled
from farflung.networks.folder.sealing import Kind
from farflung.networks.peers import pace
from farflung.networks.peers.circles import CIRCLE, FEW, circles
from farflung.networks.peers.frames import FrameError


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"memory://{tmp_path.name}-{time.monotonic_ns()}/run"


@given(st.integers(0, 500))
def test_all_of_a_large_group_are_in_one_circle_each_and_none_is_too_large(count: int) -> None:
    found = circles(tuple(range(count)))
    assert sorted(rank for circle in found for rank in circle) == (list(range(count)) if count > FEW else [])
    assert all(1 < len(circle) <= CIRCLE for circle in found)


@given(st.binary(max_size=60), st.binary(max_size=40))
def test_a_bundle_of_nonsense_is_refused_or_holds_no_more_than_there_is(table: bytes, sealed: bytes) -> None:
    try:
        found = unbundled(memoryview(table), memoryview(sealed))
    except FrameError:
        assert len(table) % 16
    else:
        assert sum(map(len, found.values())) <= len(sealed)


def counting(networks: list[FolderNetwork]) -> Counter[Kind]:
    """Counts the objects that are read from now on, by kind."""
    read, lock = Counter[Kind](), threading.Lock()

    def counted(get: Callable[..., bytes], network: FolderNetwork) -> Callable[..., bytes]:
        def and_read(name: str, *part: Any) -> bytes:
            with lock:
                read[network.peers.notes.seals.note(name)[0].kind] += 1
            return get(name, *part)

        return and_read

    for network in networks:
        store = network.peers.notes.store
        store.get = counted(store.get, network)  # type: ignore[method-assign]
    return read


def test_among_eight_one_reads_all_packets_and_the_others_its_bundle(url: str, tmp_path: Path) -> None:
    with seats(url, tmp_path, 8) as run:
        read = counting(run.open)
        assert [mean.tolist() for mean in mean_of(run.open, "round 1 of 0", 4)] == [[3.5] * 4] * 8
        assert (read[Kind.PACKET], read[Kind.BUNDLE]) == (7, 7)


def test_what_is_large_is_read_by_itself(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundles, "SMALL", 8)
    with seats(url, tmp_path, 5) as run:
        read = counting(run.open)
        assert [mean.tolist() for mean in mean_of(run.open, "round 1 of 0", 4)] == [[2.0] * 4] * 5
        assert (read[Kind.PACKET], read[Kind.BUNDLE]) == (20, 0)


def test_one_who_bundles_and_lies_is_counted_and_not_believed(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = Bundles.packet

    def lying(self: Bundles, *what: Any) -> Any:
        told = honest(self, *what)
        self._sealed = dict.fromkeys(self._sealed, b"\0" * 200)
        return told

    monkeypatch.setattr(Bundles, "packet", lying)
    with seats(url, tmp_path, 5) as run:
        assert [mean.tolist() for mean in mean_of(run.open, "round 1 of 0", 4)] == [[2.0] * 4] * 5
        assert [network.refused.get("bad bundle", 0) for network in run.open].count(1) == 4


def test_where_no_bundle_comes_all_packets_are_read(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bundles, "write", lambda *_: [])
    monkeypatch.setattr(packets, "LATE_SHARE", 0.5 / patience(10))
    with seats(url, tmp_path, 5) as run:
        values = [mean.tolist() for mean in mean_of(run.open, "round 1 of 0", 4)]
        assert values == [[2.0] * 4] * 5


@pytest.mark.slow
def test_many_who_wait_for_the_last_one_do_not_look_often(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pace, "FIRST_ROUND_SECONDS", 1e3)
    with seats(url, tmp_path, 6) as run:
        for network in run.open:
            network.peers._over.set()  # no beat comes between
            network.peers._thread.join()
            network.stand_by(1)
        run.look()
        *early, late = run.open
        ranks = tuple(sorted(network.rank for network in run.open))
        before = [network.traffic.requests for network in early]
        all_there = threading.Barrier(6)

        def then(party: Party) -> Group:
            all_there.wait(patience(20))  # who goes takes its note along
            return party.group

        pending = []
        for network in run.open:
            time.sleep(2.3 if network is late else 0.0)
            pending.append(network.meet(ranks, "round 1 of 0", 1, 1.0, "same", then))
        assert [one.wait(patience(20)) for one in pending] == [ranks] * 6
        # A note, looks after 0, 0.05, 0.15, 0.35, 0.75, 1.55 and 3.15 s, and removals of it and of a beat.
        assert all(network.traffic.requests - was <= 10 for network, was in zip(early, before, strict=True))


def test_a_packet_of_nothing_is_one(tmp_path: Path) -> None:
    """As of who has no part of a message of fewer values than members; one that means ill could send it, too."""
    with seats(f"memory://{tmp_path.name}/run", tmp_path, 3) as run:
        group = tuple(sorted(network.rank for network in run.open))
        nothing = torch.empty(0, dtype=torch.uint8)
        told = [network.exchange(nothing, group, "nothing") for network in run.open]
        sums = [network.all_reduce(torch.ones(1), group, "one") for network in run.open]
        parts = {own: {rank: nothing for rank in group if rank != own} for own in group}
        made = [one.scatter_combine_gather(parts[one.rank], group, "parts", lambda _: nothing) for one in run.open]
        for one in (*told, *made):
            assert [len(packet) for packet in one.wait(patience(10)).values()] == [0, 0, 0]
        assert [one.wait(patience(10)).tolist() for one in sums] == [[1.0]] * 3
