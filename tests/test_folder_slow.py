"""Peers meet in a folder whose store takes its time, refuses, or shows nothing of what is there."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from folder_seats import mean_of, seats
from fsspec.implementations.memory import MemoryFileSystem
from patience import patience, until

from farflung.errors import UserError
from farflung.networks import Party, Pending
from farflung.networks.base import Traffic
from farflung.networks.folder import network as network_module
from farflung.networks.folder import presence as presence_module
from farflung.networks.folder.store import Store, StoreAwayError


class Slow(MemoryFileSystem):  # type: ignore[misc]
    """A store far away: a request takes `seconds`, half of them on the way there. Some it does not do as it should."""

    protocol = "slow"
    cachable = False
    seconds = 0.0
    kept = False
    """Whether nothing may be removed."""
    feigns = False
    """Whether it says that what it keeps is removed, as buckets do of many objects at once."""
    fails = False
    """Whether it fails to remove anything."""
    hides = 0
    """How many listings are of nothing."""
    missing = False
    """Whether it says that there is no such bucket, in s3fs's way."""
    busy = 0
    """How many objects it does not write."""
    opened = 0
    refuses = False
    """Whether it lets nobody write."""
    late = False
    """Whether listings do not show yet what all know the name of."""

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        Slow.opened += 1

    def _asked(self, name: str, *given: Any, **more: Any) -> Any:
        time.sleep(Slow.seconds / 2)
        try:
            return getattr(super(), name)(*given, **more)
        finally:
            time.sleep(Slow.seconds / 2)

    def pipe_file(self, *given: Any, **more: Any) -> Any:
        if Slow.refuses:
            raise PermissionError("Access Denied")
        if Slow.busy > 0:
            Slow.busy -= 1
            raise OSError("503 Slow Down")
        return self._asked("pipe_file", *given, **more)

    def cat_file(self, *given: Any, **more: Any) -> Any:
        return self._asked("cat_file", *given, **more)

    def ls(self, *given: Any, **more: Any) -> Any:
        if Slow.missing:
            raise FileNotFoundError("The specified bucket does not exist") from OSError("NoSuchBucket")
        if Slow.hides > 0:
            Slow.hides -= 1
            raise FileNotFoundError(given[0])
        found = self._asked("ls", *given, **more)
        return [one for one in found if not (Slow.late and "/=" in one["name"])]

    def rm_file(self, *given: Any, **more: Any) -> Any:
        if Slow.fails:
            raise OSError("503 Service Unavailable")
        if Slow.kept and Slow.feigns:
            return None
        if Slow.kept:
            raise PermissionError(f"delete {given[0]}: access denied")
        return self._asked("rm_file", *given, **more)

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return super()._strip_protocol(str(path).removeprefix("slow:/").replace("//", "/"))


@pytest.fixture
def slow() -> Iterator[None]:
    fsspec.register_implementation("slow", Slow, clobber=True)
    yield
    Slow.missing, Slow.busy, Slow.refuses = False, 0, False
    Slow.seconds, Slow.kept, Slow.feigns, Slow.fails, Slow.hides, Slow.late = 0.0, False, False, False, 0, False


@pytest.mark.slow
@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize(("awaited", "later"), [(False, 0.0), (False, 0.7), (True, 0.0), (True, 0.3)])
def test_two_that_wait_in_vain_meet_though_each_request_takes_half_a_second(
    tmp_path: Path, awaited: bool, later: float
) -> None:
    """Rounds follow each other so soon that a peer's patience is two requests long."""
    Slow.seconds = 0.5
    with seats(f"slow://{tmp_path.name}/run", tmp_path, 3) as run:
        one, two, away = run.open
        away.peers.info["step"] = 10 if awaited else 10**6  # or all know that it is long past the round
        for network in run.open:
            if network is not away:
                network.peers.info["step"] = 10
                network._patience.seconds("round 0 of 0")
            network.peers.beat()
        run.look()
        pending: list[Pending[Party]] = []
        for network in (one, two):
            wanted = tuple(sorted((network.rank, away.rank)))
            pending.append(network.meet(wanted, "round 1 of 0", 10, 1.0, "", lambda party: party))
            time.sleep(later if network is one else 0)
        groups = [visit.wait(patience(20)).group for visit in pending]
        Slow.seconds = 0.0
        assert groups == [tuple(sorted((one.rank, two.rank)))] * 2


@pytest.mark.slow
@pytest.mark.usefixtures("slow")
def test_those_who_were_grouped_read_that_by_name_where_listings_show_it_late(tmp_path: Path) -> None:
    Slow.late = True
    with seats(f"slow://{tmp_path.name}/late", tmp_path, 3) as run:
        *pair, away = run.open
        away.peers.info["step"] = 10**6  # as all know, it is long past the round
        away.peers.beat()
        run.look()
        both_placed = threading.Barrier(2)

        def then(party: Party) -> Party:
            both_placed.wait(patience(10))  # who has left a round is nobody's partner
            return party

        pending = [
            network.meet(tuple(sorted((network.rank, away.rank))), "round 1 of 0", 1, 1.0, "", then) for network in pair
        ]
        groups = [visit.wait(patience(10)).group for visit in pending]
        assert groups == [tuple(sorted(network.rank for network in pair))] * 2


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("feigns", [False, True])
def test_what_may_not_be_removed_is_told_once_and_counted_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, feigns: bool
) -> None:
    monkeypatch.setattr(network_module, "LAST_SECONDS", 0.5)  # the notes of those at a round stay, too
    with seats(f"slow://{tmp_path.name}/kept", tmp_path, 2) as run:
        Slow.kept, Slow.feigns = True, feigns
        for number in range(1, 3):
            began = time.monotonic()
            assert [mean.tolist() for mean in mean_of(run.open, f"round {number} of 0", 2)] == [[0.5] * 2] * 2
            for network in run.open:
                network.peers.beat()
                for _ in range(3):
                    network.peers._tidy(network.peers.look(time.monotonic()))
            assert time.monotonic() - began < patience(2)  # nothing is tried again until a deadline
        for network in run.open:
            refused = network.peers.guard.refused
            assert set(refused) == {"object that may not be removed"}
            assert refused["object that may not be removed"] == len(network.peers.notes.staying) > 2
        assert sum("may not be removed from slow://" in line for line in run.told) == 2 == len(run.told)


@pytest.mark.usefixtures("slow")
def test_what_could_not_be_removed_for_a_while_does_not_stay(tmp_path: Path) -> None:
    """As where a key expires in mid-run, and is renewed."""
    with seats(f"slow://{tmp_path.name}/for-a-while", tmp_path, 2) as run:
        Slow.kept = True
        for network in run.open:
            network.peers.beat()
            network.peers._tidy(network.peers.look(time.monotonic()))
        assert all(network.peers.notes.staying for network in run.open)
        Slow.kept = False
        for network in list(run.open):
            run.leave(network)
    assert not fsspec.filesystem("slow").find(f"/{tmp_path.name}/for-a-while")


@pytest.mark.slow
@pytest.mark.usefixtures("slow")
def test_a_store_that_only_fails_to_remove_is_not_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presence_module, "BEAT_SECONDS", 0.2)
    with seats(f"slow://{tmp_path.name}/fails", tmp_path, 2) as run:
        one, other = (network.peers for network in run.open)
        Slow.fails = True
        for network in run.open:
            network.peers.notes.store._patience_s = 1.0
        ends, number = time.monotonic() + 5, 0
        while time.monotonic() < ends:
            number += 1
            assert [mean.tolist() for mean in mean_of(run.open, f"round {number} of 0", 2)] == [[0.5] * 2] * 2
            assert not one.away and not other.away
        assert sum("objects cannot be removed now: slow://" in line for line in run.told) == 2 == len(run.told)
        Slow.fails = False
        until(lambda: len(one.look(time.monotonic()).written) <= 4, patience(5))  # a beat of each, or two
    assert not fsspec.filesystem("slow").find(f"/{tmp_path.name}/fails")


@pytest.mark.usefixtures("slow")
def test_that_there_is_no_such_bucket_is_told_at_once_also_to_who_only_looks(tmp_path: Path) -> None:
    Slow.missing = True
    for listed in (True, False):
        with (
            pytest.raises(UserError, match=r"is not there: The specified bucket does not exist; see that"),
            seats("slow://none", tmp_path, 0) as run,
        ):
            run.sit("one", patience(10), listed=listed)


@pytest.mark.usefixtures("slow")
def test_a_store_that_is_busy_once_is_not_opened_anew_but_one_that_is_so_again(tmp_path: Path) -> None:
    store = Store(f"slow://{tmp_path.name}/busy", patience(10), Traffic())
    opened = Slow.opened
    for busy, anew in ((1, 0), (3, 2)):
        Slow.busy = busy
        store.put(f"after {busy}", b"1")
        assert Slow.busy == 0 and Slow.opened - opened == anew


@pytest.mark.usefixtures("slow")
def test_an_empty_listing_is_not_believed_where_own_objects_must_be_in_it(tmp_path: Path) -> None:
    with seats(f"slow://{tmp_path.name}/hidden", tmp_path, 2) as run:
        one, other = (network.peers for network in run.open)
        for peer in (one, other):
            peer._over.set()  # no beat comes between
            peer._thread.join()
        before = one.look(time.monotonic()).written
        Slow.hides = 1
        assert one.look(time.monotonic()).written == before and Slow.hides == 0
        assert not one.guard.refused and one.found(other.identity.rank)
        one.notes.store._patience_s = 0.2
        Slow.hides = 10**6
        with pytest.raises(StoreAwayError, match="nothing of what this peer has written"):
            one.look(time.monotonic())
        assert not one.guard.refused and one.notes.last.written == before


@pytest.mark.usefixtures("slow")
def test_who_may_not_write_is_told_at_once_and_waited_for_where_it_could_before(tmp_path: Path) -> None:
    traffic = Traffic()
    store = Store(f"slow://{tmp_path.name}/refuses", 0.5, traffic)
    Slow.refuses = True
    with pytest.raises(StoreAwayError, match="does not let this peer write: Access Denied"):
        store.put("a", b"1")
    assert traffic.requests == 1
    Slow.refuses = False
    store.put("a", b"1")
    Slow.refuses = True
    with pytest.raises(StoreAwayError, match=r"has failed for 0\.5 s: Access Denied"):
        store.put("b", b"1")
    assert traffic.requests > 3


@pytest.mark.usefixtures("slow")
def test_nobody_is_asked_for_nothing(tmp_path: Path) -> None:
    """As a member may say of its object's size: some servers answer an error then, as one that is away does."""
    traffic = Traffic()
    store = Store(f"slow://{tmp_path.name}/nothing", 0.5, traffic)
    assert store.get("a", 0, 0) == b"" and traffic.requests == 0
