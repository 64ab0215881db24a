"""Moments of inner optimizers, averaged at rhythms of their own, against a loop over replicas in plain torch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from problem import flat, inner_steps, small_model
from torch import Tensor, nn

from farflung import methods
from farflung.errors import UserError
from farflung.networks import Conditions, SimulatedNetwork, Simulation
from farflung.networks.simulator.conditions import Death
from farflung.outer import AveragedMoments, Round
from farflung.settings import Settings
from farflung.training.cautions import cautions

EVERY, STEPS, REPLICAS = 2, 26, 3
RHYTHMS = {"exp_avg": 3, "exp_avg_sq": 6}


def trained(rhythms: dict[str, int]) -> list[Tensor]:
    """Replicas whose weights are averaged after each second step, and their moments at these rhythms."""
    models = [small_model() for _ in range(REPLICAS)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]
    for step in range(STEPS):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            inner_steps(model, optimizer, rank, range(step, step + 1))
        if (step + 1) % EVERY:
            continue
        round = (step + 1) // EVERY
        for same in zip(*(model.parameters() for model in models), strict=True):
            states = [optimizer.state[one] for optimizer, one in zip(optimizers, same, strict=True)]
            kept = [[state[kind] for state in states] for kind, every in rhythms.items() if round % every == 0]
            for tensors in ([one.data for one in same], *kept):
                mean = torch.stack(tensors).double().mean(0)
                for tensor in tensors:
                    tensor.copy_(mean)
    return [flat(model) for model in models]


def test_each_kind_is_averaged_at_its_own_rhythm() -> None:
    def work(network: SimulatedNetwork) -> Tensor:
        model = small_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with methods.des_loc(every=EVERY).attach(model, optimizer, network):
            inner_steps(model, optimizer, network.rank, range(STEPS))
        return flat(model)

    seen, wanted = Simulation(REPLICAS).run(work), trained(RHYTHMS)
    for one, other, plain in zip(seen, wanted, trained({}), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=2e-5)
        assert float((one - plain).norm()) > 20 * float((one - other).norm())


def test_what_only_others_have_gradients_of_waits_for_a_second_moment() -> None:
    """First moments are averaged before second ones: divided by none, they sent the weight of a rare token to 10⁴."""

    def work(network: SimulatedNetwork) -> float:
        model = nn.Linear(2, 2, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with methods.des_loc(every=EVERY).attach(model, optimizer, network):
            for _ in range(STEPS):
                model.weight.grad = torch.tensor([[float(network.rank), 1.0], [1.0, 1.0]]) * 1e-3
                optimizer.step()
        return float(model.weight.detach().abs().max())

    assert max(Simulation(2).run(work)) < 1e-2 * STEPS * 2


def test_one_whose_moments_are_not_finite_takes_those_of_the_others_whole() -> None:
    """Also its squares, though these are finite, and larger than theirs."""

    def work(network: SimulatedNetwork) -> list[Tensor]:
        model = small_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

        def spoils(*_: object) -> None:
            for state in optimizer.state.values():
                if network.rank and int(state["step"]) == EVERY:
                    state["exp_avg"].fill_(torch.inf)
                    state["exp_avg_sq"].fill_(1e20)

        optimizer.register_step_post_hook(spoils)
        method = replace(
            methods.des_loc(every=EVERY), companions=(AveragedMoments(tuple((kind, 1) for kind in RHYTHMS)),)
        )
        with method.attach(model, optimizer, network):
            inner_steps(model, optimizer, 0, range(EVERY))
        return [state[kind] for state in optimizer.state.values() for kind in RHYTHMS]

    one, other = Simulation(2).run(work)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True)) and max(map(torch.max, one)) < 1e3


def test_after_a_death_nobody_waits_for_the_moments_of_one_that_knew_of_it_before_the_round() -> None:
    """Replica 2 waits in round 3 when 1 dies, and loses it; 0 comes to it later, and does not count on 1."""

    def work(network: SimulatedNetwork) -> list[Round]:
        model, rounds = small_model(), list[Round]()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with methods.des_loc(every=10).attach(model, optimizer, network, on_round=rounds.append):
            inner_steps(model, optimizer, network.rank, range(60))
        return rounds

    conditions = Conditions(step_ms=100, speeds=(0.5, 1, 1), deaths=(Death(1, 5.6),))
    slow, _, fast = Simulation(3, conditions).run(work)
    assert [round.round for round in fast if round.lost] == [3] and fast[2].missing == (1,)
    assert max(round.landed - round.waited_from for round in [*slow, *fast]) < 5


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(UserError, match="exp_avg is to be averaged each 0 rounds; choose at least 1"):
        AveragedMoments((("exp_avg", 0),))
    with pytest.raises(UserError, match="goes along with rounds, and a method without `outer` has none"):
        replace(methods.ddp(), companions=(AveragedMoments(()),))


def test_it_is_told_where_there_is_nothing_to_average(caplog: pytest.LogCaptureFixture) -> None:
    def work(network: SimulatedNetwork) -> None:
        model = small_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        with methods.des_loc(every=EVERY).attach(model, optimizer, network):
            inner_steps(model, optimizer, network.rank, range(STEPS))

    Simulation(2).run(work)
    told = "no attached optimizer keeps exp_avg or momentum_buffer or exp_avg_sq, so only weights are averaged"
    assert [told in line for line in caplog.messages] == [True, True], "once a replica"


@pytest.mark.parametrize(("inner", "count"), [("sign", 1), ("adamw", 0), ("muon", 0), ("gpa", 0), (None, 0)])
def test_it_is_told_before_the_start_where_an_inner_optimizer_keeps_none(inner: str | None, count: int) -> None:
    told = (
        "des-loc averages exp_avg or momentum_buffer or exp_avg_sq, and inner sign keeps none, so that only weights "
        "are averaged; give another --inner, such as adamw"
    )
    assert cautions(Settings.of(method="des-loc", inner=inner, steps=100)) == [told][:count]
