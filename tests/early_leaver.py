"""A replica of two, of which the first ends as soon as it has joined, while the second is still joining."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import torch.distributed as dist
from patience import patience

from farflung.networks import TorchNetwork

made = dist.init_process_group


def with_a_pause(*arguments: Any, **settings: Any) -> None:
    """As on a machine that does something else just then."""
    made(*arguments, **settings)
    time.sleep(2.0)


if __name__ == "__main__":
    if os.environ["RANK"] == "1":
        dist.init_process_group = with_a_pause
    began, limit = time.monotonic(), patience(5)
    network = TorchNetwork.from_env(starting=limit)
    took = time.monotonic() - began
    print(f"replica {network.rank} has joined after {took:.1f} s", file=sys.stderr, flush=True)
    os._exit(took >= limit)
