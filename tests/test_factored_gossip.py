"""Factored gossip, against its two mixing matrices; and what its hidden mean is worth."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from farflung import methods
from farflung.methods import Method
from farflung.networks import Conditions, SimulatedNetwork, Simulation
from farflung.outer import MixedAnchors, RandomGroups, Round
from farflung.planner.options import SimulateOptions
from farflung.planner.outlook import outlook
from farflung.planner.simulation import simulate
from farflung.settings import Settings

EVERY, ROUNDS = 2, 9


def trained(method: Method, replicas: int, conditions: Conditions | None = None) -> tuple[Tensor, list[list[Round]]]:
    """Weights and rounds of replicas whose drift is their rank and 1 in each step; one row each."""

    def work(network: SimulatedNetwork) -> tuple[Tensor, list[Round]]:
        model, rounds = nn.Linear(3, 1, bias=False).double(), list[Round]()
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with method.attach(model, optimizer, network, on_round=rounds.append):
            for _ in range(EVERY * ROUNDS):
                model.weight.grad = torch.full_like(model.weight, -1.0 - network.rank)
                optimizer.step()
        return model.weight.detach().flatten().clone(), rounds

    seen = Simulation(replicas, conditions).run(work) if conditions else Simulation(replicas).run(work)
    return torch.stack([weights for weights, _ in seen]), [rounds for _, rounds in seen]


def mixing(rounds: list[list[Round]], number: int, replicas: int) -> np.ndarray:
    """The matrix of a round's groups."""
    matrix = np.eye(replicas)
    for rank in range(replicas):
        for other in (group := rounds[rank][number].group):
            matrix[rank, other] = 1 / len(group)
    return matrix


@pytest.mark.parametrize(("replicas", "group_size"), [(4, 2), (6, 3), (5, 2)])
def test_weights_are_where_the_two_factors_lead(replicas: int, group_size: int) -> None:
    """x ← W1·x; v ← α·v - (x - W2·(x + β·drift)); x ← x + v; and W1 once more at the end."""
    method = methods.factored_gossip(every=EVERY, outer_lr=0.7, outer_momentum=0.4, group_size=group_size)
    weights, rounds = trained(method, replicas)
    x, v, ahead = np.zeros(replicas), np.zeros(replicas), np.zeros(replicas)
    beside = np.full((replicas, replicas), 1 / replicas)
    for number in range(ROUNDS):
        mixed = beside @ x
        ahead = ahead + mixed - x + EVERY * (1.0 + np.arange(replicas))
        x, second = mixed, mixing(rounds, number, replicas)
        meets = np.array([len(rounds[rank][number].group) > 1 for rank in range(replicas)])
        v = np.where(meets, 0.4 * v - (x - second @ (x + 0.7 * (ahead - x))), v)
        x = np.where(meets, x + v, x)
        ahead = np.where(meets, x, ahead)
    ahead += beside @ x - x
    np.testing.assert_allclose(weights.numpy(), np.repeat(ahead[:, None], 3, axis=1), rtol=1e-9)


def test_replicas_are_as_far_apart_as_both_factors_leave_them() -> None:
    """With pairs alone, differences of earlier rounds are still there; a mean among all in between removes them."""
    pairs = methods.noloco(every=EVERY, outer_lr=0.7, outer_momentum=0.0, gamma=1.0)
    in_pairs = replace(pairs, companions=(MixedAnchors(RandomGroups(2, seed=5)),))
    spread = [
        float(trained(method, 8)[0].std(0).max())
        for method in (pairs, in_pairs, methods.factored_gossip(every=EVERY, outer_lr=0.7, outer_momentum=0.0))
    ]
    assert spread[0] > spread[1] > spread[2] and spread[2] < 1e-9


def test_the_mean_among_all_is_hidden_behind_training() -> None:
    """Of two exchanges in a round only that of the pair is waited for."""
    slow = Conditions(bandwidth_mbps=0.001, latency_ms=0, step_ms=1000)
    waited = [
        sum(round.landed - round.waited_from for round in trained(method, 4, slow)[1][0])
        for method in (methods.factored_gossip(every=EVERY), methods.noloco(every=EVERY))
    ]
    assert waited[0] == pytest.approx(waited[1], rel=1e-6)


def test_what_more_is_sent_is_in_the_outlook_and_in_simulated_rounds() -> None:
    listed = SimulateOptions(methods="noloco,factored-gossip,diloco,des-loc", params=1e6, replicas=4, rounds=6)
    sent = {one.name: one.sent for one in simulate(listed)}
    assert sent["factored-gossip"] == pytest.approx(sent["noloco"] + sent["diloco"], rel=0.01), "dense pairs, and all"
    assert sent["des-loc"] > sent["diloco"]
    settings = Settings.of(method="factored-gossip", every=5, model="micro", network="simulated", steps=10)
    pairs = Settings.of(method="noloco", every=5, model="micro", network="simulated", steps=10)
    told = [dict(outlook(each, torch.device("cpu")))["rounds"] for each in (settings, pairs)]
    each = [
        float(str(re.search(r"sends ([0-9.]+) MB in one", text)).partition("sends ")[2].split()[0]) for text in told
    ]
    replicas = settings.run.replicas
    assert each[0] / each[1] == pytest.approx(1 + 2 * (replicas - 1) / replicas, rel=0.02), "anchors go as they are"
