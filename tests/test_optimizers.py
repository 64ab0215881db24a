"""Loops and optimizers other than the trainer's own, each against a plain loop that shares no code with farflung."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from problem import MeanLoss, flat, loss_of, small_model, step_all
from torch import Tensor, nn

from farflung import methods
from farflung.errors import UserError
from farflung.networks import SimulatedNetwork, Simulation
from farflung.outer import Method, Round

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


@pytest.mark.parametrize("name", EACH)
def test_gradients_are_one_optimizer_on_the_mean_gradient(name: str) -> None:
    seen = trained(methods.ddp, EACH[name])
    model = small_model()
    optimizers = EACH[name](model)
    for step in range(STEPS):
        step_all(optimizers, partial(MeanLoss, model, step))
    assert torch.equal(seen[0], seen[1]) and not torch.equal(flat(model), flat(small_model()))
    assert torch.equal(seen[0], flat(model))


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("make", [methods.ddp, partial(methods.diloco, every=2), partial(methods.noloco, every=2)])
@pytest.mark.parametrize("kind", [partial(optim.SGD, momentum=0.9), Mine])
def test_a_compiled_step_is_one_step_and_the_same(make: Callable[[], Method], kind: Any) -> None:
    def work(network: SimulatedNetwork, compiled: bool) -> tuple[list[int], int, Tensor]:
        model = small_model()
        optimizer = kind(model.parameters(), lr=0.05)
        step = torch.compile(optimizer.step, backend="eager") if compiled else optimizer.step
        rounds: list[Round] = []
        with make().attach(model, optimizer, network, on_round=rounds.append) as outer:
            for number in range(5):
                optimizer.zero_grad()
                loss_of(model, network.rank, number).backward()
                step()
        return [round.step for round in rounds], outer.step, flat(model)

    plain, compiled = (Simulation(2).run(partial(work, compiled=compiled)) for compiled in (False, True))
    assert plain[0][:2] == compiled[0][:2] and compiled[0][1] == 5
    for (*_, one), (*_, other) in zip(plain, compiled, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


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
    with pytest.raises(UserError, match=r"embed.weight has sparse gradients, .* codec='rows', .* use diloco"):
        methods.ddp().attach(model, optimizers, SimulatedNetwork.alone())
    with methods.ddp().attach(model, optimizers[1], SimulatedNetwork.alone()):
        model.head.weight.grad = torch.ones_like(model.head.weight).to_sparse()
        with pytest.raises(UserError, match="weight has sparse gradients, but no embedding"):
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
