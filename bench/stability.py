"""How far apart noisy replicas stay for each gamma: NoLoCo's recursion alone, new random groups each round.

python bench/stability.py
"""

from __future__ import annotations

import numpy as np
import torch

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


def main() -> None:
    gammas = [0.0, 0.3, 0.5, 0.7, 0.85, 1.0, 1.25, 1.5, 1.75, 2.0, 2.25]
    print("64 replicas, 300 rounds, lr 0.7, momentum 0.5: deviation between replicas, in units of a round's noise")
    print("gamma      " + "".join(f"{gamma:9g}" for gamma in gammas))
    for size in (2, 4):
        spreads = [noise_spread(size, gamma, rounds=300, replicas=64) for gamma in gammas]
        print(f"groups of {size}" + "".join(f"{spread:9.3g}" for spread in spreads))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
