"""GradScaler in users' loops: a step that one replica must skip is skipped by all, and counted by all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from problem import MeanLoss, flat, loss_of, small_model
from torch import Tensor, nn

from farflung import methods
from farflung.errors import UserError
from farflung.inner import SignSGD
from farflung.networks import SimulatedNetwork, Simulation
from farflung.outer import Average, DivergedError, Method, Round, Schedule

optim = torch.optim

STEPS = 6

SCALED: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": optim.AdamW,
    "AdamW fused": partial(optim.AdamW, fused=True),
    "SGD fused": partial(optim.SGD, momentum=0.9, fused=True),
    "RMSprop": optim.RMSprop,
}
OVERFLOW = (1, 2)
"""The replica and the step at which a loss is infinite."""


def scaled_loss(model: nn.Module, rank: int, step: int) -> Tensor:
    loss = loss_of(model, rank, step)
    return loss * float("inf") if (rank, step) == OVERFLOW else loss


def scaled_loop(
    model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: Iterable[int], unscale: bool
) -> None:
    """A user's loop as in torch's manual; each replica with another scale."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** (4 + 6 * rank))
    for step in steps:
        optimizer.zero_grad()
        scaler.scale(scaled_loss(model, rank, step)).backward()
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()


@pytest.mark.parametrize("unscale", [False, True], ids=["", "unscale_"])
@pytest.mark.parametrize("name", SCALED)
def test_one_overflow_skips_the_step_for_all(name: str, unscale: bool) -> None:
    def work(network: SimulatedNetwork) -> tuple[Tensor, list[str]]:
        model = small_model()
        optimizer = SCALED[name](model.parameters(), lr=0.01)
        before = set(vars(optimizer))
        rounds: list[Round] = []
        with methods.ddp().attach(model, optimizer, network, on_round=rounds.append):
            scaled_loop(model, optimizer, network.rank, range(STEPS), unscale)
        assert set(vars(optimizer)) == before  # what the attachment needed is gone
        return flat(model), [round.outcome for round in rounds]

    seen = Simulation(2).run(work)
    model = small_model()
    optimizer = SCALED[name](model.parameters(), lr=0.01)
    for step in range(STEPS):
        if step != OVERFLOW[1]:
            MeanLoss(model, step).backward()
            optimizer.step()
    for rank, (weights, outcomes) in enumerate(seen):
        assert torch.equal(weights, flat(model))
        assert [n for n, outcome in enumerate(outcomes) if outcome != "averaged"] == [2] * rank


@pytest.mark.parametrize("make", [methods.demo, methods.dynamic_threshold], ids=["demo", "dynamic-threshold"])
def test_a_skipped_step_loses_nothing_that_a_codec_owes(make: Callable[[], Method]) -> None:
    def work(network: SimulatedNetwork, steps: Sequence[int]) -> Tensor:
        model = small_model()
        optimizer = SignSGD(model.parameters(), lr=0.01)
        with make().attach(model, optimizer, network):
            scaled_loop(model, optimizer, network.rank, steps, unscale=False)
        return flat(model)

    with_skip = Simulation(2).run(partial(work, steps=range(STEPS)))
    without = Simulation(2).run(partial(work, steps=[step for step in range(STEPS) if step != OVERFLOW[1]]))
    assert torch.equal(with_skip[0], without[0]) and torch.equal(with_skip[0], with_skip[1])


def test_many_overflows_at_the_start_are_not_a_divergence() -> None:
    """A scaler begins too high on purpose; only gradients that are not finite without it are a fault."""

    def work(network: SimulatedNetwork, scaled: bool) -> Tensor:
        model = small_model()
        optimizer = optim.AdamW(model.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127 if scaled else 1.0)
        with methods.ddp().attach(model, optimizer, network):
            for step in range(12):
                optimizer.zero_grad()
                loss = loss_of(model, network.rank, step) * (4.0 if scaled else float("inf"))
                (scaler.scale(loss) if scaled else loss).backward()
                if scaled:
                    scaler.step(optimizer)
                    scaler.update()
                else:
                    optimizer.step()
        return flat(model)

    ends = Simulation(2).run(partial(work, scaled=True))
    assert torch.equal(ends[0], ends[1]) and not torch.equal(ends[0], flat(small_model()))
    with pytest.raises(DivergedError, match="3 rounds in a row"):
        Simulation(2).run(partial(work, scaled=False))


@pytest.mark.parametrize("name", SCALED)
def test_a_skipped_step_counts_for_rounds(name: str) -> None:
    """Averaging of weights every 2 iterations, whichever replica skipped one of them."""

    def work(network: SimulatedNetwork) -> tuple[Tensor, list[int]]:
        model = small_model()
        optimizer = SCALED[name](model.parameters(), lr=0.01)
        before = set(vars(optimizer))
        rounds: list[Round] = []
        with Method(Schedule(every=2), outer=Average).attach(model, optimizer, network, on_round=rounds.append):
            scaled_loop(model, optimizer, network.rank, range(STEPS), unscale=False)
        assert set(vars(optimizer)) == before
        return flat(model), [round.started_step for round in rounds]

    models = [small_model() for _ in range(2)]
    optimizers = [SCALED[name](model.parameters(), lr=0.01) for model in models]
    for begin in range(0, STEPS, 2):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            scaled_loop(model, optimizer, rank, range(begin, begin + 2), unscale=False)
        with torch.no_grad():
            for one, other in zip(*(model.parameters() for model in models), strict=True):
                mean = (one + other) / 2
                one.copy_(mean)
                other.copy_(mean)
    for weights, starts in Simulation(2).run(work):
        assert starts == [2, 4, 6] and torch.equal(weights, flat(models[0]))


class Old(optim.SGD):
    """Takes the scaler itself, as torch once asked of optimizers."""

    def step(self, closure: Any = None, grad_scaler: Any = None) -> None:  # type: ignore[override]
        super().step()


@pytest.mark.filterwarnings("ignore:GradScaler is going to stop")
def test_scalers_that_cannot_be_right_are_refused() -> None:
    for kind, closure, words in (
        (Old, None, "Old unscales gradients by itself"),
        (optim.SGD, lambda: None, "a GradScaler cannot take a closure"),
    ):
        model = small_model()
        optimizer = kind(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu")
        with methods.ddp().attach(model, optimizer, SimulatedNetwork.alone()):
            scaler.scale(loss_of(model, 0, 0)).backward()
            with pytest.raises(UserError, match=words):
                scaler.step(optimizer, *([closure] if closure else []))


@pytest.mark.parametrize("make", [methods.ddp, methods.diloco])
def test_scaled_gradients_in_float16_are_refused_as_torch_does(make: Callable[[], Method]) -> None:
    model = nn.Linear(2, 1).half()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    with make().attach(model, optimizer, SimulatedNetwork.alone()):
        scaler.scale(model(torch.ones(1, 2).half()).sum().float()).backward()
        with pytest.raises(UserError, match="gradients in float16 would vanish"):
            scaler.step(optimizer)
