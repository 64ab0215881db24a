"""One of four processes: two replicas of two processes each, which torch's DistributedDataParallel joins."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from problem import flat, loss_of, small_model
from torch.nn.parallel import DistributedDataParallel

from farflung import methods
from farflung.networks import TorchNetwork

METHODS = {"ddp": methods.ddp(), "demo": methods.demo(), "diloco": methods.diloco(every=2)}


def warned(everyone: TorchNetwork, between: TorchNetwork, island: dist.ProcessGroup) -> list[list[str]]:
    """What attach says of a model whose gradients travel among all, or within an island, and of the model itself."""
    told = []
    for group, network in ((None, everyone), (None, between), (island, between), (island, everyone)):
        model = DistributedDataParallel(small_model(), process_group=group)
        optimizer = torch.optim.SGD(model.parameters())
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            session = METHODS["diloco"].attach(model, optimizer, network)
        session.undo.close()
        told.append([str(one.message) for one in seen])
    return told


def main(out: Path) -> None:
    everyone = TorchNetwork.from_env()
    process = everyone.rank
    islands = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    between = everyone.among([process % 2, process % 2 + 2])
    ends: dict[str, Any] = {"told": warned(everyone, between, islands[process // 2])}
    for name, method in METHODS.items():
        model = small_model()
        island = DistributedDataParallel(model, process_group=islands[process // 2])
        optimizer = torch.optim.AdamW(island.parameters(), lr=0.01)
        with method.attach(island, optimizer, between):
            for step in range(6):
                optimizer.zero_grad()
                with island.no_sync():
                    loss_of(island, process, 100 + step).backward()
                loss_of(island, process, step).backward()
                optimizer.step()
        ends[name] = flat(model)
    torch.save(ends, out / f"{process}.pt")
    dist.barrier()
    everyone.close()


if __name__ == "__main__":
    main(Path(sys.argv[3]))
