"""Weights that change otherwise than by the attached optimizer's steps: they are where training starts, or are told."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from problem import flat, inner_steps, small_model
from registered import METHODS, made
from torch import Tensor, nn

from farflung import methods
from farflung.errors import UserError
from farflung.networks import SimulatedNetwork, Simulation
from farflung.networks.transfer import GONE
from farflung.outer import Method, Session, averages

ALONE = SimulatedNetwork.alone


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def moved(model: nn.Module) -> dict[str, Tensor]:
    return {name: value + 1 for name, value in model.state_dict().items()}


@pytest.mark.parametrize("name", sorted(METHODS))
def test_weights_that_are_loaded_in_mid_run_are_told_with_every_method(name: str) -> None:
    model = small_model()
    optimizer, method = adamw(model), made(name, every=4)
    with method.attach(model, optimizer, ALONE()) as outer:
        model.load_state_dict(moved(model))  # before the first step they are where training starts
        inner_steps(model, optimizer, 0, range(3))
        own = copy.deepcopy(model.state_dict())
        model.load_state_dict(moved(model))
        if method.exchanges:
            with pytest.raises(UserError, match=r"0\.weight was changed by load_state_dict after step 3, .* attach ag"):
                inner_steps(model, optimizer, 0, range(3, 4))
            model.load_state_dict(own)
        inner_steps(model, optimizer, 0, range(3, 4))
        assert outer.step == 4


def test_parts_and_wrapped_models_are_seen_too() -> None:
    model = small_model()
    optimizer = adamw(model)
    with methods.diloco(every=4).attach(torch.compile(model, backend="eager"), optimizer, ALONE()):
        inner_steps(model, optimizer, 0, range(2))
        last = model.get_submodule("4")
        last.load_state_dict(moved(last))
        with pytest.raises(UserError, match=r"4\.weight was changed by load_state_dict"):
            inner_steps(model, optimizer, 0, range(2, 3))


def test_other_weights_may_be_looked_at_and_put_back() -> None:
    def train(swaps: bool) -> Tensor:
        model, other = small_model(), small_model()
        optimizer = adamw(model)
        with methods.diloco(every=2).attach(model, optimizer, ALONE()):
            inner_steps(model, optimizer, 0, range(3))
            if swaps:
                own = copy.deepcopy(model.state_dict())
                model.load_state_dict(moved(other))
                model.load_state_dict(own)
            inner_steps(model, optimizer, 0, range(3, 6))
        return flat(model)

    assert torch.equal(train(swaps=True), train(swaps=False))


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_going_back_to_a_checkpoint_in_mid_run_takes_all_three_in_any_order(order: tuple[int, ...]) -> None:
    """And then it is as if the steps in between had never been."""

    def train(network: SimulatedNetwork, back: bool) -> Tensor:
        model = small_model()
        optimizer = adamw(model)
        with methods.noloco(every=4, delay=2).attach(model, optimizer, network) as outer:
            whole: list[Any] = [model, optimizer, outer]
            inner_steps(model, optimizer, network.rank, range(5))
            if back:
                saved = copy.deepcopy([one.state_dict() for one in whole])
                inner_steps(model, optimizer, network.rank, range(5, 7))
                for place in order:
                    whole[place].load_state_dict(saved[place])
            inner_steps(model, optimizer, network.rank, range(5, 12))
        return flat(model)

    # Both go back within a delay: the round that was under way is in the state, and no other has begun.
    seen = [Simulation(2).run(lambda network, back=back: train(network, back)) for back in (True, False)]  # type: ignore[misc]
    for back, straight in zip(*seen, strict=True):
        assert torch.equal(back, straight)


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("make", [lambda: methods.diloco(every=4), methods.ddp])
def test_parameters_that_are_replaced_are_told(steps: int, make: Callable[[], Any]) -> None:
    model = small_model()
    optimizer = adamw(model)
    with make().attach(model, optimizer, ALONE()):
        inner_steps(model, optimizer, 0, range(steps))
        model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
        with pytest.raises(UserError, match=r"0\.weight is no longer the tensor that .*assign=True\); load without"):
            optimizer.step()


def test_a_load_under_a_round_that_is_under_way_is_told_when_the_round_lands() -> None:
    def work(network: SimulatedNetwork) -> str:
        model = small_model()
        optimizer = adamw(model)
        with methods.diloco(every=2, delay=1).attach(model, optimizer, network) as outer:
            inner_steps(model, optimizer, network.rank, range(2))
            model.load_state_dict(moved(model))
            with pytest.warns(UserWarning, match="loaded while a round was under way") as told:
                outer.apply_pending()
        return str(told[0].filename)

    assert set(Simulation(1).run(work)) == {__file__}


def test_copies_of_an_attached_model_load_what_they_want() -> None:
    model = small_model()
    optimizer = adamw(model)
    with methods.diloco(every=2).attach(model, optimizer, ALONE()):
        inner_steps(model, optimizer, 0, range(3))
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            twin.load_state_dict(moved(model))
        inner_steps(model, optimizer, 0, range(3, 5))


# Optimizers that are not attached.


class Wrapping(torch.optim.Optimizer):
    """An optimizer that steps another one of the same parameters."""

    def __init__(self, inside: torch.optim.Optimizer) -> None:
        super().__init__([p for group in inside.param_groups for p in group["params"]], {})
        self.inside = inside

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inside.step()


def test_a_step_of_another_optimizer_is_told_while_the_rounds_last() -> None:
    model = small_model()
    optimizer = adamw(model)
    later = torch.optim.SGD(model.parameters(), lr=0.1)
    inner_steps(model, later, 0, range(1))
    with methods.noloco(every=3).attach(model, optimizer, ALONE()) as outer:
        inner_steps(model, optimizer, 0, range(4))
        with pytest.raises(UserError, match=r"SGD has stepped weights that .* attach with the new optimizer"):
            inner_steps(model, later, 0, range(4, 5))
        optimizer.zero_grad()
        inner_steps(model, optimizer, 0, range(5, 6))
        outer.finish()
    inner_steps(model, later, 0, range(6, 8))


@pytest.mark.parametrize("outside", [True, False])
def test_optimizers_that_wrap_each_other_are_no_strangers(outside: bool) -> None:
    model = small_model()
    inside = adamw(model)
    wrapping = Wrapping(inside)
    with methods.diloco(every=2).attach(model, wrapping if outside else inside, ALONE()) as outer:
        inner_steps(model, wrapping, 0, range(5))
    assert outer.step == 5


def test_optimizers_of_other_weights_and_after_a_failed_step_are_left_alone() -> None:
    model, other = small_model(), small_model()
    optimizer, elsewhere = adamw(model), adamw(other)
    with methods.diloco(every=2).attach(model, optimizer, ALONE()) as outer:
        inner_steps(other, elsewhere, 0, range(2))
        with pytest.raises(ZeroDivisionError):
            optimizer.step(lambda: 1 / 0)  # type: ignore[arg-type]
        inner_steps(model, optimizer, 0, range(3))
    assert outer.step == 3


# What a loop is told of its rounds, and the mean of all replicas' weights.


def test_the_mean_of_the_weights_is_shown_and_training_is_not_disturbed() -> None:
    def work(network: SimulatedNetwork, looks: bool) -> tuple[Tensor, Tensor, Tensor]:
        model = small_model()
        optimizer = adamw(model)
        own = shown = flat(model)
        with methods.noloco(every=4, delay=2).attach(model, optimizer, network) as outer:
            for number in range(10):
                inner_steps(model, optimizer, network.rank, range(number, number + 1))
                if looks and number in (4, 8):
                    own = flat(model)
                    with outer.averaged_weights():
                        shown = flat(model)
                    assert torch.equal(flat(model), own)
            assert outer.replicas == 3
        return flat(model), own, shown

    looked, straight = (Simulation(3).run(lambda network, looks=looks: work(network, looks)) for looks in (True, False))
    mean = torch.stack([own for _, own, _ in looked]).mean(0)
    for (weights, _, shown), (undisturbed, _, _) in zip(looked, straight, strict=True):
        assert torch.equal(weights, undisturbed)
        assert torch.equal(shown, looked[0][2])
        torch.testing.assert_close(shown, mean, rtol=0, atol=1e-6)


def test_weights_and_buffers_are_put_back_when_an_evaluation_fails() -> None:
    def work(network: SimulatedNetwork) -> bool:
        model = small_model(torch.bfloat16)
        model.register_buffer("seen", torch.zeros(1))
        optimizer = adamw(model)
        with methods.diloco(every=2).attach(model, optimizer, network) as outer:
            inner_steps(model, optimizer, network.rank, range(1))
            model.get_buffer("seen").fill_(network.rank)
            own = flat(model)
            with pytest.raises(ZeroDivisionError), outer.averaged_weights():
                assert float(model.get_buffer("seen")) == 0.5 and not torch.equal(flat(model), own)
                raise ZeroDivisionError
            return torch.equal(flat(model), own) and float(model.get_buffer("seen")) == network.rank

    assert all(Simulation(2).run(work))


@pytest.mark.parametrize("make", [lambda: methods.diloco(every=4), lambda: methods.noloco(every=4, delay=2)])
def test_who_has_ended_helps_those_who_still_look_at_the_mean(make: Callable[[], Method]) -> None:
    """Replica 1 has fewer batches: what the others look at in mid-run was taken for its end, and it went alone."""

    def work(network: SimulatedNetwork) -> tuple[list[Tensor], Tensor, Tensor]:
        model, shown = small_model(), []
        model.register_buffer("seen", torch.zeros(1))
        optimizer = adamw(model)
        with make().attach(model, optimizer, network, deadline_s=5) as outer:
            for number in range(7 if network.rank == 1 else 12):
                inner_steps(model, optimizer, network.rank, range(number, number + 1))
                model.get_buffer("seen").fill_(network.rank)
                if number in (5, 9):
                    with outer.averaged_weights():
                        shown.append(flat(model))
                        assert float(model.get_buffer("seen")) == 1.0
            outer.finish()
            ended = flat(model)
            outer.finish(average_weights=True)
        assert float(model.get_buffer("seen")) == 1.0
        return shown, ended, flat(model)

    seen = Simulation(3).run(work)
    mean = torch.stack([ended for _, ended, _ in seen]).mean(0)
    for shown, _, last in seen:
        assert torch.equal(last, seen[0][2])
        assert torch.equal(shown[0], seen[0][0][0]) and torch.equal(shown[-1], seen[0][0][len(shown) - 1])
        torch.testing.assert_close(last, mean, rtol=0, atol=1e-6)
    assert [len(shown) for shown, _, _ in seen] == [2, 1, 2]


def test_averages_of_unlike_things_are_told_at_once() -> None:
    def work(network: SimulatedNetwork) -> None:
        model = small_model()
        model.register_buffer("seen", torch.zeros(1))
        optimizer = adamw(model)
        with methods.diloco(every=4).attach(model, optimizer, network) as outer:
            inner_steps(model, optimizer, network.rank, range(2))
            with pytest.raises(UserError, match="one replica averages buffers, and another weights; every replica"):
                outer.average_buffers() if network.rank else outer.averaged_weights().__enter__()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        Simulation(2).run(work)


def test_a_long_wait_for_others_to_average_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(averages, "PATIENCE_SECONDS", 0.0)
    with averages.told_of_waiting(0, "weights", 1200.0):
        look = GONE.get()
        assert look is not None
        with pytest.warns(UserWarning, match="replica 0 waits for the others, to average weights; every replica"):
            assert not look()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert not look()
    assert GONE.get() is None


def lossy(network: SimulatedNetwork, **options: Any) -> tuple[Session, list[Any]]:
    """Replica 1 has too few batches for the last two rounds."""
    model = small_model()
    optimizer = adamw(model)
    told: list[Any] = []
    with methods.noloco(every=2).attach(model, optimizer, network, deadline_s=5, **options) as outer:
        outer.on_round(told.append)
        inner_steps(model, optimizer, network.rank, range(8 - 4 * network.rank))
    return outer, told


@pytest.mark.parametrize("heard", [False, True])
def test_rounds_tell_whether_they_were_held_and_lost_ones_are_counted_and_told_once(
    heard: bool, caplog: pytest.LogCaptureFixture
) -> None:
    given: list[Any] = []
    options: dict[str, Any] = {"on_round": given.append} if heard else {}
    (one, rounds), (other, _) = Simulation(2).run(lambda network: lossy(network, **options))
    assert (one.rounds, one.lost_rounds, other.rounds, other.lost_rounds) == (2, 2, 2, 0)
    assert [(round.held, round.lost) for round in rounds] == [(True, False)] * 2 + [(False, True)] * 2
    assert [round.missing for round in rounds] == [(), (), (1,), (1,)]
    assert all(round.bytes_sent > 0 and round.seconds >= 0 for round in rounds[:2])
    lines = [line for line in caplog.messages if "was lost" in line]
    assert len(lines) == (0 if heard else 1) and len(given) == (6 if heard else 0)
    assert all(line.startswith("replica 0: round 3 was lost: ") and "\n" not in line for line in lines)
    state = one.state_dict()
    assert (state["rounds"], state["lost_rounds"]) == (2, 2)
