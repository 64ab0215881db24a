"""GASLoC, against its equations with the graphs' Laplacians as matrices."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from farflung import methods
from farflung.codecs import Quantize
from farflung.errors import UserError
from farflung.networks import SimulatedNetwork, Simulation
from farflung.outer import Round, Schedule

EVERY, ROUNDS = 2, 9


def trained(replicas: int, **settings: float) -> tuple[Tensor, list[list[Round]]]:
    """Anchors and rounds of replicas whose drift is their rank and 1 in each step; one row of anchors each."""

    def work(network: SimulatedNetwork) -> tuple[Tensor, list[Round]]:
        model, rounds = nn.Linear(3, 1, bias=False).double(), list[Round]()
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        method = methods.gasloc(every=EVERY, **settings)  # type: ignore[arg-type]
        with method.attach(model, optimizer, network, on_round=rounds.append) as outer:
            for _ in range(EVERY * ROUNDS):
                model.weight.grad = torch.full_like(model.weight, -1.0 - network.rank)
                optimizer.step()
        return outer.anchors[0].clone(), rounds  # type: ignore[attr-defined]

    seen = Simulation(replicas).run(work)
    return torch.stack([anchor for anchor, _ in seen]), [rounds for _, rounds in seen]


@pytest.mark.parametrize(("replicas", "group_size"), [(4, 2), (6, 2), (6, 3), (4, 4)])
@pytest.mark.parametrize("gamma", [1.0, 0.6])
def test_anchors_are_where_the_equations_lead(replicas: int, group_size: int, gamma: float) -> None:
    """y = θ + η·g; θ ← y - α·Λy + γ·(y - y before); Λ of a round's groups, each of which is complete."""
    anchors, rounds = trained(replicas, outer_lr=0.7, outer_momentum=0.4, gamma=gamma, group_size=group_size)
    theta, before = np.zeros(replicas), None
    drift = EVERY * (1.0 + np.arange(replicas))
    for number in range(ROUNDS):
        laplacian = np.eye(replicas)
        for rank in range(replicas):
            for other in rounds[rank][number].group:
                laplacian[rank, other] -= 1 / len(rounds[rank][number].group)
        y = theta + 0.7 * drift
        theta = y - gamma * laplacian @ y + (0.4 * (y - before) if before is not None else 0)
        before = y
    np.testing.assert_allclose(anchors.numpy(), np.repeat(theta[:, None], 3, axis=1), rtol=1e-9)


def test_without_momentum_all_together_are_diloco_without_it() -> None:
    together, _ = trained(4, outer_lr=0.7, outer_momentum=0.0, group_size=4)
    torch.testing.assert_close(together, torch.full((4, 3), 0.7 * 2.5 * EVERY * ROUNDS).double())


def test_whole_weights_are_not_rounded() -> None:
    model = nn.Linear(3, 1)
    with pytest.raises(UserError, match="GossipDrift sends whole weights, in which"):
        method = methods.gasloc(codec=Quantize(bits=8))
        method.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), SimulatedNetwork.alone())
    with pytest.raises(UserError, match=r"outer_momentum is 1\.0; it must be less than 1"):
        methods.gasloc(outer_momentum=1.0)


def test_it_does_not_go_with_an_eager_merge() -> None:
    """That makes messages to compute with, and a replica would take one of these for what it has sent."""
    model = nn.Linear(3, 1)
    late = replace(methods.gasloc(every=4), schedule=Schedule(4, delay=4), merge="eager")  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"merge is Eager\(\), which GossipDrift does not go with; choose another"):
        late.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), SimulatedNetwork.alone())
