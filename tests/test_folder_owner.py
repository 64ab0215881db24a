"""The owner of a folder may do what it wants there: nothing is read, nothing believed, all is counted."""

from __future__ import annotations

import base64
import os
import shutil
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from folder_seats import Seats, mean_of, seats
from hypothesis import given, settings
from hypothesis import strategies as st

from farflung.networks.folder import FolderNetwork, Identity
from farflung.networks.folder.notes import Written
from farflung.networks.folder.sealing import LONGEST_NAME, Kind, Note, SealError, Seals, check_note, check_told

SECRET = "5" * 64
TOLD = b"weights that are nobody else's business"
NOTE = Note(Kind.HERE, (1 << 52) - 1, 2, 3, 4.5, 6, 7.5, True, False, 8.5, b"s" * 12, b"l" * 8, b"w" * 8, 9, 10)


@pytest.fixture(scope="module")
def identity(tmp_path_factory: pytest.TempPathFactory) -> Identity:
    return Identity(tmp_path_factory.mktemp("keys") / "peer.key")


@given(at=st.integers(0, 10**6), bit=st.integers(0, 7))
@settings(max_examples=60)
def test_a_name_with_another_bit_is_nobodys(identity: Identity, at: int, bit: int) -> None:
    seals = Seals(SECRET, identity)
    name = seals.name(NOTE)
    assert len(name) <= LONGEST_NAME and seals.note(name)[0] == NOTE
    sealed = bytearray(base64.urlsafe_b64decode(name + "=="))
    sealed[at % len(sealed)] ^= 1 << bit
    with pytest.raises(SealError, match="unknown"):
        seals.note(base64.urlsafe_b64encode(sealed).decode().rstrip("="))
    with pytest.raises(SealError, match="unknown"):
        Seals("6" * 64, identity).note(name)


@given(at=st.integers(0, 10**6), bit=st.integers(0, 7), told=st.binary(max_size=40))
@settings(max_examples=60)
def test_a_content_with_another_bit_or_under_another_name_is_nobodys(
    identity: Identity, at: int, bit: int, told: bytes
) -> None:
    seals = Seals(SECRET, identity)
    content = seals.content("name", 1, told)
    assert bytes(seals.told("name", 1, content)[1]) == told
    for name, part in (("other", 1), ("name", 0)):
        with pytest.raises(SealError, match="swapped"):
            seals.told(name, part, content)
    changed = bytearray(content)
    changed[at % len(changed)] ^= 1 << bit
    with pytest.raises(SealError, match="altered"):
        seals.told("name", 1, bytes(changed))
    with pytest.raises(SealError, match=r"altered|truncated"):
        seals.told("name", 1, content[:-1])


def test_a_member_cannot_write_in_anothers_name(identity: Identity, tmp_path: Path) -> None:
    other = Identity(tmp_path / "other.key")
    forged = Seals(SECRET, other)  # who knows the secret as all members do
    note, signature = forged.note(forged.name(NOTE))
    check_note(other.peer, note, signature)
    with pytest.raises(SealError, match="forged"):
        check_note(identity.peer, note, signature)
    signature, told = forged.told("name", 0, forged.content("name", 0, TOLD))
    with pytest.raises(SealError, match="forged"):
        check_told(identity.peer, "name", 0, signature, told)


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def packet(network: FolderNetwork, subject: bytes = b"s" * 12) -> Written:
    """A packet that one has written, and the others have not yet looked for."""
    said = network.peers.said
    return network.peers.notes.post(Kind.PACKET, lambda **who: replace(said(**who), subject=subject), [TOLD])


def of(folder: Path, written: Written) -> Path:
    (found,) = folder.rglob(written.name)
    return found


def alters(folder: Path, run: Seats) -> None:
    victim, reader = run.open
    written = packet(victim)
    path = of(folder, written)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(SealError):
        reader.peers.notes.read(victim.peers.identity.peer, written)


def swaps(folder: Path, run: Seats) -> None:
    victim, reader = run.open
    written, other = packet(victim), packet(victim)
    shutil.copy(of(folder, other), of(folder, written))
    with pytest.raises(SealError):
        reader.peers.notes.read(victim.peers.identity.peer, written)


def truncates(folder: Path, run: Seats) -> None:
    victim, reader = run.open
    path = of(folder, packet(victim))
    path.write_bytes(path.read_bytes()[:-1])
    listing = reader.peers.look(time.monotonic())
    assert not reader.peers.of(listing.written, Kind.PACKET)


def replays(folder: Path, run: Seats) -> None:
    victim, reader = run.open
    written = packet(victim)
    path = of(folder, written)
    content = path.read_bytes()
    assert reader.peers.of(reader.peers.look(time.monotonic()).written, Kind.PACKET)
    victim.peers.notes.leave(written.name)
    victim.peers.notes.sweep()
    reader.peers.look(time.monotonic())
    path.write_bytes(content)
    assert not reader.peers.of(reader.peers.look(time.monotonic()).written, Kind.PACKET)


def deletes(folder: Path, run: Seats) -> None:
    reader = run.open[1]
    of(folder, packet(reader)).unlink()
    reader.peers.look(time.monotonic())


def adds(folder: Path, run: Seats) -> None:
    victim, reader = run.open
    path = of(folder, packet(victim))
    shutil.copy(path, path.with_name("A" * len(path.name)))
    reader.peers.look(time.monotonic())


def rolls_back(folder: Path, run: Seats) -> None:
    reader = run.open[1]
    old = {path: path.read_bytes() for path in files(folder)}
    for network in run.open:
        network.peers.beat()
        network.peers.notes.sweep()
    run.look()
    new = {path: path.read_bytes() for path in files(folder)}
    for path in new:
        path.unlink()
    for path, content in old.items():
        path.write_bytes(content)
    before = reader.peers.notes.last.written
    assert reader.peers.look(time.monotonic()).written == before
    for path in files(folder):
        path.unlink()
    for path, content in new.items():
        path.write_bytes(content)


def reads(folder: Path, run: Seats) -> None:
    victim, _ = run.open
    packet(victim)
    for path in files(folder):
        for secret in (TOLD, victim.peers.identity.peer.encode(), b"peer-0", b"step", run.ticket.secret.encode()):
            assert secret not in path.read_bytes() and secret.decode() not in str(path.name)


def test_no_more_is_read_of_an_object_than_its_name_says(tmp_path: Path) -> None:
    with seats((tmp_path / "store").as_uri(), tmp_path, 2) as run:
        victim, reader = run.open
        written = packet(victim)
        os.truncate(of(tmp_path / "store", written), 1 << 28)
        tracemalloc.start()
        try:
            assert reader.peers.notes.read(victim.peers.identity.peer, written) == TOLD
            assert tracemalloc.get_traced_memory()[1] < 1 << 20
        finally:
            tracemalloc.stop()


@pytest.mark.parametrize(
    ("does", "counted"),
    [
        (alters, "altered object"),
        (swaps, "swapped object"),
        (truncates, "truncated object"),
        (replays, "replayed object"),
        (deletes, "deleted object"),
        (adds, "unknown object"),
        (rolls_back, "rolled-back listing"),
        (reads, None),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_what_the_owner_does_is_counted_and_the_run_goes_on(
    tmp_path: Path, does: Callable[[Path, Seats], None], counted: str | None
) -> None:
    with seats((tmp_path / "store").as_uri(), tmp_path, 2) as run:
        does(tmp_path / "store", run)
        reader = run.open[1]
        assert set(reader.refused) == ({counted} if counted else set())
        assert [mean.tolist() for mean in mean_of(run.open, "round 1 of 0", 3)] == [[0.5] * 3] * 2
        assert sum(reader.refused.values()) == bool(counted)
