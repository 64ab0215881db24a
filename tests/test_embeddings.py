"""Tables dealt to replicas, against one whole copy of them; and what crosses between these."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from processes import run_replicas
from torch import Tensor, nn

from farflung import UserError
from farflung.codecs import Dense, ErrorFeedback, PacketError, Quantize
from farflung.codecs.numbers import pack_numbers, unpack_numbers
from farflung.embeddings import Bags, Crossing, DistinctRows, LargestOfSample, ShardedTables
from farflung.networks import Network, PeerLostError, SimulatedNetwork, Simulation

ROWS = (40, 7, 100)
WIDTH = 6
SAMPLES = 9


def whole_tables(mode: str = "sum", sparse: bool = False) -> list[nn.EmbeddingBag]:
    torch.manual_seed(0)
    return [nn.EmbeddingBag(rows, WIDTH, mode=mode, sparse=sparse) for rows in ROWS]


def batch_of(rank: int, lookup: int) -> list[Bags]:
    """Bags of 0 to 3 rows, with repeated ones."""
    generator = torch.Generator().manual_seed(100 * lookup + rank)
    bags = []
    for rows in ROWS:
        sizes = torch.randint(0, 4, (SAMPLES,), generator=generator)
        ids = (torch.rand(int(sizes.sum()), generator=generator) ** 3 * rows).long()
        bags.append(Bags(ids, sizes.cumsum(0) - sizes))
    return bags


def loss_of(pooled: Tensor, rank: int) -> Tensor:
    """Whose gradient differs from value to value, and from replica to replica."""
    scale = torch.randn(pooled.shape, generator=torch.Generator().manual_seed(rank))
    return (scale * pooled + pooled**2).mean()


def looked_up(tables: Sequence[nn.EmbeddingBag], bags: Sequence[Bags]) -> Tensor:
    return torch.stack([table(ids, offsets) for table, (ids, offsets) in zip(tables, bags, strict=True)], dim=1)


def two_steps(network: Network, mode: str, crossing: Crossing, sparse: bool = False) -> dict[str, Any]:
    """Two steps of SGD on dealt tables: what a replica has seen."""
    tables = ShardedTables(copy.deepcopy(whole_tables(mode, sparse)), network, crossing)
    weights = list(tables.parameters())
    optimizer = torch.optim.SGD(weights, lr=0.5) if weights else None
    pooled, gradients = [], {}
    for lookup in range(2):
        found = tables(batch_of(network.rank, lookup))
        loss_of(found, network.rank).backward()
        pooled.append(found.detach())
        own = tables.owned_by(network.rank)
        gradients = {n: w.grad.to_dense() for n, w in zip(own, weights, strict=True) if w.grad is not None}
        if optimizer:
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        after = tables(batch_of(network.rank, 7))
    whole, sent = tables.whole_weights(), network.traffic.bytes_sent
    return {"pooled": pooled, "gradients": gradients, "whole": whole, "after": after, "sent": sent}


def stepped(replicas: int, mode: str, crossing: Crossing, sparse: bool = False) -> list[dict[str, Any]]:
    """What each replica has seen in two steps."""
    return Simulation(replicas).run(lambda network: two_steps(network, mode, crossing, sparse))


@pytest.mark.slow
def test_real_processes_see_what_simulated_replicas_do_bit_for_bit(tmp_path: Path) -> None:
    real = run_replicas(3, "tables", "", tmp_path)
    for one, other in zip(real, stepped(3, "mean", DistinctRows("int8")), strict=True):
        for seen in ("pooled", "whole"):
            assert all(map(torch.equal, one[seen], other[seen]))
        assert torch.equal(one["after"], other["after"])


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("replicas", [1, 2, 3, 5])
@pytest.mark.parametrize("crossing", [DistinctRows(), LargestOfSample(1.0)], ids=["rows", "all pooled"])
def test_dealt_tables_are_one_dense_lookup(replicas: int, mode: str, crossing: Crossing) -> None:
    """Pooled rows, their gradients by the mean of all losses, and the weights after steps; 5 replicas, 3 tables."""
    seen = stepped(replicas, mode, crossing)
    tables = whole_tables(mode)
    weights = [table.weight for table in tables]
    optimizer = torch.optim.SGD(weights, lr=0.5)
    for lookup in range(2):
        optimizer.zero_grad()
        losses = []
        for rank in range(replicas):
            found = looked_up(tables, batch_of(rank, lookup))
            torch.testing.assert_close(seen[rank]["pooled"][lookup], found, rtol=0, atol=1e-6)
            losses.append(loss_of(found, rank))
        torch.stack(losses).mean().backward()
        optimizer.step()
    gradients = {number: gradient for one in seen for number, gradient in one["gradients"].items()}
    assert sorted(gradients) == [0, 1, 2] and sum(len(one["gradients"]) for one in seen) == 3
    for number, weight in enumerate(weights):
        torch.testing.assert_close(gradients[number], weight.grad, rtol=0, atol=1e-6)
        for one in seen:
            torch.testing.assert_close(one["whole"][number], weight, rtol=0, atol=1e-6)
    for rank, one in enumerate(seen):
        torch.testing.assert_close(one["after"], looked_up(tables, batch_of(rank, 7)), rtol=0, atol=1e-6)


def test_a_second_backward_pass_is_an_exchange_of_its_own() -> None:
    def work(network: SimulatedNetwork) -> list[Tensor]:
        tables = ShardedTables(whole_tables(), network)
        loss = loss_of(tables(batch_of(network.rank, 0)), 1)
        seen = []
        for again in (True, False):
            loss.backward(retain_graph=again)
            seen.append(torch.cat([weight.grad.flatten().clone() for weight in tables.parameters()]))
        return seen

    for once, twice in Simulation(2).run(work):
        torch.testing.assert_close(twice, 2 * once)


@pytest.mark.parametrize("crossing", [DistinctRows(), LargestOfSample(0.25)], ids=["rows", "largest"])
def test_sparse_gradients_are_the_dense_ones(crossing: Crossing) -> None:
    for dense, sparse in zip(stepped(3, "mean", crossing), stepped(3, "mean", crossing, sparse=True), strict=True):
        for one, other in zip(dense["whole"], sparse["whole"], strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-6)
        assert dense["sent"] == sparse["sent"]


def test_the_largest_of_each_sample_cross_and_the_gradient_comes_back_at_their_places() -> None:
    """By hand: of the sample (1, -5, 2, 0), a half is -5 and 2."""
    crossing = LargestOfSample(0.5)
    activations = torch.tensor([[1.0, -5.0, 2.0, 0.0], [0.5, 0.25, -0.125, 4.0]])
    packet, places = crossing.send(activations)
    arrived, found = crossing.receive(packet, torch.empty(2, 4))
    assert arrived.tolist() == [[0.0, -5.0, 2.0, 0.0], [0.5, 0.0, 0.0, 4.0]]
    assert torch.equal(found, places)
    gradient = torch.arange(8.0).view(2, 4)
    back = crossing.send_gradient(gradient, found)
    assert crossing.receive_gradient(back, torch.empty(2, 4), places).tolist() == [[0.0, 1.0, 2.0, 0.0], [4.0, 0, 0, 7]]
    assert packet.numel() == back.numel() + 2  # four places of two bits, in the eight that are packed together


@pytest.mark.parametrize("codec", ["int8", "int4", Quantize(4, block=32)], ids=str)
def test_rows_and_gradients_are_rounded_both_ways_and_own_rows_never(codec: Any) -> None:
    exact, rounded = stepped(2, "sum", DistinctRows()), stepped(2, "sum", DistinctRows(codec))
    owned = {rank: set(one["gradients"]) for rank, one in enumerate(rounded)}
    for rank, one in enumerate(rounded):
        for number in range(len(ROWS)):
            error = (one["pooled"][0][:, number] - exact[rank]["pooled"][0][:, number]).abs().max()
            assert (error == 0) == (number in owned[rank]) and error < 1
            difference = (one["whole"][number] - exact[rank]["whole"][number]).abs().max()
            assert 0 < difference < 1
    assert rounded[0]["sent"] < exact[0]["sent"]


def test_a_row_crosses_once_however_many_samples_look_it_up() -> None:
    def sent(repeats: int) -> int:
        def work(network: SimulatedNetwork) -> int:
            tables = ShardedTables([nn.EmbeddingBag(1000, 64, mode="sum") for _ in range(2)], network)
            ids = torch.arange(100).repeat(repeats)
            with torch.no_grad():
                tables([Bags(ids, torch.arange(ids.numel())) for _ in range(2)])
            return network.traffic.bytes_sent

        return Simulation(2).run(work)[0]

    assert sent(1) == sent(20)
    assert 100 * 64 * 4 < sent(1) < 100 * 64 * 4 + 300  # gaps of one row, in a bit each, and headers


def test_a_peer_that_is_gone_is_told_of() -> None:
    def work(network: SimulatedNetwork) -> tuple[int, ...]:
        tables = ShardedTables(whole_tables(), network, deadline_s=5.0)
        if network.rank == 2:
            return ()
        with pytest.raises(PeerLostError) as lost:
            tables(batch_of(network.rank, 0))
        return lost.value.ranks

    assert Simulation(3).run(work) == [(2,), (2,), ()]


def test_a_peer_that_is_gone_on_the_way_back_is_told_of() -> None:
    def work(network: SimulatedNetwork) -> tuple[int, ...]:
        tables = ShardedTables(whole_tables(), network, deadline_s=5.0)
        pooled = tables(batch_of(network.rank, 0))
        if network.rank == 1:
            return ()
        with pytest.raises(PeerLostError) as lost:
            pooled.sum().backward()
        return lost.value.ranks

    assert Simulation(2).run(work) == [(1,), ()]


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ([], "there are no tables to deal out; give at least one"),
        ([nn.EmbeddingBag(3, 4), nn.EmbeddingBag(3, 5)], "table 1 is 5 wide, and table 0 4; give them one width"),
        ([nn.EmbeddingBag(3, 4, dtype=torch.bfloat16)], "table 0 is of torch.bfloat16; make it float32"),
        ([nn.EmbeddingBag(3, 4, mode="max")], "table 0 has mode='max'; choose sum or mean"),
        ([nn.EmbeddingBag(3, 4, max_norm=1.0)], "table 0 has max_norm=1.0, which a divided table cannot have"),
        ([nn.EmbeddingBag(3, 4, include_last_offset=True)], "table 0 has include_last_offset=True, which a divided"),
        ([nn.Embedding(3, 4)], "table 0 is a Embedding; make it an nn.EmbeddingBag"),
        ([nn.EmbeddingBag(3, 4)] * 2, "one table is given more than once, and would become several"),
        ([nn.EmbeddingBag(3, 4, padding_idx=0)], "table 0 has padding_idx=0, which a divided table cannot have"),
    ],
)
def test_tables_that_cannot_be_dealt_are_refused(tables: list[nn.EmbeddingBag], words: str) -> None:
    with pytest.raises(UserError, match=words):
        ShardedTables(tables, SimulatedNetwork.alone())


def test_bags_that_do_not_fit_are_refused() -> None:
    tables = ShardedTables(whole_tables(), SimulatedNetwork.alone())
    one = torch.tensor([0])
    for bags, words in (
        ([Bags(one, one)], "there are 3 tables, and bags for 1; give bags for each table"),
        ([Bags(one, one), Bags(one, one), Bags(one, torch.tensor([0, 1]))], "unequal numbers of samples"),
        ([Bags(one, one), Bags(one + 7, one), Bags(one, one)], "table 1 has rows 0 to 6, and is asked for 7"),
        (
            [Bags(one / 1, one), *[Bags(one, one)] * 2],
            r"ids of table 0 are \(1,\) of torch.float32; give whole numbers",
        ),
        ([Bags(one[None], one), *[Bags(one, one)] * 2], r"ids of table 0 are \(1, 1\) of torch.int64"),
        ([Bags(one, one + 1), *[Bags(one, one)] * 2], "offsets of table 0 do not rise from 0 to its 1 ids"),
        ([Bags(one, one[:0]), *[Bags(one, one[:0])] * 2], "offsets of table 0 do not rise from 0 to its 1 ids"),
        ([(one, one)] * 3, "bags of a table are a tuple; give farflung.embeddings.Bags"),
        ([Bags(one - 1, one), Bags(one, one), Bags(one, one)], "table 0 has rows 0 to 39, and is asked for -1"),
    ):
        with pytest.raises(UserError, match=words):
            tables(bags)


@pytest.mark.parametrize("crossing", [DistinctRows(), LargestOfSample(0.25)])
def test_a_batch_may_have_no_samples(crossing: Any) -> None:
    tables = ShardedTables(whole_tables(), SimulatedNetwork.alone(), crossing)
    none = torch.empty(0, dtype=torch.int64)
    width = tables.whole_weights()[0].shape[1]
    assert tables([Bags(none, none)] * 3).shape == (0, 3, width)


def test_crossings_that_cannot_work_are_refused() -> None:
    with pytest.raises(UserError, match="rows are others in each batch"):
        DistinctRows(ErrorFeedback(Dense()))
    with pytest.raises(UserError, match="LargestOfSample has share=0; choose more than 0 and at most 1"):
        LargestOfSample(0)


@given(st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=40), max_size=5))
def test_numbers_come_back_from_as_few_bits_as_the_largest_needs(lists: list[list[int]]) -> None:
    packet = pack_numbers([torch.tensor(numbers, dtype=torch.int64) for numbers in lists])
    assert [numbers.tolist() for numbers in unpack_numbers(packet)] == lists
    bits = sum((len(numbers) + 7) // 8 * max(max(numbers).bit_length(), 1) for numbers in lists if numbers)
    assert packet.numel() == 8 + 8 * len(lists) + bits
    for shorter in (packet[:-1], packet[:5]):
        with pytest.raises(PacketError):
            unpack_numbers(shorter)


def test_a_network_that_deals_no_packets_out_is_refused() -> None:
    class Plain:
        rank = 0

    with pytest.raises(UserError, match="ShardedTables needs a network that has all_to_all"):
        ShardedTables([nn.EmbeddingBag(3, 2)], cast(Any, Plain()))
