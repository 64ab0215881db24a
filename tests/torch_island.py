"""One process of some islands, for tests over torch.distributed: `python torch_island.py CASES OUT`.

CASES is a JSON object of settings by name. For each, this process trains a few steps of its part of a replica, and
leaves what it saw.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from patience import patience

from farflung.networks import Network, TorchNetwork
from farflung.pipeline import Island
from farflung.pipeline.assemble import assemble
from farflung.pipeline.local_model import persistent_buffers
from farflung.settings import Settings
from farflung.workloads import Workload

STEPS = 4


def assembled(network: Network, config: Settings, workload: Workload) -> tuple[Island, Network]:
    return assemble(config.island, workload, network, config.mesh(), 0, config.network, torch.device("cpu"))


def observed(network: Network, config: Settings, workload: Workload) -> dict[str, Any]:
    """The losses of some steps, the validation loss, what the model writes, and the own weights."""
    island, rounds = assembled(network, config, workload)
    for name, buffer in persistent_buffers(island.model).items():
        assert name.endswith("e_score_correction_bias")  # by which the best experts are chosen, and no step changes it
        buffer.copy_(torch.arange(len(buffer)) / 100)
    optimizer = torch.optim.AdamW(island.model.parameters(), lr=config.inner.lr, fused=True)
    losses = []
    with config.method().attach(island.model, optimizer, rounds, deadline_s=patience(60)):
        for step in range(STEPS):
            loss, fault = island.gradients(step)
            assert not fault
            optimizer.step()
            optimizer.zero_grad()
            island.after_step()
            losses.append(loss)
    island.after_step()  # what leaving has landed
    score = island.evaluate()
    return {
        "coordinates": island.coordinates,
        "peers": rounds.members(),
        "losses": losses,
        "validation_loss": score.value,
        "validation_losses": score.sources,
        "written": island.sample(),
        "weights": {name: p.detach().clone() for name, p in island.model.named_parameters()},
        "buffers": persistent_buffers(island.model),
        "sent": island.traffic.bytes_sent,
    }


def poisoned(network: Network, config: Settings, workload: Workload) -> list[tuple[str, bool]]:
    """What three steps report, and whether there are gradients: in the second, a weight of the first stage is NaN."""
    island, _ = assembled(network, config, workload)
    weight = next(island.model.parameters())
    before = weight.detach().clone()
    seen = []
    for step in range(3):
        if step == 1 and island.coordinates.stage == 0:
            weight.data.fill_(float("nan"))
        _, fault = island.gradients(step)
        seen.append((fault, all(parameter.grad is not None for parameter in island.model.parameters())))
        weight.data.copy_(before)
    return seen


if __name__ == "__main__":
    cases, _, out = sys.argv[1:4]
    torch.set_num_threads(1)
    network = TorchNetwork.from_env(starting=patience(60))
    results: dict[str, Any] = {}
    for name, settings in json.loads(cases).items():
        config = Settings.of(**settings)
        assert config.mesh().processes == torch.distributed.get_world_size()
        results[name] = (poisoned if name.startswith("poisoned") else observed)(network, config, config.made_workload())
    torch.save(results, Path(out) / f"{network.process}.pt")
