"""For which γ do noisy replicas stay together under gossip?
NoLoCo's recursion alone, new random groups each round, and the deviation between replicas in units of one round's
noise, which is what no exchange would add each round. Takes a minute.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from bench.lib.store import Store
from bench.lib.table import Cell, Part, Table
from farflung.outer import GossipNesterov, RandomGroups, group_of


def noise_spread(size: int, gamma: float, rounds: int, replicas: int) -> float:
    """The deviation between replicas' anchors after some rounds, in units of a round's noise.

    Each round every replica moves 200 weights by normal noise of deviation 1, independent of the others.
    """
    generator = np.random.default_rng(0)
    topology = RandomGroups(size, seed=1)
    members = tuple(range(replicas))
    anchors = [torch.zeros(200, dtype=torch.float64) for _ in members]
    outers = [GossipNesterov([anchor], lr=0.7, momentum=0.5, gamma=gamma) for anchor in anchors]
    for number in range(rounds):
        messages = []
        for rank in members:
            weights = anchors[rank] - torch.from_numpy(generator.standard_normal(200))
            messages.append(outers[rank].message(anchors[rank], weights))
        for rank in members:
            group = group_of(rank, topology.groups(members, str(number)))
            outers[rank].step_with(anchors[rank], torch.stack([messages[other] for other in group]).mean(0))
    return float(torch.stack(anchors).std(0, correction=0).mean())


GAMMAS = (0.0, 0.3, 0.5, 0.7, 0.85, 1.0, 1.25, 1.5, 1.75, 2.0, 2.25)


@dataclass(frozen=True)
class Options:
    replicas: int = 64
    """Anchors that gossip."""
    rounds: int = 300
    """Rounds after which to look."""
    gammas: tuple[float, ...] = GAMMAS
    """Pulls to try."""


SMOKE = Options(replicas=4, rounds=3, gammas=(0.7,))


def run(options: Options, store: Store) -> Iterator[Part]:
    torch.set_num_threads(1)

    def row(size: int) -> tuple[Cell, ...]:
        spreads = (noise_spread(size, gamma, options.rounds, options.replicas) for gamma in options.gammas)
        return f"groups of {size}", *spreads

    about = f"{options.replicas} replicas, {options.rounds} rounds, lr 0.7, momentum 0.5"
    columns = {"gamma": "", **{f"{gamma:g}": ".3g" for gamma in options.gammas}}
    yield Table(columns, map(row, (2, 4)), f"{about}: deviation between replicas, in units of a round's noise")
