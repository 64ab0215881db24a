"""Gradients that are averaged block by block, and stepped where they lie, teach what they would near, bit for bit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from problem import flat
from processes import run_replicas
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from farflung import cells, inner, methods
from farflung.codecs import ErrorFeedback, Quantize
from farflung.memory.copies import Threads
from farflung.memory.far import HostMemory, home_in
from farflung.memory.measure import Held
from farflung.memory.updates import FarUpdates
from farflung.networks import SimulatedNetwork, Simulation
from farflung.outer import DisagreementError, Method, mean_gradient

CPU = torch.device("cpu")
METHODS: dict[str, tuple[Callable[[], Method], int]] = {
    "a pair": (methods.ddp, 2),
    "three": (methods.ddp, 3),
    "three, int8 in parts": (partial(methods.ddp, codec=Quantize(bits=8)), 3),
    "a pair, int2 with feedback": (partial(methods.ddp, codec=ErrorFeedback(Quantize(bits=2))), 2),
    "demo": (methods.demo, 2),
}


class Layered(nn.Module):
    """Layers, of which replica 1 alone uses the third at odd steps, and nobody the fourth."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first = nn.Linear(6, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def loss(self, rank: int, step: int) -> Tensor:
        inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(1000 * rank + step))
        hidden = torch.tanh(self.layers[0](torch.tanh(self.first(inputs))))
        hidden = self.layers[1](hidden) + (self.layers[2](hidden) if rank == 1 and step % 2 else 0)
        return (hidden - 1).square().mean()


def train(model: Layered, method: Method, network: SimulatedNetwork, way: str, folder: Path, clip: float) -> list[Any]:
    """Some steps, in one of them without a sound gradient at replica 0; the weights and moments at the end."""
    make = partial(inner.INNER["adamw"].make, lr=0.05, weight_decay=0.1)
    named = dict(model.named_parameters())
    optimizer = make(list(named.items()))
    updates: FarUpdates | None = None
    with method.attach(model, optimizer, network) as session:
        if way != "whole":
            session.gradients_from(lambda: updates)
        if way == "far":
            layers = [{n: p for n, p in named.items() if f".{number}." in n} for number in range(4)]
            copies = Threads(HostMemory(), CPU)
            updates = FarUpdates(optimizer, make, layers, partial(home_in, folder), copies, {})
        for step in range(6):
            loss = model.loss(network.rank, step)
            (loss * (float("nan") if (network.rank, step) == (0, 2) else 1)).backward()
            if clip and updates:
                updates.clip(model.parameters(), clip)
            elif clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    state = [optimizer.state[parameter] for parameter in named.values()]
    return [flat(model), *(flat_of(one) for one in state)]


def flat_of(state: dict[str, Any]) -> Tensor:
    """An optimizer's values of a parameter; none where it has not stepped it."""
    return torch.cat([torch.empty(0), *(value.flatten() for value in state.values() if isinstance(value, Tensor))])


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cells of some rows of a matrix, and blocks of two or so."""
    monkeypatch.setattr(cells, "MOST", 24)
    monkeypatch.setattr(cells, "FULL", 20)
    monkeypatch.setattr(mean_gradient, "BLOCK", 30)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("clip", [0.0, 0.1])
@pytest.mark.parametrize("name", METHODS)
def test_far_gradients_are_averaged_bit_for_bit_as_near_ones(name: str, clip: float, tmp_path: Path) -> None:
    """Wherever each replica has its own, and where parameters lie in several blocks."""
    make, replicas = METHODS[name]

    def run(*ways: str) -> list[list[Tensor]]:
        def work(network: SimulatedNetwork) -> list[Tensor]:
            return train(Layered(), make(), network, ways[min(network.rank, len(ways) - 1)], tmp_path, clip)

        return Simulation(replicas).run(work)

    wanted, start = run("whole"), Layered()
    assert not torch.equal(wanted[0][0], flat(start))
    for ways in (("in blocks",), ("far",), ("far", "in blocks")):
        for found, near in zip(run(*ways), wanted, strict=True):
            assert all(map(torch.equal, found, near)), ways


@pytest.mark.usefixtures("small_blocks")
def test_a_layer_steps_before_the_last_blocks_leave(tmp_path: Path) -> None:
    def work(network: SimulatedNetwork) -> list[int]:
        own, sent = threading.get_ident(), list[int]()

        def note(*_: Any) -> None:
            if threading.get_ident() == own:
                sent.append(network.traffic.bytes_sent)

        hook = register_optimizer_step_pre_hook(note)
        try:
            train(Layered(), methods.ddp(), network, "far", tmp_path, 0.1)
        finally:
            hook.remove()
        return sent

    for sent in Simulation(2).run(work):
        whole, first, second, following, *_ = sent  # the whole optimizer's step, two layers in it, the next one
        assert whole < first < second < following


def test_replicas_that_exchange_in_unlike_ways_are_told_in_a_line(tmp_path: Path) -> None:
    def work(network: SimulatedNetwork) -> None:
        train(Layered(), methods.ddp(), network, "whole" if network.rank else "in blocks", tmp_path, 0.0)

    told = r"way of averaging .*: .*, in blocks for --memory here, .* at replica 1"
    with pytest.raises(DisagreementError, match=told):
        Simulation(2).run(work)


def test_no_whole_gradient_is_near(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a block, the next one and what the network needs for them."""
    monkeypatch.setattr(mean_gradient, "BLOCK", 1)

    def most(way: str) -> int:
        def work(network: SimulatedNetwork) -> int:
            with Held() as held:  # type: ignore[no-untyped-call]
                train(Layered(512), methods.ddp(), network, way, tmp_path, 0.0)
            return held.most

        return max(Simulation(1).run(work))

    layer = 4 * 512 * 513
    assert most("far") < most("whole") - 3 * layer


@pytest.mark.slow
def test_who_is_lost_within_a_step_ends_it_and_leaves_nobody_another_mean(tmp_path: Path) -> None:
    """A layer of those who are left is as it was, or has taken the step that all would have."""
    seen = run_replicas(3, "", "", tmp_path, frozenset({1}), script="torch_far.py")
    assert seen[1] is None
    (lost, one), (other_lost, other) = seen[0], seen[2]
    assert lost and other_lost and len(one) == len(other) == 4
    assert all(torch.equal(one[step][name], other[step][name]) for step in range(3) for name in one[step])
    *_, before, after = one
    stepped = 0
    for name, old in before.items():
        ends = [end for end in (after[name], other[3][name]) if not torch.equal(end, old)]
        assert all(torch.equal(end, ends[0]) for end in ends)
        stepped += bool(ends)
    assert 0 < stepped < len(before)
