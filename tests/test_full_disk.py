"""A disk that fills up while a run trains: events wait in memory for room, and nothing ends."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from patience import patience, until
from processes import SMALL, fill
from warm import Python

from farflung.events import StepEvent, WarningEvent
from farflung.report import read_run
from farflung.training import events
from farflung.training.events import EventLog


def warned(step: int) -> WarningEvent:
    return WarningEvent(step=step, message="x" * 200)


def lines_of(folder: Path) -> list[dict[str, object]]:
    text = (folder / "events" / "replica-0.jsonl").read_text()
    assert text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def test_lines_wait_for_room_and_are_whole(disk: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log = EventLog(disk, 0, "replica-0", time.monotonic)
    log.write(warned(0))
    filler = fill(disk)
    for step in range(1, 100):
        log.write(warned(step))
        assert log.size() == (disk / "events" / "replica-0.jsonl").stat().st_size
        assert len(lines_of(disk)) <= step + 1
    assert len(lines_of(disk)) < 50
    told = capfd.readouterr().err
    assert told.count("\n") == 1 and "No space left on device; training goes on; make room" in told
    filler.unlink()
    log.write(warned(100))
    assert [line["step"] for line in lines_of(disk)] == list(range(101))
    log.close()


def test_the_lines_that_wait_are_not_without_end(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "MOST_WAITING", 8)
    log = EventLog(disk, 0, "replica-0", time.monotonic)
    filler = fill(disk)
    for step in range(1000):
        log.write(warned(step))
    before = len(lines_of(disk)) if (disk / "events" / "replica-0.jsonl").stat().st_size else 0
    filler.unlink()
    log.write(warned(1000))
    log.write(warned(1001))
    *_, told, _, last = lines = lines_of(disk)
    steps = [line["step"] for line in lines if line is not told]
    assert last["step"] == 1001 and steps == sorted(steps) and len(lines) <= before + 11
    assert told["message"] == f"{1002 - len(steps)} events left out: there was no room in {disk}"


@pytest.mark.slow
@pytest.mark.parametrize("network", ["simulated", "torch"])
def test_a_run_goes_on_and_its_events_are_written_when_there_is_room(disk: Path, tmp_path: Path, network: str) -> None:
    settings = [*SMALL, "--replicas", 2, "--steps", 2000, "--every", 10, "--network", network, "--out", "disk/run"]
    process = Python("-m", "farflung", "train", *settings, cwd=tmp_path, err=tmp_path / "err")
    until(lambda: len(list(disk.glob("run/checkpoints/step-*"))) > 1)
    filler = fill(disk)
    until(lambda: "it is tried again" in (tmp_path / "err").read_text() or process.poll() is not None)
    assert process.poll() is None, process.communicate()
    filler.unlink()
    assert process.wait(patience(60)) == 0, process.communicate()
    assert (tmp_path / "err").read_text().count("training goes on; make room") == 1
    run = read_run(disk / "run")
    assert not run.unread() and (disk / "run" / "summary.json").exists()
    for replica in (0, 1):
        assert [event.step for event in run.of(replica, StepEvent)] == list(range(5, 2001, 5))
