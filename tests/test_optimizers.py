"""Loops and optimizers other than the trainer's own, each against a plain loop that shares no code with farflung."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from problem import flat, loss_of, small_model
from processes import run_replicas
from torch import Tensor, nn

from farflung import methods
from farflung.codecs import Dense, ErrorFeedback, PacketError, Quantize, Threshold
from farflung.config import UserError
from farflung.networks import SimulatedNetwork, Simulation
from farflung.outer import Average, Diverged, Method, Round, Schedule, SignSGD
from farflung.outer.notes import Noted

Optimizers = list[torch.optim.Optimizer]
Make = Callable[[nn.Module], Optimizers]

STEPS = 6


def of_all(make: Callable[..., torch.optim.Optimizer], **settings: Any) -> Make:
    return lambda model: [make(model.parameters(), **settings)]


def muon_and_adamw(model: nn.Module) -> Optimizers:
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.01)]


optim = torch.optim
EACH: dict[str, Make] = {
    "Adam": of_all(optim.Adam, lr=0.01, amsgrad=True),
    "AdamW": of_all(optim.AdamW, lr=0.01),
    "AdamW fused": of_all(optim.AdamW, lr=0.01, fused=True),
    "NAdam": of_all(optim.NAdam, lr=0.01),
    "RAdam": of_all(optim.RAdam, lr=0.01),
    "Adamax": of_all(optim.Adamax, lr=0.01),
    "Adagrad": of_all(optim.Adagrad, lr=0.05),
    "Adadelta": of_all(optim.Adadelta, lr=1.0),
    "Adafactor": of_all(optim.Adafactor, lr=0.01),
    "RMSprop": of_all(optim.RMSprop, lr=0.005, momentum=0.9, centered=True),
    "Rprop": of_all(optim.Rprop, lr=0.01),
    "SGD": of_all(optim.SGD, lr=0.05),
    "SGD Nesterov": of_all(optim.SGD, lr=0.02, momentum=0.9, nesterov=True, weight_decay=0.1),
    "SGD fused": of_all(optim.SGD, lr=0.02, momentum=0.9, fused=True),
    "SGD maximize": of_all(optim.SGD, lr=0.001, maximize=True, foreach=False),
    "ASGD": of_all(optim.ASGD, lr=0.02, t0=2),
    "LBFGS": of_all(optim.LBFGS, lr=0.1, max_iter=4),
    "LBFGS Wolfe": of_all(optim.LBFGS, max_iter=3, line_search_fn="strong_wolfe"),
    "Muon, AdamW": muon_and_adamw,
}


def step_all(optimizers: Optimizers, loss: Callable[[], Any]) -> None:
    """One iteration of a user's plain loop, with a closure where the optimizer wants one."""

    def closure() -> Any:
        optimizers[0].zero_grad()
        value = loss()
        value.backward()
        return value

    if isinstance(optimizers[0], optim.LBFGS):
        optimizers[0].step(closure)
        return
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss().backward()
    for optimizer in optimizers:
        optimizer.step()


def trained(
    method: Callable[[], Method], make: Make, replicas: int = 2, steps: int = STEPS, same_data: bool = False
) -> list[Tensor]:
    """The weights of replicas that train in a plain loop under a method."""

    def work(network: SimulatedNetwork) -> Tensor:
        model = small_model()
        optimizers = make(model)
        with method().attach(model, optimizers, network):
            for step in range(steps):
                rank = 0 if same_data else network.rank
                step_all(optimizers, partial(loss_of, model, rank, step))
        return flat(model)

    return Simulation(replicas).run(work)


class MeanLoss:
    """The mean of the losses of two replicas, whose gradient is the mean of theirs to the bit."""

    def __init__(self, model: nn.Module, step: int) -> None:
        self.model, self.step = model, step

    def backward(self) -> None:
        parameters = list(self.model.parameters())
        losses = [loss_of(self.model, rank, self.step) for rank in range(2)]
        each = [torch.autograd.grad(loss, parameters) for loss in losses]
        self.value = (losses[0].detach() + losses[1].detach()) / 2
        for parameter, one, other in zip(parameters, *each, strict=True):
            parameter.grad = (one + other) / 2

    def __float__(self) -> float:
        return float(self.value)


@pytest.mark.parametrize("name", EACH)
def test_gradients_are_one_optimizer_on_the_mean_gradient(name: str) -> None:
    seen = trained(methods.ddp, EACH[name])
    model = small_model()
    optimizers = EACH[name](model)
    for step in range(STEPS):
        step_all(optimizers, partial(MeanLoss, model, step))
    assert torch.equal(seen[0], seen[1]) and not torch.equal(flat(model), flat(small_model()))
    assert torch.equal(seen[0], flat(model))


@pytest.mark.parametrize("name", EACH)
def test_rounds_leave_replicas_equal(name: str) -> None:
    ends = trained(lambda: methods.diloco(every=3), EACH[name])
    assert torch.equal(ends[0], ends[1]) and not torch.equal(ends[0], flat(small_model()))
    for method in (methods.diloco, methods.noloco):
        alike = trained(partial(method, every=2), EACH[name], same_data=True)
        assert torch.equal(alike[0], alike[1]) and torch.isfinite(alike[0]).all()


# Closures


def test_a_closure_returns_the_mean_loss_and_is_called_by_any_optimizer() -> None:
    def work(network: SimulatedNetwork) -> tuple[list[float], Tensor]:
        model = small_model()
        optimizer = optim.SGD(model.parameters(), lr=0.05)
        losses: list[float] = []

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, network.rank, len(losses))
            loss.backward()
            return loss

        with methods.ddp().attach(model, optimizer, network):
            for step in range(4):
                losses.append(float(optimizer.step(closure=closure) if step % 2 else optimizer.step(closure)))
        return losses, flat(model)

    seen = Simulation(2).run(work)
    model = small_model()
    optimizer = optim.SGD(model.parameters(), lr=0.05)
    expected = []
    for step in range(4):
        mean = MeanLoss(model, step)
        mean.backward()
        optimizer.step()
        expected.append(float(mean))
    for losses, weights in seen:
        assert losses == expected and torch.equal(weights, flat(model))


class Deaf(optim.SGD):
    """Takes a closure and never calls it."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()


def test_an_optimizer_that_never_calls_its_closure_is_found_out() -> None:
    model = small_model()
    optimizer = Deaf(model.parameters(), lr=0.1)
    with methods.ddp().attach(model, optimizer, SimulatedNetwork.alone()):
        optimizer.step()
        with pytest.raises(UserError, match="Deaf never called its closure"):
            optimizer.step(lambda: loss_of(model, 0, 0))


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_one_bad_evaluation_of_a_closure_spoils_nobody(search: str | None) -> None:
    """The mean loss is then that of the others, and no gradient counts as zero."""

    def work(network: SimulatedNetwork) -> tuple[Tensor, list[str]]:
        model = small_model()
        optimizer = optim.LBFGS(model.parameters(), lr=0.1, max_iter=3, line_search_fn=search)
        rounds: list[Round] = []

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, network.rank, 0)
            if network.rank == 1 and len(rounds) == 2:
                loss = loss * float("nan")
            loss.backward()
            return loss

        with methods.ddp().attach(model, optimizer, network, on_round=rounds.append):
            for _ in range(4):
                optimizer.step(closure)
        return flat(model), [round.outcome for round in rounds]

    (one, sound), (other, spoilt) = Simulation(2).run(work)
    assert torch.equal(one, other) and torch.isfinite(one).all() and not torch.equal(one, flat(small_model()))
    assert set(sound) == {"averaged"} and spoilt.count("no progress offered") == 1


# GradScaler

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


@pytest.mark.parametrize("make", [methods.demo, methods.dct], ids=["demo", "dct"])
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
    with pytest.raises(Diverged, match="3 rounds in a row"):
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


# Loops and models of all sorts


class Mine(optim.SGD):
    """An optimizer of a user's own, whose base class has hooks, too."""

    fails = False

    def step(self, closure: Any = None) -> Any:
        if self.fails:
            raise RuntimeError("out of memory")
        return super().step(closure)


@pytest.mark.parametrize(
    ("make", "steps"), [(methods.ddp, [1, 2, 3, 4, 5]), (partial(methods.diloco, every=2), [2, 4])]
)
def test_a_step_that_calls_the_base_classes_step_is_one_step(make: Callable[[], Method], steps: list[int]) -> None:
    optim.SGD([torch.ones(1)], lr=0.1)  # torch hooks a class when its first optimizer is made

    def work(network: SimulatedNetwork, kind: Any) -> tuple[list[int], Tensor]:
        model = small_model()
        optimizer = kind(model.parameters(), lr=0.05)
        rounds: list[Round] = []
        with make().attach(model, optimizer, network, on_round=rounds.append) as outer:
            for step in range(5):
                step_all([optimizer], partial(loss_of, model, network.rank, step))
            assert outer.step == 5
        return [round.step for round in rounds], flat(model)

    plain, mine = (Simulation(2).run(partial(work, kind=kind)) for kind in (optim.SGD, Mine))
    for (plain_steps, one), (my_steps, other) in zip(plain, mine, strict=True):
        assert plain_steps == my_steps == steps and torch.equal(one, other)


def test_a_step_that_raised_does_not_silence_the_hooks() -> None:
    model = small_model()
    optimizer = Mine(model.parameters(), lr=0.05)
    rounds: list[Round] = []
    with methods.ddp().attach(model, optimizer, SimulatedNetwork.alone(), on_round=rounds.append):
        optimizer.fails = True
        with pytest.raises(RuntimeError, match="out of memory"):
            optimizer.step()
        optimizer.fails = False
        optimizer.step()
    assert len(rounds) == 2


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
    "demo": (methods.demo, 2),
    "dct": (methods.dct, 3),
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
        assert name in ("demo", "dct") or moved[2] == (name == "feedback")


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


def test_islands_of_several_processes_that_torch_joins(tmp_path: Path) -> None:
    """Two replicas of two processes: gradients are one optimizer on the mean of four, replicas equal in all methods."""
    seen = run_replicas(4, "", "", tmp_path, script="torch_ddp.py")
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


# What cannot be right is refused


def test_what_is_trained_later_is_refused() -> None:
    def unfreeze(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
        model[0].requires_grad_(True)

    def add(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
        model[0].requires_grad_(True)
        optimizer.add_param_group({"params": model[0].parameters()})

    for held, change in ((range(3), unfreeze), (range(1, 3), add)):
        model = small_model()
        assert isinstance(model, nn.Sequential)
        model[0].requires_grad_(False)
        layers = [model[0], model[2], model[4]]
        optimizer = optim.SGD([p for n in held for p in layers[n].parameters()], lr=0.1)
        network = SimulatedNetwork.alone()
        with methods.ddp().attach(model, optimizer, network):
            step_all([optimizer], partial(loss_of, model, 0, 0))
            change(model, optimizer)
            with pytest.raises(
                UserError, match=r"0.weight has come to be trained .* leave the with statement and attach"
            ):
                step_all([optimizer], partial(loss_of, model, 0, 1))
        with methods.ddp().attach(model, optimizer, network) as outer:
            step_all([optimizer], partial(loss_of, model, 0, 2))
        assert outer.step == 1


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


def test_copies_beside_the_model_are_refused_by_the_optimizers_name() -> None:
    model = small_model(torch.bfloat16)
    masters = [nn.Parameter(p.detach().float()) for p in model.parameters()]
    with pytest.raises(UserError, match="RMSprop trains parameters that the model does not have"):
        methods.ddp().attach(model, optim.RMSprop(masters), SimulatedNetwork.alone())


class Tagger(nn.Module):
    """Sparse embeddings and a dense head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed, self.head = nn.Embedding(9, 4, sparse=True), nn.Linear(4, 1)

    def loss(self, rank: int, step: int) -> Tensor:
        tokens = torch.randint(9, (5,), generator=torch.Generator().manual_seed(10 * rank + step))
        return (self.head(self.embed(tokens)) - tokens[:, None]).square().mean()


def test_sparse_gradients_are_refused_where_they_would_be_averaged_and_right_in_rounds() -> None:
    model = Tagger()
    optimizers = [optim.SparseAdam([model.embed.weight]), optim.SGD(model.head.parameters(), lr=0.1)]
    with pytest.raises(UserError, match=r"embed has sparse gradients, .* use diloco"):
        methods.ddp().attach(model, optimizers, SimulatedNetwork.alone())
    with methods.ddp().attach(model, optimizers[1], SimulatedNetwork.alone()):
        model.head.weight.grad = torch.ones_like(model.head.weight).to_sparse()
        with pytest.raises(UserError, match="a parameter of SGD has sparse gradients"):
            optimizers[1].step()

    def work(network: SimulatedNetwork) -> Tensor:
        model = Tagger()
        optimizers = [optim.SparseAdam([model.embed.weight], lr=0.1), optim.SGD(model.head.parameters(), lr=0.01)]
        with methods.diloco(every=3).attach(model, optimizers, network):
            for step in range(6):
                step_all(optimizers, partial(model.loss, network.rank, step))
        return flat(model)

    seen = Simulation(2).run(work)
    assert torch.equal(seen[0], seen[1]) and not torch.equal(seen[0], flat(Tagger()))


# Notes


@given(
    shapes=st.lists(st.sampled_from([(), (), (3,), (2, 5), (130,)]), min_size=1, max_size=8),
    codec=st.sampled_from([Quantize(bits=2), ErrorFeedback(Quantize(bits=4)), Threshold(share=0.5), Dense()]),
    seed=st.integers(0, 99),
)
@settings(max_examples=40, deadline=None)
def test_notes_arrive_as_they_are_and_the_rest_as_its_codec_makes_it(shapes: Any, codec: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(shape, generator=generator) * 1e6 for shape in shapes]
    noted, alone = Noted(copy.deepcopy(codec)), copy.deepcopy(codec)
    packet = noted.encode(tensors)
    decoded = noted.decode(packet, tensors)
    others = [n for n, shape in enumerate(shapes) if shape]
    assert all(torch.equal(decoded[n], tensors[n]) for n in range(len(shapes)) if n not in others)
    if others:
        plain = [tensors[n] for n in others]
        known = alone.decode(alone.encode(plain), plain)
        assert all(torch.equal(decoded[n], tensor) for n, tensor in zip(others, known, strict=True))
    place = seed * packet.numel() // 100
    packet[place] ^= 1
    with pytest.raises(PacketError):
        noted.decode(packet, tensors)
