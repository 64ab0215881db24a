"""Checkpoints that go from one layout to another, in process: every parameter keeps what was kept of it."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from farflung.codecs import Dense
from farflung.errors import UserError
from farflung.methods import Method
from farflung.networks import Conditions, Network, Simulation
from farflung.outer import Everyone, GossipNesterov, Schedule
from farflung.pipeline import Mesh, MeshCoordinates
from farflung.pipeline.local_model import LocalModel
from farflung.training import checkpoint
from farflung.training.resharding import buffer_names, load_state, own_names, whole_weights

OUTERS: dict[str, Any] = {
    "sgd": partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True),
    "gossip": GossipNesterov,
    "adam": partial(torch.optim.Adam, lr=0.1),
}
LAYERS = 4


def part_of(mesh: Mesh, coordinates: MeshCoordinates) -> LocalModel:
    """The same made-up model in every layout: four layers of matrices of five rows, dealt out to stages and shards.

    Each layer has a buffer that all of its shards have whole.
    """
    torch.manual_seed(0)
    whole = {f"layers.{n}.{name}": torch.randn(shape) for n in range(LAYERS) for name, shape in SHAPES.items()}
    own: dict[str, nn.Parameter] = {}
    buffers: dict[str, Tensor] = {}
    for name, tensor in whole.items():
        if int(name.split(".")[1]) * mesh.stages // LAYERS == coordinates.stage:
            rows = tensor.chunk(mesh.shards)
            own[name] = nn.Parameter(
                rows[coordinates.shard].clone() if coordinates.shard < len(rows) else tensor[:0].clone()
            )
            buffers[f"layers.{name.split('.')[1]}.mean"] = torch.zeros(3)
    return LocalModel(own, buffers)


SHAPES = {"weight": (5, 3), "bias": (2,)}


def buffer_of(name: str) -> Tensor:
    """What training has made of a buffer."""
    return torch.arange(3.0) + int(name.split(".")[1])


def train(network: Network, mesh: Mesh, coordinates: MeshCoordinates, method: Method, steps: int) -> dict[str, Any]:
    """What a process keeps in its checkpoint after some steps of a gradient that differs between replicas."""
    model = part_of(mesh, coordinates)
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1, momentum=0.9)
    for name, buffer in model.named_buffers():
        buffer.copy_(buffer_of(name))
    with method.attach(model, optimizer, network) as outer:
        for _ in range(steps):
            step(model, optimizer, network.rank)
        return {
            "shard": coordinates.shard,
            "buffers": buffer_names(model),
            **own_names(model, optimizer, method.schedule.fragments),
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "outer": outer.state_dict(),
            "late": {"count": 0, "mean": {}},
            "traffic": vars(network.traffic),
            "boundary_traffic": vars(network.traffic),
            "events_size": 0,
        }


def step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    for parameter in model.parameters():
        parameter.grad = parameter.detach() * (1 + rank)
    optimizer.step()


def kept(state: dict[str, Any]) -> dict[str, dict[str, Tensor]]:
    """What the outer optimizer keeps and the anchors, by kind and the parameter's name."""
    found: dict[str, dict[str, Tensor]] = {}
    for n, names in enumerate(state["fragments"]):
        flats = {"anchor": state["outer"]["streams"][n]["anchor"], **state["outer"]["outer"]["state"].get(n, {})}
        sizes = [state["model"][name].numel() for name in names]
        for kind, flat in flats.items():
            pieces = torch.split(flat, sizes) if flat.dim() else [flat] * len(names)
            shapes = [state["model"][name].shape if flat.dim() else () for name in names]
            values = zip(names, pieces, shapes, strict=True)
            found.setdefault(kind, {}).update({name: piece.view(shape) for name, piece, shape in values})
    return found


LAYOUT = st.builds(Mesh, st.just(2), st.sampled_from([1, 2]), st.sampled_from([1, 2, 3]))


@pytest.mark.slow
@given(LAYOUT, LAYOUT, st.sampled_from(sorted(OUTERS)), st.integers(1, 2), st.integers(1, 9))
@settings(max_examples=25, deadline=None)
def test_what_is_kept_of_a_parameter_goes_with_it(old: Mesh, new: Mesh, outer: str, fragments: int, steps: int) -> None:
    """Also before the first landing of some fragments: then there is nothing yet, or in mixed company noughts."""
    method = Method(Schedule(every=6, fragments=fragments), Everyone(), Dense(), OUTERS[outer])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        written = []
        for coordinates in places(old):
            state = Simulation(2, Conditions()).run(
                partial(train, mesh=old, coordinates=coordinates, method=method, steps=steps)
            )
            checkpoint.save(folder, steps, old.file_stem(coordinates), state[0])
            written.append(kept(state[0]))
        whole = whole_weights(checkpoint.parts_of(folder, steps, 0))
        assert all(torch.equal(whole[f"layers.{n}.mean"], buffer_of(f"layers.{n}.mean")) for n in range(LAYERS))
        for coordinates in places(new):
            model = part_of(new, coordinates)
            optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1, momentum=0.9)
            state = load_state(folder, steps, new, coordinates, model, optimizer, fragments)
            model.load_state_dict(state["model"])
            assert len(dict(model.named_buffers())) == LAYERS // new.stages
            assert all(torch.equal(buffer, buffer_of(name)) for name, buffer in model.named_buffers())
            now = kept(state)
            for kind, tensors in now.items():
                for key, tensor in tensors.items():
                    parts = [part[kind][key] for part in written if key in part.get(kind, {})]
                    if tensor.dim():
                        whole = torch.cat([*parts]) if parts else torch.zeros(SHAPES[key.split(".")[2]])
                        rows = whole.chunk(new.shards)
                        assert torch.equal(
                            tensor, rows[coordinates.shard] if coordinates.shard < len(rows) else whole[:0]
                        )
                    elif parts:
                        assert tensor == parts[0]
            for kind, key in {(kind, key) for part in written for kind, named in part.items() for key in named}:
                assert key in now[kind] or key not in dict(model.named_parameters())
            goes_on(state, new, coordinates, method)


def test_what_lies_on_another_machine_is_asked_for(tmp_path: Path) -> None:
    """A machine has one of two stages, and another schedule deals out other layers to it."""
    mesh, method = Mesh(1, 2), Method(Schedule(every=6), Everyone(), Dense(), OUTERS["sgd"])
    (state,) = Simulation(1).run(partial(train, mesh=mesh, coordinates=MeshCoordinates(0, 0), method=method, steps=3))
    checkpoint.save(tmp_path, 3, mesh.file_stem(MeshCoordinates(0, 0)), state)
    model = part_of(mesh, MeshCoordinates(0, 1))
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1, momentum=0.9)
    with pytest.raises(UserError, match=r"only parts of replica 0 .* copy the folders of all machines together"):
        load_state(tmp_path, 3, mesh, MeshCoordinates(0, 0), model, optimizer, 1)


def goes_on(state: dict[str, Any], mesh: Mesh, coordinates: MeshCoordinates, method: Method) -> None:
    """Trains until all fragments have landed."""

    def replica(network: Network) -> None:
        model = part_of(mesh, coordinates)
        optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1, momentum=0.9)
        with method.attach(model, optimizer, network) as loop:
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            loop.load_state_dict(state["outer"])
            for _ in range(12):
                step(model, optimizer, network.rank)
            found = loop.state_dict()["outer"]["state"]
            assert len(found) == method.schedule.fragments
            assert all(torch.isfinite(v).all() for values in found.values() for v in values.values())

    Simulation(2, Conditions()).run(replica)


def places(mesh: Mesh) -> list[MeshCoordinates]:
    return [MeshCoordinates(0, stage, shard) for stage in range(mesh.stages) for shard in range(mesh.shards)]
