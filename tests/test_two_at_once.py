"""Two processes that are started in one run folder: one of them trains, and the other leaves all as it is."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from farflung.errors import UserError
from farflung.training import events
from farflung.training.beginning import left_as_it_was
from farflung.training.events import EventLog
from farflung.training.resharding import whole_rounds

LINE = b'{"event": "warning"}\n'


def begun(folder: Path) -> Path:
    """A run's file of events."""
    path = folder / "events" / "replica-0.jsonl"
    path.parent.mkdir(parents=True)
    path.write_bytes(LINE * 3)
    return path


@pytest.mark.parametrize("ends", [False, True], ids=["trains on", "ends meanwhile"])
def test_who_comes_second_neither_takes_the_run_nor_goes_back_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    """Both have found out where to go on from; the first puts a file of its own in the place of the one that was."""
    path = begun(tmp_path)
    monkeypatch.setattr(events, "ENDING_SECONDS", 5.0 if ends else 0.5)
    told: list[str] = []

    def second() -> None:
        try:
            EventLog(tmp_path, 0, "replica-0", time.monotonic, keep=len(LINE))
        except UserError as error:
            told.append(str(error))

    old = events.locked(path)
    thread = threading.Thread(target=second)
    thread.start()
    time.sleep(0.2)  # it waits
    first = events._begun_again(path, 2 * len(LINE))
    old.close()
    first.write(LINE * 2)
    if ends:
        first.close()
    thread.join(10)
    assert told and ("start again, to go on from there" if ends else "is being trained by another process") in told[0]
    assert path.read_bytes() == LINE * 4
    first.close()


HOLDS = """
import sys, time
from pathlib import Path
from farflung.training import events
file = events.locked(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(600)
"""


def test_who_is_refused_removes_nothing_of_the_one_that_has_begun(tmp_path: Path) -> None:
    """Neither had begun when the other looked; what has come since is the first one's."""
    folder, script = tmp_path / "run", tmp_path / "holds.py"
    script.write_text(HOLDS)
    with pytest.raises(UserError, match="already holds a run"), left_as_it_was(folder):
        path = begun(folder)
        path.write_bytes(b"")
        (folder / "config.toml").touch()
        other = subprocess.Popen([sys.executable, script, path], stdout=subprocess.PIPE)
        assert other.stdout and other.stdout.readline() == b"held\n"
        raise events.holds_a_run(folder)
    other.kill()
    other.communicate()
    assert path.exists() and (folder / "config.toml").exists()
    with pytest.raises(UserError), left_as_it_was(tmp_path / "new"):
        begun(tmp_path / "new").write_bytes(b"")
        raise events.holds_a_run(folder)
    assert not (tmp_path / "new").exists()


def test_a_checkpoint_that_another_process_has_removed_meanwhile_is_told_as_that(tmp_path: Path) -> None:
    """It was there when this one found out where to go on from; another replica's may be there still."""
    (tmp_path / "checkpoints" / "step-000005").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step-000005" / "replica-1.pt").touch()
    with pytest.raises(UserError, match="no checkpoint of step 5 of replica 0 any more, which another process"):
        whole_rounds(tmp_path, 5, 0)
