"""Layers of any kind, as others write them, learn the same bits with every plan, or are refused in a line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import same
from torch import Tensor, nn
from torch.nn.functional import gelu
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint

from farflung.errors import UserError
from farflung.inner import ADAMW
from farflung.memory.calls import calls_of
from farflung.memory.fitted import Fitted
from farflung.memory.plan import LayerCost, LayerPlan
from farflung.memory.profile import Model

WIDTH = 8
CPU = torch.device("cpu")
BATCHES = torch.randn(3, 4, 6, WIDTH, generator=torch.Generator().manual_seed(0))
PLANS: list[list[LayerPlan]] = [
    [LayerPlan("recompute")] * 3,
    [LayerPlan("recompute-moved", "moments-far"), LayerPlan("move", "optimizer-far"), LayerPlan("keep", "weights-far")],
    [LayerPlan("keep", "optimizer-far"), LayerPlan("recompute", "moments-far"), LayerPlan("move", "weights-far")],
]


class Plain(nn.Module):
    """A layer with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, hidden: Tensor) -> Any:
        return hidden + self.down(gelu(self.up(self.norm(hidden))))


class BatchNormed(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.batches = nn.BatchNorm1d(WIDTH)

    def forward(self, hidden: Tensor) -> Any:
        return super().forward(self.batches(hidden.flatten(0, 1)).view_as(hidden))


class Counting(Plain):
    """Its buffers are changed in place, or replaced, and what it computes depends on them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, hidden: Tensor) -> Any:
        self.count += 1
        self.mean = 0.9 * self.mean + 0.1 * hidden.detach().mean((0, 1))
        return super().forward(hidden) + self.mean * self.count


class Spectral(Plain):
    def __init__(self) -> None:
        super().__init__()
        spectral_norm(self.up)


class Beside(Plain):
    """It leaves part of the loss in an attribute."""

    def forward(self, hidden: Tensor) -> Any:
        leaving = super().forward(hidden)
        self.beside = leaving.square().mean()
        return leaving


class Table(Plain):
    def forward(self, hidden: Tensor) -> Any:
        return {"hidden": super().forward(hidden), "beside": self.up.weight.square().mean()}


class Empty(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.nothing, self.scale = nn.Parameter(torch.zeros(0, WIDTH)), nn.Parameter(torch.ones(()))

    def forward(self, hidden: Tensor) -> Any:
        return super().forward(hidden) * self.scale + self.nothing.sum()


class Short(Plain):
    """Part of it is of bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.up.bfloat16(), self.down.bfloat16()

    def forward(self, hidden: Tensor) -> Any:
        return hidden + self.down(gelu(self.up(self.norm(hidden).bfloat16()))).float()


class Unused(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(2, 2)


class Patched(Plain):
    """Somebody has given it another forward pass than its class has."""

    def __init__(self) -> None:
        super().__init__()
        usual = self.forward
        self.forward = lambda hidden: 2 * usual(hidden)  # type: ignore[method-assign]


class Last(Plain):
    """What needs a gradient comes after what needs none."""

    def forward(self, hidden: Tensor) -> Any:
        leaving = super().forward(hidden)
        return leaving.detach().mean(), leaving


class Cut(Plain):
    """Nothing that it returns needs a gradient."""

    def forward(self, hidden: Tensor) -> Any:
        return super().forward(hidden).detach()


class Whole(nn.Module):
    """Some layers between two others, called as `call` says."""

    def __init__(self, kind: Callable[[], nn.Module], call: Callable[[Whole, Tensor], Tensor]) -> None:
        super().__init__()
        self.begin, self.end = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.layers = nn.ModuleList(kind() for _ in range(3))
        self.call, self.casts = call, False

    def forward(self, batch: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.casts):
            return self.end(self.call(self, self.begin(batch))).square().mean()


def in_turn(whole: Whole, hidden: Tensor) -> Tensor:
    for layer in whole.layers:
        hidden = layer(hidden)
    return hidden


def twice(whole: Whole, hidden: Tensor) -> Tensor:
    return in_turn(whole, in_turn(whole, hidden))


def adding(whole: Whole, hidden: Tensor) -> Tensor:
    return in_turn(whole, hidden) + sum(layer.beside for layer in whole.layers)  # type: ignore[misc]


def of_tables(whole: Whole, hidden: Tensor) -> Tensor:
    beside = torch.zeros(())
    for layer in whole.layers:
        returned = layer(hidden)
        hidden, beside = returned["hidden"], beside + returned["beside"]
    return hidden + beside


def of_the_last(whole: Whole, hidden: Tensor) -> Tensor:
    for layer in whole.layers:
        _, hidden = layer(hidden)
    return hidden


def listened_to(whole: Whole, hidden: Tensor) -> Tensor:
    """As routers' logits are taken from within layers."""
    heard: list[Tensor] = []
    handles = [layer.up.register_forward_hook(lambda *a: heard.append(a[-1])) for layer in whole.layers]  # type: ignore
    leaving = in_turn(whole, hidden)
    for handle in handles:
        handle.remove()
    return leaving + heard[0].mean() + torch.stack(heard).square().mean()


def dropping(whole: Whole, hidden: Tensor) -> Tensor:
    for layer in whole.layers:
        hidden = layer(hidden) if torch.rand(()) < 0.5 else hidden
    return hidden


def leaving_out(whole: Whole, hidden: Tensor) -> Tensor:
    return whole.layers[0](hidden)


def checkpointed(whole: Whole, hidden: Tensor) -> Tensor:
    return checkpoint(partial(in_turn, whole), hidden, use_reentrant=True)


def sharing(whole: Whole, hidden: Tensor) -> Tensor:
    return in_turn(whole, hidden)


def made(kind: Callable[[], nn.Module], call: Callable[[Whole, Tensor], Tensor]) -> Whole:
    torch.manual_seed(1)
    whole = Whole(kind, call)
    if call is sharing:
        whole.layers[2].up = whole.layers[0].up
    return whole


def learnt(whole: Whole, folder: Path, plan: list[LayerPlan] | None) -> dict[str, Any]:
    """Its state and the optimizer's after some steps, clipped."""
    make = partial(ADAMW.make, lr=0.01, weight_decay=0.1)
    optimizer = make(list(whole.named_parameters()))
    model = Model(whole, list(whole.layers), lambda: whole(BATCHES[0]), make, CPU)
    fitted = Fitted(model, optimizer, str(folder), near_gradients=False)
    if plan:
        record = fitted.planned("1GB", 1 << 40, True, 1, lambda one: [one])
        fitted.carry_out(replace(record, plan=replace(record.plan, layers=tuple(plan))))
    torch.manual_seed(2)
    for batch in BATCHES:
        fitted.gradients_begin()
        whole(batch).backward()
        fitted.clip(0.1)
        optimizer.step()
        optimizer.zero_grad()
    moments = optimizer.state_dict()["state"]
    assert all(moments.values()), "who has no gradient has no moments"
    return whole.state_dict() | {f"{number} {key}": one[key] for number, one in moments.items() for key in one}


KINDS: list[tuple[Callable[[], nn.Module], Callable[[Whole, Tensor], Tensor]]] = [
    *((kind, in_turn) for kind in (BatchNormed, Counting, Spectral, Empty, Short, Unused, Patched, Cut)),
    *((Plain, call) for call in (twice, sharing, listened_to, dropping, leaving_out, checkpointed)),
    (Counting, twice),
    (Beside, adding),
    (Table, of_tables),
    (Last, of_the_last),
]


@pytest.mark.parametrize(("kind", "call"), KINDS)
def test_layers_of_any_kind_learn_the_same_bits(
    kind: Callable[[], nn.Module], call: Callable[[Whole, Tensor], Tensor], tmp_path: Path
) -> None:
    kept = learnt(made(kind, call), tmp_path, None)
    for plan in PLANS:
        assert same(learnt(made(kind, call), tmp_path, plan), kept), plan


class Recurrent(nn.Module):
    """It multiplies with the same weights at each place of a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, hidden: Tensor) -> Any:
        return hidden + self.inner(hidden)[0]


@pytest.mark.parametrize(
    ("kind", "call", "again"),
    [(Plain, in_turn, False), (Plain, twice, True), (Plain, sharing, True), (Recurrent, in_turn, True)],
)
def test_gradients_of_weights_that_are_cast_once_for_several_uses_are_the_same_bits(
    kind: Callable[[], nn.Module], call: Callable[[Whole, Tensor], Tensor], again: bool, tmp_path: Path
) -> None:
    """Autocast sums up what comes back to one copy in bfloat16, and what comes back to several in float32."""

    def casting() -> Whole:
        whole = made(kind, call)
        whole.casts = True
        return whole

    kept = learnt(casting(), tmp_path, None)
    for plan in PLANS:
        assert same(learnt(casting(), tmp_path, plan), kept), plan
    whole = casting()
    _, found = calls_of(list(whole.layers), partial(whole, BATCHES[0]), CPU)
    assert found == again


class Named(Plain):
    def forward(self, *, hidden: Tensor) -> Any:  # type: ignore[override]
        return super().forward(hidden)


def by_name(whole: Whole, hidden: Tensor) -> Tensor:
    return whole.layers[0](hidden=hidden)


class Changing(Plain):
    def forward(self, hidden: Tensor) -> Any:
        return hidden.add_(self.down(gelu(self.up(hidden.clone()))))


class Looking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, WIDTH)

    def forward(self, numbers: Tensor) -> Any:
        return self.table(numbers)


def looked_up(whole: Whole, hidden: Tensor) -> Tensor:
    return hidden + whole.layers[0](torch.arange(4)).sum()  # type: ignore[no-any-return]


class Silent(Plain):
    def forward(self, _: Tensor) -> Any:
        return None


def unheard(whole: Whole, hidden: Tensor) -> Tensor:
    whole.layers[0](hidden)
    return hidden


def without_any(_: Whole, hidden: Tensor) -> Tensor:
    return hidden


@pytest.mark.parametrize(
    ("kind", "call", "told"),
    [
        (Named, by_name, "layer 0, a Named, must be given hidden states first, and not by name; call it so, or leave"),
        (Looking, looked_up, "layer 0, a Looking, must be given hidden states first, and not by name; call it so, or"),
        (Changing, in_turn, "layer 0, a Changing, changes what it is given, so that it cannot compute it again; copy"),
        (Silent, unheard, "layer 0, a Silent, returns no tensor; have it return hidden states, or leave out --memory"),
        (Plain, without_any, "layer 0, a Plain, takes no part in a step; have it do so, or leave out --memory"),
    ],
)
def test_layers_that_cannot_be_planned_are_refused_in_a_line(
    kind: Callable[[], nn.Module], call: Callable[[Whole, Tensor], Tensor], told: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=told):
        learnt(made(kind, call), tmp_path, PLANS[0])


def costs(whole: Whole, folder: Path) -> tuple[LayerCost, ...]:
    make = partial(ADAMW.make, lr=0.01)
    model = Model(whole, list(whole.layers), lambda: whole(BATCHES[0]), make, CPU)
    fitted = Fitted(model, make(list(whole.named_parameters())), str(folder), near_gradients=False)
    return fitted.planned("1GB", 1 << 40, True, 1, lambda one: [one]).profile.layers


def test_a_layer_that_is_called_twice_takes_twice_as_much(tmp_path: Path) -> None:
    once, again = costs(made(Plain, in_turn), tmp_path)[0], costs(made(Plain, twice), tmp_path)[0]
    assert again.saved_bytes == 2 * once.saved_bytes


def test_frozen_layers_are_measured_apart_from_trained_ones(tmp_path: Path) -> None:
    whole = made(Plain, in_turn)
    whole.layers[0].requires_grad_(False)
    frozen, *trained = costs(whole, tmp_path)
    assert frozen.gradient_bytes == frozen.moment_bytes == 0 < frozen.saved_bytes < trained[0].saved_bytes
    assert all(one.gradient_bytes == one.weight_bytes > 0 < one.moment_bytes for one in trained)
