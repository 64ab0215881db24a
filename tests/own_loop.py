"""One of two processes of a training loop of one's own: `python own_loop.py FOLDER STEPS`; it resumes by itself."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import numpy as np
import torch
from problem import flat

import farflung

WIDE = 400
"""Checkpoints of so wide a model take a while to write."""


def main(folder: Path, steps: int) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, WIDE), torch.nn.Linear(WIDE, WIDE), torch.nn.Dropout(0.1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    network = farflung.from_env()
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(1 + network.rank)

    method = farflung.methods.noloco(every=5, delay=2, codec="int8")
    with farflung.RunFolder(folder) as run, method.attach(model, optimizer, network) as outer:
        if own := run.begin(outer, steps=steps):
            scheduler.load_state_dict(own["scheduler"])
        while outer.step < steps:
            loss = (model(torch.randn(4, 8) + random.random()) - np.random.rand()).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            run.log(loss, 4)
            if outer.step % 4 == 0:
                run.save(scheduler=scheduler.state_dict())
    torch.save({"weights": flat(model), "rounds": outer.rounds}, folder / f"end-{network.rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
