"""A slow momentum beside the fast one, against torch's AdamW, its formula in numpy, and replicas that average it."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from farflung.adamw import SlowAdamW
from farflung.errors import UserError
from farflung.inner import ADAMW, MUON, Muon
from farflung.networks import Group, Pending, SimulatedNetwork, Simulation
from farflung.outer import Average, AveragedMoments, Method, Schedule
from farflung.settings import Settings

STEPS = 30
SETTINGS: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.1}


def gradient(step: int, shape: tuple[int, ...] = (4, 3)) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def trained(make: Any, steps: int = STEPS, resumed_at: int | None = None) -> Tensor:
    weight = nn.Parameter(torch.ones(4, 3, dtype=torch.float64))
    optimizer = make([weight])
    for step in range(steps):
        if step == resumed_at:
            torch.save(optimizer.state_dict(), file := io.BytesIO())
            file.seek(0)
            optimizer = make([weight])
            optimizer.load_state_dict(torch.load(file, weights_only=True))
        weight.grad = gradient(step)
        optimizer.step()
    return weight.detach()


def test_a_slow_momentum_that_is_as_fast_changes_nothing() -> None:
    slow = trained(lambda p: SlowAdamW(p, slow_share=0.7, slow_momentum=0.9, **SETTINGS))
    torch.testing.assert_close(slow, trained(lambda p: torch.optim.AdamW(p, betas=(0.9, 0.95), **SETTINGS)))
    plain = {"momentum": 0.9, "nesterov": False, **SETTINGS}
    muon = trained(lambda p: Muon(p, slow_share=0.7, slow_momentum=0.9, **plain))
    torch.testing.assert_close(muon, trained(lambda p: Muon(p, **plain)), rtol=1e-3, atol=1e-4)


def test_steps_follow_a_mix_of_both_momenta() -> None:
    theta, fast, slow, square = np.ones((4, 3)), *(np.zeros((4, 3)) for _ in range(3))
    for step in range(STEPS):
        g, t = gradient(step).numpy(), step + 1
        fast, slow, square = 0.9 * fast + 0.1 * g, 0.99 * slow + 0.01 * g, 0.95 * square + 0.05 * g**2
        along = 0.4 * fast / (1 - 0.9**t) + 0.6 * slow / (1 - 0.99**t)
        theta = theta * (1 - 0.05 * 0.1) - 0.05 * along / (np.sqrt(square / (1 - 0.95**t)) + 1e-8)
    seen = trained(lambda p: SlowAdamW(p, slow_share=0.6, slow_momentum=0.99, **SETTINGS))
    np.testing.assert_allclose(seen.numpy(), theta, rtol=1e-9)


def test_muon_goes_along_the_orthogonal_factor_of_the_mix() -> None:
    weight = nn.Parameter(torch.zeros(4, 3, dtype=torch.float64))
    muon = Muon([weight], lr=1.0, weight_decay=0.0, momentum=0.8, nesterov=False, slow_share=1.0, slow_momentum=0.5)
    mean = torch.zeros(4, 3, dtype=torch.float64)
    for step in range(3):
        before, weight.grad = weight.detach().clone(), gradient(step)
        muon.step()
        mean = 0.5 * mean + 0.5 * gradient(step)
        u, _, v = torch.linalg.svd(mean, full_matrices=False)
        along = (before - weight.detach()) / (0.2 * 4**0.5)
        assert float((along * (u @ v)).sum()) > 0.9 * float(along.norm() * (u @ v).norm())


@pytest.mark.parametrize("inner", ["adamw", "muon"])
def test_it_goes_on_from_its_state_bit_for_bit(inner: str) -> None:
    made = {"adamw": ADAMW, "muon": MUON}[inner].having(slow_share=0.5).make
    make = lambda p: made([("layers.0.weight", p[0])], **SETTINGS)  # noqa: E731
    assert torch.equal(trained(make), trained(make, resumed_at=7))


def test_replicas_average_it_at_its_rhythm() -> None:
    """After each second round it is the same; in between it is each replica's own, as the fast one always is."""
    method = Settings.of(method="diloco", every=2, inner="adamw", slow_share=0.5, slow_rounds=2).method()
    assert method.companions == (AveragedMoments((("slow_momentum", 2), ("exp_avg_sq", 2))),)

    def work(network: SimulatedNetwork) -> list[dict[str, Tensor]]:
        model = nn.Linear(3, 4, bias=False).double()
        nn.init.ones_(model.weight)
        optimizer = method.inner.make(model.named_parameters(), lr=0.1, weight_decay=0.0)
        seen = []
        with method.attach(model, optimizer, network):
            for step in range(8):
                model.weight.grad = gradient(100 * network.rank + step)
                optimizer.step()
                seen.append({kind: one.clone() for kind, one in optimizer.state[model.weight].items()})
        return seen

    one, other = Simulation(2).run(work)
    same = [torch.equal(a["slow_momentum"], b["slow_momentum"]) for a, b in zip(one, other, strict=True)]
    assert same == [False, False, False, True, False, False, False, True]
    assert same == [torch.equal(a["exp_avg_sq"], b["exp_avg_sq"]) for a, b in zip(one, other, strict=True)]
    assert not any(torch.equal(a["exp_avg"], b["exp_avg"]) for a, b in zip(one, other, strict=True))


def test_with_other_moments_that_are_averaged_each_exchange_has_a_key_of_its_own() -> None:
    """Two averaged moments at one round, under one key; what the one averages was no part of what replicas compare."""
    method = Settings.of(method="des-loc", every=1, inner="adamw", slow_share=0.5, slow_rounds=4).method()
    (averaged,) = method.companions
    assert isinstance(averaged, AveragedMoments)
    kinds = {"exp_avg": [3], "momentum_buffer": [3], "exp_avg_sq": [6, 4], "slow_momentum": [4]}
    assert averaged.by_kind() == kinds

    def work(network: SimulatedNetwork) -> tuple[list[str], list[str]]:
        keys, exchange = [], network.exchange

        def noted(packet: Tensor, group: Group, key: str) -> Pending[dict[int, Tensor]]:
            keys.append(key)
            return exchange(packet, group, key)

        network.exchange = noted  # type: ignore[method-assign]
        model = nn.Linear(3, 4, bias=False)
        optimizer = method.inner.make(model.named_parameters(), lr=0.1, weight_decay=0.0)
        with method.attach(model, optimizer, network) as outer:
            for step in range(12):
                model.weight.grad = gradient(100 * network.rank + step).float()
                optimizer.step()
        return keys, [str(outer.choices()["AveragedMoments"])]

    (keys, (told,)), _ = Simulation(2).run(work)
    assert len(keys) == len(set(keys))
    assert "exp_avg'" in told and "slow_momentum" in told


def test_two_companions_of_a_kind_are_refused() -> None:
    moments = AveragedMoments((("exp_avg", 3),)), AveragedMoments((("exp_avg_sq", 6),))
    with pytest.raises(UserError, match="AveragedMoments twice, and their exchanges one name; give one that does both"):
        Method(Schedule(1), outer=Average, companions=moments)


def furthest(make: Any, steps: int, seen: int) -> float:
    """How far a weight goes whose gradient comes in the first steps only, as the embedding of a rare token."""
    weight = nn.Parameter(torch.zeros(1, 1))
    optimizer = make([("embedding", weight)], lr=1.0, weight_decay=0.0)
    for step in range(steps):
        weight.grad = torch.full((1, 1), 1e-3 * (step < seen))
        optimizer.step()
    return abs(float(weight))


@pytest.mark.parametrize("inner", ["adamw", "muon"])
def test_what_gets_no_gradients_any_more_stays_near(inner: str) -> None:
    """The size of gradients was forgotten before the slow momentum was, and divided that by next to nothing."""
    plain = {"adamw": ADAMW, "muon": MUON}[inner]
    slow = plain.having(slow_share=0.5)
    assert furthest(slow.make, 800, 1) < 5 * furthest(plain.make, 800, 1)


def test_what_only_another_replica_has_gradients_of_goes_as_far_as_there() -> None:
    """A replica had the others' slow momentum, and no size of gradients to divide it by: its weights went to 10⁴."""
    method = Settings.of(method="diloco", every=2, inner="adamw", slow_share=0.5, slow_rounds=1).method()

    def work(network: SimulatedNetwork) -> float:
        model = nn.Linear(2, 2, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = method.inner.make(model.named_parameters(), lr=0.01, weight_decay=0.0)
        with method.attach(model, optimizer, network):
            for _ in range(20):
                model.weight.grad = torch.tensor([[float(network.rank), 1.0], [1.0, 1.0]]) * 1e-3
                optimizer.step()
        return float(model.weight.abs().max())

    assert max(Simulation(2).run(work)) < 0.01 * 20 * 2


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"slow_momentum": 0.99}, "slow_momentum is 0.99, but there is no slow momentum; add --slow-share 0.5"),
        ({"slow_rounds": 3}, "slow_rounds is 3, but there is no slow momentum; add --slow-share"),
        ({"inner": "sign", "slow_share": 0.5}, "slow_share is 0.5, which only Muon and AdamW have; leave it out"),
    ],
)
def test_what_would_be_ignored_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        Settings.of(**given).method()
