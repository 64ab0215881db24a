"""Cells: what a model is cut into, who keeps which, and packets of several."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shards import SimulatedLayout
from torch import Tensor

from farflung import cells
from farflung.cells import Cell, dealt, layers_of
from farflung.codecs import Dense, ErrorFeedback, PacketError, Quantize, Threshold
from farflung.networks import SimulatedNetwork, Simulation
from farflung.outer.bundles import Bundle
from farflung.outer.keepers import Keeper
from farflung.pipeline import Mesh

SHAPES = st.lists(st.sampled_from([(), (3,), (7, 2), (5, 3, 2), (1, 9), (0, 4), (40, 3)]), min_size=1, max_size=6)
MODELS = st.lists(SHAPES, min_size=1, max_size=5).map(
    lambda layers: {f"layers.{n}.{m}": shape for n, layer in enumerate(layers) for m, shape in enumerate(layer)}
)


def small_cells(shapes: Mapping[str, tuple[int, ...]], full: int, most: int) -> list[list[Cell]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cells, "FULL", full)
        patch.setattr(cells, "MOST", most)
        return list(layers_of(shapes).values())


@given(MODELS, st.integers(1, 60), st.integers(1, 30))
def test_each_row_of_a_model_is_in_one_cell_of_its_layer(shapes: Any, full: int, most: int) -> None:
    found = small_cells(shapes, full, most)
    names = [cell.name for layer in found for cell in layer]
    assert len(set(names)) == len(names)
    rows: dict[str, list[range]] = {}
    for number, layer in enumerate(found):
        for cell in layer:
            for piece in cell.pieces:
                assert piece.parameter.startswith(f"layers.{number}.")
                count = piece.shape[0] if piece.shape else 1
                assert piece.numel <= max(most, math.prod(piece.shape[1:]))
                rows.setdefault(piece.parameter, []).append(range(piece.begin, piece.begin + count))
    for name, shape in shapes.items():
        assert [row for part in rows[name] for row in part] == list(range(shape[0] if shape else 1))
    assert all(cell.numel >= full for layer in found for cell in layer[:-1])


def test_a_layer_is_what_one_number_counts() -> None:
    names = ["embed.weight", "layers.0.a.weight", "layers.0.b", "layers.1.a.weight", "norm.weight", "head"]
    assert list(layers_of(dict.fromkeys(names, (2, 2)))) == ["embed", "layers.0", "layers.1", "norm", "head"]


@given(st.lists(st.integers(1, 100), min_size=1, max_size=30), st.integers(1, 8))
def test_keepers_get_about_as_many_values(sizes: list[int], keepers: int) -> None:
    made = [layer[0] for layer in layers_of({f"{n}.x": (size,) for n, size in enumerate(sizes)}).values()]
    chosen = dealt(made, keepers)
    loads = [sum(cell.numel for cell in made if chosen[cell.name] == keeper) for keeper in range(keepers)]
    assert sum(loads) == sum(sizes)
    assert max(loads) - min(loads) <= max(sizes)


@given(MODELS, st.integers(1, 4), st.integers(1, 60), st.integers(1, 30))
@settings(max_examples=50, deadline=None)
def test_keepers_see_whole_cells_and_shards_get_their_rows_back(shapes: Any, count: int, full: int, most: int) -> None:
    shapes = {name: shape or (1,) for name, shape in shapes.items()}  # FSDP divides no tensors without rows
    found = [cell for layer in small_cells(shapes, full, most) for cell in layer]
    whole = {name: torch.randn(shape) for name, shape in shapes.items()}
    flats = {cell.name: torch.cat([_piece(whole, piece).flatten() for piece in cell.pieces]) for cell in found}

    def work(network: SimulatedNetwork) -> None:
        shard = network.rank
        local = {name: chunks[shard] for name, t in whole.items() if len(chunks := t.chunk(count)) > shard}
        chosen = dealt(found, count)
        keeper = Keeper(found, chosen, SimulatedLayout(shapes, shapes, network, Mesh.alike(1, 1, count)))
        kept = [flats[cell.name] for cell in found if chosen[cell.name] == shard]
        flat = torch.full((sum(map(len, kept)),), torch.nan)
        keeper.gather(local, flat)
        assert torch.equal(flat, torch.cat([torch.empty(0), *kept]))
        written = {name: torch.full_like(rows, torch.nan) for name, rows in local.items()}
        keeper.scatter(flat * 2, written)
        assert all(torch.equal(written[name], 2 * rows) for name, rows in local.items())

    Simulation(count).run(work)


def _piece(whole: Mapping[str, Tensor], piece: cells.Piece) -> Tensor:
    return whole[piece.parameter][piece.begin : piece.begin + piece.shape[0]]


@given(
    sizes=st.lists(st.lists(st.sampled_from([(), (3,), (2, 5), (130,)]), min_size=1, max_size=3), max_size=5),
    codec=st.sampled_from([Quantize(bits=2), ErrorFeedback(Quantize(bits=4)), Threshold(share=0.5), Dense()]),
    seed=st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_a_bundle_is_each_cell_by_a_codec_of_its_own(sizes: Any, codec: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    parts = [[torch.randn(shape, generator=generator) for shape in shapes] for shapes in sizes]
    tensors = [tensor for part in parts for tensor in part]
    bundle = Bundle([copy.deepcopy(codec) for _ in parts], [len(part) for part in parts])
    packet = bundle.encode(tensors)
    alone = [copy.deepcopy(codec) for _ in parts]
    expected = [one.decode(one.encode(part), part) for one, part in zip(alone, parts, strict=True)]
    decoded = bundle.decode(packet, tensors)
    assert all(map(torch.equal, decoded, [tensor for part in expected for tensor in part]))
    missing = math.dist(torch.cat([torch.empty(0), *(t.flatten() for t in tensors)]), _flat(decoded))
    if not isinstance(codec, ErrorFeedback):
        assert bundle.error_of(packet, tensors) == pytest.approx(missing / max(_size(tensors), 1e-30), abs=1e-5)
    if len(packet):
        packet[seed * len(packet) // 100] ^= 1
        with pytest.raises(PacketError):
            bundle.decode(packet, tensors)
    with pytest.raises(PacketError):
        bundle.decode(torch.cat([packet, torch.zeros(8, dtype=torch.uint8)]), tensors)


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([torch.empty(0), *(tensor.flatten() for tensor in tensors)])


def _size(tensors: Sequence[Tensor]) -> float:
    return float(_flat(tensors).norm())
