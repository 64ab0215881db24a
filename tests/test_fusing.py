"""Radial-directional averaging, against its formula in plain Python and what it is for."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from farflung import methods
from farflung.codecs import Dense, Modulo
from farflung.errors import UserError
from farflung.methods import Method
from farflung.networks import SimulatedNetwork, Simulation
from farflung.outer import Everyone, Schedule
from farflung.outer.averaging import Averaging, Meeting
from farflung.outer.fragments import split
from farflung.outer.fusing import radial_of
from farflung.settings import Settings

SHAPES = ((6, 5), (7,), ())
DESCENT = {"outer_lr": 1.0, "outer_momentum": 0.0}


def reference(vectors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """(Σ w|v| / Σ w) · φ(Σ w·φ(v) / Σ w)."""
    rows = [vector.flatten().tolist() for vector in vectors]
    lengths = [math.sqrt(sum(x * x for x in row)) for row in rows]
    total = sum(weights)
    sums = [
        sum(w * row[i] / length for w, row, length in zip(weights, rows, lengths, strict=True) if length) / total
        for i in range(len(rows[0]))
    ]
    norm = math.sqrt(sum(x * x for x in sums))
    length = sum(w * one for w, one in zip(weights, lengths, strict=True)) / total
    return torch.tensor([length * x / norm if norm else 0.0 for x in sums]).view(vectors[0].shape)


def gradients(rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(shape, generator=generator) * 10.0 ** (number - rank) for number, shape in enumerate(SHAPES)]


def model_of(shapes: Sequence[tuple[int, ...]]) -> nn.ParameterList:
    return nn.ParameterList([nn.Parameter(torch.zeros(shape)) for shape in shapes])


def moved(method: Method, replicas: int, gradients: Callable[[int], list[Tensor]]) -> list[list[Tensor]]:
    """What one round makes of the replicas' gradients, by steps of 1."""

    def work(network: SimulatedNetwork) -> list[Tensor]:
        given = gradients(network.rank)
        model = model_of([one.shape for one in given])
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with method.attach(model, optimizer, network):
            for weight, gradient in zip(model, given, strict=True):
                weight.grad = gradient
            optimizer.step()
        return [-weight.detach() for weight in model]

    return Simulation(replicas).run(work)


@pytest.mark.parametrize("codec", ["float32", "bfloat16"])
@pytest.mark.parametrize("group_size", [None, 3])
def test_lengths_and_directions_are_averaged_apart(codec: str, group_size: int | None) -> None:
    """By all-reduce, of whole packets and of their parts; each replica has the same bits."""
    method = replace(methods.diloco(every=1, codec=codec, group_size=group_size, **DESCENT), fuse="rda")  # type: ignore[arg-type]
    seen = moved(method, 3, gradients)
    for number in range(len(SHAPES)):
        wanted = reference([gradients(rank)[number] for rank in range(3)], [1.0] * 3)
        close = 1e-5 if codec == "float32" else 0.01
        torch.testing.assert_close(seen[0][number], wanted, rtol=close, atol=close * float(wanted.norm()))
        assert group_size or all(torch.equal(seen[0][number], one[number]) for one in seen)


@pytest.mark.parametrize("way", ["whole", "parts"])
def test_messages_weigh_what_they_are_said_to(way: str) -> None:
    weights = {0: 4.0, 1: 1.0, 2: 0.0}

    def work(network: SimulatedNetwork) -> list[Tensor]:
        model = model_of(SHAPES)
        for weight, gradient in zip(model, gradients(network.rank), strict=True):
            weight.data.copy_(gradient)
        (fragment,) = split(model, 1)
        outer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
        method = Method(Schedule(1), Everyone(), Dense(), outer=torch.optim.SGD, averaging=way, fuse="rda")  # type: ignore[arg-type]
        averaging = Averaging(network.rank, method, radial=radial_of("rda", fragment, model, outer))
        message = fragment.message(fragment.read())
        averaging.start(message, Meeting(network, (0, 1, 2), "a round", 0, weights))[0].wait(1.0)
        return [tensor for tensors in message.cells.values() for tensor in tensors]

    for seen in Simulation(3).run(work):
        for number in range(len(SHAPES)):
            wanted = reference([gradients(rank)[number] for rank in range(3)], list(weights.values()))
            torch.testing.assert_close(seen[number], wanted, rtol=1e-5, atol=1e-5 * float(wanted.norm()))


@pytest.mark.parametrize("replicas", [2, 4, 8])
def test_orthogonal_steps_keep_their_length_and_equal_ones_are_what_they_were(replicas: int) -> None:
    """The plain mean of orthogonal steps is shorter by the root of their number."""
    for fuse, length in (("rda", 3.0), ("mean", 3.0 / math.sqrt(replicas))):
        method = replace(methods.diloco(every=1, **DESCENT), fuse=fuse)  # type: ignore[arg-type]
        unlike = moved(method, replicas, lambda rank: [3.0 * torch.eye(8)[rank]])[0][0]
        assert float(unlike.norm()) == pytest.approx(length)
        torch.testing.assert_close(moved(method, replicas, lambda rank: gradients(0))[0], gradients(0))


def test_nothing_has_no_direction() -> None:
    method = replace(methods.diloco(every=1, **DESCENT), fuse="rda")  # type: ignore[arg-type]
    step = [torch.tensor([3.0, 4.0]), torch.zeros(5), torch.full((2,), 1e30)]
    seen = moved(method, 2, lambda rank: [one * rank for one in step])[0]
    torch.testing.assert_close(seen, [one / 2 for one in step])
    against = moved(method, 2, lambda rank: [one * (1 - 2 * rank) for one in step])[0]
    assert all(torch.equal(one, torch.zeros_like(one)) for one in against)


def test_tables_of_embeddings_have_the_plain_mean() -> None:
    def work(network: SimulatedNetwork) -> list[Tensor]:
        model = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 4, bias=False))
        for weight in model.parameters():
            nn.init.zeros_(weight)
            weight.grad = torch.zeros_like(weight)
            weight.grad.view(-1)[network.rank] = 1.0
        method = replace(methods.diloco(every=1, **DESCENT), fuse="rda")  # type: ignore[arg-type]
        with method.attach(model, optimizer := torch.optim.SGD(model.parameters(), lr=1.0), network):
            optimizer.step()
        return [-weight.detach().view(-1)[:2] for weight in model.parameters()]

    table, matrix = Simulation(2).run(work)[0]
    torch.testing.assert_close(table, torch.full((2,), 0.5))
    torch.testing.assert_close(matrix, torch.full((2,), math.sqrt(0.5)))


def test_it_is_refused_where_there_are_no_pseudo_gradients() -> None:
    refused = {
        "ddp": "there are none",
        "ist": "there are none",
        "eager-diloco": "eager takes",
        "sparta": "Sampled",
        "sparseloco": "ErrorFeedback",
    }
    for name, why in refused.items():
        with pytest.raises(UserError, match=rf"^fuse is 'rda', which is for pseudo-gradients, and {why}[^\n]*leave"):
            Settings.of(method=name, fuse="rda").method()
    with pytest.raises(UserError, match="sends some of the values, which would get the length of all"):
        Settings.of(method="diloco", codec="random0.5", fuse="rda").method()
    with pytest.raises(UserError, match="receiver's own"):
        replace(methods.diloco(codec=Modulo(bits=4), group_size=2), fuse="rda")
    model = nn.Linear(2, 2)
    with pytest.raises(UserError, match=r"GossipNesterov sends whole weights; leave it out, or use diloco"):
        method = Settings.of(method="noloco", fuse="rda").method()
        method.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), SimulatedNetwork.alone())
