"""Moments that are far step as those that are near."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from test_memory_modes import CPU, layers_of, model_of
from torch import Tensor

from farflung import inner, methods
from farflung.memory.copies import Threads
from farflung.memory.far import Home, HostMemory, home_in
from farflung.memory.moments import FarMoments
from farflung.networks import SimulatedNetwork, Simulation
from farflung.workloads import models


def made(kind: str, far: Path | None, limit: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model, and its optimizer, with the moments of some layers in files of a folder."""
    model = model_of("llama")
    make = partial(inner.INNER[kind].make, lr=0.01, weight_decay=0.1)
    optimizer = make(list(model.named_parameters()))
    if far is not None:
        keep_far(model, optimizer, kind, far, limit)
    return model, optimizer


def keep_far(model: torch.nn.Module, optimizer: torch.optim.Optimizer, kind: str, far: Path, limit: int) -> None:
    make = partial(inner.INNER[kind].make, lr=0.01, weight_decay=0.1)
    ids = [{id(parameter) for parameter in layer.parameters()} for layer in layers_of(model)[1:4]]
    named = [{name: p for name, p in model.named_parameters() if id(p) in own} for own in ids]
    FarMoments(optimizer, make, named, partial(home_in, far), Threads(HostMemory(), CPU), limit)


def steps(model: torch.nn.Module, optimizer: torch.optim.Optimizer, numbers: range, stream: int = 0) -> list[Tensor]:
    for number in numbers:
        for group in optimizer.param_groups:
            group["lr"] = 0.01 / (number + 1)
        tokens = torch.randint(2, 256, (2, 16), generator=torch.Generator().manual_seed(100 * stream + number))
        models.sequence_loss(model, tokens, tokens, None).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("limit", [0, 10**9])
@pytest.mark.parametrize("kind", ["adamw", "sign"])
def test_far_moments_step_bit_for_bit(kind: str, limit: int, tmp_path: Path) -> None:
    near, far = made(kind, None, 0), made(kind, tmp_path, limit)
    assert all(map(torch.equal, steps(*near, range(3)), steps(*far, range(3))))


def test_far_moments_of_muon_step_alike(tmp_path: Path) -> None:
    near, far = made("muon", None, 0), made("muon", tmp_path, 0)
    for one, other in zip(steps(*near, range(3)), steps(*far, range(3)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_far_moments_step_along_mean_gradients(tmp_path: Path) -> None:
    """Of replicas whose gradients are averaged in each step; they stay equal, and are those with all moments near."""

    def ended(far: Path | None) -> list[list[Tensor]]:
        def work(network: SimulatedNetwork) -> list[Tensor]:
            model, optimizer = made("adamw", None, 0)
            with methods.ddp().attach(model, optimizer, network):
                if far:
                    keep_far(model, optimizer, "adamw", far, 0)
                return steps(model, optimizer, range(3), network.rank)

        return Simulation(2).run(work)

    near, far = ended(None), ended(tmp_path)
    assert all(map(torch.equal, near[0], near[1]))
    for one, other in zip(near, far, strict=True):
        assert all(map(torch.equal, one, other))


def test_no_page_of_a_file_stays_near_while_its_layer_steps(tmp_path: Path) -> None:
    """Else moments that have come would take their memory twice."""
    (whole,) = layer = [torch.nn.Parameter(torch.ones(1 << 18))]
    homes: list[Home] = []

    def home(like: Tensor) -> Home:
        homes.append(home_in(tmp_path, like))
        return homes[-1]

    class Watched(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            seen.append([near_pages(one.tensor) for one in homes])
            return super().step(closure)

    seen: list[list[int]] = []
    optimizer = torch.optim.AdamW(layer)
    copies = Threads(HostMemory(), CPU)
    FarMoments(optimizer, lambda named: Watched(dict(named).values()), [{"w": whole}], home, copies, 0)
    for _ in range(3):
        whole.grad = torch.ones_like(whole)
        optimizer.step()
    assert seen == [[], [0, 0], [0, 0]]
    assert near_pages(homes[0].tensor) == 0 and homes[0].tensor.norm() > 0 and near_pages(homes[0].tensor) > 0


def near_pages(tensor: Tensor) -> int:
    """Kilobytes of a mapped file that are in this process's memory."""
    begins = f"{tensor.data_ptr():x}-"
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    assert any(line.startswith(begins) for line in lines)
    return next(int(line.split()[1]) for line in lines if line.startswith("Rss:"))


def test_a_checkpoint_goes_on_with_far_moments_or_near_ones(tmp_path: Path) -> None:
    """Either's state, in either's place, gives the bits of a run that was not interrupted."""
    whole = made("adamw", None, 0)
    wanted = steps(*whole, range(5))
    for before, after in ((None, tmp_path), (tmp_path, None), (tmp_path, tmp_path)):
        first, second = made("adamw", before, 0), made("adamw", after, 0)
        steps(*first, range(3))
        second[0].load_state_dict(first[0].state_dict())
        second[1].load_state_dict(first[1].state_dict())
        assert all(map(torch.equal, steps(*second, range(3, 5)), wanted))
