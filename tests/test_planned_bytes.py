"""The bytes that the planner counts, against those that real processes of the same layout send."""

import json
from functools import partial
from typing import Any

import pytest
import torch
from families import FAMILIES, gpt2
from processes import run_replicas
from torch import nn

from farflung.planner.architecture import Architecture, architecture_of
from farflung.planner.cost import exchange
from farflung.planner.layout import Layout
from farflung.planner.machines import Cluster, Machines
from farflung.planner.saved import _passes, _spared
from farflung.planner.step import Gathered, island_bytes
from farflung.settings import Settings

pytestmark = pytest.mark.slow

COMMON: dict[str, Any] = {"sequence_length": 16, "batch_size": 8, "max_tokens": 100_000, "every": 2, "replicas": 2}
RANKED = {"codec": "ef-lowrank4-int8"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "stages": {"method": "noloco", "stages": 2},
    "stages, 8 bits": {"method": "noloco", "stages": 2, "boundary": "int8", "microbatches": 2, "codec": "modulo4"},
    "subspace": {"method": "noloco", "stages": 2, "boundary": "subspace8"},
    "tied": {"model": "gpt2", "method": "diloco", "stages": 2, "microbatches": 4, **RANKED},
    "shards": {"model": "gpt2", "method": "diloco", "shard": 2, **RANKED},
    "shards, microbatches": {"method": "noloco", "shard": 2, "microbatches": 4},
    "shards of stages": {"model": "gpt2", "method": "local", "replicas": 1, "every": None, "stages": 2, "shard": 2},
    "groups of four": {"model": "gpt2", "method": "diloco", "replicas": 4, **RANKED},
    "fragments": {"method": "diloco", "replicas": 4, "fragments": 2, "codec": "int4"},
    "ddp": {"method": "ddp", "replicas": 4, "every": None},
}


@pytest.fixture(scope="module")
def models_saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    found = {}
    for name, config in {"llama": FAMILIES["llama"], "gpt2": gpt2(n_embd=64, n_layer=6)}.items():
        found[name] = str(tmp_path_factory.mktemp(name))
        config.save_pretrained(found[name])
    return found


@pytest.fixture(scope="module")
def processes(models_saved: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of four processes has sent in every layout."""
    cases = json.dumps({name: run_of(name, models_saved).flat() for name in LAYOUTS})
    return run_replicas(4, cases, "", tmp_path_factory.mktemp("sent"), script="torch_bytes.py")


def run_of(name: str, models_saved: dict[str, str]) -> Settings:
    settings = {"model": "llama", **COMMON, **LAYOUTS[name]}
    return Settings.of(**{**settings, "model": models_saved[settings["model"]]})


def planned(model: Architecture, config: Settings) -> dict[str, float]:
    """Of all processes, in one round and in one step."""
    size = config.island.stages * config.island.shard
    islands = tuple(tuple(range(size * n, size * (n + 1))) for n in range(config.run.replicas))
    layout = Layout(config.run.replicas, config.island.stages, config.island.shard, islands)
    method = config.method()
    found = exchange(model, method, Cluster((Machines(4, 80, 100),)), layout)
    parts = config.island.parts
    gathered = [Gathered.of(model, span, config.island.shard, parts) for span in model.spans(config.island.stages)]
    others = config.run.replicas * config.island.shard * (config.island.shard - 1)
    return {
        "rounds": found.bytes_sent * method.schedule.fragments,
        "stages": config.run.replicas * island_bytes(model, config.island, config.workload.sequence_length),
        "weights": others * sum(stage.weights for stage in gathered),
        "gradients": others * sum(stage.gradients for stage in gathered),
    }


@pytest.mark.parametrize("name", LAYOUTS)
def test_planned_bytes_are_those_that_are_sent(
    name: str, processes: list[dict[str, Any]], models_saved: dict[str, str]
) -> None:
    config = run_of(name, models_saved)
    model = architecture_of(config.workload.model, config.workload.sequence_length, "bytes")
    expected = planned(model.constrained(config.island.boundary, config.island.stages, config.run.seed), config)
    seen = {what: sum(process[name][what] for process in processes) for what in expected}
    # Packets have headers, which matter for so small a model only.
    assert seen.pop("rounds") == pytest.approx(expected.pop("rounds"), rel=0.04)
    assert seen == expected


class Bare(nn.Module):
    """A layer without products."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.tanh()


class Twofold(nn.Module):
    """It returns what it is given, and something computed of it by two products."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return hidden, self.down(self.up(hidden).tanh())


@pytest.mark.parametrize("frozen", [False, True])
def test_what_is_spared_is_a_part_of_the_forward_pass_whatever_the_backward_pass_computes(frozen: bool) -> None:
    for layer, spared in ((Twofold(), 0.5), (Bare(), 0.0)):
        layer.requires_grad_(not frozen)
        assert _spared(layer, partial(_passes, layer, (torch.ones(4, 8),), {})) == spared
