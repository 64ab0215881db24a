"""What goes wrong in one process of an island is known to all of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run_replicas
from torch import Tensor
from torch_mishap import always, bad_gradient, never, once, trained
from torch_shard import Model

from farflung.networks import Conditions, Network, Simulation

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("case", "spoils", "replicas", "replica_of"),
    [
        ("spoilt", once, 2, (0, 0, 1, 1)),
        ("spoilt, HSDP", once, 1, (0, 0, 0, 0)),
        ("diverged, HSDP", always, 1, (0, 0, 0, 0)),
    ],
)
def test_what_one_process_says_of_training_holds_for_its_whole_replica(
    case: str, spoils: Callable[[int], bool], replicas: int, replica_of: tuple[int, ...], tmp_path: Path
) -> None:
    def one(network: Network) -> tuple[list[Any], dict[str, Tensor]]:
        return trained(network, Model(), network.rank, lambda batch: batch, spoils if network.rank == 0 else never)

    expected = Simulation(replicas, Conditions()).run(one)
    assert any("my own check" in str(said) for said in expected[0][0])
    for seen, replica in zip(run_replicas(4, case, "", tmp_path, script="torch_mishap.py"), replica_of, strict=True):
        (said, weights), (expected_said, expected_weights) = seen[case], expected[replica]
        assert said == expected_said
        for name, weight in weights.items():
            torch.testing.assert_close(weight, expected_weights[name], atol=1e-5, rtol=1e-5)


def test_processes_of_a_replica_that_are_given_other_methods_are_told(tmp_path: Path) -> None:
    for process, seen in enumerate(run_replicas(4, "unlike", "", tmp_path, script="torch_mishap.py")):
        for what, said in seen["unlike"].items():
            assert said.startswith(f"process 1 of replica {process // 2} is given another {what} than its process 0: ")
            assert said.endswith("; give all processes of a replica the same method and settings")
        assert seen["unlike"]["schedule"].partition("its process 0: ")[2].startswith("every: 4, not ")


def test_an_island_that_has_shards_twice_is_refused_beside_another_layout(tmp_path: Path) -> None:
    for seen in run_replicas(4, "kept twice", "", tmp_path, script="torch_mishap.py"):
        assert seen["kept twice"] == (
            "processes 0 and 1 of replica 0 both keep layers.0.weight, and islands of unlike layouts need one keeper; "
            "shard that island over a mesh of one dimension, or give all islands the same mesh"
        )


@pytest.mark.parametrize("case", ["", "scaled"])
def test_no_part_of_a_bad_gradient_is_given_to_other_replicas(case: str, tmp_path: Path) -> None:
    def one(network: Network) -> tuple[list[Any], dict[str, Tensor]]:
        return bad_gradient(network, Model(), network.rank, lambda batch: batch, case, spoils=network.rank == 0)

    expected = Simulation(3, Conditions()).run(one)
    name = f"bad gradient, {case}".strip(", ")
    processes = run_replicas(4, name, "", tmp_path, script="torch_mishap.py")
    for seen, replica in zip(processes, (0, 0, 1, 2), strict=True):
        (said, weights), (expected_said, expected_weights) = seen[name], expected[replica]
        assert said == expected_said
        for key, weight in weights.items():
            torch.testing.assert_close(weight, expected_weights[key], atol=1e-5, rtol=1e-5)
