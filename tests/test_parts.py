"""What holds for every part that methods may take: simulated replicas are real ones, and states go round."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from problem import gone_on, replica
from processes import run_together
from torch import Tensor

from farflung import methods
from farflung.methods import Method
from farflung.networks import Network, Simulation, TorchNetwork
from farflung.outer import AveragedMoments, MomentumSchedule

STEPS, REPLICAS = 14, 3

PARTS: dict[str, Callable[[], Method]] = {
    "rda": lambda: replace(methods.diloco(every=4), fuse="rda"),
    "rda in few bits, late": lambda: replace(methods.streaming_diloco(every=4, codec="ef-int4"), fuse="rda"),
    "turned": lambda: methods.diloco(every=4, delay=3, merge="turned"),
    "sent": lambda: methods.diloco(every=4, delay=2, merge="sent", codec="random20", outer_lr=1.0, outer_momentum=0.0),
    "sparta": lambda: methods.sparta(codec="random10"),
    "gasloc": lambda: methods.gasloc(every=4),
    "factored gossip": lambda: methods.factored_gossip(every=4),
    "moments": lambda: methods.des_loc(every=2),
    "late moments": lambda: replace(
        methods.diloco(every=4, delay=2), companions=(AveragedMoments((("exp_avg", 1), ("exp_avg_sq", 2))),)
    ),
    "outer momentum": lambda: replace(methods.diloco(every=4), momentum=MomentumSchedule(0.8, 6, 0.2, STEPS)),
}


def one_process(network: Network) -> dict[str, Tensor]:
    """What one replica comes to with each part."""
    return {name: replica(make, STEPS)(network).weights for name, make in PARTS.items()}


@pytest.mark.slow
def test_processes_come_to_the_weights_of_the_simulation(tmp_path: Path) -> None:
    run_together(REPLICAS, __file__, tmp_path)
    simulated = Simulation(REPLICAS).run(one_process)
    for rank, expected in enumerate(simulated):
        real = torch.load(tmp_path / f"{rank}.pt")
        for name in PARTS:
            assert torch.equal(real[name], expected[name]), name


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("at", [5, 8])
def test_a_part_goes_on_from_its_state_bit_for_bit(name: str, at: int) -> None:
    whole, parts = gone_on(PARTS[name], at, STEPS, 2)
    assert all(torch.equal(one, again) for (one, _), (again, _) in zip(whole, parts, strict=True))


if __name__ == "__main__":
    torch.set_num_threads(1)
    seat = TorchNetwork.from_env(starting=120)
    torch.save(one_process(seat), Path(sys.argv[1]) / f"{seat.rank}.pt")
