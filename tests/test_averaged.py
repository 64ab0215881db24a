"""The mean of the weights that replicas end with, made part by part."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from farflung.memory.far import MakeHome, far_homes, near_home
from farflung.memory.measure import Held, bytes_of
from farflung.networks import SimulatedNetwork, Simulation
from farflung.outer.fragments import split
from farflung.training.averaged import PartByPart

LAYERS, REPLICAS = 40, 3
CPU = torch.device("cpu")


def model_of(replica: int) -> nn.Sequential:
    torch.manual_seed(replica)
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(LAYERS)))


def ended(home: MakeHome) -> list[tuple[list[Tensor], float, int]]:
    """Of each replica: its weights after the end, how far off they were, and the most bytes that it has held for it."""

    def work(network: SimulatedNetwork) -> tuple[list[Tensor], float, int]:
        model = model_of(network.rank)
        with Held() as held:  # type: ignore[no-untyped-call]
            means = PartByPart(network, split(model, 1), home, 60.0).means(cored=False)
            for mean in means:
                mean.write(CPU)
        return list(model.parameters()), sum(mean.apart for mean in means), held.most

    return Simulation(REPLICAS).run(work)


def test_the_mean_by_parts_is_that_of_all_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit, with a part of the copies that the whole takes."""
    whole = ended(near_home)
    monkeypatch.setattr("farflung.training.averaged.AT_ONCE", 5000)
    parts = ended(far_homes(str(tmp_path)))
    own = [list(model_of(replica).parameters()) for replica in range(REPLICAS)]
    for number, values in enumerate(zip(*own, strict=True)):
        expected = torch.stack([value.double() for value in values]).mean(0).float()
        for replica in range(REPLICAS):
            found = parts[replica][0][number]
            assert torch.equal(found, whole[replica][0][number])
            torch.testing.assert_close(found, expected)
    for replica, (_, apart, most) in enumerate(parts):
        pairs = zip(own[replica], parts[replica][0], strict=True)
        off = sum(float((one.detach().double() - mean.detach().double()).square().sum()) for one, mean in pairs)
        assert apart == pytest.approx(off, rel=1e-5)
        assert most < bytes_of(own[replica]) / 2 < whole[replica][2]
