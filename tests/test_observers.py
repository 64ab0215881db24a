"""Observers, and rounds by the clock, of real peers on this machine."""

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from patience import patience, until
from processes import saved
from test_independent import Launched
from warm import Python

from farflung.errors import UserError
from farflung.events import CheckpointEvent, EvaluationEvent, RoundEvent, StepEvent
from farflung.report.peers import line, table
from farflung.report.read import Run
from farflung.settings import Settings
from farflung.training import limits

SMALL = [
    *("--independent", "--replicas", 2, "--model", "micro", "--every", "2s", "--rounds", 1000, "--batch-size", 2),
    *("--sequence-length", 32, "--eval-sequences", 4, "--eval-every", 50, "--log-every", 1, "--max-tokens", 200_000),
]


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[Launched]:
    launched = Launched(tmp_path)
    yield launched
    launched.stop()


@pytest.mark.slow
def test_an_observer_judges_what_peers_have_and_is_in_nobody_s_round(launched: Launched) -> None:
    training = launched.start(*SMALL, "--deadline", patience(15), "--out", "run")
    until(lambda: (launched.run / "run.ticket").exists() and launched.averaged(0) > 0, 120)
    files = {"out": launched.folder / "observer.out", "err": launched.folder / "observer.err"}
    observes = ("join", "run", "--observe", "--out", "observer")
    observer = Python("-m", "farflung", *observes, cwd=launched.folder, **files)
    try:
        seen = Run(launched.folder / "observer")

        def judged() -> list[EvaluationEvent]:
            seen.refresh()
            return [event for replica in seen.replicas for event in seen.of(replica, EvaluationEvent)]

        until(lambda: (launched.folder / "observer" / "events").exists() and len(judged()) > 2, 120)
        observer.send_signal(signal.SIGINT)
        observer.wait(patience(60))
        training.send_signal(signal.SIGINT)
        training.wait(patience(60))
    finally:
        observer.kill()
    (own,) = seen.replicas
    assert not seen.of(own, StepEvent) and not seen.of(own, RoundEvent)
    # A tenth of a second is what a run by the clock counts; each judgement is of another round than the one before.
    rounds = [event.step // 20 for event in judged()]
    assert rounds == sorted(set(rounds)) and rounds[0] > 0
    kept = [event.step for event in seen.of(own, CheckpointEvent)]
    assert kept == [event.step for event in judged()]
    best = min(judged(), key=lambda event: event.score or 0.0).step
    assert saved(launched.folder / "observer", best, own)["trained"] == 0
    for number in range(2):
        held = launched.events(number, RoundEvent)
        assert all(own not in event.group and len(event.group) in (0, 2) for event in held)
        assert all(event.started_step >= 20 * event.round for event in held)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"network": "simulated"}, "an observer is one more peer of a run on the internet"),
        ({"network": "torch"}, "give --observe to farflung join, with that run's ticket"),
        ({"network": "internet", "stages": 2}, "an observer has the whole model in one process"),
        ({"network": "internet", "method": "local"}, "whose peers exchange nothing that one could observe"),
    ],
)
def test_what_nobody_can_observe_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        limits.check_observer(Settings.of(observe=True, **given))


def test_observers_are_listed_after_those_who_train() -> None:
    rows: list[dict[str, Any]] = [
        {"name": "watcher", "state": "observes", "step": 0, "heard": 1.0, "behind": 0.0},
        {"name": "worker", "state": "trains", "step": 40, "heard": 1.0, "behind": 0.0, "loss": 2.0, "rounds": 2},
    ]
    rows[1]["tokens_per_second"] = 100.0
    assert line(rows) == "1 other peer · worker at step 40, loss 2.0000"
    assert [list(column.cells) for column in table(rows).columns[:3]] == [
        ["worker", "watcher"],
        ["trains", "observes"],
        ["40", ""],
    ]
