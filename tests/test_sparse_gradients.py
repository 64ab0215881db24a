"""Embeddings with sparse gradients in a loop of one's own: their rows travel, never the whole table."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from farflung import methods
from farflung.codecs import Codec, ErrorFeedback, Rows, Threshold, codec_named
from farflung.networks import SimulatedNetwork, Simulation
from farflung.outer import Method

ROWS, WIDTH, STEPS = 3000, 8, 5


class Chooser(nn.Module):
    """Two tables, of which a batch touches a few rows, and a head."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.bag = nn.EmbeddingBag(ROWS, WIDTH, mode="mean", sparse=sparse)
        self.other = nn.Embedding(ROWS, WIDTH, sparse=sparse)
        self.head = nn.Linear(2 * WIDTH, 1)

    def loss(self, rank: int, step: int) -> Tensor:
        # Each once in a batch, since torch adds those that come twice in another order where they are sparse; 7 in all.
        ids = 8 + torch.randperm(ROWS - 8, generator=torch.Generator().manual_seed(100 * rank + step))[:12].view(4, 3)
        ids[0, 1] = 7
        both = torch.cat([self.bag(ids), self.other(ids[:, 1])], dim=1)
        return (self.head(both).squeeze(1) - ids[:, 0] / ROWS).square().mean()


Make = Callable[[Chooser], list[torch.optim.Optimizer]]


def sgd(model: Chooser) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(model.parameters(), lr=0.1)]


def trained(method: Callable[[], Method], make: Make, sparse: bool, replicas: int) -> list[tuple[list[Tensor], int]]:
    """Where each replica ends, and the bytes that it has sent."""

    def work(network: SimulatedNetwork) -> tuple[list[Tensor], int]:
        model = Chooser(sparse)
        optimizers = make(model)
        with method().attach(model, optimizers, network):
            for step in range(STEPS):
                model.zero_grad()
                model.loss(network.rank, step).backward()
                for optimizer in optimizers:
                    optimizer.step()
                assert model.bag.weight.grad is not None and model.bag.weight.grad.is_sparse == sparse
        return [weight.detach() for weight in model.parameters()], network.traffic.bytes_sent

    return Simulation(replicas).run(work)


@pytest.mark.parametrize("replicas", [2, 3])
def test_rows_give_the_bits_that_whole_tables_give(replicas: int) -> None:
    """Of more than two, packets add up in another order than an all-reduce, whatever is in them."""
    as_rows = trained(lambda: methods.ddp(codec="rows"), sgd, sparse=True, replicas=replicas)
    whole = trained(lambda: methods.ddp(codec="rows" if replicas > 2 else None), sgd, sparse=False, replicas=replicas)
    for (weights, _), (expected, _) in zip(as_rows, whole, strict=True):
        assert all(map(torch.equal, weights, expected))
    # 16 rows a step of the two tables, each 32 bytes and a gap of at most 12 bits, the head, notes and headers.
    packet = 16 * (WIDTH * 4 + 2) + 100 + 600
    assert max(sent for _, sent in as_rows) < STEPS * (replicas - 1) * packet + 2000
    tables = 2 * ROWS * WIDTH * 4
    assert max(sent for _, sent in as_rows) < STEPS * tables / 50


def test_thresholds_of_sparse_gradients_are_those_of_dense_ones() -> None:
    sparse, dense = (trained(methods.dynamic_threshold, sgd, sparse=sparse, replicas=2) for sparse in (True, False))
    for (weights, sent), (expected, sent_dense) in zip(sparse, dense, strict=True):
        assert all(map(torch.equal, weights, expected)) and sent == sent_dense


def test_sparse_adam_steps_along_the_mean_of_rows() -> None:
    """Against a plain loop over the same batches; a row that no replica touches keeps its moments."""

    def make(model: Chooser) -> list[torch.optim.Optimizer]:
        tables = [model.bag.weight, model.other.weight]
        return [torch.optim.SparseAdam(tables, lr=0.05), torch.optim.SGD(model.head.parameters(), lr=0.01)]

    seen = trained(lambda: methods.ddp(codec="rows"), make, sparse=True, replicas=2)
    model = Chooser(sparse=True)
    optimizers = make(model)
    for step in range(STEPS):
        model.zero_grad()
        sum(model.loss(rank, step) / 2 for rank in range(2)).backward()  # type: ignore[union-attr]
        for optimizer in optimizers:
            optimizer.step()
    for weights, _ in seen:
        for weight, expected in zip(weights, model.parameters(), strict=True):
            torch.testing.assert_close(weight, expected, rtol=0, atol=1e-5)


def test_rounds_send_the_rows_that_have_moved() -> None:
    as_rows = trained(lambda: methods.diloco(every=5, codec="rows"), sgd, sparse=True, replicas=2)
    whole = trained(lambda: methods.diloco(every=5), sgd, sparse=True, replicas=2)
    for (weights, sent), (expected, sent_whole) in zip(as_rows, whole, strict=True):
        assert all(map(torch.equal, weights, expected)) and sent < sent_whole / 20


@pytest.mark.parametrize("codec", [Rows(), codec_named("rows-int8"), ErrorFeedback(Threshold(0.01))], ids=str)
def test_a_table_of_noughts_costs_next_to_nothing(codec: Codec) -> None:
    table = torch.zeros(100_000, 16)
    table[[3, 70_000]] = torch.randn(2, 16, generator=torch.Generator().manual_seed(0))
    packet = codec.encode([table])
    assert packet.numel() < 1100
    (arrived,) = codec.decode(packet, [table])
    torch.testing.assert_close(arrived, table, rtol=0, atol=0.03)
    assert not arrived[0].any()


def test_what_is_sent_and_what_is_left_make_the_gradient_and_the_old_residue_exactly() -> None:
    """Bit for bit: a value travels as it is, or stays as it is."""
    codec = ErrorFeedback(Threshold(share=0.02))
    generator = torch.Generator().manual_seed(3)
    old = [torch.zeros(300, 40), torch.zeros(77)]
    for _ in range(40):
        gradient = [torch.randn(tensor.shape, generator=generator) for tensor in old]
        total = [g + e for g, e in zip(gradient, old, strict=True)]
        sent = codec.decode(codec.encode(gradient), gradient)
        old = [tensor.clone() for tensor in codec.state_dict()["residual"]]
        for t, s, e in zip(total, sent, old, strict=True):
            assert torch.equal(s + e, t) and not (s * e).any()


def test_a_threshold_of_1_percent_in_2_bits_is_a_hundredth_of_the_bytes() -> None:
    codec = ErrorFeedback(Threshold(share=0.01) | codec_named("int2"))  # type: ignore[operator]
    generator = torch.Generator().manual_seed(4)
    sizes = []
    for _ in range(60):
        message = [torch.randn(1000, 200, generator=generator), torch.randn(64, 64, generator=generator)]
        sizes.append(codec.encode(message).numel())
    whole = 4 * (1000 * 200 + 64 * 64)
    assert sum(sizes) / len(sizes) < whole / 100
