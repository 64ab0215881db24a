"""A peer that meets others in a ticket's folder, in a loop of one's own: `folder_peer.py TICKET KEY STEPS OUTCOMES`."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
from problem import inner_steps, small_model

from farflung import methods
from farflung.networks import from_env
from farflung.outer import Round


def main() -> None:
    ticket, key, steps, outcomes = sys.argv[1:]
    os.environ |= {"FARFLUNG_TICKET": ticket, "FARFLUNG_KEY": key}
    network, model = from_env(deadline=10), small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def tell(round: Round) -> None:
        with Path(outcomes).open("a") as file:
            file.write(f"{round.outcome}\n")

    with methods.noloco(every=5).attach(model, optimizer, network, on_round=tell) as outer:
        while outer.step < int(steps):
            inner_steps(model, optimizer, 0, range(outer.step, outer.step + 1))
            time.sleep(0.05)
        outer.saved()
    network.close()  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
