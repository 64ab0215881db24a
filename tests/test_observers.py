"""Observers: of simulated replicas, of processes, and of real peers on this machine, with rounds by the clock."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from patience import patience, until
from processes import SMALL as BRIEF
from processes import farflung, same, saved, train_together, trained_here
from swarm import SETTINGS, Swarm
from test_independent import Launched
from warm import Python

from farflung.errors import UserError
from farflung.events import CheckpointEvent, EvaluationEvent, RoundEvent, StepEvent
from farflung.report.peers import line, table
from farflung.report.read import Run
from farflung.settings import Settings, read_settings
from farflung.training import checkpoint, launch, limits
from farflung.training.export import export
from farflung.training.resharding import whole_weights

SMALL = [
    *("--independent", "--replicas", 2, "--model", "micro", "--every", "2s", "--rounds", 1000, "--batch-size", 2),
    *("--sequence-length", 32, "--eval-sequences", 4, "--eval-every", 50, "--log-every", 1, "--max-tokens", 200_000),
]

SIMULATED: dict[str, Any] = {
    "network": "simulated",
    "model": "micro",
    "replicas": 3,
    "steps": 17,
    "every": 5,
    "batch_size": 2,
    "warmup": 2,
    "sequence_length": 16,
    "eval_sequences": 4,
    "eval_every": 100,
    "checkpoint_every": 6,
    "max_tokens": 100_000,
}


def simulated(folder: Path, resume: bool = False, **given: Any) -> Path:
    trained_here(folder, resume, **SIMULATED | given)
    return folder


def judged_in(folder: Path) -> list[EvaluationEvent]:
    """What an observer has judged, in order."""
    seen = Run(folder)
    seen.refresh()
    (own,) = seen.replicas
    return seen.of(own, EvaluationEvent)


def averaged(folder: Path) -> dict[str, torch.Tensor]:
    return whole_weights(checkpoint.averages(folder))


def holds_the_best(observer: Path) -> bool:
    """Whether an observer has ended with the weights that it has judged best, in whatever step, and says so."""
    judged = judged_in(observer)
    best = min(judged, key=lambda event: event.score or 0.0)
    (replica,) = checkpoint.replicas_of(observer)
    told = json.loads((observer / "summary.json").read_text())["validation_loss_averaged"]
    return told == best.score and same(averaged(observer), saved(observer, best.step, replica)["model"])


@pytest.mark.parametrize("method", ["noloco", "diloco"])
def test_an_observer_of_simulated_replicas_changes_nothing_and_sees_the_end(tmp_path: Path, method: str) -> None:
    alone = simulated(tmp_path / "alone", method=method)
    run = simulated(tmp_path / "run", method=method, observers=2)
    assert same(averaged(alone), averaged(run))
    for replica in range(3):
        assert same(*(saved(folder, 17, replica)["model"] for folder in (alone, run)))
    for number in range(2):
        observer = run / f"observer-{number}"
        assert [event.step for event in judged_in(observer)] == [5, 10, 15, 17]
        assert holds_the_best(observer)
        assert same(saved(observer, 17, 3 + number)["model"], averaged(run))
    # In turn: replica 1 after the first round, replica 2 after the second.
    assert saved(run / "observer-0", 17, 3)["trained"] == 0


def test_an_observer_whose_best_was_not_the_last_ends_with_that(tmp_path: Path) -> None:
    """With a learning rate at which the model gets worse and worse."""
    run = simulated(tmp_path / "run", inner="sign", lr=0.3, warmup=0, keep_checkpoints=1, observers=1)
    judged = judged_in(run / "observer-0")
    assert min(judged, key=lambda event: event.score or 0.0).step < 17
    observer = run / "observer-0"
    assert holds_the_best(observer)
    assert export(observer, tmp_path / "model") == "the weights that the observer judged best"
    for restart in (False, True):  # which would train one replica there, over what was judged
        with pytest.raises(UserError, match=f"is an observer's, which goes on with its run: .* --resume {run}$"):
            launch.prepare(read_settings(observer / "config.toml"), observer, resume=not restart, restart=restart)


def test_an_observer_bears_replicas_that_die_and_goes_on_when_the_run_does(tmp_path: Path) -> None:
    conditions = tmp_path / "conditions.toml"
    conditions.write_text("[[deaths]]\nreplica = 1\nat_s = 0.95\n")
    given = {"observers": 1, "conditions": str(conditions), "deadline": 1.0}
    run = simulated(tmp_path / "run", **given)
    # Replica 1 dies before the second round. It has shown the first; the fourth, at step 20, would be its turn again.
    assert [event.step for event in judged_in(run / "observer-0")] == [5, 10, 15, 17]
    simulated(run, resume=True, **given, steps=27)
    assert [event.step for event in judged_in(run / "observer-0")] == [5, 10, 15, 17, 25, 27]
    assert same(saved(run / "observer-0", 27, 3)["model"], averaged(run))
    launch.prepare(Settings.of(**SIMULATED | given, out=str(run)), run, resume=False, restart=True)
    assert not (run / "observer-0").exists()


def test_an_observer_that_was_shown_nothing_has_no_result(tmp_path: Path) -> None:
    conditions = tmp_path / "conditions.toml"
    conditions.write_text("".join(f"[[deaths]]\nreplica = {replica}\nat_s = 0.2\n" for replica in (0, 1)))
    run = simulated(tmp_path / "run", replicas=2, observers=1, conditions=str(conditions))
    assert not judged_in(run / "observer-0") and not (run / "observer-0" / "summary.json").exists()


def test_what_comes_later_of_an_earlier_round_is_left_out(tmp_path: Path) -> None:
    """Replica 1 shows the first round over a link that takes longer than the time until replica 0 shows the second."""
    conditions = tmp_path / "conditions.toml"
    sites = "".join(f'[[sites]]\nname = "{name}"\n' for name in "abc")  # of replica 0, replica 1 and the observer
    links = {"ab": 1, "ac": 1, "bc": 700}
    joined = (f"[[links]]\nbetween = {[*pair]}\nlatency_ms = {latency}\n" for pair, latency in links.items())
    conditions.write_text(sites + "".join(joined))
    run = simulated(tmp_path / "run", replicas=2, observers=1, conditions=str(conditions), latency_ms=None)
    assert [event.step for event in judged_in(run / "observer-0")] == [10, 17]


def test_an_observer_sees_rounds_by_the_clock_of_unlike_replicas(tmp_path: Path) -> None:
    """A step takes a tenth of a second, and of one replica four tenths."""
    conditions = tmp_path / "conditions.toml"
    conditions.write_text("speeds = [1, 0.25]\n")
    given = {"every": "0.5s", "rounds": 3, "observers": 1, "conditions": str(conditions), "method": "diloco"}
    run = simulated(tmp_path / "run", **given)
    assert [event.step for event in judged_in(run / "observer-0")] == [5, 10, 15]
    assert same(saved(run / "observer-0", 15, 3)["model"], averaged(run))


@pytest.mark.slow
def test_an_observer_of_processes_sees_all_that_it_comes_to_and_the_end(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train_together(3, *BRIEF, "--steps", 12, "--every", 4, "--observers", 1, "--out", run)
    seen = [event.step for event in judged_in(run / "observer-0")]
    assert seen[-1] == 12 and seen == sorted(set(seen)) and {*seen} <= {4, 8, 12}
    assert holds_the_best(run / "observer-0")
    assert same(saved(run / "observer-0", 12, 0)["model"], averaged(run))
    assert json.loads((run / "summary.json").read_text())["replicas"] == 2


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


@pytest.mark.slow
def test_an_observer_of_a_run_that_nobody_trains_ends_in_a_line_and_leaves_no_model(swarm: Swarm) -> None:
    """It had ended well, with the weights that its model had begun with as the best."""
    swarm.start("invite", "--name", "test", *SETTINGS, "--port", swarm.port, "--ticket", "run.ticket", log="bootstrap")
    until(lambda: "the ticket is in run.ticket" in swarm.said("bootstrap"))
    for flags, told in (
        (["--first"], "an observer trains nothing, so it cannot begin a run; leave out --first or --observe"),
        (
            ["--deadline", 2],
            "nobody has trained for 2 s, and this observer has seen nothing of the run; observe it",
        ),
    ):
        observer = swarm.join("observer", "--observe", *flags)
        assert observer.wait(patience(60)) == 2
        assert swarm.said("observer").splitlines()[-1].startswith(f"farflung: {told}")
        assert not (swarm.folder / "observer" / "summary.json").exists()


@pytest.mark.slow
def test_an_observer_is_not_told_to_begin_the_run_itself(tmp_path: Path) -> None:
    ticket, folder = tmp_path / "run.ticket", tmp_path / "meet"
    folder.mkdir()
    assert not farflung("invite", "--name", "test", "--at", f"file://{folder}", "--ticket", ticket).returncode
    done = farflung("join", ticket, "--observe", "--deadline", 1, "--out", tmp_path / "observer")
    assert done.returncode == 2 and "nobody is in " in done.stderr
    assert done.stderr.rstrip().endswith("; observe it once farflung status shows somebody who trains")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"network": "simulated"}, "a run of one's own has --observers"),
        ({"network": "torch"}, "give it to farflung join, with that run's ticket"),
        ({"network": "internet", "stages": 2}, "an observer has the whole model in one process"),
        ({"network": "internet", "method": "local"}, "whose peers exchange nothing that one could observe"),
    ],
)
def test_what_nobody_can_observe_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        limits.check_observer(Settings.of(observe=True, **given))


def test_observers_of_peers_join_by_themselves() -> None:
    for given in ({"network": "internet"}, {"independent": True}):
        with pytest.raises(UserError, match="farflung join TICKET --observe; leave out --observers"):
            limits.check_observer(Settings.of(observers=1, **given))


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
