"""NoLoCo and DiLoCo against an implementation of the papers' equations that shares no code with farflung."""

import itertools
from typing import Any

import numpy as np
import pytest
import reference
import torch
from problem import flat, inner_steps, small_model

from bench.models.stability import noise_spread
from farflung import methods
from farflung.codecs import codec_named
from farflung.methods import Method
from farflung.networks import SimulatedNetwork, Simulation

EVERY, ROUNDS = 4, 10


def trajectory(method: Method, replicas: int) -> list[list[tuple[np.ndarray, np.ndarray, tuple[int, ...]]]]:
    """For each round and replica: weights before it, weights after it, and its group."""

    def work(network: SimulatedNetwork) -> list[Any]:
        model = small_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        rounds: list[Any] = []
        seen = []
        before = {"weights": flat(model)}
        # Registered first, so it sees the weights before the round that the same step brings.
        optimizer.register_step_post_hook(lambda *_: before.update(weights=flat(model)))
        with method.attach(model, optimizer, network, on_round=rounds.append):
            for step in range(EVERY * ROUNDS):
                inner_steps(model, optimizer, network.rank, range(step, step + 1))
                if (step + 1) % EVERY == 0:
                    seen.append((before["weights"].double().numpy(), flat(model).double().numpy(), rounds[-1].group))
        return seen

    by_replica = Simulation(replicas).run(work)
    return [[by_replica[rank][r] for rank in range(replicas)] for r in range(ROUNDS)]


def start(replicas: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    weights = flat(small_model()).double().numpy()
    return [weights.copy() for _ in range(replicas)], [np.zeros_like(weights) for _ in range(replicas)]


@pytest.mark.parametrize(("replicas", "size"), [(4, 2), (8, 4), (5, 2), (4, 4)])
@pytest.mark.parametrize("settings", [(0.7, 0.5, 0.7), (0.9, 0.3, 0.4)])
def test_noloco_is_the_papers_equations(replicas: int, size: int, settings: tuple[float, float, float]) -> None:
    lr, momentum, gamma = settings
    method = methods.noloco(EVERY, lr, momentum, gamma, size)
    anchors, momenta = start(replicas)
    for seen in trajectory(method, replicas):
        groups = sorted({group for _, _, group in seen if group})
        weights = [before for before, _, _ in seen]
        anchors, momenta = reference.noloco_round(anchors, momenta, weights, groups, lr, momentum, gamma)
        for rank, (before, after, group) in enumerate(seen):
            np.testing.assert_allclose(after, anchors[rank] if group else before, rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("replicas", "codec", "seed"),
    [
        (2, "bfloat16", 0),
        (3, "bfloat16", 0),
        (3, "float16", 1),
        (3, "modulo4", 4),
        (3, "modulo4x2", 2),
        (4, "int8", 1),
        (5, "int8", 4),
        (5, "modulo4", 4),
        (6, "bfloat16", 0),
        (7, "bfloat16", 0),
        (7, "ef-int4", 2),
    ],
)
def test_what_is_rounded_in_gossip_takes_nothing_from_the_progress_of_any_number(
    replicas: int, codec: str, seed: int
) -> None:
    """Of an odd number one sits out, and its anchor stays behind: it must not only draw others back to it."""
    steps, every, lr = 200, 5, 2e-5

    def gradient(rank: int, step: int) -> np.ndarray:
        return 1 + 0.3 * np.random.default_rng([rank, step]).standard_normal(600)

    def work(network: SimulatedNetwork) -> tuple[float, list[tuple[int, ...]]]:
        weights = torch.nn.Parameter(torch.ones(600))
        model = torch.nn.ParameterList([weights])
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        groups: list[tuple[int, ...]] = []
        method = methods.noloco(every, codec=codec_named(codec), seed=seed)
        with method.attach(model, optimizer, network, on_round=lambda round: groups.append(round.group)):
            for step in range(steps):
                weights.grad = torch.from_numpy(gradient(network.rank, step)).float()
                optimizer.step()
        return 1 - float(weights.detach().double().mean()), groups

    moved, groups = zip(*Simulation(replicas).run(work), strict=True)
    anchors, momenta, weights = ([np.full(600, x) for _ in range(replicas)] for x in (1.0, 0.0, 1.0))
    for step in range(steps):
        weights = [before - lr * gradient(rank, step) for rank, before in enumerate(weights)]
        if (step + 1) % every == 0:
            met = sorted({of_replica[step // every] for of_replica in groups} - {()})
            anchors, momenta = reference.noloco_round(anchors, momenta, weights, met, 0.7, 0.5, 0.7)
            for rank in itertools.chain(*met):
                weights[rank] = anchors[rank].copy()
    assert np.mean(moved) == pytest.approx(1 - np.mean(weights), rel=0.01)


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_diloco_is_the_papers_equations(replicas: int) -> None:
    anchors, velocities = start(replicas)
    for seen in trajectory(methods.diloco(EVERY, 0.7, 0.9), replicas):
        anchors, velocities = reference.diloco_round(anchors, velocities, [before for before, _, _ in seen], 0.7, 0.9)
        for rank, (_, after, _) in enumerate(seen):
            np.testing.assert_allclose(after, anchors[rank], rtol=0, atol=1e-6)


@pytest.mark.parametrize("delay", [1, 3])
def test_a_delayed_round_uses_the_weights_at_its_start_and_keeps_what_came_after(delay: int) -> None:
    """Replayed with given pseudo-progress in place of an inner optimizer, so that every weight is known."""
    generator = np.random.default_rng(0)
    moves = generator.standard_normal((2, EVERY * ROUNDS + delay, 5)) * 0.1
    method = methods.noloco(EVERY, 0.7, 0.5, 0.7, delay=delay)

    def work(network: SimulatedNetwork) -> np.ndarray:
        weight = torch.nn.Parameter(torch.zeros(5))
        model = torch.nn.ParameterList([weight])
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with method.attach(model, optimizer, network):
            for move in moves[network.rank]:
                weight.grad = -torch.from_numpy(move).float()
                optimizer.step()
        return weight.detach().double().numpy()

    seen = Simulation(2).run(work)
    anchors, momenta = [np.zeros(5)] * 2, [np.zeros(5)] * 2
    weights, at_start = [np.zeros(5)] * 2, [np.zeros(5)] * 2
    for step in range(1, EVERY * ROUNDS + delay + 1):
        weights = [weights[i] + moves[i, step - 1] for i in range(2)]
        if step > delay and (step - delay) % EVERY == 0:
            anchors, momenta = reference.noloco_round(anchors, momenta, at_start, [(0, 1)], 0.7, 0.5, 0.7)
            weights = [reference.apply_delayed(weights[i], at_start[i], anchors[i]) for i in range(2)]
        if step % EVERY == 0:
            at_start = [w.copy() for w in weights]
    for i in range(2):
        np.testing.assert_allclose(seen[i], weights[i], rtol=0, atol=1e-5)


@pytest.mark.slow
def test_gamma_in_the_stable_range_keeps_replicas_together_and_outside_does_not() -> None:
    pairs = {gamma: noise_spread(2, gamma, rounds=160, replicas=32) for gamma in (0.0, 0.3, 0.7, 1.2, 1.8)}
    fours = {gamma: noise_spread(4, gamma, rounds=160, replicas=32) for gamma in (0.3, 1.0, 1.8, 2.4)}
    assert pairs[0.7] < pairs[0.3] < pairs[0.0] and pairs[0.7] < pairs[1.2]
    assert pairs[1.8] > 1e4
    assert fours[1.0] < fours[0.3] and fours[1.8] < 100 and fours[2.4] > 1e4
