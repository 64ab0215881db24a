"""Sampled values, and rounds that land only where something was sent, or turned towards the outer momentum."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from problem import replica
from torch import Tensor, nn

from farflung import methods
from farflung.codecs import Sampled
from farflung.errors import UserError
from farflung.methods import Method
from farflung.networks import SimulatedNetwork, Simulation
from farflung.outer import Average, KeepTurned, Schedule
from farflung.outer import Method as OwnMethod


def places(codec: Sampled, round: int, size: int = 200) -> list[int]:
    codec.set_round(round)
    x = torch.ones(size)
    return codec.decode(codec.encode([x]), [x])[0].nonzero().flatten().tolist()


def test_replicas_draw_the_same_places_others_in_each_round_and_all_alike() -> None:
    one, other = Sampled(share=0.05), Sampled(share=0.05)
    one.seed(1)
    other.seed(2)
    drawn = [places(one, round) for round in range(400)]
    assert drawn == [places(other, round) for round in range(400)]
    assert all(len(some) == 10 and len({place // 20 for place in some}) == 10 for some in drawn)
    counts = torch.tensor([place for some in drawn for place in some]).bincount(minlength=200)
    assert int(counts.min()) > 4 and int(counts.max()) < 45  # 20 are expected of each, with a deviation of 4.4


def test_what_is_drawn_comes_as_it_is() -> None:
    codec, x = Sampled(share=0.1), torch.randn(30, 40)
    back = codec.decode(codec.encode([x]), [x])[0]
    assert torch.equal(back[back != 0], x[back != 0]) and int((back != 0).sum()) == 120
    assert torch.equal(Sampled(share=1.0).decode(Sampled(share=1.0).encode([x]), [x])[0], x)


def walked(method: Method, steps: int, replicas: int = 3) -> Tensor:
    """Where replicas end whose steps are of lengths of their own, one row each; they would be at steps·(1 + rank)."""

    def work(network: SimulatedNetwork) -> Tensor:
        weight = nn.Linear(50, 1, bias=False).double()
        nn.init.zeros_(weight.weight)
        optimizer = torch.optim.SGD(weight.parameters(), lr=1.0)
        with method.attach(weight, optimizer, network):
            for _ in range(steps):
                weight.weight.grad = torch.full_like(weight.weight, -1.0 - network.rank)
                optimizer.step()
        return weight.weight.detach().flatten()

    return torch.stack(Simulation(replicas).run(work))


@pytest.mark.parametrize("steps", [1, 7, 40])
def test_sparta_averages_what_it_sends_leaves_the_rest_and_moves_no_mean(steps: int) -> None:
    came = walked(methods.sparta(codec="random10"), steps)
    torch.testing.assert_close(came.mean(0), torch.full((50,), 2.0 * steps).double(), rtol=1e-6, atol=0)
    alike = (came[0] == came[1]) & (came[1] == came[2])
    assert int(alike.sum()) == 5
    if steps == 1:
        alone = torch.tensor([1.0, 2.0, 3.0])[:, None].expand(3, 50).double()
        assert torch.equal(came[:, ~alike], alone[:, ~alike])


def test_a_late_round_lands_on_top_of_what_was_trained_meanwhile_where_it_was_sent() -> None:
    """Sent after 4 steps, landed after 6: the mean of 4 steps, 8, and two own ones; elsewhere 6 own ones."""
    method = methods.diloco(every=4, delay=2, merge="sent", codec="random20", outer_lr=1.0, outer_momentum=0.0)
    came = walked(method, 6)
    own = torch.tensor([1.0, 2.0, 3.0]).double()
    sent = came[0] != 6.0
    assert int(sent.sum()) == 10
    torch.testing.assert_close(came[:, sent], (8.0 + 2 * own)[:, None].expand(3, 10))
    torch.testing.assert_close(came[:, ~sent], (6 * own)[:, None].expand(3, 40))


def test_what_would_count_twice_or_is_no_pseudo_gradient_is_refused() -> None:
    with pytest.raises(UserError, match="would count twice; choose a codec without feedback"):
        methods.diloco(codec="ef-topk2-int2", merge="sent")
    model = nn.Linear(2, 2)
    for merge in ("sent", "turned"):
        method = OwnMethod(Schedule(every=2, delay=1), outer=Average, merge=merge)  # type: ignore[arg-type]
        with pytest.raises(UserError, match="Average sends whole weights; choose another, such as kept"):
            method.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), SimulatedNetwork.alone())


@pytest.mark.parametrize("make", [partial(torch.optim.SGD, lr=0.7), partial(torch.optim.Adam, lr=0.1)])
def test_where_there_is_no_outer_momentum_nothing_can_be_turned_towards_it(make: Any) -> None:
    """It was no other merge than kept then, without a word."""
    model = nn.Linear(2, 2)
    method = OwnMethod(Schedule(every=2, delay=1), outer=make, merge="turned")  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"towards the outer momentum, and .* has none; give an outer_momentum above 0"):
        method.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), SimulatedNetwork.alone())


def reference(gradient: list[float], momentum: list[float], merge: KeepTurned) -> list[float]:
    length, other = math.hypot(*gradient), math.hypot(*momentum)
    if not length or not other:
        return gradient
    u, v = [x / length for x in gradient], [x / other for x in momentum]
    cosine, share = sum(map(lambda a, b: a * b, u, v)), length / (length + other)
    if cosine >= merge.aligned:
        return gradient
    if cosine < 0:
        most = min(1.0, -merge.shrinking * cosine * share)
        return [g - most * cosine * length * b for g, b in zip(gradient, v, strict=True)]
    part = min(1.0, merge.turning * (1 - cosine) * share)
    turned = [(1 - part) * a + part * b for a, b in zip(u, v, strict=True)]
    return [length * x / math.hypot(*turned) for x in turned]


numbers = st.lists(st.integers(-16, 16).map(lambda number: number / 4), min_size=3, max_size=3)


@given(gradient=numbers, momentum=numbers)
def test_a_late_gradient_is_kept_turned_or_shrunk_by_its_cosine_with_the_momentum(
    gradient: list[float], momentum: list[float]
) -> None:
    given_one, along = torch.tensor([gradient, momentum], dtype=torch.float64)
    at_the_edge = 2 * float(given_one @ along) - float(given_one.norm() * along.norm())
    assume(abs(at_the_edge) > 1e-6 or not any(gradient) or not any(momentum))
    turned = given_one.clone()
    KeepTurned().turn(turned, along)
    expected = torch.tensor(reference(gradient, momentum, KeepTurned())).double()
    torch.testing.assert_close(turned, expected, rtol=1e-5, atol=1e-6)
    assert turned.norm() <= given_one.norm() * (1 + 1e-9)
    assert turned @ along >= given_one @ along - 1e-9


@pytest.mark.parametrize("size", [2.0**-100, 1.0, 2.0**100, 2.0**120])
@pytest.mark.parametrize("of_momentum", [2.0**-100, 1.0, 2.0**100])
@pytest.mark.parametrize("momentum", [[-1.0, -2.0, -3.0], [4.0, -3.0, 1.0], [0.0, 0.0, 0.0]])
def test_a_late_gradient_is_turned_whatever_its_size(size: float, of_momentum: float, momentum: list[float]) -> None:
    gradient = torch.tensor([1.0, 2.0, 3.0]) * size
    expected, along = gradient.double(), torch.tensor(momentum) * of_momentum
    KeepTurned().turn(expected, along.double())
    KeepTurned().turn(gradient, along)
    torch.testing.assert_close(gradient / size, (expected / size).float())
    KeepTurned().turn(torch.empty(0), torch.empty(0))


def test_only_late_rounds_are_turned() -> None:
    def trained(merge: str) -> Tensor:
        return Simulation(2).run(replica(lambda: methods.diloco(every=4, delay=4, merge=merge), 20))[0].weights

    assert not torch.equal(trained("turned"), trained("kept"))
    with pytest.raises(UserError, match=r"^merge 'turned' is for rounds that are late[^\n]*give a delay, or leave"):
        methods.diloco(every=4, merge="turned")
