"""A folder of peers on a disk that fills up, and one that goes away and comes back."""

from __future__ import annotations

import shutil
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import pytest
from folder_seats import mean_of, met, seats
from fsspec.implementations.memory import MemoryFileSystem
from patience import patience, until
from processes import fill, run_here

from farflung.errors import UserError
from farflung.networks.base import Traffic
from farflung.networks.folder.store import Store, StoreAwayError


def test_on_a_full_disk_nothing_is_left_of_what_could_not_be_written(disk: Path) -> None:
    store = Store(disk.as_uri(), 0.2, Traffic())
    filler = fill(disk)
    for write in (store.put, store.create):
        with pytest.raises(StoreAwayError, match="No space left on device"):
            write("large", bytes(1 << 22))
    assert store.names() == {filler.name: filler.stat().st_size}


def test_a_disk_that_may_not_be_written_is_told_of_in_the_same_words_each_time(disk: Path) -> None:
    store = Store(disk.as_uri(), 0.2, Traffic())
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    told = set()
    for number in range(2):
        with pytest.raises(StoreAwayError, match="Read-only file system") as error:
            store.put(f"object-{number}", b"1")
        told.add(str(error.value))
    assert len(told) == 1


def test_what_one_is_the_first_to_write_is_all_that_lies_there(tmp_path: Path) -> None:
    store = Store(tmp_path.as_uri(), patience(5), Traffic())
    assert store.create("a", b"1") and not store.create("a", b"22")
    assert store.names() == {"a": 1}


class Unsure(MemoryFileSystem):  # type: ignore[misc]
    """A store that only tells whether there is an object, to two who both look first and then write."""

    protocol = "unsure"
    cachable = False
    looked, written = threading.Barrier(2), threading.Barrier(2)

    def exists(self, path: str, **more: Any) -> bool:
        found: bool = super().exists(path, **more)
        Unsure.looked.wait(patience(5))
        return found

    def pipe_file(self, path: str, value: bytes, **more: Any) -> None:
        super().pipe_file(path, value)
        Unsure.written.wait(patience(5))

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return super()._strip_protocol(str(path).removeprefix("unsure:/").replace("//", "/"))


def test_of_two_who_have_looked_before_either_wrote_one_is_the_first(tmp_path: Path) -> None:
    fsspec.register_implementation("unsure", Unsure, clobber=True)
    stores = [Store(f"unsure://{tmp_path.name}/run", patience(5), Traffic()) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        first = list(pool.map(lambda store, own: store.create("a", own), stores, (b"1", b"2")))
    assert sorted(first) == [False, True]
    assert stores[0].get("a", 0, 9) == (b"1" if first[0] else b"2")


def test_a_folder_below_a_file_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("here")
    with (
        pytest.raises(UserError, match=r"leads through a file: .*; see that"),
        seats((tmp_path / "file").as_uri(), tmp_path, 1),
    ):
        pass


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="this system has no folder that nobody may write in")
def test_where_no_folder_can_be_made_one_is_told_in_one_line(tmp_path: Path) -> None:
    with (
        pytest.raises(UserError, match=r"cannot be made there: .*; see that"),
        seats("file:///proc/nothing", tmp_path, 1),
    ):
        pass


def test_while_the_folder_has_gone_peers_are_alone_and_then_meet_again(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    with seats(folder.as_uri(), tmp_path, 2) as run:
        for network in run.open:
            network.peers.notes.store._patience_s = 0.2
        where = next(folder.iterdir())
        shutil.rmtree(folder)
        parties = met(run.open, "round 1 of 0", lambda _, party: party)
        assert [(party.group, party.alone) for party in parties] == [((), "away")] * 2
        until(lambda: sum("has gone; this peer trains on alone" in line for line in run.told) == 2, patience(20))
        where.mkdir(parents=True)
        until(lambda: sum("is there again" in line for line in run.told) == 2, patience(40))
        assert [mean.tolist() for mean in mean_of(run.open, "round 2 of 0", 2)] == [[0.5] * 2] * 2
    assert len(run.told) == 4


def test_the_last_one_takes_along_what_a_server_left_that_was_stopped_while_it_wrote(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    with seats(folder.as_uri(), tmp_path, 2) as run:
        (where,) = folder.iterdir()
        whole = max(where.iterdir(), key=lambda path: len(path.name))
        (where / f"{whole.name}.0000000012").write_bytes(b"a part")
        run.look()
        run.leave(run.open[0])
        assert any(path.name.endswith(".0000000012") for path in where.iterdir()), "somebody may still need it"
    assert not any(path.is_file() for path in folder.rglob("*"))


def test_a_folder_is_where_its_url_says_for_everybody_with_spaces_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def invite(at: str) -> str:
        code = run_here(monkeypatch, tmp_path, "invite", "--name", "x", "--ticket", "x.ticket", "--at", at)
        told = capsys.readouterr().err
        assert code == (0 if "the ticket is in" in told else 2)
        return told

    whole = f"file://{tmp_path}/our share"
    for at in ("file://our share", "file://", "./our share"):
        assert f"such as {whole if 'share' in at else f'file://{tmp_path}'}" in invite(at)
        assert not (tmp_path / "our share").exists()
    invite(whole)
    assert (tmp_path / "our share").is_dir()


def test_who_invites_is_told_what_who_trains_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    at = ("--name", "x", "--ticket", "x.ticket", "--at", (tmp_path / "store").as_uri())
    assert run_here(monkeypatch, tmp_path, "invite", *at, "--method", "gpa", "--inner", "sign") == 0
    told = "farflung: gpa is published with PrimalAveraging, and is another method with inner sign; give --inner gpa"
    assert told in capsys.readouterr().err.splitlines()
