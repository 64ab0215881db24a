"""Models that users have wrapped with FSDP2 in loops of their own: two islands of two shards are two whole replicas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from processes import run_replicas
from torch_shard import EVALUATED, METHODS, Model, evaluated, frozen, trained

from farflung.networks import Conditions, Network, Simulation

pytestmark = pytest.mark.slow

NAMES = list(METHODS)


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of four processes came to, under every method."""
    return run_replicas(4, ";".join(NAMES), "", tmp_path_factory.mktemp("shards"), script="torch_shard.py")


@pytest.mark.parametrize("name", NAMES)
def test_shards_train_as_whole_replicas_do(name: str, processes: list[dict[str, Any]]) -> None:
    def whole(network: Network) -> dict[str, torch.Tensor]:
        model = Model()
        trained(name, network, model, network.rank, lambda batch: batch)
        return {key: parameter.detach() for key, parameter in model.named_parameters()}

    tolerance = 1e-5
    replicas = Simulation(2, Conditions()).run(whole)
    apart = max(float((replicas[0][key] - replicas[1][key]).abs().max()) for key in replicas[0])
    assert name == "ddp" or apart > 10 * tolerance  # the last round is some steps ago, or the pair draws near slowly
    for process, seen in enumerate(processes):
        for key, weight in seen[name]["weights"].items():
            torch.testing.assert_close(weight, replicas[process // 2][key], atol=tolerance, rtol=tolerance)
    for island in (processes[:2], processes[2:]):
        one, other = (seen[name]["anchors"] for seen in island)
        assert not one.keys() & other.keys()  # each cell has one keeper
        assert name == "ddp" or sum((one | other).values()) == sum(seen[name]["own"] for seen in island)
    assert processes[0][name]["own"] > processes[1][name]["own"] > 0


@pytest.mark.parametrize("name", ["local", "noloco, resumed"])
def test_weights_are_averaged_at_the_end_with_who_has_the_same_cells(
    name: str, processes: list[dict[str, Any]]
) -> None:
    """Where no step of this session has told islands of each other, and one lists its processes in another order."""
    (before, after), (others, others_after) = processes[0]["ended"][name], processes[2]["ended"][name]
    for key, weight in before.items():
        mean = (weight + others[key]) / 2
        assert not torch.equal(weight, others[key])
        torch.testing.assert_close(after[key], mean)
        torch.testing.assert_close(others_after[key], mean)


@pytest.mark.parametrize("name", EVALUATED)
@pytest.mark.parametrize(("layouts", "first"), [("alike", (0, 0, 1, 1)), ("unlike", (0, 0, 1, 2))])
def test_who_evaluates_leaves_no_weights_out(
    name: str, layouts: str, first: tuple[int, ...], processes: list[dict[str, Any]]
) -> None:
    """A forward pass without gradients leaves FSDP2's root gathered, which then shows others in its shards' place."""

    def whole(network: Network) -> tuple[float, dict[str, torch.Tensor]]:
        loss, weights = evaluated(network, Model(), network.rank, lambda batch: batch, name)
        return loss, {key: weight.detach() for key, weight in weights.items()}

    replicas = Simulation(max(first) + 1, Conditions()).run(whole)
    for seen, replica in zip(processes, first, strict=True):
        loss, weights = seen["evaluated"][layouts, name]
        assert loss == pytest.approx(replicas[replica][0], abs=1e-5)
        for key, weight in weights.items():
            torch.testing.assert_close(weight, replicas[replica][1][key], atol=1e-5, rtol=1e-5)


def test_islands_of_unlike_shards_may_have_frozen_weights(processes: list[dict[str, Any]]) -> None:
    def trained_whole(network: Network) -> dict[str, torch.Tensor]:
        model = Model()
        assert not frozen(network, model, network.rank, lambda batch: batch)
        return {key: parameter.detach() for key, parameter in model.named_parameters()}

    replicas = Simulation(3, Conditions()).run(trained_whole)
    for process, seen in enumerate(processes):
        refusal, weights = seen["frozen"][""]
        assert not refusal
        for key, weight in weights.items():
            torch.testing.assert_close(weight, replicas[max(0, process - 1)][key], atol=1e-5, rtol=1e-5)
        assert "starts from other values of layers.0.weight" in seen["frozen"]["differs"][0]
        assert "layers.0.weight is frozen, and yet it moves, which islands of unlike" in seen["frozen"]["moves"][0]


def test_rounds_between_different_shards_are_refused(processes: list[dict[str, Any]]) -> None:
    for process, seen in enumerate(processes):
        island = [0, 1] if process < 2 else [2, 3]
        assert seen["refusal"] == (
            f"the model is sharded over processes {island[0]} and {island[1]}, which are replicas of this network, "
            f"too; hold rounds between equal shards: network.among([{process % 2}, {process % 2 + 2}])"
        )
