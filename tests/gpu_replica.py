"""One of two replicas on a GPU, or on the CPU: `python gpu_replica.py DEVICE METHOD CODEC OUT`.

Saves its weights after some steps, and each round's outcome and compression error.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn

from farflung import methods
from farflung.codecs import codec_named
from farflung.networks import TorchNetwork

STEPS = 17


def main(device: str, method: str, codec: str, out: str) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 64)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    how = {"every": 4, "codec": codec_named(codec)} | ({"delay": 3} if method == "noloco" else {})
    rounds = []
    with getattr(methods, method)(**how).attach(model, optimizer, TorchNetwork(), on_round=rounds.append):
        for step in range(STEPS):
            entering = torch.randn(32, 64, generator=torch.Generator().manual_seed(100 * rank + step)).to(device)
            model(entering).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    outcomes = [(str(one.outcome), round(one.compression_error, 3)) for one in rounds]
    torch.save(([one.detach().cpu() for one in model.parameters()], outcomes), f"{out}-{rank}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
