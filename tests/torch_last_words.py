"""A process that ends while it still waits for another: `torch_last_words.py HOW FOLDER`.

The other dies only when the first one's interpreter is being torn down, of which an object there tells.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from farflung.networks import PeerLostError, TorchNetwork


class TornDown:
    """Told last of all, when what Python has loaded is let go."""

    def __init__(self, word: Path) -> None:
        self._word = str(word)

    def __del__(self, open=os.open, flags=os.O_CREAT, sleep=time.sleep) -> None:  # type: ignore[no-untyped-def]
        open(self._word, flags)
        sleep(1.5)


def main() -> None:
    """Waits in vain a few times, and ends."""
    how, folder = sys.argv[1], Path(sys.argv[2])
    network = TorchNetwork.from_env(starting=60)
    if network.rank == 1:
        while not (folder / "torn down").exists():
            time.sleep(0.01)
        os._exit(0)
    for number in range(4):
        try:
            network.exchange(torch.zeros(5, dtype=torch.uint8), (0, 1), str(number)).wait(0.1)
        except PeerLostError:
            continue
    if how == "destroyed":
        dist.destroy_process_group()
    elif how == "closed":
        network.close()
    sys.modules["torn_down"] = TornDown(folder / "torn down")  # type: ignore[assignment]


if __name__ == "__main__":
    main()
