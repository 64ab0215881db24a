"""One of some processes that swap: `torch_swap.py CASE _ OUT`; leaves what it received, through which memory."""

from __future__ import annotations

import os
import resource
import signal
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from patience import patience
from torch import Tensor

from farflung.hooks import swaps
from farflung.networks import TorchNetwork

SIZES = (0, 1, 70_000, 3, 250_000)
DTYPES = (torch.float32, torch.float64)


def parts(sender: int, receiver: int, dtype: torch.dtype, size: int) -> list[Tensor]:
    """What one gives another: nothing, a matrix that is not contiguous, a half-precision one, and one number."""
    numbers = torch.Generator().manual_seed(100 * sender + 10 * receiver + size)
    drawn = [torch.randn(shape, generator=numbers, dtype=dtype) for shape in ((size + sender, 3), (7, receiver), (1,))]
    return [drawn[0].t(), drawn[1].bfloat16(), drawn[2]] if size else []


def received(swap: Any, own: int, count: int) -> list[Tensor]:
    """What comes of swaps of all sizes, one after the other."""
    found = []
    for size in SIZES:
        for dtype in DTYPES:
            outgoing = [parts(own, other, dtype, size) for other in range(count)]
            incoming = [[torch.full_like(one, torch.nan) for one in parts(n, own, dtype, size)] for n in range(count)]
            swap(outgoing, incoming, torch.empty(0, dtype=dtype))
            found += [one for some in incoming for one in some]
    return found


def dying_at(call: int) -> None:
    """This process ends where it next begins to wait for the others for so many times."""
    waiting, calls = dist.all_reduce, iter(range(call))

    def all_reduce(*arguments: Any, **named: Any) -> Any:
        if next(calls, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        return waiting(*arguments, **named)

    dist.all_reduce = all_reduce


def main() -> None:
    case, _, out = sys.argv[1:4]
    network = TorchNetwork.from_env(starting=patience(30))
    own, count = network.process, dist.get_world_size()
    group = dist.new_group(timeout=timedelta(seconds=patience(20)))
    if case == "no room" and own == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, resource.RLIM_INFINITY))
    if case == "death" and own == 1:
        dying_at(3)
    swaps.SHARED = 1 << 20
    swap, messages = swaps.Swaps(group), lambda *given: swaps.swapped(*given, group)
    try:
        found = received(swap, own, count)
        told = {"found": found, "messages": received(messages, own, count), "memory": swap._memory is not None}
    except RuntimeError as error:
        told = {"error": str(error)}
    told["files"] = [path.name for path in Path("/dev/shm").glob("*farflung*")]
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    torch.save(told, Path(out) / f"{own}.pt")


if __name__ == "__main__":
    main()
