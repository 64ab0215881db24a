"""Mishaps in users' loops where two things meet: a resume and a NaN, two attachments, an interrupt, an end."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
import torch
from problem import flat, inner_steps, loss_of, small_model
from test_copies import Masters
from torch import Tensor, nn

from farflung import methods
from farflung.errors import UserError
from farflung.methods import Method
from farflung.networks import SimulatedNetwork, Simulation
from farflung.outer import OuterLoop, Round

NAN = float("nan")


def test_an_attachment_that_was_left_is_not_entered_again() -> None:
    def work(network: SimulatedNetwork) -> None:
        model = small_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ended = methods.diloco(every=5).attach(model, optimizer, network)
        with ended:
            inner_steps(model, optimizer, network.rank, range(5))
        interrupted = methods.diloco(every=5).attach(model, optimizer, network)
        with pytest.raises(KeyboardInterrupt), interrupted:
            raise KeyboardInterrupt
        for outer in (ended, interrupted):
            with pytest.raises(UserError, match="attach again"), outer:
                pass

    Simulation(2).run(work)


class Taught(nn.Module):
    """A student, a teacher that follows it and that nobody trains, and statistics."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.student = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
        self.teacher = copy.deepcopy(self.student[0]).requires_grad_(False)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.student(inputs) + 0.1 * self.teacher(inputs).mean()

    def follow(self) -> None:
        with torch.no_grad():
            for own, other in zip(self.teacher.parameters(), self.student[0].parameters(), strict=True):
                own.lerp_(other, 0.1)


@pytest.mark.slow
@pytest.mark.parametrize("model_first", [True, False])
@pytest.mark.parametrize(("saved", "spoilt"), [(33, 33), (33, 36), (35, 33)])
def test_what_nobody_trains_recovers_after_a_resume_as_without_one(saved: int, spoilt: int, model_first: bool) -> None:
    """The checkpoint lies before the NaN, or between it and the round that finds it."""

    def train(network: SimulatedNetwork, model: Taught, optimizer: Any, steps: range) -> None:
        for step in steps:
            optimizer.zero_grad()
            loss = loss_of(model, network.rank, step)
            (loss * NAN if (network.rank, step) == (1, spoilt) else loss).backward()
            if (network.rank, step) == (1, spoilt):
                model.student[1].running_mean.fill_(NAN)
            optimizer.step()
            model.follow()

    def made() -> tuple[Taught, torch.optim.Optimizer]:
        model = Taught()
        return model, torch.optim.AdamW(model.student.parameters(), lr=0.01)

    def work(network: SimulatedNetwork, interrupted: bool) -> dict[str, Tensor]:
        model, optimizer = made()
        with methods.diloco(every=10).attach(model, optimizer, network) as outer:
            train(network, model, optimizer, range(saved))
            state = copy.deepcopy((model.state_dict(), optimizer.state_dict(), outer.state_dict()))
            if not interrupted:
                train(network, model, optimizer, range(saved, 60))
                return copy.deepcopy(model.state_dict())
        model, optimizer = made()
        with methods.diloco(every=10).attach(model, optimizer, network) as outer:
            own, loop = (lambda: model.load_state_dict(state[0])), (lambda: outer.load_state_dict(state[2]))
            for load in (own, loop) if model_first else (loop, own):
                load()
            optimizer.load_state_dict(state[1])
            train(network, model, optimizer, range(saved, 60))
            return copy.deepcopy(model.state_dict())

    whole = Simulation(2).run(lambda network: work(network, False))
    parts = Simulation(2).run(lambda network: work(network, True))
    for one, other in zip(whole, parts, strict=True):
        for name, tensor in one.items():
            assert torch.isfinite(tensor).all() and torch.equal(tensor, other[name]), name


def test_statistics_that_a_state_has_not_kept_go_back_to_what_was_loaded() -> None:
    """As a state made of another layout's parts, which had kept other things."""

    def work(network: SimulatedNetwork) -> tuple[Tensor, Tensor]:
        model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with methods.diloco(every=10).attach(model, optimizer, network) as outer:
            inner_steps(model, optimizer, network.rank, range(12))
            state = copy.deepcopy((model.state_dict(), outer.state_dict()))
        state[1]["untrained"]["kept"].clear()
        model[1].reset_running_stats()
        with methods.diloco(every=10).attach(model, optimizer, network) as outer:
            model.load_state_dict(state[0])
            outer.load_state_dict(state[1])
            inner_steps(model, optimizer, network.rank, range(12, 13))
            before = model[1].running_var.clone()
            inner_steps(model, optimizer, network.rank, range(13, 19))
            model[1].running_var.fill_(NAN)
            outer.spoil("loss is nan")
            inner_steps(model, optimizer, network.rank, range(19, 20))
            return before, model[1].running_var.clone()

    torch.manual_seed(0)
    for before, restored in Simulation(1).run(work):
        assert torch.equal(before, restored)


@pytest.mark.parametrize("apart", [False, True], ids=["one backward", "a backward each"])
@pytest.mark.parametrize("every", [(5, 7), (3, 20), (4, 4)])
def test_attachments_that_hang_together_recover_together(every: tuple[int, int], apart: bool) -> None:
    """Two halves of a model, each with rounds of its own; what spoils one spoils the other in the next step."""

    def work(network: SimulatedNetwork) -> tuple[Tensor, list[Round]]:
        model = small_model()
        optimizers = [torch.optim.Adam(model[:2].parameters(), 1e-3), torch.optim.Adam(model[2:].parameters(), 1e-3)]
        rounds: list[Round] = []
        with ExitStack() as stack:
            for optimizer, number in zip(optimizers, every, strict=True):
                method = methods.diloco(every=number)
                stack.enter_context(method.attach(model, optimizer, network, on_round=rounds.append))
            for step in range(65):
                for turn in optimizers if apart else [None]:
                    model.zero_grad()
                    loss = loss_of(model, network.rank, step)
                    (loss * NAN if (network.rank, step) == (1, 12) else loss).backward()
                    for optimizer in [turn] if turn else optimizers:
                        optimizer.step()
        return flat(model), rounds

    for rank, (weights, rounds) in enumerate(Simulation(2).run(work)):
        assert torch.isfinite(weights).all()
        spoilt = [round for round in rounds if round.outcome != "averaged"]
        assert all(round.outcome == "no progress offered" for round in spoilt)
        assert len(spoilt) == (2 if rank else 0)


class Interrupted:
    """A pending result at which the user's patience ends, once."""

    finished_at = 0.0

    def done(self) -> bool:
        return True

    def wait(self, timeout: float) -> Any:
        raise KeyboardInterrupt


@pytest.mark.slow
@pytest.mark.parametrize("how", ["waiting", "told"])
def test_an_interrupt_in_mid_round_parts_nobody_for_good(how: str) -> None:
    """The loop goes on; an eager merge had applied what it offered already."""

    def work(network: SimulatedNetwork, interrupts: bool) -> Tensor:
        model = small_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        mine, all_reduce = interrupts and network.rank == 1, network.all_reduce

        def told(round: Round) -> None:
            if mine and how == "told" and round.round == 4:
                raise KeyboardInterrupt

        def interrupted(tensor: Tensor, group: Any, key: str) -> Any:
            pending = all_reduce(tensor, group, key)
            return Interrupted() if mine and how == "waiting" and key.startswith("round 4 of") else pending

        network.all_reduce = interrupted  # type: ignore[method-assign]
        with methods.eager_diloco(every=5).attach(model, optimizer, network, on_round=told) as outer:
            assert isinstance(outer, OuterLoop)
            caught: list[int] = []
            for step in range(200):
                try:
                    inner_steps(model, optimizer, network.rank, range(step, step + 1))
                except KeyboardInterrupt:
                    caught.append(step)
            assert len(caught) == mine
            return outer.anchors[0].clone()

    apart = []
    for interrupts in (False, True):
        anchors = Simulation(3).run(lambda network: work(network, interrupts))  # noqa: B023
        apart.append(max(float((anchor - anchors[0]).norm()) for anchor in anchors))
    assert apart[1] < 1.5 * apart[0]


@pytest.mark.parametrize("make", [methods.local, lambda: methods.diloco(every=7)], ids=["local", "diloco"])
def test_masters_go_along_with_the_mean_at_the_end(make: Callable[[], Method]) -> None:
    """Else the next step would put back what each replica had."""

    def work(network: SimulatedNetwork) -> Tensor:
        model = small_model(torch.bfloat16)
        optimizer = Masters(model.parameters(), 0.05, hidden=False)
        with make().attach(model, optimizer, network) as outer:
            inner_steps(model, optimizer, network.rank, range(12))
            outer.finish(average_weights=True)
        mean = flat(model).float()
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        torch.testing.assert_close(flat(model).float(), mean, rtol=0.02, atol=0.002)
        return mean

    one, other = Simulation(2).run(work)
    assert torch.equal(one, other)


@pytest.mark.parametrize("first", ["site", "far"])
@pytest.mark.parametrize("ends", ["site", "far"])
def test_an_optimizer_is_left_as_it_was_in_whatever_order_its_attachments_end(first: str, ends: str) -> None:
    """Gradients averaged within a site, weights between sites; one loss overflows on one of two replicas."""

    def work(network: SimulatedNetwork) -> tuple[int, float]:
        model = small_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

        def steps(numbers: range) -> None:
            for step in numbers:
                optimizer.zero_grad()
                loss = loss_of(model, network.rank, step)
                scaler.scale(loss * float("inf") if (network.rank, step) == (0, 8) else loss).backward()
                scaler.step(optimizer)
                scaler.update()

        attached = {}
        for name in sorted(("site", "far"), key=lambda name: name != first):
            method, seat = {
                "far": (methods.diloco(every=4), network),
                "site": (methods.ddp(), SimulatedNetwork.alone()),
            }[name]
            attached[name] = method.attach(model, optimizer, seat)
        steps(range(5))
        attached.pop(ends).finish()
        steps(range(5, 12))
        (last,) = attached.values()
        last.finish()
        weights = flat(model).clone()
        steps(range(12, 13))
        return last.step, float((flat(model) - weights).abs().max())

    with pytest.warns(UserWarning, match="rounds have ended"):
        found = Simulation(2).run(work)
    for step, moved in found:
        assert step == 12
        assert 0 < moved < 0.1


def test_rounds_may_land_in_inference_mode() -> None:
    def work(network: SimulatedNetwork, inference: bool) -> Tensor:
        model = small_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with methods.noloco(every=5, delay=3).attach(model, optimizer, network) as outer:
            inner_steps(model, optimizer, network.rank, range(6))
            with torch.inference_mode(inference):
                outer.apply_pending()
                assert outer.rounds == 1
            inner_steps(model, optimizer, network.rank, range(6, 20))
        return flat(model)

    within, outside = (Simulation(2).run(partial(work, inference=inference)) for inference in (True, False))
    assert all(torch.equal(one, other) for one, other in zip(within, outside, strict=True))


def test_masters_of_weights_that_begin_at_zero_are_known_for_copies() -> None:
    """With a warm-up from 0, so that the first steps leave them there."""

    def work(network: SimulatedNetwork, masters: bool) -> Tensor:
        model = nn.Linear(6, 100)
        for parameter in model.parameters():
            nn.init.zeros_(parameter)
        optimizer = Masters(model.parameters(), 0.0, hidden=False) if masters else torch.optim.SGD(model.parameters())
        with methods.diloco(every=4).attach(model, optimizer, network):
            for step in range(15):
                optimizer.param_groups[0]["lr"] = 0.001 * step
                inner_steps(model, optimizer, network.rank, range(step, step + 1))
        return flat(model)

    plain = Simulation(2).run(lambda network: work(network, False))
    masters = Simulation(2).run(lambda network: work(network, True))
    for one, other in zip(plain, masters, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-6)
