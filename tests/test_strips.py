"""Messages that go as several packets, so that some are decoded while others are on the wire."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from problem import replica
from torch import Tensor

from farflung import methods
from farflung.codecs import Codec, Dense, ErrorFeedback, Modulo, Quantize, TopK
from farflung.networks import PeerLostError, Pending, SimulatedNetwork, Simulation
from farflung.outer import Method, RandomGroups, Schedule, bundles
from farflung.outer.aggregation import Aggregation
from farflung.outer.averaging import Averaging, Meeting
from farflung.outer.bundles import strips
from farflung.outer.columns import Message, views_like


@given(st.lists(st.integers(0, 40), max_size=60), st.integers(1, 50))
def test_strips_are_all_cells_in_order_few_and_none_but_the_last_short(sizes: list[int], strip: int) -> None:
    cells = {f"layer {number}": [torch.zeros(size)] for number, size in enumerate(sizes)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bundles, "STRIP", strip)
        runs = strips(cells)
    assert [cell for run in runs for cell in run.items()] == list(cells.items())
    assert len(runs) <= bundles.MOST_STRIPS
    assert all(sum(tensor.numel() for (tensor,) in run.values()) >= strip for run in runs[:-1])


@pytest.mark.slow
@pytest.mark.parametrize("codec", [Dense(torch.bfloat16), TopK(share=0.3, chunk=8), ErrorFeedback(TopK(share=0.3))])
def test_what_a_codec_makes_of_single_tensors_is_the_same_in_strips(
    codec: Codec, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(network: SimulatedNetwork) -> tuple[Tensor, int, list[float]]:
        result = replica(lambda: methods.diloco(every=3, codec=codec), steps=12)(network)
        return result.weights, network.traffic.packets_sent, [round.compression_error for round in result.rounds]

    whole = Simulation(2).run(work)
    monkeypatch.setattr(bundles, "STRIP", 50)
    cut = Simulation(2).run(work)
    for (weights, packets, errors), (expected, fewer, whole_errors) in zip(cut, whole, strict=True):
        assert torch.equal(weights, expected)
        assert packets == fewer + 4 * 2  # three packets a round where there was one
        assert errors == pytest.approx(whole_errors, rel=0.2)


@pytest.mark.parametrize("codec", [Modulo(bits=8, block=8), ErrorFeedback(Quantize(bits=8, block=8))])
def test_blocks_are_averaged_as_finely_in_strips(codec: Codec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundles, "STRIP", 50)
    messages = [torch.randn(300, generator=torch.Generator().manual_seed(1)) + 0.01 * rank for rank in range(2)]

    def work(network: SimulatedNetwork) -> Tensor:
        average = averaged(network, codec)
        for number in range(3):
            mean = average(messages[network.rank].clone(), f"round {number}").wait(5)
        return mean

    for mean in Simulation(2).run(work):
        assert (mean - (messages[0] + messages[1]) / 2).abs().max() < 0.02


def test_a_partner_who_never_comes_leaves_the_own_values() -> None:
    def work(network: SimulatedNetwork) -> Tensor:
        message = torch.arange(300.0)
        pending = averaged(network, Dense(torch.bfloat16))(message, f"only {network.rank}")
        for _ in range(2):  # also of one who waits in slices
            with pytest.raises(PeerLostError) as lost:
                pending.wait(3.0)
            assert lost.value.ranks == (1 - network.rank,)
        return message

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bundles, "STRIP", 50)
        for message in Simulation(2).run(work):
            assert torch.equal(message, torch.arange(300.0))


@pytest.mark.parametrize(("lie", "taken"), [(1.0, True), (1e4, False)])
def test_a_checked_message_comes_in_strips_and_counts_as_a_whole_or_not_at_all(lie: float, taken: bool) -> None:
    blamed: list[int] = []

    def work(network: SimulatedNetwork) -> tuple[Tensor, str, int]:
        message = torch.ones(300)
        if network.rank == 1:
            message[250:] = lie  # the last of its strips
        lost = ""
        pending = averaged(network, Dense(), Aggregation("mean", lambda rank, _: blamed.append(rank)))(message, "x")
        try:
            pending.wait(5)
        except PeerLostError as error:
            lost = str(error)
        return message, lost, network.traffic.packets_sent

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bundles, "STRIP", 50)
        honest, _ = Simulation(2).run(work)
    message, lost, packets = honest
    assert packets == 6
    assert torch.equal(message, torch.ones(300))
    assert ("times as large as usual" in lost, 1 in blamed) == (not taken, not taken)


@pytest.mark.parametrize(("worth", "packets"), [(0, 6), (100, 6), (400, 3), (10_000, 1)])
def test_strips_are_fewer_where_a_packet_costs_requests(worth: int, packets: int) -> None:
    def work(network: SimulatedNetwork) -> tuple[Tensor, int]:
        network.worth_a_packet = worth
        message = torch.full((300,), float(network.rank))
        averaged(network, Dense(), Aggregation("mean", lambda *_: None))(message, "x").wait(5)
        return message, network.traffic.packets_sent

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bundles, "STRIP", 50)
        for message, sent in Simulation(2).run(work):
            assert torch.equal(message, torch.full((300,), 0.5)) and sent == packets


def averaged(
    network: SimulatedNetwork, codec: Codec, aggregation: Aggregation | None = None
) -> Callable[[Tensor, str], Pending[Tensor]]:
    """Averages messages of 300 values in six tensors among two."""
    method = Method(Schedule(every=1), RandomGroups(), codec, averaging="whole")
    averaging = Averaging(network.rank, method, aggregation=aggregation)

    def start(flat: Tensor, key: str) -> Pending[Tensor]:
        cells = {f"cell {n}": [part] for n, part in enumerate(flat.split(50))}
        message = Message(flat, list(cells), partial(views_like, cells))
        return averaging.start(message, Meeting(network, (0, 1), key))[0]

    return start
