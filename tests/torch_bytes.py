"""One process of some islands, for tests over torch.distributed: `python torch_bytes.py CASES - OUT`.

CASES is a JSON object of settings by name. For each, this process trains three rounds of its part of a replica, and
leaves what it has sent in the last one, and in its last step: to other replicas, to other stages, to other shards.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from farflung.networks import TorchNetwork
from farflung.pipeline.assemble import assemble
from farflung.settings import Settings

ROUNDS = 3
gathered = {"weights": 0, "gradients": 0}
"""Bytes that this process has sent other shards, by what they were."""


def counting(what: str, collective: Callable[..., Any]) -> Callable[..., Any]:
    """A collective of FSDP's, and a note of this process's shard, the smaller tensor, which each of the others gets."""

    def counted(*given: Any, **named: Any) -> Any:
        shard = min(value.nbytes for value in (*given, *named.values()) if isinstance(value, torch.Tensor))
        gathered[what] += (dist.get_world_size(named["group"]) - 1) * shard
        return collective(*given, **named)

    return counted


dist.all_gather_single = counting("weights", dist.all_gather_single)
dist.reduce_scatter_single = counting("gradients", dist.reduce_scatter_single)


def sent(network: TorchNetwork, config: Settings) -> dict[str, int]:
    island, rounds = assemble(
        config.island, config.made_workload(), network, config.mesh(), 0, config.network, torch.device("cpu")
    )
    method = config.method()
    optimizer = method.inner.make(island.model.named_parameters(), lr=1e-3, weight_decay=0.0)
    every = method.schedule.every or 1
    noted = []
    with method.attach(island.model, optimizer, rounds, deadline_s=60):
        for step in range(ROUNDS * every):
            island.gradients(step)
            optimizer.step()
            optimizer.zero_grad()
            island.after_step()
            noted.append((rounds.traffic.bytes_sent, island.traffic.bytes_sent, *gathered.values()))
    (one, other), last = (noted[-1 - n * every] for n in (0, 1)), noted[-2]
    in_step = [now - before for now, before in zip(one, last, strict=True)]
    return {"rounds": one[0] - other[0], "stages": in_step[1], "weights": in_step[2], "gradients": in_step[3]}


if __name__ == "__main__":
    cases, _, out = sys.argv[1:4]
    torch.set_num_threads(1)
    network = TorchNetwork.from_env(starting=60)
    results: dict[str, Any] = {}
    for name, settings in json.loads(cases).items():
        results[name] = sent(network, Settings.of(**settings))
    torch.save(results, Path(out) / f"{network.process}.pt")
