"""Rounds by the clock: replicas of unlike speeds come to them in the step that they are in."""

import copy
import io
import json
import math
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from problem import Trained, flat, inner_steps, small_model, trainer
from processes import run_replicas, same_weights, saved, trained_here
from registered import METHODS, made
from torch import Tensor
from torch_replica import BY_CLOCK

from farflung import methods
from farflung.cli.training import what_is_asked
from farflung.codecs import codec_named
from farflung.errors import UserError
from farflung.methods import Method, RoundSettings, chosen, defaults_of
from farflung.networks import Conditions, Network, Simulation
from farflung.outer import RandomGroups, Schedule, Session
from farflung.planner.timing import Timer
from farflung.report.live import plain_line
from farflung.report.read import Run
from farflung.settings import Settings
from farflung.training import cautions, limits

AT_ONCE: dict[str, Any] = {"latency_ms": 0.0, "bandwidth_mbps": 1e12}
"""Conditions in which exchanges take next to no time."""
ONE_SLOW = Conditions(**AT_ONCE, speeds=(1.0, 1.0, 1.0, 0.25))
BY_THE_CLOCK = [n for n in METHODS if "every" in (known := defaults_of(n)) and known.get("fragments", 1) == 1]


@pytest.mark.parametrize("name", BY_THE_CLOCK)
def test_even_speeds_give_the_bits_of_rounds_by_steps(name: str) -> None:
    """A step takes a tenth of a second."""
    by_steps = Simulation(3, Conditions(**AT_ONCE)).run(trainer(lambda: made(name, every=4), 6))
    by_clock = Simulation(3, Conditions(**AT_ONCE)).run(trainer(lambda: made(name, every="0.4s"), 6))
    for one, other in zip(by_steps, by_clock, strict=True):
        assert torch.equal(one.weights, other.weights)
        assert [r.started_step for r in one.rounds] == [r.started_step for r in other.rounds]


@settings(max_examples=8, deadline=None)
@example(speeds=[1.0, 1.0, 0.375], seconds="1s", name="noloco")  # of two that are as fast, one waits for the slow one
@given(
    speeds=st.lists(st.floats(0.1, 3.0), min_size=3, max_size=4),
    seconds=st.sampled_from(["1s", "2.5s", "6s"]),
    name=st.sampled_from(["diloco", "noloco"]),
)
def test_nobody_waits_longer_than_one_step_of_the_slowest(speeds: list[float], seconds: str, name: str) -> None:
    """However unlike the speeds are; all have had the same rounds in the end, and train whenever they do not wait."""
    conditions = Conditions(**AT_ONCE, speeds=tuple(speeds))
    # Rounds further apart than the longest step, so that no two of them are due in one.
    trained = Simulation(len(speeds), conditions).run(trainer(lambda: made(name, every=seconds), 4))
    slowest_s = 0.1 / min(speeds)
    for replica, speed in zip(trained, speeds, strict=True):
        assert [round.round for round in replica.rounds] == [1, 2, 3, 4]
        assert {round.outcome for round in replica.rounds} <= {"averaged", "sat out"}
        assert all(round.landed - round.waited_from <= slowest_s + 1e-6 for round in replica.rounds)
        waited_s = sum(round.landed - round.waited_from for round in replica.rounds)
        assert replica.steps * 0.1 / speed == pytest.approx(replica.rounds[-1].landed - waited_s)


def test_a_replica_four_times_slower_trains_a_quarter_of_the_steps() -> None:
    trained = Simulation(4, ONE_SLOW).run(trainer(lambda: methods.diloco(every="4s"), 3))
    assert [one.steps for one in trained] == [120, 120, 120, 30]
    assert all(torch.equal(one.weights, trained[0].weights) for one in trained)


def test_rounds_that_one_long_step_has_missed_are_made_up_for() -> None:
    """With steps of 3 s and a round each second, three come after each step, of which each takes one."""
    conditions = Conditions(**AT_ONCE, step_ms=3000)
    trained = Simulation(2, conditions).run(trainer(lambda: methods.diloco(every="1s"), 5))
    assert [[round.round for round in one.rounds] for one in trained] == [[1, 2, 3, 4, 5]] * 2
    assert [[round.started_step for round in one.rounds] for one in trained] == [[10, 20, 30, 40, 50]] * 2


@pytest.mark.parametrize("name", ["diloco", "noloco", "dilocox", "sparseloco"])
@pytest.mark.parametrize("weighting", ["even", "steps"])
def test_resumed_in_the_middle_of_an_interval_it_goes_on_bit_for_bit(name: str, weighting: str) -> None:
    method: Callable[[], Method] = lambda: made(name, every="2s")  # noqa: E731
    if method().schedule.delay and weighting == "steps":
        return

    def part(network: Network, saved: Mapping[int, bytes], until_s: float) -> tuple[bytes, Tensor]:
        """Trains from what is saved to a moment of the run."""
        model = small_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        # The state was saved under another clock, which began at another moment.
        begins, steps = network.now(), 0
        with method().attach(model, optimizer, network, weighting=weighting) as outer:  # type: ignore[arg-type]
            if network.rank in saved:
                state = torch.load(io.BytesIO(saved[network.rank]), weights_only=True)
                model.load_state_dict(state["model"])
                optimizer.load_state_dict(state["optimizer"])
                outer.load_state_dict(state["outer"])
                steps, begins = state["steps"], begins - state["seconds"]
            while network.now() - begins < until_s - 1e-6:
                inner_steps(model, optimizer, network.rank, range(steps, steps + 1))
                steps += 1
            state = {
                "outer": outer.state_dict(),
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "steps": steps,
                "seconds": network.now() - begins,
            }
            torch.save(copy.deepcopy(state), buffer := io.BytesIO())
            weights = flat(model)
        return buffer.getvalue(), weights

    whole = Simulation(4, ONE_SLOW).run(lambda network: part(network, {}, 9.0))
    first = Simulation(4, ONE_SLOW).run(lambda network: part(network, {}, 5.1))
    saved = {rank: state for rank, (state, _) in enumerate(first)}
    rest = Simulation(4, ONE_SLOW).run(lambda network: part(network, saved, 9.0))
    assert all(torch.equal(one, other) for (_, one), (_, other) in zip(whole, rest, strict=True))


@pytest.mark.parametrize("codec", ["float32", "int8"])
@pytest.mark.parametrize("way", ["whole", "parts"])
def test_messages_weigh_the_steps_behind_them(way: Any, codec: str) -> None:
    """Against a mean taken by hand of what replicas that train alone come to."""
    average = partial(torch.optim.SGD, lr=1.0)  # of pseudo-gradients: the mean of the weights

    def work(network: Network) -> tuple[Tensor, Tensor, int]:
        model, before = small_model(), list[Tensor]()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        method = Method(Schedule("1s"), codec=codec_named(codec), outer=average, averaging=way)
        steps = 0
        with method.attach(model, optimizer, network, weighting="steps") as outer:
            while not outer.rounds:
                trained = copy.deepcopy(model)
                alone = torch.optim.SGD(trained.parameters(), lr=1e-2)
                inner_steps(trained, alone, network.rank, range(steps, steps + 1))
                before = [flat(trained)]
                inner_steps(model, optimizer, network.rank, range(steps, steps + 1))
                steps += 1
        return before[0], flat(model), steps

    alone, ended, steps = zip(*Simulation(4, ONE_SLOW).run(work), strict=True)
    assert steps == (10, 10, 10, 3)
    weights = torch.tensor(steps, dtype=torch.float64)
    mean = (torch.stack(alone).double() * weights[:, None]).sum(0) / weights.sum()
    for one in ended:
        torch.testing.assert_close(one.double(), mean, rtol=0, atol=1e-6 if codec == "float32" else 2e-3)
    assert all(torch.equal(one, ended[0]) for one in ended)


def test_who_has_sat_out_a_round_weighs_the_steps_of_both() -> None:
    """Against means taken by hand: of three in pairs one is left over, whose next message holds all that it learnt."""

    def work(network: Network) -> list[tuple[Tensor, tuple[int, ...], Tensor]]:
        """The weights before each round, its group, and the weights after it."""
        model, held, told = small_model(), list[Any](), list[tuple[Tensor, tuple[int, ...], Tensor]]()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        method = Method(Schedule(2), topology=RandomGroups(), outer=partial(torch.optim.SGD, lr=1.0))
        with method.attach(model, optimizer, network, weighting="steps", on_round=held.append) as outer:
            while outer.step < 12:
                trained = copy.deepcopy(model)
                alone = torch.optim.SGD(trained.parameters(), lr=1e-2)
                inner_steps(trained, alone, network.rank, range(outer.step, outer.step + 1))
                inner_steps(model, optimizer, network.rank, range(outer.step, outer.step + 1))
                if outer.step % 2 == 0:
                    told.append((flat(trained), held[-1].group, flat(model)))
        return told

    replicas = Simulation(3).run(work)
    anchors, steps, unlike = [flat(small_model())] * 3, [0] * 3, 0
    for seen in zip(*replicas, strict=True):
        steps = [one + 2 for one in steps]
        moved = [anchor - before for anchor, (before, _, _) in zip(anchors, seen, strict=True)]
        for rank, (before, group, after) in enumerate(seen):
            mean = sum(steps[one] * moved[one] for one in group) / max(1, sum(steps[one] for one in group))
            torch.testing.assert_close(after, anchors[rank] - mean if group else before, rtol=0, atol=1e-6)
        pair = seen[0][1] or seen[1][1]
        unlike += steps[pair[0]] != steps[pair[1]]
        anchors = [after if rank in pair else anchors[rank] for rank, (_, _, after) in enumerate(seen)]
        steps = [0 if rank in pair else count for rank, count in enumerate(steps)]
    assert unlike


@pytest.mark.parametrize(("name", "replicas"), [("noloco", 4), ("diloco", 3)])
def test_where_all_have_as_many_steps_weights_change_no_bit(name: str, replicas: int) -> None:
    """So nobody may be left over in a round."""
    even, weighed = (
        Simulation(replicas).run(trainer(lambda: made(name, every=5), 4, weighting=weighting))
        for weighting in ("even", "steps")
    )
    assert all(torch.equal(one.weights, other.weights) for one, other in zip(even, weighed, strict=True))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: Schedule("1s", fragments=2),
            "fragments is 2, but rounds by the clock have none; choose 1, or give every",
        ),
        (lambda: Schedule("1s", final=20), "every_final is 20, but rounds by the clock have none; leave it out, or"),
        (lambda: Schedule(5, delay="1s"), "delay is '1s', but every is 5; give both as times, or neither"),
        (lambda: Schedule("1s", delay="2s"), "delay is 20 but every is 10 .tenths of a second."),
        (lambda: Schedule("1s", delay=5), "delay is 5, but rounds go by the clock; give it as a time, too"),
        (lambda: Schedule("3s", seconds=7), "every is 3s and seconds is 7; give one of them"),
        (lambda: Schedule(seconds="30s"), "seconds is '30s'; give a number, or a time such as every='30s'"),  # type: ignore[arg-type]
        (lambda: Schedule(5, seconds=1.0), "every is 5 and seconds is 1; give one of them"),
        (lambda: Schedule("soon"), "every is 'soon'; give inner steps, such as 50, or a time, such as 30s"),
        (lambda: Method(Schedule("1s")), "a method without `outer` averages gradients at every step"),
        (lambda: chosen(RoundSettings("ddp", every="1s")), "ddp has no setting every"),
        (lambda: chosen(RoundSettings("streaming-diloco", every="1s")), "fragments is 3"),
    ],
)
def test_what_cannot_go_by_the_clock_is_refused(make: Callable[[], object], words: str) -> None:
    with pytest.raises(UserError, match=words):
        make()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "every is 30s, so that rounds end the run, and not steps; say how many with --rounds"),
        ({"rounds": 2, "routes": "random", "stages": 2}, "every is 30s, but with routes random replicas step together"),
        ({"rounds": 2, "swarm": True}, "every is 30s, but with swarm replicas step together"),
        ({"rounds": 2, "network": "simulated", "step_ms": 0.0}, "every is 30s, but steps of 0 ms take no time"),
    ],
)
def test_settings_that_cannot_go_by_the_clock_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        limits.check_clock(Settings.of(every="30s", **given))


def test_rounds_in_place_of_steps() -> None:
    assert Settings.of(every=20, rounds=7).run.steps == 140
    assert Settings.of(method="dilocox", rounds=2).run.steps == 250
    by_clock = Settings.of(every="2min", rounds=3)
    assert by_clock.by_clock and by_clock.run.steps == 3600 and by_clock.changed(rounds=4).run.steps == 4800
    assert not cautions.cautions(by_clock)
    with pytest.raises(UserError, match="rounds is 3, but ddp counts none; give --steps"):
        Settings.of(method="ddp", rounds=3)
    with pytest.raises(UserError, match="--steps and --rounds both say when the run ends"):
        what_is_asked(["--steps", "30", "--rounds=3"])


@pytest.mark.parametrize(
    ("make", "weighting", "words"),
    [
        (methods.ddp, "steps", "weighting is 'steps', but this method averages gradients in each step"),
        (methods.dilocox, "steps", "weighting is 'steps', which members tell each other before a round, and delay"),
        (methods.diloco, "more", "weighting is 'more'; choose 'even' or 'steps'"),
    ],
)
def test_weights_that_there_cannot_be_are_refused(make: Callable[[], Method], weighting: Any, words: str) -> None:
    model, network = small_model(), Simulation(1).networks[0]
    with pytest.raises(UserError, match=words):
        make().attach(model, torch.optim.SGD(model.parameters(), lr=0.1), network, weighting=weighting)


def trained_by(clock: Callable[[], Any], every: Any = "0.4s", steps: int = 30) -> tuple[list[int], list[int]]:
    """What a replica counts after each of its steps by a clock, and at what counts its rounds came."""
    model, network, rounds = small_model(), Simulation(1).networks[0], list[int]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    method = methods.diloco(every=every)
    told = []
    given: Any = {"clock": clock, "on_round": lambda event: rounds.append(event.started_step)}
    with method.attach(model, optimizer, network, **given) as outer:
        for _ in range(steps):
            optimizer.step()
            told.append(outer.step)
    return told, rounds


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(-24, 24).map(lambda eighths: eighths / 8), min_size=5, max_size=30))
def test_a_clock_that_is_set_back_goes_on_from_there(moves: list[float]) -> None:
    """Only what it moves forward counts, as if it had never been set back."""
    with_leaps, without = accumulate(moves), accumulate(max(move, 0.0) for move in moves)
    by_it = trained_by(lambda: next(with_leaps), steps=len(moves) - 1)
    assert by_it == trained_by(lambda: next(without), steps=len(moves) - 1)
    assert by_it[0] == sorted(by_it[0])


@pytest.mark.parametrize("told", [math.nan, math.inf, None, "3"])
def test_a_clock_that_tells_no_time_is_told_of(told: Any) -> None:
    with pytest.raises(UserError, match=r"the clock has told .*; let it tell seconds"):
        trained_by(lambda: told)


def test_a_clock_that_stands_still_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    assert trained_by(lambda: 5.0, steps=1200) == ([0] * 1200, [])
    assert [record.getMessage() for record in caplog.records] == [
        "the clock stands still at 5 s, so that no round comes; look at what tells the time"
    ]


def test_a_clock_that_nothing_goes_by_is_refused() -> None:
    with pytest.raises(UserError, match="clock is given, but every is 4; leave it out"):
        trained_by(lambda: 5.0, every=4)


def test_a_state_by_steps_is_no_state_by_the_clock() -> None:
    def session(every: Any) -> Session:
        model, network = small_model(), Simulation(1).networks[0]
        return methods.noloco(every=every).attach(model, torch.optim.SGD(model.parameters(), lr=0.1), network)

    with pytest.raises(UserError, match=r"this state was saved with another schedule: .*every=50.*, not .*seconds=5.0"):
        session("5s").load_state_dict(session(50).state_dict())


SMALL: dict[str, Any] = {
    "model": "micro",
    "network": "simulated",
    "replicas": 2,
    "batch_size": 2,
    "sequence_length": 32,
    "eval_sequences": 4,
    "eval_every": 8,
    "log_every": 4,
    "checkpoint_every": 6,
    "warmup": 2,
    "max_tokens": 200_000,
    "latency_ms": 0.0,
    "bandwidth_mbps": 1e12,
    "method": "diloco",
}


def run(folder: Path, resume: bool = False, **given: Any) -> dict[str, Any]:
    trained_here(folder, resume, **SMALL | given)
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return summary


@pytest.mark.slow
def test_a_run_by_the_clock_is_that_by_steps_where_all_are_equally_fast(tmp_path: Path) -> None:
    run(tmp_path / "steps", every=4, steps=12)
    run(tmp_path / "clock", every="0.4s", rounds=3)
    assert same_weights(tmp_path / "steps", tmp_path / "clock", 12)
    told = []
    for name in ("steps", "clock"):
        shown = Run(tmp_path / name)
        shown.refresh()
        told.append(plain_line(shown))
    assert told[0].startswith("step 12/12 · ") and told[1].startswith("1.2 s of 1.2 s · ")
    sent = [json.loads((tmp_path / name / "summary.json").read_text())["ddp_bytes"] for name in ("steps", "clock")]
    assert sent[0] == sent[1] > 0


@pytest.mark.slow
def test_a_run_of_unlike_replicas_goes_on_from_a_round_bit_for_bit(tmp_path: Path) -> None:
    """All judge and keep what they have after a round, whatever their steps."""
    (tmp_path / "slow.toml").write_text("speeds = [1, 0.3]\nlatency_ms = 3\n")
    given: dict[str, Any] = {"every": "1s", "rounds": 4, "conditions": str(tmp_path / "slow.toml"), "latency_ms": None}
    run(tmp_path / "run", **given)
    lines = (tmp_path / "run" / "events" / "replica-1.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    for kind in ("evaluation", "checkpoint"):
        assert [event["step"] for event in events if event["event"] == kind] == [10, 20, 30, 40]
    whole = [saved(tmp_path / "run", 40, replica) for replica in (0, 1)]
    assert whole[0]["trained"] > 2 * whole[1]["trained"]
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-000040")
    run(tmp_path / "run", resume=True, **given)
    for replica, before in enumerate(whole):
        after = saved(tmp_path / "run", 40, replica)
        assert after["trained"] == before["trained"]
        assert all(map(torch.equal, before["model"].values(), after["model"].values()))


@pytest.mark.slow
def test_under_the_same_clocks_real_processes_give_the_simulated_bits(tmp_path: Path) -> None:
    """One of them is four times slower; the clocks of the simulated ones are replayed to them, call by call."""
    clocks: dict[str, list[list[float]]] = {}
    simulated: dict[str, list[Trained]] = {}
    for case in BY_CLOCK:
        clocks[case] = told = [[], [], [], []]

        def work(network: Network, case: str = case, told: list[list[float]] = told) -> Trained:
            def now() -> float:
                told[network.rank].append(network.now())
                return told[network.rank][-1]

            return BY_CLOCK[case](now)(network)

        simulated[case] = Simulation(4, ONE_SLOW).run(work)
    (tmp_path / "clocks.json").write_text(json.dumps(clocks))
    for rank, real in enumerate(run_replicas(4, "by_clock", str(tmp_path / "clocks.json"), tmp_path)):
        for case, trained in real.items():
            assert torch.equal(trained.weights, simulated[case][rank].weights), case
            assert trained.steps == simulated[case][rank].steps == (60, 60, 60, 15)[rank]


@pytest.mark.parametrize("name", ["diloco", "noloco"])
def test_rounds_without_tensors_come_when_those_of_simulated_training_do(name: str) -> None:
    conditions = Conditions(latency_ms=10, bandwidth_mbps=1e6, speeds=(1.0, 0.4, 2.3), step_sigma=0.2, seed=3)
    trained = Simulation(3, conditions).run(trainer(lambda: made(name, every="2s"), 5))
    parameters = 4 * trained[0].weights.numel()
    timing = Timer(made(name, every="2s"), lambda members: parameters, conditions, 3, 5, 120).run()
    start = 0.01  # that replicas agree on where they start from
    for times in timing.rounds:
        same = [replica.rounds[times.round - 1] for replica in trained]
        assert times.started + start == pytest.approx(min(round.started for round in same), abs=1e-3)
        assert times.landed + start == pytest.approx(max(round.landed for round in same), abs=1e-3)
        assert times.blocked == pytest.approx(sum(round.landed - round.waited_from for round in same), abs=1e-3)
    assert timing.steps == round(sum(replica.steps for replica in trained) / 3)
