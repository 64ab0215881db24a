"""A newcomer that is killed while it fetches the run's state goes on, started again, where it stopped."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import state_peer
import torch
from patience import patience, until
from processes import HERE, free_port
from state_peer import CELLS, CHANGED
from warm import Python

from farflung.networks.internet.states.downloads import ASKED_FOR, Kept
from farflung.networks.peers.frames import digest
from farflung.testing.peers import write_ticket

pytestmark = pytest.mark.slow
DONORS, EACH = 3, 6
"""Pieces that each has given when the newcomer is killed."""


class Join:
    """Donors and a newcomer, each a process."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        write_ticket(folder / "run.ticket", folder / "0.key", "127.0.0.1", self.port)
        self.donors = [self.start("serve", number) for number in range(DONORS)]
        until(lambda: len(list(folder.glob("*.given"))) == DONORS)

    def start(self, what: str, number: int) -> Python:
        return Python(HERE / "state_peer.py", what, self.folder, number, self.port)

    @property
    def given(self) -> int:
        """Pieces that donors have begun to give."""
        return sum(path.stat().st_size for path in self.folder.glob("*.given"))

    @property
    def kept(self) -> int:
        """Pieces that the newcomer has on its disk."""
        return len([path for path in self.folder.glob("fetched/*") if len(path.name) == 64])

    def stop_donors_at(self, pieces: int) -> None:
        """Lets each give so many pieces and no more, but for those that have been asked for by then."""
        (self.folder / "enough").write_text(str(pieces))

    def started_and_killed_half_way(self) -> int:
        """How many pieces a newcomer had kept when it was killed."""
        self.stop_donors_at(EACH)
        newcomer = self.start("fetch", DONORS)
        until(lambda: self.kept == self.given == DONORS * EACH)
        newcomer.kill()
        (self.folder / "killed").touch()
        assert not (self.folder / "found.pt").exists()
        (self.folder / "enough").unlink()
        return self.kept

    def fetched(self) -> tuple[dict[str, torch.Tensor], int]:
        """What a newcomer fetches, and the step of that."""
        newcomer = self.start("fetch", DONORS)
        _, errors = newcomer.communicate(timeout=patience(60))
        assert newcomer.returncode == 0, errors
        found: tuple[dict[str, torch.Tensor], int] = torch.load(self.folder / "found.pt")
        return found


@pytest.fixture
def join(tmp_path: Path) -> Iterator[Join]:
    made = Join(tmp_path)
    yield made
    (tmp_path / "over").touch()
    for donor in made.donors:
        donor.kill()


def check(found: dict[str, torch.Tensor], moved: bool) -> None:
    expected = state_peer.state(moved).tensors
    assert found.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


@pytest.mark.parametrize("moved", [False, True])
def test_the_second_start_fetches_only_what_is_missing_though_the_others_have_moved_on(join: Join, moved: bool) -> None:
    kept = join.started_and_killed_half_way()
    assert kept == DONORS * EACH
    if moved:
        (join.folder / "moved").touch()
    before = join.given
    found, step = join.fetched()
    check(found, moved=False)  # the donors still hold what it was in the midst of
    assert join.given - before == CELLS - kept and step == 8
    assert not (join.folder / "fetched").exists(), "kept no longer when it was taken"


def test_what_has_changed_is_fetched_again_where_donors_hold_the_old_state_no_longer(join: Join) -> None:
    kept = join.started_and_killed_half_way()
    (join.folder / "moved").touch()
    notes = [join.folder / f"{number}.forgets" for number in range(DONORS)]
    for note in notes:
        note.touch()
    until(lambda: not any(note.exists() for note in notes))
    before = join.given
    found, step = join.fetched()
    check(found, moved=True)
    assert join.given - before == CELLS - kept + CHANGED and step == 20  # the first cells come first


def test_a_donor_that_dies_half_way_is_done_without(join: Join) -> None:
    join.stop_donors_at(EACH)
    newcomer = join.start("fetch", DONORS)
    until(lambda: join.kept == join.given == DONORS * EACH)
    join.donors[1].kill()
    (join.folder / "enough").unlink()
    _, errors = newcomer.communicate(timeout=patience(60))
    assert newcomer.returncode == 0, errors
    check(torch.load(join.folder / "found.pt")[0], moved=False)
    assert join.given <= CELLS + 2, "only what was under way is asked for again"


def test_what_is_kept_is_taken_only_when_it_is_whole(tmp_path: Path) -> None:
    content = bytearray(torch.arange(1000.0).numpy().tobytes())
    name, into = digest(memoryview(content)), memoryview(bytearray(4000))
    kept = Kept(tmp_path / "fetched")
    kept.begin(["a"], {name})
    kept.put(name, memoryview(content))
    assert kept.get(name, into) and into == content and kept.snapshots() == ["a"]
    path = tmp_path / "fetched" / name
    path.write_bytes(content[:-1])
    assert not kept.get(name, into)
    path.write_bytes(bytes(4000))
    assert not kept.get(name, into)
    kept.begin(["b"], {"other"})
    assert [path.name for path in (tmp_path / "fetched").iterdir()] == [ASKED_FOR]
    (tmp_path / "fetched" / ASKED_FOR).write_text("{")
    assert kept.snapshots() == []
    kept.clear()
    assert not (tmp_path / "fetched").exists()
    Kept(None).put(name, memoryview(content))
    assert not Kept(None).get(name, into)
