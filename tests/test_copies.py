"""Optimizers that keep weights of their own: copies go along with rounds, hidden ones are refused, others stay."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from problem import flat, loss_of, small_model, step_all
from test_internet import Run
from torch import Tensor, nn

from farflung import methods
from farflung.errors import UserError
from farflung.methods import Method
from farflung.networks import SharedState, SimulatedNetwork, Simulation
from farflung.outer import ElasticLoop, OuterLoop
from farflung.outer.shared import shared_tensors

Make = Callable[[nn.Module], torch.optim.Optimizer]

PLAIN = partial(methods.diloco, outer_lr=1.0, outer_momentum=0.0)
"""Rounds that put the mean of all weights in their place."""


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)


# Copies in the state.


class Masters(torch.optim.Optimizer):
    """Plain descent of float32 copies, in its state or out of sight; the parameters are what they round to."""

    def __init__(self, parameters: Any, lr: float, hidden: bool) -> None:
        super().__init__(parameters, {"lr": lr})
        self.hidden = hidden
        self.secret: dict[Any, Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            home = self.secret if self.hidden else self.state[p]
            key = p if self.hidden else "master"
            master = home.setdefault(key, p.detach().float().clone())
            master.sub_(p.grad.float(), alpha=self.param_groups[0]["lr"])
            p.copy_(master)


class ScheduleFree(torch.optim.Optimizer):
    """Schedule-free descent (arXiv 2405.15682): y = (1 - β)·z + β·x is what the model holds, z lies in the state."""

    def __init__(self, parameters: Any, lr: float, beta: float = 0.9) -> None:
        super().__init__(parameters, {"lr": lr, "beta": beta, "k": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        group = self.param_groups[0]
        weight = 1 / (group["k"] + 1)
        for y in group["params"]:
            z = self.state[y].setdefault("z", y.detach().clone())
            x = (y - (1 - group["beta"]) * z) / group["beta"]
            z.sub_(y.grad, alpha=group["lr"])
            x.lerp_(z, weight)
            y.copy_((1 - group["beta"]) * z + group["beta"] * x)
        group["k"] += 1


class Quadratic(nn.Module):
    """300 weights, drawn towards another point on each replica and in each step."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.linspace(-1, 1, 300).to(dtype))

    def differentiate(self, rank: int, number: int) -> None:
        target = torch.randn(300, generator=torch.Generator().manual_seed(rank)) + 0.1 * number
        self.weights.grad = (self.weights.float() - target).to(self.weights.dtype)


def quadratic(
    make: Callable[[nn.Module], torch.optim.Optimizer],
    delay: int = 0,
    dtype: torch.dtype = torch.float32,
    every: int = 8,
    steps: int = 25,
) -> list[Tensor]:
    """Where two replicas come in `steps` steps, with weights averaged every `every`."""

    def work(network: SimulatedNetwork) -> Tensor:
        model = Quadratic(dtype)
        optimizer = make(model)
        method = methods.diloco(every=every, delay=delay, outer_lr=1.0, outer_momentum=0.0)
        with method.attach(model, optimizer, network):
            for number in range(steps):
                model.differentiate(network.rank, number)
                optimizer.step()
        return model.weights.detach().float()

    return Simulation(2).run(work)


@pytest.mark.parametrize("delay", [0, 3])
def test_float32_masters_in_an_optimizers_state_are_as_good_as_none(delay: int) -> None:
    plain = quadratic(sgd, delay)
    masters = quadratic(lambda model: Masters(model.parameters(), 0.05, hidden=False), delay)
    half = quadratic(lambda model: Masters(model.parameters(), 0.05, hidden=False), delay, torch.bfloat16)
    for one, other, rounded in zip(plain, masters, half, strict=True):
        torch.testing.assert_close(other, one, rtol=0, atol=1e-5)
        torch.testing.assert_close(rounded, one, rtol=0.01, atol=0.02)


def test_a_schedule_free_optimizers_other_point_goes_along() -> None:
    """A round adds the same to y and z, of each replica."""
    y = [torch.linspace(-1, 1, 300)] * 2
    z = list(y)
    for number in range(24):
        for rank in range(2):
            target = torch.randn(300, generator=torch.Generator().manual_seed(rank)) + 0.1 * number
            x = (y[rank] - 0.1 * z[rank]) / 0.9
            z[rank] = z[rank] - 0.05 * (y[rank] - target)
            x = x + (z[rank] - x) / (number + 1)
            y[rank] = 0.1 * z[rank] + 0.9 * x
        if number % 8 == 7:
            mean = (y[0] + y[1]) / 2
            y, z = [mean, mean], [z[rank] + mean - y[rank] for rank in range(2)]
    seen = quadratic(lambda model: ScheduleFree(model.parameters(), 0.05))
    for rank in range(2):
        target = torch.randn(300, generator=torch.Generator().manual_seed(rank)) + 2.4
        x = (y[rank] - 0.1 * z[rank]) / 0.9
        last = z[rank] - 0.05 * (y[rank] - target)
        torch.testing.assert_close(seen[rank], 0.1 * last + 0.9 * (x + (last - x) / 25), rtol=0, atol=1e-4)


# Copies that are the parameters themselves.


class SharedMasters(torch.optim.Optimizer):
    """Float32 masters made by `.float()`, which are the parameters themselves where these are float32."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            master = self.state[p].setdefault("master", p.detach().float())
            master.sub_(p.grad.float(), alpha=self.param_groups[0]["lr"])
            p.copy_(master)


class PutsBack(torch.optim.SGD):
    """Steps from weights that were kept in the state just before, which take the parameters' place, as SAM does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            self.state[p]["old"] = p.data.clone()
            p.add_(1.0)
        for p in self.param_groups[0]["params"]:
            p.data = self.state[p]["old"]
        return super().step(closure)


@pytest.mark.parametrize("kind", [SharedMasters, PutsBack])
def test_state_that_is_the_parameter_itself_moves_once(kind: Any) -> None:
    for one, other in zip(quadratic(sgd), quadratic(lambda model: kind(model.parameters(), lr=0.05)), strict=True):
        torch.testing.assert_close(other, one, rtol=0, atol=1e-6)


# What stands still, and what moves seldom.


class Lookahead(torch.optim.SGD):
    """Slow weights go half of the way in every k-th step, and the fast ones back to them (arXiv 1907.08610)."""

    def __init__(self, parameters: Any, lr: float, k: int, home: str) -> None:
        super().__init__(parameters, lr=lr)
        self.k, self.n = k, 0
        held = self.param_groups[0]["params"]
        self.slow = {p: p.detach().clone() for p in held}
        if home == "state":
            for p, slow in self.slow.items():
                self.state[p]["slow"] = slow

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.n += 1
        if self.n % self.k == 0:
            for p, slow in self.slow.items():
                p.copy_(slow.lerp_(p, 0.5))


@pytest.mark.parametrize("k", [3, 6, 20])
def test_slow_weights_in_the_state_go_along_even_if_they_move_seldom(k: int) -> None:
    """Rounds every 4 steps add what they add to the fast weights to the slow ones, from the first on."""
    fast = [torch.linspace(-1, 1, 300)] * 2
    slow = list(fast)
    for number in range(41):
        for rank in range(2):
            target = torch.randn(300, generator=torch.Generator().manual_seed(rank)) + 0.1 * number
            fast[rank] = fast[rank] - 0.05 * (fast[rank] - target)
            if number % k == k - 1:
                fast[rank] = slow[rank] = (slow[rank] + fast[rank]) / 2
        if number % 4 == 3:
            mean = (fast[0] + fast[1]) / 2
            fast, slow = [mean, mean], [slow[rank] + mean - fast[rank] for rank in range(2)]
    seen = quadratic(lambda model: Lookahead(model.parameters(), 0.05, k, "state"), every=4, steps=41)
    for rank in range(2):
        torch.testing.assert_close(seen[rank], fast[rank], rtol=0, atol=1e-4)


class TowardsStart(torch.optim.Optimizer):
    """Descent that is drawn towards the initial weights, which lie in its state (L2-SP, arXiv 1802.01483)."""

    def __init__(self, parameters: Any, lr: float = 0.1, at_once: bool = False) -> None:
        super().__init__(parameters, {"lr": lr})
        if at_once:
            for p in self.param_groups[0]["params"]:
                self.state[p]["p0"] = p.detach().clone()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            start = self.state[p].setdefault("p0", p.detach().clone())
            p.sub_(p.grad + 0.1 * (p - start), alpha=self.param_groups[0]["lr"])


def starts(every: int, steps: int, at_once: bool, resume_after: int = 0) -> list[tuple[Tensor, Tensor]]:
    """The weights, and those that optimizers remember as the initial ones, of two replicas."""

    def work(network: SimulatedNetwork) -> tuple[Tensor, Tensor]:
        model = small_model()
        optimizer = TowardsStart(model.parameters(), at_once=at_once)
        outer = methods.diloco(every=every).attach(model, optimizer, network)
        for number in range(steps):
            if number and number == resume_after:
                saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), outer.state_dict()))
                outer.finish()
                model = small_model()
                optimizer = TowardsStart(model.parameters(), at_once=at_once)
                outer = methods.diloco(every=every).attach(model, optimizer, network)
                for thing, state in zip((model, optimizer, outer), saved, strict=True):
                    thing.load_state_dict(state)
            step_all([optimizer], partial(loss_of, model, network.rank, number))
        kept = torch.cat([optimizer.state[p]["p0"].flatten() for p in model.parameters()])
        outer.finish()
        return flat(model), kept

    return Simulation(2).run(work)


@pytest.mark.parametrize(("every", "steps"), [(5, 60), (1, 60), (40, 41)])
def test_initial_weights_in_the_state_stay_what_they_were(every: int, steps: int) -> None:
    for at_once in (False, True):
        for weights, kept in starts(every, steps, at_once):
            assert torch.equal(kept, flat(small_model())) and float((weights - kept).norm()) > 0.5


def test_what_is_known_of_copies_goes_on_bit_for_bit() -> None:
    """Saved while initial weights still pass for a copy, and go back to what they were 20 steps later."""
    for whole, broken in zip(starts(5, 60, False), starts(5, 60, False, resume_after=18), strict=True):
        assert torch.equal(whole[0], broken[0]) and torch.equal(whole[1], broken[1])


# Copies out of sight.


class Accumulates(torch.optim.Optimizer):
    """Hidden masters that move in every k-th step only, by the mean of the gradients since."""

    def __init__(self, parameters: Any, lr: float, k: int) -> None:
        super().__init__(parameters, {"lr": lr})
        self.k, self.n = k, 0
        self.masters = {p: p.detach().clone() for p in self.param_groups[0]["params"]}
        self.sums = {p: torch.zeros_like(p) for p in self.masters}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.n += 1
        for p, master in self.masters.items():
            self.sums[p].add_(p.grad)
            if self.n % self.k == 0:
                master.sub_(self.sums[p], alpha=self.param_groups[0]["lr"] / self.k)
                self.sums[p].zero_()
                p.copy_(master)


class Secret(torch.optim.AdamW):
    """AdamW on masters that nobody sees."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr=lr)
        self.masters = {p: p.detach().float().clone() for p in self.param_groups[0]["params"]}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        before = {p: p.detach().clone() for p in self.masters}
        super().step()
        for p, master in self.masters.items():
            p.copy_(master.add_(p - before[p]))


def wide_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 1)).to(dtype)


def train(
    make: Make, method: Method, steps: int, same_batch: bool = False, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """Two replicas in a plain loop; with `same_batch`, each on one batch of its own."""

    def work(network: SimulatedNetwork) -> Tensor:
        model = wide_model(dtype)
        optimizer = make(model)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 15, gamma=0.3)
        with method.attach(model, optimizer, network):
            for number in range(steps):
                seed = 0 if same_batch else number
                inputs = torch.randn(16, 6, generator=torch.Generator().manual_seed(1000 * network.rank + seed))
                loss = (model(inputs.to(dtype)) - inputs.to(dtype).sum(1, keepdim=True)).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
        return flat(model)

    return Simulation(2).run(work)


HIDDEN: dict[str, Make] = {
    "masters": lambda model: Secret(model.parameters(), lr=0.01),
    **{
        f"masters every {k}": partial(lambda k, model: Accumulates(model.parameters(), 0.1, k), k) for k in (1, 2, 4, 8)
    },
    **{f"slow {k}": partial(lambda k, model: Lookahead(model.parameters(), 0.1, k, ""), k) for k in (1, 3, 5, 8)},
}


@pytest.mark.parametrize("name", HIDDEN)
def test_copies_out_of_sight_are_found_out_and_refused_by_name(name: str) -> None:
    who = type(HIDDEN[name](wide_model())).__name__
    for method in (methods.diloco(every=5), methods.noloco(every=6, delay=2, fragments=2)):
        with pytest.raises(UserError, match=f"{who} keeps weights of its own and puts them back"):
            train(HIDDEN[name], method, 80)


def test_masters_out_of_sight_are_found_out_where_weights_are_rounded() -> None:
    with pytest.raises(UserError, match="Secret keeps weights of its own"):
        train(HIDDEN["masters"], methods.diloco(every=5), 50, dtype=torch.bfloat16)


def test_each_of_several_optimizers_is_looked_at() -> None:
    """Two of one kind, of which only the first hides its slow weights."""

    def work(network: SimulatedNetwork) -> None:
        model = wide_model()
        parts = [list(layer.parameters()) for layer in model if isinstance(layer, nn.Linear)]
        optimizers = [Lookahead(parts[0], 0.1, 3, ""), Lookahead(parts[1] + parts[2], 0.1, 3, "state")]
        with methods.diloco(every=5).attach(model, optimizers, network):
            for number in range(60):
                step_all([*optimizers], partial(loss_of, model, network.rank, number))

    with pytest.raises(UserError, match="Lookahead keeps weights of its own"):
        Simulation(2).run(work)


def foreign(kind: Any, **settings: Any) -> Make:
    """One of torch's own as a class of a user's."""
    return lambda model: type(f"My{kind.__name__}", (kind,), {})(model.parameters(), **settings)


optim = torch.optim
HONEST: dict[str, Make] = {
    "Adam": foreign(optim.Adam, lr=0.03),
    "NAdam": foreign(optim.NAdam, lr=0.01),
    "Adagrad": foreign(optim.Adagrad, lr=0.05),
    "RMSprop": foreign(optim.RMSprop, lr=0.005, momentum=0.9, centered=True),
    "Rprop": foreign(optim.Rprop, lr=0.01),
    "SGD Nesterov": foreign(optim.SGD, lr=0.02, momentum=0.9, nesterov=True, weight_decay=0.1),
    "slow weights in the state": lambda model: Lookahead(model.parameters(), 0.1, 4, "state"),
    "initial weights in the state": lambda model: TowardsStart(model.parameters()),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", HONEST)
def test_who_keeps_nothing_out_of_sight_is_never_refused(name: str) -> None:
    """Nor where training is drawn back to where it came from: each replica on one batch, rounds at every step."""
    for method in (PLAIN(every=1), methods.diloco(every=5), methods.noloco(every=3, delay=1, fragments=2)):
        for same_batch in (True, False):
            assert all(torch.isfinite(end).all() for end in train(HONEST[name], method, 32, same_batch))


# Accidents.


class FromTheStart(torch.optim.Optimizer):
    """Descent of float32 masters that are made with the optimizer."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})
        for p in self.param_groups[0]["params"]:
            self.state[p] = {"master": p.detach().float().clone(), "sum": torch.full_like(p, 0.5), "steps": 0}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            state["steps"] += 1
            state["sum"].add_(p.grad)
            state["master"].sub_(p.grad.float(), alpha=self.param_groups[0]["lr"])
            p.copy_(state["master"])


class DescentAtOnce(TowardsStart):
    """With initial weights made with the optimizer."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr, at_once=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [FromTheStart, torch.optim.Adagrad, torch.optim.Adam, DescentAtOnce])
def test_a_spoilt_replica_goes_back_whatever_its_optimizer_made_at_once(kind: Any, dtype: torch.dtype) -> None:
    """Its state is then as at the start, but for masters, which are what the weights have become.

    Initial weights pass for masters at first, and are what they were in the end.
    """

    def work(network: SimulatedNetwork) -> tuple[list[str], list[dict[str, Any]], list[dict[str, Any]], Tensor, Tensor]:
        model = small_model(dtype)
        optimizer = kind(model.parameters(), lr=0.05)
        fresh = [copy.deepcopy(optimizer.state.get(p, {})) for p in model.parameters()]
        told: list[str] = []
        back: list[dict[str, Any]] = []
        method = methods.diloco(every=5, outer_lr=1.0, outer_momentum=0.0)
        with method.attach(model, optimizer, network, on_round=lambda round: told.append(round.outcome)) as outer:
            for number in range(50):
                inputs = torch.randn(8, 6, generator=torch.Generator().manual_seed(100 * network.rank + number))
                loss = (model(inputs.to(dtype)) - inputs.to(dtype).sum(1, keepdim=True)).square().mean()
                optimizer.zero_grad()
                (loss * float("nan") if (number, network.rank) == (7, 1) else loss).backward()
                optimizer.step()
                if number == 9:
                    back = [copy.deepcopy(optimizer.state.get(p, {})) for p in model.parameters()]
                    there = flat(model)
            starts = [optimizer.state[p]["p0"] for p in model.parameters() if "p0" in optimizer.state[p]]
            outer.finish(average_weights=True)
        assert all(torch.equal(start, state["p0"]) for start, state in zip(starts, fresh, strict=False))
        return told, fresh, back, there, flat(model)

    (_, *_, one), (told, fresh, back, there, other) = Simulation(2).run(work)
    assert told == ["averaged", "no progress offered", *["averaged"] * 8]
    assert torch.equal(one, other) and torch.isfinite(one).all()
    starts = [state.pop("p0") for state in back if "p0" in state]
    masters = [state.pop("master") for state in back if "master" in state]
    assert not masters or torch.equal(torch.cat([master.flatten() for master in masters]).to(dtype), there)
    assert (kind is DescentAtOnce) == bool(starts) and (kind is FromTheStart) == bool(masters)
    for before, after in zip(fresh, back, strict=True):
        assert set(after) == (set() if kind is torch.optim.Adagrad else set(before) - {"master", "p0"})
        assert all(torch.equal(torch.as_tensor(after[name]), torch.as_tensor(before[name])) for name in after)


def test_a_newcomers_masters_begin_where_the_others_stand(tmp_path: Path) -> None:
    model, network = small_model(), SimulatedNetwork.alone()
    optimizer = FromTheStart(model.parameters(), lr=0.05)
    with methods.diloco(every=5).attach(model, optimizer, network) as outer:
        for number in range(10):
            step_all([optimizer], partial(loss_of, model, 0, number))
        assert isinstance(outer, OuterLoop)
        state, there = SharedState(dict(shared_tensors(outer._weights)), {"step": 10}), flat(model)
    newcomer, run = small_model(), Run(tmp_path)
    optimizer = FromTheStart(newcomer.parameters(), lr=0.0)
    try:
        with methods.diloco(every=5).attach(newcomer, optimizer, run.join()) as outer:
            assert isinstance(outer, ElasticLoop)
            outer.take(state)
            step_all([optimizer], partial(loss_of, newcomer, 0, 10))
            torch.testing.assert_close(flat(newcomer), there, rtol=0, atol=1e-6)
    finally:
        run.close()
    assert not torch.allclose(there, flat(small_model()), atol=1e-2)
