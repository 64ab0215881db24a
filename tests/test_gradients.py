"""Averaged gradients in loops and models of all sorts, each against a plain loop that shares no code."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from problem import flat, loss_of, small_model, step_all
from processes import run_replicas
from torch import Tensor, nn

from farflung import methods
from farflung.codecs import Codec, Dense, ErrorFeedback, Quantize, Threshold
from farflung.errors import UserError
from farflung.networks import Network, SimulatedNetwork, Simulation
from farflung.outer import Method, RandomGroups, Round, Schedule

optim = torch.optim


class Partial(nn.Module):
    """A part that is always used, one that replica 1 alone uses at odd steps, one that is never used, a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.used, self.rare, self.never, self.frozen = (nn.Linear(6, 6) for _ in range(4))
        self.frozen.requires_grad_(False)

    def loss(self, rank: int, step: int) -> Tensor:
        inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(1000 * rank + step))
        hidden = self.frozen(torch.tanh(self.used(inputs)))
        if rank == 1 and step % 2:
            hidden = hidden + self.rare(inputs)
        return (hidden - inputs).square().mean()


PARTIAL: dict[str, tuple[Callable[[], Method], int]] = {
    "ddp": (methods.ddp, 2),
    "ddp int8": (partial(methods.ddp, codec=Quantize(bits=8)), 2),
    "ddp int8 in parts": (partial(methods.ddp, codec=Quantize(bits=8)), 3),
    "ddp int2": (partial(methods.ddp, codec=Quantize(bits=2)), 2),
    "feedback": (partial(methods.ddp, codec=ErrorFeedback(Threshold(share=0.5, refresh=1))), 2),
    "feedback int2": (partial(methods.ddp, codec=ErrorFeedback(Quantize(bits=2))), 2),
    "demo": (methods.demo, 2),
    "dynamic-threshold": (methods.dynamic_threshold, 3),
}


@pytest.mark.parametrize("name", PARTIAL)
def test_who_has_a_gradient_nowhere_stays_without_one(name: str) -> None:
    make, replicas = PARTIAL[name]

    def work(network: SimulatedNetwork) -> tuple[Partial, list[bool]]:
        model = Partial()
        optimizer = optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.5)
        moved = []
        with make().attach(model, optimizer, network):
            for step in range(4):
                before = flat(model.rare)
                step_all([optimizer], partial(model.loss, network.rank, step))
                moved.append(not torch.equal(flat(model.rare), before))
        return model, moved

    seen = Simulation(replicas).run(work)
    start = Partial()
    for model, moved in seen:
        assert torch.equal(flat(model), flat(seen[0][0]))
        assert torch.equal(flat(model.never), flat(start.never))
        assert torch.equal(flat(model.frozen), flat(start.frozen))
        assert not torch.equal(flat(model.used), flat(start.used))
        # Only feedback may owe the rare part something in the steps in between.
        assert moved == [False, True, moved[2], True]
        assert name in ("demo", "dynamic-threshold") or moved[2] == name.startswith("feedback")


def test_one_replicas_gradient_counts_zeros_for_the_others() -> None:
    def work(network: SimulatedNetwork) -> Tensor:
        model = Partial()
        optimizer = optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
        with methods.ddp().attach(model, optimizer, network):
            for step in range(4):
                step_all([optimizer], partial(model.loss, network.rank, step))
        return flat(model)

    model = Partial()
    optimizer = optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
    for step in range(4):
        optimizer.zero_grad()
        for rank in range(2):
            (model.loss(rank, step) / 2).backward()
        optimizer.step()
    for weights in Simulation(2).run(work):
        torch.testing.assert_close(weights, flat(model), rtol=0, atol=1e-7)


def accumulating(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Callable[[int], Any]) -> None:
    """Two microbatches a step, clipped, with a schedule."""
    scheduler = optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=6)
    for step in range(5):
        for part in range(2):
            (loss(2 * step + part) / 2).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("compiled", [False, True], ids=["", "compiled"])
def test_accumulated_gradients_schedules_and_compiled_models(compiled: bool) -> None:
    def work(network: SimulatedNetwork) -> Tensor:
        model = small_model()
        called: Any = torch.compile(model, backend="aot_eager") if compiled else model
        optimizer = optim.AdamW(called.parameters(), lr=0.01)
        with methods.ddp().attach(called, optimizer, network):
            accumulating(model, optimizer, lambda step: loss_of(called, network.rank, step))
        return flat(model)

    model = small_model()
    accumulating(
        model,
        optim.AdamW(model.parameters(), lr=0.01),
        lambda step: (loss_of(model, 0, step) + loss_of(model, 1, step)) / 2,
    )
    for weights in Simulation(2).run(work):
        torch.testing.assert_close(weights, flat(model), rtol=0, atol=1e-6)


@pytest.mark.slow
def test_islands_of_several_processes_that_torch_joins(tmp_path: Path) -> None:
    """Two replicas of two processes: gradients are one optimizer on the mean of four, replicas equal in all methods.

    Where torch would join replicas, too, attach says so.
    """
    seen = run_replicas(4, "", "", tmp_path, script="torch_ddp.py")
    for told in [one.pop("told") for one in seen]:
        assert [len(lines) for lines in told] == [1, 1, 0, 1]
        assert "averages gradients between replicas 0, 1, 2 and 3 at every step" in told[0][0]
    for name, weights in seen[0].items():
        assert all(torch.equal(weights, other[name]) for other in seen)
    model = small_model()
    optimizer = optim.AdamW(model.parameters(), lr=0.01)
    for step in range(6):
        optimizer.zero_grad()
        for process in range(4):
            ((loss_of(model, process, 100 + step) + loss_of(model, process, step)) / 4).backward()
        optimizer.step()
    torch.testing.assert_close(seen[0]["ddp"], flat(model), rtol=0, atol=1e-6)


class Adversaries(nn.Module):
    """A generator and a discriminator."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.generator, self.discriminator = nn.Linear(3, 4), nn.Linear(4, 1)


def fight(model: Adversaries, generator: Any, discriminator: Any, steps: Iterable[int], ranks: Sequence[int]) -> None:
    """The discriminator steps twice, before and after the generator at odd steps; at even ones only it steps."""

    def noise(rank: int, step: int) -> Tensor:
        return torch.randn(8, 3, generator=torch.Generator().manual_seed(100 * rank + step))

    def judge(step: int) -> None:
        model.zero_grad()
        for rank in ranks:
            made = model.generator(noise(rank, step)).detach()
            real = noise(rank, step + 50) @ torch.ones(3, 4)
            ((model.discriminator(made) - model.discriminator(real)).tanh().mean() / len(ranks)).backward()
        discriminator.step()

    for step in steps:
        judge(step)
        if step % 2:
            model.zero_grad()
            for rank in ranks:
                (-model.discriminator(model.generator(noise(rank, step))).tanh().mean() / len(ranks)).backward()
            generator.step()
            judge(step)


def adversaries() -> tuple[Adversaries, torch.optim.Optimizer, torch.optim.Optimizer]:
    model = Adversaries()
    return (
        model,
        optim.Adam(model.generator.parameters(), lr=0.02),
        optim.RMSprop(model.discriminator.parameters(), lr=0.01),
    )


@pytest.mark.parametrize("codec", [None, ErrorFeedback(Quantize(bits=4))], ids=["dense", "feedback"])
def test_several_optimizers_are_averaged_each_in_its_own_time_and_resumed(codec: Any) -> None:
    def work(network: SimulatedNetwork, stop: int | None = None) -> tuple[Tensor, int]:
        def part(steps: range, state: Any = None) -> Any:
            model, generator, discriminator = adversaries()
            with methods.ddp(codec).attach(model, [generator, discriminator], network) as outer:
                if state:
                    for thing, saved in zip((model, generator, discriminator, outer), state, strict=True):
                        thing.load_state_dict(saved)
                fight(model, generator, discriminator, steps, [network.rank])
            return model, generator, discriminator, outer

        if stop is None:
            done = part(range(6))
        else:
            done = part(range(stop, 6), [thing.state_dict() for thing in part(range(stop))])
        return flat(done[0]), done[3].step

    seen = Simulation(2).run(work)
    assert torch.equal(seen[0][0], seen[1][0]) and [step for _, step in seen] == [9, 9]
    assert torch.equal(Simulation(2).run(partial(work, stop=3))[0][0], seen[0][0])
    model, generator, discriminator = adversaries()
    fight(model, generator, discriminator, range(6), ranks=[0, 1])
    difference = (flat(model) - seen[0][0]).abs().max()
    assert difference < 1e-6 if codec is None else difference > 1e-6


@pytest.mark.parametrize("given", [0, 1])
def test_a_parameter_that_another_optimizer_trains_does_not_stay_silent(given: int) -> None:
    def work(network: SimulatedNetwork) -> None:
        model, *optimizers = adversaries()
        with methods.ddp().attach(model, optimizers[given], network):
            fight(model, *optimizers, range(6), [network.rank])

    other = ("discriminator", "generator")[given]
    with pytest.raises(
        UserError, match=rf"{other}.weight is trained, but none of the .* all of the model's optimizers"
    ):
        Simulation(2).run(work)


def test_a_copy_of_what_is_averaged_may_be_the_models_too() -> None:
    """A teacher that follows the trained part is the same everywhere, though no optimizer holds it."""

    def work(network: SimulatedNetwork) -> Tensor:
        model = nn.ModuleList([small_model(), small_model()])
        optimizer = optim.SGD(model[0].parameters(), lr=0.05)
        with methods.ddp().attach(model, optimizer, network):
            for step in range(5):
                step_all([optimizer], partial(loss_of, model[0], network.rank, step))
                with torch.no_grad():
                    for follower, leader in zip(model[1].parameters(), model[0].parameters(), strict=True):
                        follower.lerp_(leader, 0.5)
        return flat(model)

    seen = Simulation(2).run(work)
    assert torch.equal(seen[0], seen[1])


def test_an_optimizer_that_trains_nothing_yet_steps_with_the_others() -> None:
    def work(network: SimulatedNetwork) -> Tensor:
        model = Partial()
        optimizers = [optim.SGD(model.frozen.parameters(), lr=0.1), optim.SGD(model.used.parameters(), lr=0.1)]
        with methods.ddp().attach(model, optimizers, network):
            step_all(optimizers, partial(model.loss, network.rank, 0))
        assert torch.equal(flat(model.frozen), flat(Partial().frozen))
        return flat(model)

    seen = Simulation(2).run(work)
    assert torch.equal(seen[0], seen[1]) and not torch.equal(seen[0], flat(Partial()))


@pytest.mark.parametrize("codec", [Dense(), Quantize(bits=8), ErrorFeedback(Quantize(bits=2))])
def test_who_sits_out_keeps_its_own_gradient(codec: Codec) -> None:
    def work(network: Network) -> tuple[Tensor, list[Round]]:
        rounds: list[Round] = []
        model = nn.Linear(6, 1, bias=False)
        nn.init.ones_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with Method(Schedule(every=1), topology=RandomGroups(), codec=codec).attach(
            model, optimizer, network, on_round=rounds.append
        ):
            (model.weight * (network.rank + 1)).sum().backward()
            optimizer.step()
        return 1 - model.weight.detach(), rounds

    met = dict(enumerate(Simulation(3).run(work)))
    (alone,) = (rank for rank, (_, rounds) in met.items() if not rounds[0].group)
    pair = [rank + 1 for rank in met if rank != alone]
    assert met[alone][1][0].outcome == "sat out"
    torch.testing.assert_close(met[alone][0], torch.full((1, 6), alone + 1.0))
    for rank in met.keys() - {alone}:
        torch.testing.assert_close(met[rank][0], torch.full((1, 6), sum(pair) / 2))


@pytest.mark.parametrize("codec", [Dense(), ErrorFeedback(Quantize(bits=4))])
def test_an_optimizer_of_nothing_but_empty_parameters_steps_with_the_others(codec: Codec) -> None:
    def work(network: Network) -> Tensor:
        model = nn.ParameterDict({"empty": torch.zeros(0, 4), "one": torch.zeros(3)})
        optimizers = [torch.optim.SGD([model[name]], lr=1.0) for name in ("empty", "one")]
        with methods.ddp(codec=codec).attach(model, optimizers, network):
            (model["one"].sum() * network.rank + model["empty"].sum()).backward()
            for optimizer in optimizers:
                optimizer.step()
        return model["one"].detach()

    for weights in Simulation(2).run(work):
        torch.testing.assert_close(weights, torch.full((3,), -0.5))
