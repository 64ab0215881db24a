"""What one that lies in moments can do to the others, and what newcomers believe of theirs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from folder_seats import seats
from problem import inner_steps, small_model
from test_companions import EVERY, adamw, averaged, kept_by
from torch import Tensor

from farflung import methods
from farflung.methods import Method
from farflung.networks import SimulatedNetwork, Simulation
from farflung.outer import AveragedMoments, Round, elastic
from farflung.outer.aggregation import Aggregation
from farflung.outer.averaging import Averaging, Meeting
from farflung.outer.columns import Message, views_like
from farflung.outer.companions import moments
from farflung.outer.companions.additions import Addition, exchanged
from farflung.outer.companions.growths import decay_of, growth_of
from farflung.outer.outcomes import Outcome, Result
from farflung.outer.parties import average_of_party

BOTH = averaged(AveragedMoments((("exp_avg", 1), ("exp_avg_sq", 1))))
Lie = Callable[[Tensor, Tensor, Tensor], None]
"""Changes the first moments, the squares and the steps of a cell in place."""


@contextmanager
def lying(rank: int, lie: Lie) -> Iterator[None]:
    """Within, a replica lies in all messages of moments."""
    tell = Averaging.start_parts

    def told(self: Averaging, parts: Any, meetings: Any) -> Any:
        for part in parts if self._rank == rank and "moments" in meetings[0].key else ():
            _change(part, lie)
        return tell(self, parts, meetings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Averaging, "start_parts", told)
        yield


def _change(message: Message, lie: Lie) -> None:
    for *kinds, steps in message.cells.values():
        half = len(kinds) // 2
        for first, square in zip(kinds[:half], kinds[half : 2 * half], strict=True):
            lie(first, square, steps)


LIES: dict[str, Lie] = {
    "negative squares": lambda first, square, steps: square.mul_(-5),
    "squares that leave nothing": lambda first, square, steps: square.mul_(-1.999),
    "negative steps": lambda first, square, steps: steps.fill_(-1e5 * 2.0**-30),
    "no steps": lambda first, square, steps: steps.zero_(),
    "endless steps": lambda first, square, steps: steps.fill_(3e38),
}


@pytest.mark.parametrize("kind", LIES)
def test_no_lie_spoils_others_weights_or_steps(kind: str) -> None:
    """Squares and steps are never negative, so that their mean is at least a replica's own share of it."""

    def work(network: SimulatedNetwork) -> tuple[list[str], dict[str, Tensor]]:
        model, outcomes = small_model(), list[str]()
        optimizer = adamw(model)
        with BOTH.attach(model, optimizer, network, on_round=lambda round: outcomes.append(round.outcome)):
            inner_steps(model, optimizer, network.rank, range(3 * EVERY))
            before = kept_by(optimizer)
            inner_steps(model, optimizer, network.rank, range(3 * EVERY, 4 * EVERY))
        assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
        return outcomes, {name: value / before[name] for name, value in kept_by(optimizer).items()}

    with lying(2, LIES[kind]):
        one, other, _ = Simulation(3).run(work)
    for outcomes, grown in (one, other):
        assert outcomes == ["averaged"] * 4
        for name, times in grown.items():
            if name.startswith(("exp_avg_sq", "step")):
                assert torch.isfinite(times).all() and (times > 0.3).all(), name


def test_the_same_lie_of_steps_round_after_round_takes_no_more_of_them() -> None:
    """Else all would go by ever smaller steps: those of a run that has just begun."""

    def work(network: SimulatedNetwork) -> dict[str, Tensor]:
        model = small_model()
        optimizer = adamw(model)
        with BOTH.attach(model, optimizer, network):
            inner_steps(model, optimizer, network.rank, range(10 * EVERY))
        return kept_by(optimizer)

    with lying(2, LIES["no steps"]):
        honest, _, _ = Simulation(3).run(work)
    assert all(value >= 10 * EVERY / 3 for name, value in honest.items() if name.startswith("step"))


def growths(method: Method, steps: int, lie: Lie = lambda *_: None) -> list[dict[str, set[float]]]:
    """As how many times as large the first of three counts what it sends of each cell, in each round with moments."""
    seen: list[dict[str, set[float]]] = []

    def noted(loop: Any, added: Addition, averaging: Averaging) -> Any:
        if loop.network.rank == 0:
            one = added.growth if isinstance(added.growth, Mapping) else {"all": [added.growth]}
            seen.append({cell: set(each) for cell, each in one.items()})
        return exchanged(loop, added, averaging)

    def work(network: SimulatedNetwork) -> None:
        model = small_model()
        optimizer = adamw(model)
        with method.attach(model, optimizer, network):
            inner_steps(model, optimizer, network.rank, range(steps))

    with lying(2, lie), pytest.MonkeyPatch.context() as patch:
        patch.setattr(moments, "exchanged", noted)
        Simulation(3).run(work)
    return seen


def test_moments_are_judged_by_what_they_forget_and_not_by_how_long_a_run_is() -> None:
    """A replica that has just come believes of those that forget within ten steps ten times its own, and no more."""
    first, square = (decay_of(kind, {"betas": (0.9, 0.999)}) for kind in ("exp_avg", "exp_avg_sq"))
    assert growth_of(first, 1.0, 1e6) == pytest.approx(10)
    assert growth_of(square, 1.0, 1e6) == pytest.approx(1000)
    assert growth_of(square, 1e5, 1e6) == pytest.approx(1)
    assert growth_of(decay_of("sum", {}), 10.0, 1e3) == 100
    assert growth_of(decay_of("momentum_buffer", {"momentum": 0.99}), 0.0, 1e3) == pytest.approx(100)
    assert growth_of(decay_of("slow_momentum", {"slow_momentum": 0.99}), 10.0, 1e6) < 11


def test_who_has_averaged_moments_judges_others_by_its_own_whatever_they_say_of_steps() -> None:
    first, *later = growths(BOTH, 4 * EVERY, LIES["no steps"])
    assert all(max(each) > 100 for each in first.values())  # of squares after five steps
    assert later == [{"all": {1.0}}] * 3


def test_what_is_averaged_more_rarely_counts_by_own_steps_though_others_have_been_taken() -> None:
    method = averaged(AveragedMoments((("exp_avg", 1), ("exp_avg_sq", 4))))
    *_, last = growths(method, 4 * EVERY, LIES["endless steps"])
    assert all(max(each) == pytest.approx(growth_of(0.999, 4 * EVERY, 0)) for each in last.values())


def test_by_the_clock_a_change_counts_by_its_time_and_not_as_if_a_step_took_a_tenth_of_a_second(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Else all whose steps take long would take messages that are many times as large as they can be."""
    seen: list[float] = []

    def noted(network: Any, party: Any, message: Any, meeting: Meeting, *rest: Any) -> Any:
        assert isinstance(meeting.growth, float)
        seen.append(meeting.growth)
        return average_of_party(network, party, message, meeting, *rest)

    def work(seat: Any) -> None:
        model, ended = small_model(), list[Round]()
        with methods.diloco(every="1s", codec="int8").attach(model, adamw(model), seat, on_round=ended.append) as outer:
            optimizer = outer.trained.optimizers[0]
            while len(ended) < 2:
                time.sleep(0.45)
                inner_steps(model, optimizer, 0, range(1))

    monkeypatch.setattr(elastic, "average_of_party", noted)
    with seats(f"memory://{tmp_path.name}/run", tmp_path, 2) as run, ThreadPoolExecutor(2) as pool:
        list(pool.map(work, run.open))
    assert len(seen) >= 2 and set(seen) == {1.0}


@pytest.mark.parametrize("members", [2, 3, 4, 5])
def test_nobody_is_blamed_where_gradients_are_small_and_squares_much_smaller(members: int) -> None:
    """A part that one averages for all has first moments of a cell, or squares, or some of both."""
    blamed: list[tuple[int, str]] = []

    def work(network: SimulatedNetwork) -> None:
        rule = Aggregation("mean", lambda rank, why: blamed.append((rank, why)))
        averaging = Averaging(network.rank, methods.des_loc(), aggregation=rule)
        for number in range(3):
            cells = {"cell": [torch.full((64,), 1e-4), torch.full((64,), 1e-8), torch.full((1,), 1e-6)]}
            flat = torch.cat(cells["cell"])
            meeting = Meeting(network, network.members(), f"round {number}", number)
            averaging.start(Message(flat, ["cell"], partial(views_like, cells)), meeting)[0].wait(60)

    Simulation(members).run(work)
    assert not blamed


def test_one_whose_own_message_is_refused_goes_to_no_meeting_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """It knows that they refuse it, too; asking for a group without itself ended its training."""
    asked: list[Addition] = []
    monkeypatch.setattr(moments, "exchanged", lambda loop, added, averaging: asked.append(added))

    def work(network: SimulatedNetwork) -> None:
        model = small_model()
        with BOTH.attach(model, adamw(model), network) as outer:
            sync, weights = outer._rounds.syncs[0], outer._weights[0]  # type: ignore[attr-defined]
            refused = Result(weights.anchor, (0, 1, 2), Outcome.PEER_LOST, missing=(network.rank,))
            outer._along.after(sync, weights, 1, refused)  # type: ignore[attr-defined]

    Simulation(3).run(work)
    assert not asked
