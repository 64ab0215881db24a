"""One of two stages of which the second starts late: `torch_start.py CASE WAY OUT`; leaves what the first is told.

CASE says how: `late` by more than a step may take, or `never`; WAY how the first then waits for it in vain, in a step.
"""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
from patience import patience

from farflung.networks import PeerLostError, TorchNetwork
from farflung.pipeline import Island
from farflung.pipeline.assemble import assemble
from farflung.settings import Settings

DEADLINE = patience(0.2)


def assembled(network: TorchNetwork, starting: float) -> Island:
    config = Settings.of(model="micro", replicas=1, stages=2, deadline=DEADLINE, starting=starting)
    device = torch.device("cpu")
    return assemble(config.island, config.made_workload(), network, config.mesh(), 0, config.network, device)[0]


def main() -> None:
    case, way, out = sys.argv[1:4]
    network = TorchNetwork.from_env(starting=patience(30))
    told = ""
    try:
        if network.process == 0:
            island = assembled(network, starting=1.0 if case == "never" else patience(30))
            island.gradients(0) if way == "microbatches" else island.total(torch.zeros(1))
        elif case == "late":
            time.sleep(4 * DEADLINE)
            assembled(network, starting=patience(30))
    except PeerLostError as error:
        told = f"{type(error).__name__}: {error}"
    if network.process == 0:
        network.store.set("told", told)
    network.store.wait(["told"], timedelta(seconds=patience(60)))  # the second takes no part in the step
    torch.save(told, Path(out) / f"{network.process}.pt")


if __name__ == "__main__":
    main()
