"""Checkpoints that go from one layout to another, in process: every cell keeps what was kept of it."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shards import Islands, SimulatedLayout
from torch import Tensor, nn

from farflung import methods
from farflung.codecs import codec_named
from farflung.errors import UserError
from farflung.inner import MuonAdamW, PrimalAveraging, SlowAdamW, names_of
from farflung.methods import Method
from farflung.networks import SimulatedNetwork, Simulation
from farflung.outer import AlignedSteps, AveragedMoments, Everyone, GossipNesterov, Schedule
from farflung.pipeline import IslandShape, Mesh, MeshCoordinates
from farflung.pipeline.local_model import LocalModel
from farflung.training import checkpoint
from farflung.training.resharding import buffer_names, load_state, whole_weights

OUTERS: dict[str, Any] = {
    "sgd": partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True),
    "gossip": GossipNesterov,
    "adam": partial(torch.optim.Adam, lr=0.1),
}
CODECS = ["float32"], ["float32", "ef-int8", "ef-topk20", "ef-lowrank1-int8"]
"""For outer optimizers that send whole weights, and for others."""
LAYERS = 4
SHAPES = {"weight": (5, 3), "bias": (2,)}
OUTLINE = {f"layers.{n}.{name}": shape for n in range(LAYERS) for name, shape in SHAPES.items()}
STEPS = 12


def stage_of(name: str, shape: IslandShape) -> int:
    return int(name.split(".")[1]) * shape.stages // LAYERS


def part_of(mesh: Mesh, network: SimulatedNetwork, buffers: bool = False) -> LocalModel:
    """The same made-up model in every layout: four layers of matrices of five rows, dealt out to stages and shards.

    With `buffers`, each layer has one that all of its shards have whole.
    """
    coordinates = mesh.coordinates(network.rank)
    shape = mesh.shape(coordinates.replica)
    torch.manual_seed(0)
    whole = {name: torch.randn(shape) for name, shape in OUTLINE.items()}
    here = [name for name in whole if stage_of(name, shape) == coordinates.stage]
    own: dict[str, nn.Parameter] = {}
    for name in here:
        rows = whole[name].chunk(shape.shards)
        own[name] = nn.Parameter(
            (rows[coordinates.shard] if coordinates.shard < len(rows) else whole[name][:0]).clone()
        )
    means = {f"layers.{name.split('.')[1]}.mean": torch.zeros(3) for name in here if buffers}
    return LocalModel(own, means, SimulatedLayout(OUTLINE, here, network, mesh), tables=())


def buffer_of(name: str) -> Tensor:
    """What training has made of a buffer."""
    return torch.arange(3.0) + int(name.split(".")[1])


Inner = Callable[..., torch.optim.Optimizer]
SGD: Inner = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def train(
    mesh: Mesh, method: Method, make: Inner, steps: range, folder: Path | None, buffers: bool, process: SimulatedNetwork
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A process's checkpoint after some steps of a gradient that differs between replicas, and its weights."""
    coordinates, network = mesh.coordinates(process.rank), Islands(process, mesh)
    model = part_of(mesh, process, buffers)
    optimizer = make(model.named_parameters())
    if isinstance(optimizer, MuonAdamW):
        optimizer.lie_in(model.layout)
    with method.attach(model, optimizer, network) as outer:
        if folder:
            state = load_state(folder, steps[0], mesh, coordinates, model, optimizer)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            outer.load_state_dict(state["outer"])
        for name, buffer in model.named_buffers():
            buffer.copy_(buffer_of(name))
        for _ in steps:
            for parameter in model.parameters():
                parameter.grad = parameter.detach() * (1 + network.rank)
            optimizer.step()
        weights = {name: p.detach().clone() for name, p in model.named_parameters()}
        return {
            "shard": coordinates.shard,
            "buffers": buffer_names(model),
            "names": names_of(optimizer),
            "model": {name: tensor.clone() for name, tensor in model.state_dict().items()},
            "optimizer": copy.deepcopy(optimizer.state_dict()),
            "outer": copy.deepcopy(outer.state_dict()),  # which what is applied at the end would change
            "late": {"count": 0, "mean": {}},
            "traffic": vars(network.traffic),
            "boundary_traffic": vars(network.traffic),
            "events_size": 0,
        }, weights


def trained(
    mesh: Mesh,
    method: Method,
    steps: range,
    resume: Path | None = None,
    save: Path | None = None,
    buffers: bool = False,
    make: Inner = SGD,
) -> list[dict[str, Tensor]]:
    """Each replica's whole weights after some steps; goes on from a folder's checkpoint, and leaves one, if given."""
    whole: list[dict[str, dict[int, Tensor]]] = [{} for _ in range(mesh.replicas)]
    seen = Simulation(mesh.processes).run(partial(train, mesh, method, make, steps, resume, buffers))
    for process, (state, weights) in enumerate(seen):
        coordinates = mesh.coordinates(process)
        if save:
            checkpoint.save(save, steps.stop, mesh.file_stem(coordinates), state)  # type: ignore[arg-type]
        for name, rows in weights.items():
            whole[coordinates.replica].setdefault(name, {})[coordinates.shard] = rows
    return [{name: torch.cat([rows for _, rows in sorted(one.items())]) for name, one in w.items()} for w in whole]


SHAPE = st.builds(IslandShape, st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 3]))
LAYOUT = st.builds(Mesh, st.tuples(SHAPE, SHAPE))


@pytest.mark.slow
@given(
    LAYOUT,
    LAYOUT,
    st.sampled_from([(outer, codec) for outer in OUTERS for codec in CODECS[outer != "gossip"]]),
    st.integers(1, 2),
    st.integers(0, 2),
    st.integers(1, STEPS - 1),
)
@settings(max_examples=25, deadline=None)
def test_a_run_goes_on_in_another_layout_as_in_one_process(
    old: Mesh, new: Mesh, kind: tuple[str, str], fragments: int, delay: int, steps: int
) -> None:
    """With anchors, outer state, codecs' memory and pending rounds."""
    outer, codec = kind
    schedule = Schedule(every=6, fragments=fragments, delay=delay)
    method = Method(schedule, Everyone(), codec_named(codec), OUTERS[outer])

    alike = all(len(set(mesh.shapes)) == 1 for mesh in (old, new))

    def found(first: Mesh, then: Mesh) -> list[dict[str, Tensor]]:
        with tempfile.TemporaryDirectory() as name:
            trained(first, method, range(steps), save=Path(name), buffers=alike)
            for replica in range(2):
                whole = whole_weights(checkpoint.parts_of(Path(name), steps, replica))
                means = [f"layers.{n}.mean" for n in range(LAYERS) if alike]
                assert all(torch.equal(whole[name], buffer_of(name)) for name in means)
            return trained(then, method, range(steps, STEPS), resume=Path(name), buffers=alike)

    for one, other in zip(found(Mesh.alike(2), Mesh.alike(2)), found(old, new), strict=True):
        for key, tensor in one.items():
            torch.testing.assert_close(other[key], tensor, atol=1e-6, rtol=1e-5)


METHODS: dict[str, Method] = {
    "noloco": methods.noloco(every=3),
    "diloco, parts": methods.diloco(every=3, codec="int8"),
    "diloco, delayed fragments": methods.diloco(every=4, delay=2, fragments=2),
    "eager": methods.diloco(every=3, delay=3, merge="eager"),
    "modulo": methods.noloco(every=3, codec="modulo8"),
    "nolocox": methods.nolocox(every=3),
    "sparseloco": methods.sparseloco(every=3),
    "dilocox": methods.dilocox(every=3),
    "demo": methods.demo(),
    "ddp": methods.ddp(),
    "ddp, encoded": methods.ddp(codec="ef-topk20"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
@given(st.lists(SHAPE, min_size=2, max_size=4))
@settings(max_examples=6, deadline=None)
def test_islands_of_unlike_shapes_train_as_single_processes_do(name: str, shapes: list[IslandShape]) -> None:
    """To the bit, since cells are averaged and encoded whole wherever they lie."""
    alone = trained(Mesh.alike(len(shapes)), METHODS[name], range(STEPS))
    for one, other in zip(alone, trained(Mesh(tuple(shapes)), METHODS[name], range(STEPS)), strict=True):
        assert one.keys() == other.keys()
        for key, tensor in one.items():
            torch.testing.assert_close(other[key], tensor, atol=0, rtol=0)


ADAMW: Inner = partial(torch.optim.AdamW, lr=0.01)
COMPANIONS: dict[str, tuple[Method, Inner]] = {
    "des-loc": (methods.des_loc(every=2), ADAMW),
    "gpa": (methods.gpa(every=3), partial(PrimalAveraging, lr=0.01)),
    "gasloc": (methods.gasloc(every=3), ADAMW),
    "factored gossip": (methods.factored_gossip(every=3), ADAMW),
    "decoupled": (methods.decoupled_diloco(every=4, delay=2, fragments=2), ADAMW),
    "slow momentum, late": (
        replace(methods.diloco(every=3, delay=2), companions=(AveragedMoments((("slow_momentum", 2),)),)),
        partial(SlowAdamW, lr=0.01),
    ),
    "aligned, late, with a slow momentum": (
        replace(
            methods.diloco(every=3, delay=2),
            companions=(AlignedSteps(), AveragedMoments((("slow_momentum", 1), ("exp_avg_sq", 1)))),
        ),
        partial(MuonAdamW, lr=0.01, align=0.5, slow_share=0.4),
    ),
}


@pytest.mark.parametrize("stages", [1, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", COMPANIONS)
def test_what_goes_along_with_rounds_goes_on_in_another_layout(name: str, stages: int) -> None:
    """Of a bias of two rows, one of three shards has none, and yet may keep its cell; of few cells, one keeps none."""
    method, make = COMPANIONS[name]
    whole = trained(Mesh.alike(2), method, range(STEPS), make=make)
    divided, single = Mesh.alike(2, stages, 3), Mesh.alike(2)
    for old, new in ((divided, single), (single, divided)):
        with tempfile.TemporaryDirectory() as folder:
            trained(old, method, range(7), save=Path(folder), make=make)
            again = trained(new, method, range(7, STEPS), resume=Path(folder), make=make)
        for one, other in zip(whole, again, strict=True):
            for key, tensor in one.items():
                torch.testing.assert_close(other[key], tensor, atol=1e-5, rtol=1e-4)


def test_unlike_islands_refuse_what_only_alike_ones_can_average() -> None:
    mesh = Mesh((IslandShape(1, 1), IslandShape(2, 1)))

    def work(process: SimulatedNetwork) -> str:
        part = part_of(mesh, process)
        model = LocalModel(dict(part.named_parameters()), {"layers.0.mean": torch.zeros(3)}, part.layout, tables=())
        optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1)
        with methods.diloco(every=2).attach(model, optimizer, Islands(process, mesh)):
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            with pytest.raises(UserError) as error:
                optimizer.step()
        return str(error.value)

    assert set(Simulation(3).run(work)) == {
        "the model keeps layers.0.mean besides its trained weights, which islands of unlike layouts cannot average; "
        "give all islands the same stages and shards"
    }


def test_what_lies_on_another_machine_is_asked_for(tmp_path: Path) -> None:
    """A machine has one of two stages, and another schedule deals out other layers to it."""
    mesh, method = Mesh.alike(1, 2), Method(Schedule(every=6), Everyone(), outer=OUTERS["sgd"])
    trained(mesh, method, range(3), save=tmp_path)
    checkpoint.path_of(tmp_path, 3, mesh.file_stem(MeshCoordinates(0, 1))).unlink()
    with pytest.raises(UserError, match=r"only parts of replica 0 .* copy the folders of all machines together"):
        trained(mesh, method, range(3, 6), resume=tmp_path)
