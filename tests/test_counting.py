"""Bytes and memory told from shapes, against what replicas that train really send and keep."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import pytest
import torch
from registered import METHODS
from torch import Tensor, nn

from farflung import methods
from farflung.cells import cells_among
from farflung.codecs import Codec
from farflung.methods import RECIPES, Method
from farflung.networks import Network, Simulation
from farflung.outer import bytes_per_parameter, kept_bytes, message_bytes, traffic_per_hop
from farflung.outer.fragments import split
from farflung.outer.healing import sketch

SHAPES = ((40, 30), (), (70,), (3, 20, 10), (64, 64))
ROUNDS = 4

T = TypeVar("T")

ALIKE = (
    *("float32", "bfloat16", "int8", "int2", "e3m0", "block-dct", "topk5-int4", "block-dct-topk5-int8"),
    *("ef-topk2-int2", "ef-lowrank4-int4", "lowrank2", "threshold5", "ef-threshold5-int8"),
)
CASES: dict[str, Callable[[], Method]] = {
    **{name: RECIPES[name] for name in METHODS if name not in ("nolocox", "local") and not RECIPES[name]().sends_more},
    **{f"diloco {name}": lambda name=name: methods.diloco(codec=name) for name in ALIKE},
    **{f"noloco {name}": lambda name=name: methods.noloco(codec=name) for name in (*ALIKE, "modulo4")},
    **{f"ddp {name}": lambda name=name: methods.ddp(codec=name) for name in ALIKE},
    **{f"diloco rda {name}": lambda name=name: replace(methods.diloco(codec=name), fuse="rda") for name in ALIKE[:4]},
    "nolocox": lambda: methods.nolocox(codec="modulo3"),
    "noloco in threes": lambda: methods.noloco(codec="modulo4", group_size=3),
    "demo in parts": lambda: methods.demo(averaging="parts"),
    "sparseloco in parts": lambda: methods.sparseloco(averaging="parts"),
    "noloco modulo4x2": lambda: methods.noloco(codec="modulo4x2"),
}


def parameters() -> nn.ParameterList:
    return nn.ParameterList([nn.Parameter(torch.zeros(shape)) for shape in SHAPES])


def trained(make: Callable[[], Method], replicas: int, seen: Callable[[Any], T]) -> list[list[T]]:
    """What is seen of each replica, after so many inner steps as each fragment has a round in."""
    every = make().schedule.every or 1

    def work(network: Network) -> list[T]:
        generator = torch.Generator().manual_seed(network.rank)
        model = parameters()
        found = []
        with make().attach(model, optimizer := torch.optim.SGD(model, lr=0.1), network) as attached:
            for step in range(ROUNDS * every):
                for parameter in model:
                    parameter.grad = torch.randn(parameter.shape, generator=generator)
                optimizer.step()
                if (step + 1) % every == 0:
                    found.append(seen(attached))
        return found

    return Simulation(replicas).run(work)


def expected_bytes(method: Method, replicas: int) -> float:
    """Of all replicas, in one round of each fragment."""
    total = 0.0
    fragments = [fragment.cells for fragment in split(parameters(), method.schedule.fragments)]
    for members in map(len, method.topology.groups(tuple(range(replicas)), "any")):
        hops = sum(traffic_per_hop(method.codec, method.averaging, members))
        compared = sketch(torch.zeros(1), False).nbytes if method.outer and method.topology.identical else 0
        each = (hops * message_bytes(method, cells, members) + compared for cells in fragments)
        total += members * (members - 1) * sum(each)
    return total


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_what_a_round_sends_is_told_to_the_byte_where_packets_are_of_one_length(name: str) -> None:
    method = CASES[name]()
    replicas = 3 if method.topology.identical else 4
    ends = trained(CASES[name], replicas, lambda attached: attached.network.traffic.bytes_sent)
    sent = sum(replica[-1] - replica[-2] for replica in ends)
    if method.codec.traits.fixed_length:
        assert sent == pytest.approx(expected_bytes(method, replicas), abs=replicas / 2)  # each rounds its own
    elif not method.codec.traits.feeds_back:
        assert sent == pytest.approx(expected_bytes(method, replicas), rel=0.1)
    else:  # what a threshold lets through of a residual is half to twice what it is set for
        assert 0.5 < sent / expected_bytes(method, replicas) < 2


@pytest.mark.parametrize("name", CASES)
def test_torchs_default_dtype_and_device_do_not_matter(name: str) -> None:
    def told() -> tuple[float, ...]:
        method = CASES[name]()
        cells = cells_among([[shape] for shape in SHAPES])
        return message_bytes(method, cells, 3), kept_bytes(method, cells), bytes_per_parameter(method)

    usual = told()
    try:
        torch.set_default_dtype(torch.float64)
        torch.set_default_device("meta")
        other = told()
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
    assert other == usual


def test_cells_of_the_same_shapes_are_counted_once_however_many_there_are() -> None:
    asked = []

    class Told(Codec):
        def nbytes(self, like: Sequence[Tensor]) -> int:
            asked.append([tuple(tensor.shape) for tensor in like])
            return 1 + sum(tensor.numel() for tensor in like)

    cells = cells_among([[(8, 8)]] * 1000 + [[(8, 4)]] * 10)
    assert message_bytes(replace(methods.noloco(), codec=Told()), cells, 2) == 1000 * (1 + 64) + 10 * (1 + 32)
    assert asked == [[(8, 8)], [(8, 4)]]
