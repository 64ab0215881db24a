"""Layers that the host steps learn what they would near, bit for bit, with their weights far or not."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from test_memory_modes import CPU, layers_of, model_of
from torch import Tensor, nn

from farflung import inner
from farflung.memory import modes
from farflung.memory.copies import Threads
from farflung.memory.far import HostMemory, home_in
from farflung.memory.plan import LayerCost, LayerPlan, Mode
from farflung.memory.updates import FarUpdates, FarWeights
from farflung.workloads import models

MODES: tuple[Mode, ...] = ("keep", "recompute", "move", "recompute-moved")


class Run:
    """A model of four layers and its optimizer; the middle ones are stepped by the host, if there is a folder."""

    def __init__(self, kind: str, far: Path | None, weights: bool = False, frozen: bool = False, **sizes: int) -> None:
        self.model = model_of("llama", **sizes)
        layers = list(layers_of(self.model))
        if frozen:
            layers[1].mlp.requires_grad_(False)
        make = partial(inner.INNER[kind].make, lr=0.01, weight_decay=0.1)
        named = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self.optimizer = make(list(named.items()))
        self.updates: FarUpdates | None = None
        self.weights: FarWeights | None = None
        if far is not None:
            home, copies = partial(home_in, far), Threads(HostMemory(), CPU)
            if weights:
                self.weights = FarWeights(layers[1:], home)
                cost = LayerCost(1, 2, 100_000, 8_000, 0, 0, 0, 0, 0)
                plans = [LayerPlan(MODES[number % 4]) for number in range(len(layers))]
                modes.apply(layers, plans, [cost] * len(layers), modes.Calling(copies, 0))
            own = [{id(parameter) for parameter in layer.parameters()} for layer in layers[1:]]
            parts = [{name: p for name, p in named.items() if id(p) in ids} for ids in own]
            homes = self.weights.homes if self.weights else {}
            self.updates = FarUpdates(self.optimizer, make, parts, home, copies, homes)

    def steps(self, numbers: range, microbatches: int = 1, most: float = 0.5) -> list[Tensor]:
        for number in numbers:
            for group in self.optimizer.param_groups:
                group["lr"] = 0.01 / (number + 1)
            for part in range(microbatches):
                tokens = torch.randint(2, 256, (2, 16), generator=torch.Generator().manual_seed(10 * number + part))
                models.sequence_loss(self.model, tokens).backward()
            if self.updates:
                self.updates.clip(self.model.parameters(), most)
            else:
                nn.utils.clip_grad_norm_(self.model.parameters(), most)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return [parameter.detach().clone() for parameter in self.model.parameters()]


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize(("kind", "microbatches", "most"), [("adamw", 1, 0.5), ("adamw", 3, 1e9), ("sign", 1, 0.5)])
def test_what_the_host_steps_is_bit_for_bit_what_is_stepped_near(
    kind: str, microbatches: int, most: float, weights: bool, tmp_path: Path
) -> None:
    wanted = Run(kind, None).steps(range(3), microbatches, most)
    found = Run(kind, tmp_path, weights).steps(range(3), microbatches, most)
    assert all(map(torch.equal, found, wanted))


def test_muon_steps_alike(tmp_path: Path) -> None:
    for one, other in zip(Run("muon", tmp_path).steps(range(3)), Run("muon", None).steps(range(3)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_weights_that_are_not_trained_are_far_too(tmp_path: Path) -> None:
    far = Run("adamw", tmp_path, weights=True, frozen=True)
    wanted = Run("adamw", None, frozen=True).steps(range(2))
    assert all(map(torch.equal, far.steps(range(2)), wanted))


def test_gradients_are_far_and_those_that_no_step_has_taken_are_forgotten(tmp_path: Path) -> None:
    run = Run("adamw", tmp_path)
    models.sequence_loss(run.model, torch.ones((2, 16), dtype=torch.int64)).backward()
    near = {name for name, parameter in run.model.named_parameters() if parameter.grad is not None}
    assert near and not any(".layers.1." in name or ".layers.3." in name for name in near)
    assert run.updates
    run.updates.forget()
    run.optimizer.zero_grad()
    assert all(map(torch.equal, run.steps(range(2)), Run("adamw", None).steps(range(2))))


def test_a_checkpoint_goes_on_with_far_updates_or_near_ones(tmp_path: Path) -> None:
    wanted = Run("adamw", None).steps(range(5))
    for before, after in ((None, tmp_path), (tmp_path, None), (tmp_path, tmp_path)):
        first, second = Run("adamw", before, weights=True), Run("adamw", after, weights=True)
        first.steps(range(3))
        second.model.load_state_dict(first.model.state_dict())
        second.optimizer.load_state_dict(first.optimizer.state_dict())
        assert all(map(torch.equal, second.steps(range(3, 5)), wanted))


def test_what_is_undone_is_near_again(tmp_path: Path) -> None:
    run = Run("adamw", tmp_path, weights=True)
    run.steps(range(2))
    assert run.updates and run.weights
    run.updates.undo()
    run.updates = None
    run.weights.undo()
    assert all(map(torch.equal, run.steps(range(2, 4)), Run("adamw", None).steps(range(4))))


@pytest.mark.skipif(sys.platform != "linux", reason="tells by Linux's account of a process's pages")
def test_what_is_far_takes_no_memory_between_steps_and_little_in_them(tmp_path: Path) -> None:
    def pages() -> int:
        """Bytes of files that this process has in its memory."""
        lines = Path("/proc/self/status").read_text("ascii").splitlines()
        return sum(1024 * int(line.split()[1]) for line in lines if line.startswith(("RssFile:", "RssShmem:")))

    run = Run("adamw", tmp_path, weights=True, hidden_size=256, intermediate_size=1024, num_hidden_layers=8)
    run.steps(range(1))
    assert run.weights
    homes = run.weights.homes
    for home in homes.values():
        home.let_go()
    before, within, after = pages(), list[int](), list[int]()
    for parameter in homes:
        parameter.register_hook(lambda _: within.append(pages() - before))
    run.optimizer.register_step_post_hook(lambda *_: after.append(pages() - before))
    run.steps(range(1, 3))
    # Gradients are as much as weights, and moments twice as much; of seven layers that are far, two may be near.
    weights = sum(home.tensor.nbytes for home in homes.values())
    assert weights > 20_000_000 and max(within) < weights and max(after) < weights / 3
