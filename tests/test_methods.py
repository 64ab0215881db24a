"""The recipes on compressed, delayed and adapting rounds, against plain numpy and laws."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from problem import Result, flat, inner_steps, replica, small_model
from torch import Tensor

from farflung import methods
from farflung.codecs import (
    Codec,
    Dense,
    ErrorFeedback,
    LowRank,
    Modulo,
    Packet,
    Quantize,
    SplitCodec,
    Threshold,
)
from farflung.errors import UserError
from farflung.networks import SimulatedNetwork, Simulation
from farflung.outer import (
    Adapt,
    Average,
    Drop,
    Eager,
    Everyone,
    GossipNesterov,
    Keep,
    Merge,
    Method,
    Mix,
    OuterLoop,
    RandomGroups,
    Round,
    Schedule,
    SplitGossip,
    bytes_per_parameter,
)
from farflung.outer.adaptation import Adaptation, effective_ranks
from farflung.outer.bundles import cut
from farflung.settings import Settings

DOUBLE = torch.float64


def run(make: Callable[[], Method], replicas: int, steps: int) -> list[Result]:
    return Simulation(replicas).run(replica(make, steps, DOUBLE))


def trained(weights: np.ndarray, rank: int, steps: range, state: dict[str, Any]) -> np.ndarray:
    """Inner AdamW steps from these weights; `state` carries the inner optimizer over."""
    model = small_model(DOUBLE)
    torch.nn.utils.vector_to_parameters(torch.from_numpy(weights.copy()), model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if state:
        optimizer.load_state_dict(state["inner"])
    inner_steps(model, optimizer, rank, steps)
    state["inner"] = optimizer.state_dict()
    return flat(model).numpy().copy()


def test_eager_diloco_uses_its_own_fresh_part_and_the_others_last_one() -> None:
    """Δ used = own now / M + (mean - own / M) of last round; Nesterov; θ = φ'. Nobody's progress at first."""
    seen = run(lambda: methods.eager_diloco(every=4, outer_lr=0.7, outer_momentum=0.6, codec=Dense()), 3, 18)
    start = flat(small_model(DOUBLE)).numpy()
    anchors, velocities = [start.copy() for _ in range(3)], [np.zeros_like(start) for _ in range(3)]
    weights, states = list(anchors), [{} for _ in range(3)]
    last: list[np.ndarray] = [np.zeros_like(start)] * 3
    for round in range(5):
        end = min(4 * round + 4, 18)
        now = [trained(weights[r], r, range(4 * round, end), states[r]) for r in range(3)]
        deltas = [(anchors[r] - now[r]) * (end % 4 == 0) for r in range(3)]
        mean = np.mean(last, axis=0)
        for r in range(3):
            before = anchors[r]
            used = deltas[r] / 3 + mean - last[r] / 3
            velocities[r] = 0.6 * velocities[r] + used
            anchors[r] = anchors[r] - 0.7 * (used + 0.6 * velocities[r])
            weights[r] = anchors[r] if end % 4 == 0 else now[r] + anchors[r] - before
        last = deltas
    # Steps 17 and 18 come before the end, not before a round: they stay in the weights, which only the mean corrects.
    for r in range(3):
        np.testing.assert_allclose(seen[r].weights.numpy(), weights[r], rtol=0, atol=1e-6)


@pytest.mark.parametrize(("merge", "own"), [(Mix(0.3), 0.3), (Drop(), 0.0), (Mix(0.0), 0.0), (Mix(1.0), 1.0)])
def test_applying_a_round_mixes_own_weights_with_the_new_anchor(merge: Merge, own: float) -> None:
    """One replica, plain averaging: the new anchor is what the weights were two steps before."""
    method = Method(Schedule(every=5, delay=2), Everyone(), outer=Average, merge=merge)
    (result,) = run(lambda: method, 1, 7)
    state: dict[str, Any] = {}
    at_start = trained(flat(small_model(DOUBLE)).numpy(), 0, range(5), state)
    now = trained(at_start, 0, range(5, 7), state)
    np.testing.assert_allclose(result.weights.numpy(), own * now + (1 - own) * at_start, rtol=0, atol=1e-7)


def test_dct_sends_a_hundredth_and_owes_the_rest() -> None:
    everything = ErrorFeedback(Threshold(share=1.0, refresh=1))
    exact, sparse = (run(make, 2, 5) for make in (methods.ddp, lambda: methods.dynamic_threshold(codec=everything)))
    torch.testing.assert_close(exact[0].weights, sparse[0].weights, rtol=0, atol=1e-6)
    little = run(lambda: methods.dynamic_threshold(), 2, 5)
    assert little[0].outer.network.traffic.bytes_sent < sparse[0].outer.network.traffic.bytes_sent / 2.5
    errors = [round.compression_error for round in little[0].rounds]
    assert len(errors) == 5 and all(0.5 < error < 1 for error in errors)


def test_bytes_of_a_replica_do_not_grow_with_their_number() -> None:
    def bytes_sent(replicas: int) -> int:
        def work(network: SimulatedNetwork) -> int:
            model = torch.nn.Linear(200, 200, bias=False)
            torch.nn.init.ones_(model.weight)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            with methods.diloco(every=1, codec=ErrorFeedback(Quantize(bits=4))).attach(model, optimizer, network):
                model(torch.randn(3, 200)).square().mean().backward()
                optimizer.step()
            return network.traffic.bytes_sent

        return max(Simulation(replicas).run(work))

    few, many = bytes_sent(4), bytes_sent(16)
    assert few > 1.4 * 200 * 200 / 2  # 2 · 3/4 of a message
    assert many < 1.45 * few  # 2 · 15/16, and headers


@pytest.mark.parametrize("replicas", [2, 5])
def test_parts_that_are_shared_out_are_averaged_as_the_whole_would_be(replicas: int) -> None:
    """The codec loses nothing of such small matrices, but does not say so, so that its packets travel."""
    whole = run(lambda: methods.diloco(every=4), replicas, 12)
    shared = run(lambda: methods.diloco(every=4, codec=LowRank(64)), replicas, 12)
    for one, other in zip(whole, shared, strict=True):
        torch.testing.assert_close(one.weights, other.weights, rtol=0, atol=1e-6)
        assert torch.equal(other.weights, shared[0].weights)


@pytest.mark.parametrize("parts", [1, 2, 3, 7, 40])
def test_a_message_is_cut_into_equal_parts_between_rows(parts: int) -> None:
    shapes: Sequence[tuple[int, ...]] = [(30, 4), (7,), (), (0, 3), (2, 50), (5, 2, 3)]
    tensors = [torch.randn(shape) for shape in shapes]
    lists = [part.get("cell", []) for part in cut({"cell": tensors}, parts)]
    assert len(lists) == parts
    again = torch.cat([tensor.reshape(-1) for part in lists for tensor in part])
    assert torch.equal(again.sort().values, torch.cat([t.reshape(-1) for t in tensors]).sort().values)
    total = sum(tensor.numel() for tensor in tensors)
    assert max(sum(tensor.numel() for tensor in part) for part in lists) <= total / parts + 100


class Altering(Codec):
    """Dense packets, of which one replica's are altered on the way."""

    def __init__(self, network: SimulatedNetwork) -> None:
        self.alters = network.rank == 1

    def __deepcopy__(self, memo: dict[int, Any]) -> "Altering":
        return self

    def encode(self, tensors: Sequence[Tensor]) -> Packet:
        packet = Dense().encode(tensors)
        if self.alters:
            packet[-9] ^= 1
        return packet

    def decode(self, packet: Packet, like: Sequence[Tensor]) -> list[Tensor]:
        return Dense().decode(packet, like)

    def error_of(self, packet: Packet, tensors: Sequence[Tensor]) -> float:
        return 0.0


@pytest.mark.parametrize("averaging", ["parts", "whole"])
def test_a_round_goes_on_without_a_peer_whose_packets_cannot_be_read(averaging: Any) -> None:
    def work(network: SimulatedNetwork) -> Result:
        method = Method(
            Schedule(every=4),
            Everyone(),
            Altering(network),
            outer=partial(torch.optim.SGD, lr=1.0),
            averaging=averaging,
        )
        return replica(lambda: method, 8)(network)

    seen = Simulation(3).run(work)
    for rank in (0, 2):
        assert [round.outcome for round in seen[rank].rounds] == ["peer lost"] * 2
        for round in seen[rank].rounds:
            assert round.reason.startswith("replica 1 sent what cannot be read: packet has checksum")
        assert torch.isfinite(seen[rank].weights).all()
    if averaging == "whole":
        assert torch.equal(seen[0].weights, seen[2].weights)


def test_effective_rank_of_known_matrices() -> None:
    def effective_rank(tensors: list[Tensor]) -> float:
        total, size = effective_ranks(tensors)
        return total / size

    generator = torch.Generator().manual_seed(0)
    orthogonal = torch.linalg.qr(torch.randn(20, 20, generator=generator)).Q
    assert effective_rank([orthogonal]) == pytest.approx(20, rel=1e-4)
    thin = orthogonal[:, :3] @ orthogonal[:3]
    assert effective_rank([thin]) == pytest.approx(3, rel=1e-3)
    assert effective_rank([orthogonal, thin, torch.ones(500)]) == pytest.approx(11.5, rel=1e-3)
    assert effective_rank([torch.zeros(4, 4)]) == pytest.approx(1.0, abs=1.0)


def test_the_share_follows_how_much_of_the_rank_is_used() -> None:
    orthogonal = torch.eye(64)

    def observed(adaptation: Adaptation, rank: int) -> float:
        total, size = effective_ranks([orthogonal[:, :rank] @ orthogonal[:rank]])
        return adaptation.observe(total / size)

    adaptation = Adaptation(Adapt(window=2, least=0.3))
    # 64, then half of that: use falls to the mean of 64 and 32; then 32 of three quarters, which is 42.7 of all.
    assert [observed(adaptation, rank) for rank in (64, 64, 32)] == pytest.approx([1.0, 1.0, 0.75])
    assert observed(adaptation, 32) == pytest.approx(0.75 * (32 + 32 / 0.75) / 2 / 64, rel=1e-4)
    assert [observed(adaptation, 2) for _ in range(5)][-1] == 0.3
    # A codec that lets through less is no reason to let through still less.
    steady = Adaptation(Adapt(window=1))
    assert observed(steady, 64) == 1 and observed(steady, 48) == pytest.approx(0.75)
    assert [observed(steady, 48) for _ in range(5)] == pytest.approx([0.75] * 5)


def test_an_adapting_run_shortens_its_rounds_and_packets_alike_everywhere() -> None:
    """The gradient's rank falls from 4 to 1; rounds come twice and then four times as often, with smaller packets."""
    basis = torch.linalg.qr(torch.randn(32, 32, generator=torch.Generator().manual_seed(1))).Q

    def make() -> Method:
        plain = methods.dilocox(every=8, codec=LowRank(rank=4), outer_momentum=0.0)
        return replace(plain, adapt=Adapt(window=1, least=0.25))

    def work(network: SimulatedNetwork) -> list[tuple[int, int | None, float | None, int]]:
        model = torch.nn.Linear(32, 32, bias=False)
        torch.nn.init.ones_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        seen: list[tuple[int, int | None, float | None, int]] = []

        def note(round: Round) -> None:
            seen.append((round.started_step, round.every, round.effective_rank, network.traffic.bytes_sent))

        with make().attach(model, optimizer, network, on_round=note):
            for step in range(64):
                rank = 4 if step < 24 else 1
                model.weight.grad = 0.01 * basis[:, :rank] @ basis[:rank]
                optimizer.step()
        return seen

    everyone = Simulation(4).run(work)
    assert all([entry[:3] for entry in seen] == [entry[:3] for entry in everyone[0]] for seen in everyone)
    starts, everys, ranks, sent = zip(*everyone[0], strict=True)
    assert starts[:4] == (8, 16, 24, 32) and everys[:3] == (8, 8, 8) and everys[4:] == (2,) * len(everys[4:])
    assert ranks[0] == pytest.approx(4, abs=0.1) and ranks[-1] == pytest.approx(1, abs=0.1)
    assert {later - start for start, later in itertools.pairwise(starts[6:])} == {2}
    sizes = [later - before for before, later in itertools.pairwise(sent)]
    assert sizes[-2] < 0.6 * sizes[1]


def test_pairs_adapt_what_they_send_but_not_when() -> None:
    seen = Simulation(4).run(replica(lambda: methods.nolocox(every=5), steps=60))
    for result in seen:
        assert {round.every for round in result.rounds} == {5}
        assert all(round.effective_rank > 1 for round in result.rounds)
        assert [round.started_step for round in result.rounds] == list(range(5, 61, 5))


def test_gossip_of_halves_is_gossip_of_their_sum() -> None:
    """Codecs that lose nothing: what travels apart must train as what travels together."""
    together = run(lambda: methods.noloco(every=4), 4, 16)
    apart = run(lambda: methods.noloco(every=4, codec=LowRank(64), group_size=4), 4, 16)
    whole = run(lambda: methods.noloco(every=4, group_size=4), 4, 16)
    assert not torch.equal(together[0].weights, whole[0].weights)
    outer = apart[0].outer
    assert isinstance(outer, OuterLoop) and type(outer.outer).__name__ == "SplitGossip"
    for one, other in zip(whole, apart, strict=True):
        # The anchors' half travels by modulo, in two turns, so only nearly.
        torch.testing.assert_close(one.weights, other.weights, rtol=0, atol=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("codec", [Dense(torch.bfloat16), Dense(torch.float16), Quantize(bits=8), Modulo(bits=4)])
def test_gossip_loses_no_small_steps_to_rounding(codec: Codec) -> None:
    """Gains of 1 that move by 2e-5 a step: a bfloat16's neighbours of 1 are 0.004 away, so weights must not travel."""

    def moved(codec: Codec) -> float:
        def work(network: SimulatedNetwork) -> Tensor:
            norm = torch.nn.LayerNorm(64)
            optimizer = torch.optim.AdamW(norm.parameters(), lr=2e-5, weight_decay=0.0)
            with methods.noloco(every=10, codec=codec).attach(norm, optimizer, network):
                for step in range(100):
                    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(1000 * network.rank + step))
                    (-norm(x) * x).mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
            return norm.weight.detach() - 1

        return float(torch.stack(Simulation(4).run(work)).mean())

    exact = moved(Dense())
    assert exact > 0.001
    assert moved(codec) == pytest.approx(exact, rel=0.02)


def test_gossip_of_halves_keeps_replicas_near_from_the_first_rounds() -> None:
    """Anchors begin equal and then move apart; what travels of them must be wide enough to be read at once."""

    def spread(codec: Codec) -> float:
        def work(network: SimulatedNetwork) -> Tensor:
            model = torch.nn.Sequential(torch.nn.Linear(6, 256), torch.nn.Tanh(), torch.nn.Linear(256, 1))
            for parameter in model.parameters():
                torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(3))
            torch.nn.init.zeros_(model[0].bias)  # type: ignore[arg-type]
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            with methods.noloco(every=5, codec=codec).attach(model, optimizer, network):
                inner_steps(model, optimizer, network.rank, range(40))
            return flat(model)

        return float(torch.stack(Simulation(4).run(work)).std(0).norm())

    assert spread(Quantize(bits=8)) < 2.5 * spread(Dense())


@pytest.mark.parametrize("codec", [Modulo(bits=4), SplitCodec(Quantize(bits=8), Modulo(bits=4))])
def test_who_must_end_alike_cannot_take_what_depends_on_the_receiver(codec: Codec) -> None:
    for make in (methods.ddp, methods.diloco, methods.streaming_diloco, methods.sparseloco, methods.dynamic_threshold):
        with pytest.raises(UserError, match=r"reads messages by the receiver's own values.*use it with noloco"):
            make(codec=codec)
    assert methods.diloco(codec=codec, group_size=2).codec == codec
    with pytest.raises(UserError, match="Modulo"):
        Settings.of(method="diloco", codec="modulo4").method()


@pytest.mark.parametrize(
    ("outer", "codec"),
    [
        (GossipNesterov, SplitCodec(Quantize(bits=2), Modulo(bits=4))),
        (GossipNesterov, SplitCodec(Modulo(bits=4), Quantize(bits=2))),
        (Average, SplitCodec(Quantize(bits=2), Modulo(bits=4))),
        (Average, ErrorFeedback(Quantize(bits=8))),
        (SplitGossip, Quantize(bits=2)),
        (SplitGossip, SplitCodec(Modulo(bits=4), Quantize(bits=2))),
    ],
)
def test_whole_weights_are_never_rounded(outer: Any, codec: Codec) -> None:
    model = torch.nn.Linear(3, 1)
    method = Method(Schedule(every=2), topology=RandomGroups(), codec=codec, outer=outer, averaging="whole")
    with pytest.raises(UserError, match=r"sends whole weights, in which .* would round small steps away"):
        method.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), SimulatedNetwork.alone())


@pytest.mark.parametrize(
    ("outer", "codec"),
    [
        (GossipNesterov, SplitCodec(Dense(), Modulo(bits=4))),
        (Average, Modulo(bits=4)),
        (SplitGossip, Dense()),
        (SplitGossip, Modulo(bits=4)),
        (SplitGossip, SplitCodec(Quantize(bits=2), Modulo(bits=4))),
    ],
)
def test_what_keeps_weights_is_taken(outer: Any, codec: Codec) -> None:
    model = torch.nn.Linear(3, 1)
    method = Method(Schedule(every=2), topology=RandomGroups(), codec=codec, outer=outer, averaging="whole")
    method.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), SimulatedNetwork.alone())


def test_noloco_takes_a_codec_of_halves_as_it_is() -> None:
    codec = SplitCodec(Quantize(bits=8), Modulo(bits=4))
    assert methods.noloco(codec=codec).codec == codec
    assert methods.noloco(codec=codec).outer.func is SplitGossip  # type: ignore[union-attr]


def test_eager_needs_a_delay_of_a_whole_round() -> None:
    with pytest.raises(UserError, match="set delay to the same as every"):
        Method(Schedule(every=4, delay=2), outer=Average, merge=Eager())


def test_settings_reach_their_method() -> None:
    method = Settings.of(method="streaming-diloco", codec="int8", merge="kept", every=30, delay=3).method()
    assert method.codec == Quantize(bits=8) and method.merge == Keep() and method.schedule == Schedule(30, 3, 3)
    assert Settings.of(method="dilocox", adapt=False).method().adapt is None
    for settings, complaint in [
        ({"method": "demo", "codec": "int8"}, "demo has no setting codec"),
        ({"method": "noloco", "codec": "int5"}, "codec 'int5': .* choose 8, 4 or 2"),
        ({"method": "noloco", "merge": "thrown"}, "must be one of kept, dropped, mixed, eager, sent, turned"),
        ({"method": "diloc"}, "did you mean 'diloco'"),
    ]:
        with pytest.raises(UserError, match=complaint):
            Settings.of(**settings).method()


def test_the_listed_bytes_are_those_of_the_codec() -> None:
    assert bytes_per_parameter(methods.ddp()) == pytest.approx(4, abs=1e-3)
    assert bytes_per_parameter(methods.local()) == 0
    assert bytes_per_parameter(methods.streaming_diloco()) == pytest.approx(0.5, abs=0.01)
    assert bytes_per_parameter(methods.noloco(codec=LowRank(64) | Quantize(bits=4))) > 2 / 8


def test_what_receivers_read_by_their_own_values_is_never_averaged_in_parts() -> None:
    whole = methods.noloco(every=4, group_size=4, codec=Modulo(bits=4))
    seen = [run(lambda way=way: replace(whole, averaging=way), 4, 16) for way in ("whole", "parts")]
    for one, other in zip(*seen, strict=True):
        assert torch.equal(one.weights, other.weights)


@pytest.mark.parametrize(
    "name", ["diloco", "streaming-diloco", "eager-diloco", "dilocox", "sparseloco", "noloco", "nolocox"]
)
def test_recipes_refuse_what_the_command_line_refuses(name: str) -> None:
    mistakes = {"outer_lr": -1.0, "outer_momentum": 1.0, "gamma": -1.0, "group_size": 0}
    for setting, value in mistakes.items():
        if setting in methods.defaults_of(name):
            with pytest.raises(UserError, match=f"^{setting} is {value}; "):
                methods.RECIPES[name](**{setting: value})
