"""Trains a small network in a plain loop with two optimizers, Muon for the matrices and AdamW for the rest.

    torchrun --nproc-per-node 2 examples/loop_two_optimizers.py --out runs/two
    torchrun --nproc-per-node 2 examples/loop_two_optimizers.py --out runs/two --resume    # goes on after a crash

The loop accumulates gradients over two batches and has a schedule for each optimizer. It saves by itself, so it says
what a checkpoint is: weights, optimizers, schedules and rounds, at a step that all replicas have.
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn

import farflung

EVERY = 10
"""Inner steps between two rounds, and between two checkpoints."""


def batch_of(replica: int, number: int) -> Tensor:
    """Numbers to add: a function of replica and step, so that a loop which goes on needs no memory of them."""
    return torch.randn(16, 8, generator=torch.Generator().manual_seed(1_000_000 * replica + number))


def last_of_all(folder: Path, replicas: int) -> int:
    """The last step that all replicas have saved. On machines with disks of their own, ask each."""
    saved = [{int(path.stem) for path in (folder / str(replica)).glob("*.pt")} for replica in range(replicas)]
    return max(set.intersection(*saved), default=0)


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--out", type=Path, default=Path("runs/two"))
    options.add_argument("--steps", type=int, default=100)
    options.add_argument("--resume", action="store_true")
    given = options.parse_args()

    network = farflung.networks.from_env()
    torch.manual_seed(0)  # all replicas start from equal weights
    model = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))
    matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    rest = [parameter for parameter in model.parameters() if parameter.ndim != 2]
    optimizers = [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=0.01)]
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(one, given.steps) for one in optimizers]
    parts = [model, *optimizers, *schedules]

    own = given.out / str(network.rank)
    own.mkdir(parents=True, exist_ok=True)
    first = last_of_all(given.out, len(network.members())) if given.resume else 0
    with farflung.methods.noloco(every=EVERY).attach(model, optimizers, network) as outer:
        if first:
            saved = torch.load(own / f"{first}.pt")
            for part, state in zip([*parts, outer], saved, strict=True):
                part.load_state_dict(state)
        for step in range(first, given.steps):
            for half in range(2):
                batch = batch_of(network.rank, 2 * step + half)
                loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean() / 2
                loss.backward()
            for optimizer, schedule in zip(optimizers, schedules, strict=True):
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
            if (step + 1) % EVERY == 0:
                torch.save([part.state_dict() for part in [*parts, outer]], own / "part")
                (own / "part").replace(own / f"{step + 1}.pt")  # a crash leaves no half file
        outer.finish(average_weights=True)
    if network.rank == 0:
        torch.save(model.state_dict(), given.out / "final.pt")
    print(f"replica {network.rank}: loss {2 * loss.item():.4f}, {network.traffic.bytes_sent:,} bytes sent")


if __name__ == "__main__":
    main()
