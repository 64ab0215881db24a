"""Steps that follow the last round's mean step, against sums by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from farflung import methods
from farflung.errors import UserError
from farflung.inner import MUON, Muon
from farflung.joint.maps import FirstRows
from farflung.networks import SimulatedNetwork, Simulation
from farflung.outer import AlignedSteps
from farflung.settings import Settings
from farflung.training.cautions import cautions
from farflung.training.core import check_core

EVERY = 4


def walked(align: float, rounds: int, delay: int = 0, lr: float = 0.1, later: float = 1.0) -> Tensor:
    """Anchors after each round of one number, whose gradient is -1 in the first round, and +1 later; a row a replica.

    The learning rate is `later` times as large after the first round.
    """

    def work(network: SimulatedNetwork) -> Tensor:
        model = nn.Linear(1, 1, bias=False).double()
        nn.init.zeros_(model.weight)
        optimizer = Muon(model.named_parameters(), lr=lr, weight_decay=0.0, momentum=0.0, nesterov=False, align=align)
        settings = {"method": "diloco", "every": EVERY, "delay": delay, "outer_lr": 1.0, "outer_momentum": 0.0}
        method = Settings.of(**settings, inner="muon", muon_align=align or None).method()
        seen = []
        with method.attach(model, optimizer, network) as outer:
            for step in range(EVERY * rounds):
                model.weight.grad = torch.full_like(model.weight, 1.0 if step >= EVERY else -1.0)
                optimizer.step()
                seen.append(outer.anchors[0].clone())  # type: ignore[attr-defined]
                if step == EVERY - 1:
                    optimizer.param_groups[0]["lr"] *= later
        return torch.cat(seen[EVERY - 1 :: EVERY])

    return torch.stack(Simulation(2).run(work))


@pytest.mark.parametrize("align", [0.25, 0.5, 1.0])
def test_a_step_is_in_part_the_last_rounds_mean_step(align: float) -> None:
    """Rounds go D, then (1 - α)·(-D) + α·D', where D' is how far the round before went."""
    anchors = walked(align, 5)
    first = float(walked(0.0, 1)[0, 0])
    position, last, wanted = first, first, [first]
    for _ in range(4):
        last = -(1 - align) * first + align * last
        position += last
        wanted.append(position)
    torch.testing.assert_close(anchors[0], torch.tensor(wanted).double(), rtol=1e-6, atol=1e-9)
    assert first > 0.05 and torch.equal(anchors[0], anchors[1])


def test_mean_steps_shrink_with_the_learning_rate() -> None:
    anchors = walked(1.0, 2, later=0.5)[0]
    assert float(anchors[1] - anchors[0]) == pytest.approx(0.5 * float(anchors[0]))


def test_a_matrix_may_get_its_first_gradient_after_a_round() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    optimizer = Muon(model.named_parameters(), lr=0.1, align=0.5)
    method = Settings.of(method="diloco", every=2, inner="muon", muon_align=0.5).method()
    begin = model[1].weight.detach().clone()
    with method.attach(model, optimizer, SimulatedNetwork.alone()):
        for step in range(4):
            model[0](torch.ones(1, 4)).sum().backward()
            if step >= 2:
                model[1](torch.ones(1, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            assert torch.equal(model[1].weight, begin) is (step < 2)


def test_it_is_only_asked_of_muon_where_rounds_are_held() -> None:
    assert Settings.of(method="diloco", muon_align=0.5).method().companions == (AlignedSteps(),)
    assert Settings.of(method="ddp", muon_align=0.5).method().companions == methods.ddp().companions


@pytest.mark.parametrize("method", ["ddp", "local", "ist", "resist"])
def test_it_is_told_where_rounds_tell_muon_nothing(method: str) -> None:
    (told,) = cautions(Settings.of(method=method, muon_align=0.5, steps=100))
    assert told == f"muon_align is 0.5, but {method} averages no matrices in rounds; it changes nothing; leave it out"


@pytest.mark.parametrize(("method", "count"), [("ddp", 1), ("local", 1), ("ist", 0), ("diloco", 0)])
def test_it_is_told_where_no_round_averages_slow_momenta(method: str, count: int) -> None:
    told = cautions(Settings.of(method=method, slow_share=0.5, slow_rounds=2, steps=100))
    assert (
        told == [f"slow_rounds is 2, but {method} averages no slow momenta; it changes nothing; leave it out"][:count]
    )


def test_it_is_told_where_nobody_follows() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    method = replace(methods.diloco(), companions=(AlignedSteps(),))
    with pytest.warns(UserWarning, match="none that is attached has an align above 0, so nothing follows; give attach"):
        method.attach(model, optimizer, SimulatedNetwork.alone())


def test_a_core_whose_rest_is_left_out_of_some_steps_is_refused() -> None:
    """A round's movement of the rest was divided by all steps: its own steps shrank to two thirds at align=0.5."""
    model = nn.Sequential(FirstRows(nn.Linear(4, 4, bias=False), 2))
    optimizer = MUON.having(muon_align=0.5).make(model.named_parameters(), lr=0.1, weight_decay=0.0)
    with pytest.raises(UserError, match=r"trained without its rest; leave out muon_align \(AlignedSteps\), or core"):
        Settings.of(method="diloco", muon_align=0.5).method().attach(model, optimizer, SimulatedNetwork.alone())
    with pytest.raises(UserError, match="core is lowrank4, which does not go with muon_align; leave one of them out"):
        check_core(Settings.of(model="micro", core="lowrank4", muon_align=0.5))
