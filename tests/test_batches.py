"""Batches of a workload of the user's own: whatever they consist of, tensors are moved and the rest stays as it is."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from own_workload import Guess, GuessSettings
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from farflung.errors import UserError
from farflung.networks import SimulatedNetwork
from farflung.networks.settings import NetworkSettings
from farflung.pipeline.assemble import assemble
from farflung.pipeline.island import WholeIsland
from farflung.pipeline.mesh import Mesh
from farflung.pipeline.settings import IslandSettings
from farflung.workloads.batches import mapped, to
from farflung.workloads.dealing import ALL

META = torch.device("meta")


class Named(NamedTuple):
    x: Any
    y: Any


@dataclass(frozen=True)
class Fields:
    x: Any
    y: Any
    sizes: list[int] = field(default_factory=list, init=False)


LEAVES = st.one_of(st.just(torch.ones(2)), st.integers(), st.text(max_size=2), st.none(), st.binary(max_size=2))


def _nested(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.lists(children, max_size=3),
        st.lists(children, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=2), children, max_size=3),
        st.builds(Named, children, children),
        st.builds(Fields, children, children),
    )


@given(st.recursive(LEAVES, _nested, max_leaves=8))
def test_only_tensors_are_moved_and_all_keeps_its_form(batch: Any) -> None:
    assert _form(to(batch, META), "meta") == _form(batch, "meta")


def _form(batch: Any, device: str) -> Any:
    """A batch with a word in the place of each tensor that is there, or is to come there."""
    if isinstance(batch, Tensor):
        return f"a tensor of {tuple(batch.shape)} on {device}" if batch.device.type in (device, "cpu") else "elsewhere"
    if isinstance(batch, Named | Fields):
        return type(batch).__name__, _form(batch.x, device), _form(batch.y, device)
    if isinstance(batch, dict):
        return {key: _form(value, device) for key, value in batch.items()}
    return (type(batch), [_form(one, device) for one in batch]) if isinstance(batch, list | tuple) else batch


def test_tensors_in_all_of_them_come_to_the_device() -> None:
    batch = {"a": [torch.ones(1)], "b": Named((torch.ones(1), "a cat"), Fields(torch.ones(1), 3))}
    moved = to(batch, META)
    found = [moved["a"][0], moved["b"].x[0], moved["b"].y.x]
    assert [one.device for one in found] == [META] * 3 and moved["b"].x[1] == "a cat" and moved["b"].y.y == 3


def test_what_can_move_its_own_tensors_does() -> None:
    packed = to(pack_sequence([torch.ones(3), torch.ones(2)]), META)
    assert isinstance(packed, PackedSequence) and packed.data.device == META


def test_several_of_one_form_become_one() -> None:
    batches = [Named({"x": torch.full((2,), float(n))}, [torch.tensor(n)]) for n in range(3)]
    stacked = mapped(lambda *parts: torch.stack(parts), *batches)
    assert isinstance(stacked, Named) and stacked.x["x"].tolist() == [[0, 0], [1, 1], [2, 2]]
    assert stacked.y[0].tolist() == [0, 1, 2]


def _island(**change: Any) -> WholeIsland:
    workload: Any = type("Changed", (Guess,), change)(GuessSettings(), ALL)
    nowhere: Any = None
    at: Any = type("At", (), {"replica": 0})()
    return WholeIsland(IslandSettings(), workload, workload.build(0), nowhere, at, 0, torch.device("cpu"))


def test_a_loss_may_have_a_dimension_of_one() -> None:
    plain, island = _island(), _island(loss=lambda self, model, batch: Guess.loss(self, model, batch)[None])
    assert island.gradients(1) == plain.gradients(1)
    for one, other in zip(island.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


@pytest.mark.parametrize("spoil", [Tensor.detach, Tensor.long])
def test_a_loss_that_nothing_can_be_learnt_from_is_told(spoil: Any) -> None:
    with pytest.raises(UserError, match="loss does not depend on what is trained; let it return floats that the model"):
        _island(loss=lambda self, model, batch: spoil(Guess.loss(self, model, batch))).gradients(1)


def _weighed(weights: list[Any], loss: Any = Guess.loss) -> WholeIsland:
    """An island whose microbatches weigh so much."""
    left = iter(weights)
    island = _island(weight=lambda self, batch: next(left), loss=loss)
    island.settings = IslandSettings(microbatches=len(weights), clip=0.0)
    return island


@pytest.mark.parametrize("none", [0, 0.0, torch.zeros(())])
def test_a_microbatch_that_weighs_nothing_is_left_out(none: Any) -> None:
    """Its loss may be NaN, as a mean of nothing is."""

    def loss(self: Guess, model: nn.Linear, batch: Tensor) -> Tensor:
        return model.bias.sum() * (1.0, math.nan, 3.0)[int(batch[0])]

    island = _weighed([1, none, torch.tensor(3.0)], loss)
    island.workload.sample_ids = lambda *_: np.arange(3)  # type: ignore[method-assign]
    island.model.bias.data.fill_(1.0)
    loss, fault = island.gradients(1)
    assert (loss, fault) == (0.25 * 1 + 0.75 * 3, "")
    assert island.model.bias.grad.tolist() == [2.5]


@pytest.mark.parametrize("weights", [[0, 0], [torch.zeros(()), 0.0]])
def test_a_step_of_which_nothing_weighs_has_no_loss_and_no_gradients(weights: list[Any]) -> None:
    island = _weighed(weights)
    loss, fault = island.gradients(1)
    assert math.isnan(loss) and not fault
    assert all(parameter.grad is None for parameter in island.model.parameters())


@pytest.mark.parametrize("weight", [-1, math.nan, math.inf, "a", None, torch.ones(3)])
def test_a_weight_that_is_none_is_told(weight: Any) -> None:
    with pytest.raises(UserError, match=r"the workload's weight of a batch is .*; let it return a number, of at least"):
        _weighed([1, weight]).gradients(1)


def _assembled(**change: Any) -> None:
    workload: Any = type("Changed", (Guess,), change)(GuessSettings(), ALL)
    network = SimulatedNetwork.alone()
    assemble(IslandSettings(), workload, network, Mesh.alike(1), 0, NetworkSettings(), torch.device("cpu"))


@pytest.mark.parametrize("units", [0, -1, 1.5, math.nan, "a", None])
def test_units_that_no_sample_has_are_told(units: Any) -> None:
    _assembled()
    with pytest.raises(UserError, match=r"units_per_sample is .*; let it be a whole number, of at least 1"):
        _assembled(units_per_sample=units)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (nn.Identity(), r"\(Identity\) has no parameters; let build give one to train"),
        (nn.Linear(1, 1).requires_grad_(False), r"\(Linear\) has 2 parameters, and none of them requires a gradient"),
    ],
)
def test_a_model_that_cannot_be_trained_is_told(model: nn.Module, words: str) -> None:
    with pytest.raises(UserError, match=words):
        _assembled(build=lambda self, seed, reshape=None: model)
