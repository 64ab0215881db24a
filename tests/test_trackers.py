"""Trackers get what the events say: the libraries' own stores are read back, beside plain JSON of the events."""

from __future__ import annotations

import asyncio
import json
import math
import shutil
import signal
import sqlite3
import struct
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from patience import patience, until
from processes import SMALL, farflung, trained
from warm import Python

from farflung.errors import UserError
from farflung.events import EvaluationEvent
from farflung.report import read_run
from farflung.report.trackers import follow
from farflung.report.trackers.known import Seat, Tracker, named
from farflung.report.trackers.rows import figures_of
from farflung.settings import Settings
from farflung.training.peer import shared_settings

Point = tuple[str, int, float]
"""A figure's name, its step and its value."""

SHORT = [*SMALL, "--network", "simulated", "--replicas", "2", "--method", "noloco", "--every", "5"]
QUIET = {"WANDB_MODE": "offline", "HF_HUB_OFFLINE": "1", "MLFLOW_DISABLE_TELEMETRY": "true"}


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two replicas, and 20 steps."""
    return trained(tmp_path_factory, *SHORT, "--steps", "20")


@pytest.fixture
def run(real: Path, tmp_path: Path) -> Path:
    shutil.copytree(real, tmp_path / "run")
    return tmp_path / "run"


def told(folder: Path, replica: int, distances: bool = True) -> list[Point]:
    """What a replica's events say, in numbers, by hand; and with them the consensus distances of all."""
    points: list[Point] = []
    for text in (folder / "events" / f"replica-{replica}.jsonl").read_text().splitlines():
        line = json.loads(text)
        kind, step = line.pop("event"), line.pop("step")
        line.pop("replica")
        line.pop("format", None)
        if kind == "round":
            line["seconds"] = line["finished"] - line["started"]
        if kind == "evaluation":
            line["validation_loss"] = line.pop("score")  # under the name of the figure that the run is judged by
        line |= {f"{field}/{name}": value for field in ("spent",) for name, value in (line.get(field) or {}).items()}
        points += [(f"{kind}/{name}", step, value) for name, value in line.items() if type(value) in (int, float)]
    if distances:
        found = read_run(folder).consensus_distance()
        points += [("consensus/distance", step, value) for step, value in found.items()]
    return sorted(points)


def same(found: Iterator[Point], expected: list[Point]) -> bool:
    """Whether points are the same, to the precision of the float32 in which TensorBoard keeps them."""
    points = sorted(found)
    names = [point[:2] for point in points] == [point[:2] for point in expected]
    near = (math.isclose(one[2], other[2], rel_tol=1e-6) for one, other in zip(points, expected, strict=False))
    return bool(points) and names and all(near)


def in_tensorboard(run: Path, place: Path) -> Iterator[Point]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    store = EventAccumulator(str(run / "tensorboard" / run.name), size_guidance={"scalars": 0})
    store.Reload()
    for name in store.Tags()["scalars"]:
        for point in store.Scalars(name):
            yield name, point.step, point.value


def records(path: Path) -> Iterator[bytes]:
    """The records of an offline W&B run: LevelDB's log format, behind a header of 7 bytes."""
    data, at, record = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or its last part
            yield record
            record = b""


def in_wandb(run: Path, place: Path) -> Iterator[Point]:
    from wandb.proto.wandb_internal_pb2 import Record

    for path in place.glob("wandb/offline-run-*/run-*.wandb"):
        for data in records(path):
            items = Record.FromString(data).history.item
            row = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in items}
            for name, value in row.items():
                if not name.startswith("_") and name != "step":
                    yield name, row["step"], value


def in_trackio(run: Path, place: Path) -> Iterator[Point]:
    with sqlite3.connect(place / "trackio" / "farflung.db") as store:
        for step, text in store.execute("select step, metrics from metrics"):
            for name, value in json.loads(text).items():
                yield name, step, value


def in_mlflow(run: Path, place: Path) -> Iterator[Point]:
    with sqlite3.connect(place / "mlflow.db") as store:
        assert store.execute("select count(*) from runs").fetchone() == (1,)
        yield from store.execute("select key, step, value from metrics")


STORES: dict[str, Callable[[Path, Path], Iterator[Point]]] = {
    "tensorboard": in_tensorboard,
    "wandb": in_wandb,
    "trackio": in_trackio,
    "mlflow": in_mlflow,
}


def track(run: Path, place: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`farflung track` in a folder of its own, with stores there."""
    where = {"WANDB_DIR": str(place), "TRACKIO_DIR": str(place / "trackio")}
    where |= {"MLFLOW_TRACKING_URI": f"sqlite:///{place / 'mlflow.db'}"}
    return farflung("track", run, *arguments, **QUIET, **where)


def test_the_losses_of_each_source_are_figures_with_names_that_each_tracker_takes() -> None:
    losses = {"/texts/a.jsonl": 2.0, "../b/**/*.py": 3.0, "https://host/c": None}
    event = EvaluationEvent(step=5, tokens=10, bytes_sent=0, score=2.5, scores=losses, sample="")
    figures = figures_of(event)
    assert figures.pop("evaluation/at") == event.at
    assert figures == {
        "evaluation/tokens": 10,
        "evaluation/bytes_sent": 0,
        "evaluation/validation_loss": 2.5,
        "evaluation/validation_losses/texts_a.jsonl": 2.0,
        "evaluation/validation_losses/b_.py": 3.0,
    }


@pytest.mark.slow
def test_each_trackers_own_store_has_the_events_figures_once_also_after_the_run_went_back(run: Path) -> None:
    place, to = run.parent, ("--to", ",".join(STORES))
    events = run / "events" / "replica-0.jsonl"
    whole = events.read_text()
    lines = whole.splitlines(keepends=True)
    events.write_text("".join(lines[: 2 * len(lines) // 3]))
    assert track(run, place, *to).returncode == 0
    beside = events.with_suffix(".tmp")  # a resumed run writes a new file, which begins as the old one did
    beside.write_text(whole)
    beside.replace(events)
    for _ in range(2):
        done = track(run, place, *to)
        assert done.returncode == 0, done.stdout + done.stderr
    assert [line.split()[1] for line in done.stdout.splitlines()] == [f"{name}:" for name in STORES]
    expected = told(run, 0)
    assert {name for name, _, _ in expected} >= {"step/loss", "evaluation/validation_loss", "round/bytes_sent"}
    for name, read in STORES.items():
        assert same(read(run, place), expected), name


@pytest.mark.slow
@pytest.mark.parametrize("name", STORES)
def test_each_tracker_works_without_the_others(name: str, run: Path) -> None:
    done = track(run, run.parent, "--to", name)
    assert done.returncode == 0, done.stdout
    assert same(STORES[name](run, run.parent), told(run, 0))


@pytest.mark.slow
def test_a_run_is_tracked_while_it_trains_and_a_tracker_that_fails_costs_it_nothing(tmp_path: Path) -> None:
    out = tmp_path / "run"
    command = ["train", *SHORT, "--steps", "20", "--out", out, "--track", "tensorboard,wandb"]
    nobody = {"WANDB_MODE": "online", "WANDB_API_KEY": "x" * 40, "WANDB_BASE_URL": "http://127.0.0.1:9"}
    done = farflung(*command, "--track-replicas", "all", **nobody, WANDB_DIR=str(tmp_path), WANDB_INIT_TIMEOUT="5")
    assert done.returncode == 0, done.stderr
    assert (out / "summary.json").exists()
    (line,) = [line for line in done.stderr.splitlines() if "farflung: tensorboard:" in line]
    assert f"tensorboard --logdir {out}/tensorboard" in line
    (line,) = [line for line in done.stderr.splitlines() if "farflung: wandb " in line]
    assert f"farflung track {out} --to wandb" in line
    for replica in (0, 1):
        run = out / "tensorboard" / f"run-replica-{replica}"
        (out / "tensorboard" / "run").unlink(missing_ok=True)
        (out / "tensorboard" / "run").symlink_to(run)
        assert same(in_tensorboard(out, tmp_path), told(out, replica, distances=replica == 0))


def test_a_tracker_that_hangs_holds_up_neither_others_nor_the_end(run: Path) -> None:
    rows: list[dict[str, float]] = []

    class Kept:
        tracker = None

        def log(self, values: dict[str, float], step: int) -> None:
            rows.append(values)

        def finish(self) -> None:
            pass

    never = threading.Event()
    hangs = Tracker("none", lambda seat: never.wait(), lambda seat, run: "")
    works = Tracker("none", lambda seat: Kept(), lambda seat, run: "here")
    over = threading.Event()
    over.set()
    outcomes = follow(run, {"hangs": hangs, "works": works}, "first", over, catch_up_seconds=1)
    never.set()
    assert [outcome.failed for outcome in outcomes] == [True, False]
    assert "in time" in outcomes[0].line and "farflung track" in outcomes[0].line
    assert outcomes[1].line == "works: here" and len(rows) > 10


@pytest.mark.parametrize("error", [ValueError, SystemExit, asyncio.CancelledError], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("where", ["start", "log", "finish"])
def test_a_tracker_that_throws_anything_anywhere_has_failed_in_one_line(
    where: str, error: type[BaseException], run: Path
) -> None:
    class Throws:
        tracker = None

        def __init__(self) -> None:
            self.does("start")

        def does(self, what: str) -> None:
            if what == where:
                raise error("boom\nand more")

        def log(self, values: dict[str, float], step: int) -> None:
            self.does("log")

        def finish(self) -> None:
            self.does("finish")

    over = threading.Event()
    over.set()
    (outcome,) = follow(run, {"one": Tracker("none", lambda seat: Throws(), lambda seat, run: "here")}, "first", over)
    assert outcome.failed and outcome.line.startswith(f"one failed: {error.__name__}: boom and more; hand the rest on")


def test_a_second_process_does_not_hand_the_same_run_on_to_the_same_tracker(run: Path) -> None:
    over = threading.Event()
    over.set()

    def begin(seat: Seat) -> Any:
        with pytest.raises(UserError, match="another process hands"):
            follow(run, {"one": Tracker("none", begin, lambda seat, run: "")}, "first", over)
        raise ValueError("seen")

    (outcome,) = follow(run, {"one": Tracker("none", begin, lambda seat, run: "")}, "first", over)
    assert "ValueError: seen" in outcome.line


@pytest.mark.parametrize(
    ("names", "line"),
    [
        ("tensorbord", "there is no tracker 'tensorbord'; did you mean 'tensorboard'?"),
        (
            "wandb",
            "the tracker wandb needs wandb, which is not installed; install it with: pip install 'farflung[track]'",
        ),
    ],
)
def test_a_tracker_that_cannot_be_used_is_refused_in_one_line(
    names: str, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError) as error:
        named(names)
    assert str(error.value) == line


def test_training_does_not_begin_with_a_tracker_that_there_is_not(tmp_path: Path) -> None:
    done = farflung("train", *SHORT, "--steps", "5", "--track", "wandbb", "--out", tmp_path / "run")
    assert (done.returncode, done.stderr) == (2, "farflung: there is no tracker 'wandbb'; did you mean 'wandb'?\n")
    assert not (tmp_path / "run").exists()


def test_a_peers_trackers_are_its_own_and_in_no_ticket() -> None:
    shared = shared_settings(Settings.of(track="wandb", track_replicas="all", every=7))
    assert shared == {"every": 7}


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    done = farflung("track", tmp_path)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and "holds no run" in done.stderr


def test_who_follows_a_run_is_told_that_it_goes_on_until_ctrl_c(run: Path) -> None:
    process = Python("-m", "farflung", "track", run, "--to", "tensorboard", "--follow")
    until(lambda: process.out.read_text() or process.poll() is not None)
    assert process.out.read_text() == f"farflung: handing {run} on to tensorboard as it goes on; Ctrl-C ends it\n"
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate(timeout=patience(60))
    assert process.wait() == 0 and "tensorboard --logdir" in out, errors
