"""The rounds: what the outer loop promises for any model and any optimizer."""

import copy
import gc
import io
import itertools
import re
from functools import partial
from typing import Any

import pytest
import torch
from problem import flat, inner_steps, replica, small_model
from torch import Tensor, nn

from farflung import methods
from farflung.codecs import Dense, ErrorFeedback, LowRank, Modulo, Quantize
from farflung.errors import UserError
from farflung.methods import Method
from farflung.networks import SimulatedNetwork, Simulation, Traffic
from farflung.outer import (
    Average,
    DisagreementError,
    DivergedError,
    Everyone,
    GossipNesterov,
    OuterLoop,
    RandomGroups,
    Schedule,
)
from farflung.outer.fragments import split


def alone(
    model: nn.Module, method: Method, lr: float = 1e-2, **options: Any
) -> tuple[OuterLoop, torch.optim.Optimizer]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    outer = method.attach(model, optimizer, SimulatedNetwork.alone(), **options)
    assert isinstance(outer, OuterLoop)
    return outer, optimizer


def test_one_replica_with_plain_averaging_every_step_is_the_inner_optimizer_bit_for_bit() -> None:
    averaging = Method(Schedule(every=1), Everyone(), outer=Average)
    with_rounds = Simulation(1).run(replica(lambda: averaging, steps=40))[0]
    without = Simulation(1).run(replica(methods.local, steps=40))[0]
    assert len(with_rounds.rounds) == 40 and not without.rounds
    assert torch.equal(with_rounds.weights, without.weights)


def test_ddp_is_one_optimizer_on_the_mean_gradient() -> None:
    seen = Simulation(3).run(replica(methods.ddp, steps=5))
    model = small_model(torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(5):
        for rank in range(3):
            inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(1000 * rank + step)).double()
            ((model(inputs) - inputs.sum(1, keepdim=True)).square().mean() / 3).backward()
        optimizer.step()
        optimizer.zero_grad()
    for result in seen:
        assert torch.equal(result.weights, seen[0].weights)
        torch.testing.assert_close(result.weights.double(), flat(model), rtol=0, atol=1e-6)


def test_diloco_keeps_all_replicas_equal_and_noloco_keeps_them_near() -> None:
    apart = torch.stack([r.weights for r in Simulation(4).run(replica(methods.local, steps=60))]).std(0).norm()
    equal = torch.stack([r.weights for r in Simulation(4).run(replica(lambda: methods.diloco(every=5), steps=60))])
    near = torch.stack([r.weights for r in Simulation(4).run(replica(lambda: methods.noloco(every=5), steps=60))])
    assert torch.equal(equal[0], equal[3])
    assert 0 < near.std(0).norm() < apart / 3


COMPRESSED = {
    "noloco-modulo": lambda: methods.noloco(every=5, codec=Modulo(bits=4)),
    "nolocox": lambda: methods.nolocox(every=5, codec=ErrorFeedback(LowRank(2) | Quantize(4, stochastic=True))),
    "dilocox": lambda: methods.dilocox(every=5, codec=ErrorFeedback(LowRank(2) | Quantize(4, stochastic=True))),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        *(lambda d=delay, f=f: methods.noloco(every=5, delay=d, fragments=f) for delay in (0, 3, 5) for f in (1, 3)),
        *(pytest.param(make, id=name) for name, make in COMPRESSED.items()),
    ],
)
def test_going_on_from_a_state_is_going_on_bit_for_bit(make: Any) -> None:
    """Also in the middle of a round: saved at step 12, two steps after rounds started at 10.

    With settings of all sorts; what every method promises is in test_conformance.py.
    """

    def work(network: SimulatedNetwork, interrupted: bool) -> Tensor:
        method = make()
        model = small_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with method.attach(model, optimizer, network) as outer:
            inner_steps(model, optimizer, network.rank, range(12))
            file = io.BytesIO()
            torch.save((model.state_dict(), optimizer.state_dict(), outer.state_dict()), file)
            if not interrupted:
                inner_steps(model, optimizer, network.rank, range(12, 25))
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        if interrupted:
            model = small_model()
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            with method.attach(model, optimizer, network) as outer:
                model.load_state_dict(saved[0])
                optimizer.load_state_dict(saved[1])
                outer.load_state_dict(saved[2])
                inner_steps(model, optimizer, network.rank, range(12, 25))
        return flat(model)

    undisturbed = Simulation(4).run(lambda network: work(network, False))
    resumed = Simulation(4).run(lambda network: work(network, True))
    for one, other in zip(undisturbed, resumed, strict=True):
        assert torch.equal(one, other)


def test_leaving_lands_what_is_pending_and_unhooks() -> None:
    model = small_model()
    outer, optimizer = alone(model, methods.diloco(every=4, delay=4), on_round=(landed := []).append)
    with outer:
        inner_steps(model, optimizer, 0, range(6))
        assert not landed
    assert [(round.started_step, round.step) for round in landed] == [(4, 6)]
    inner_steps(model, optimizer, 0, range(6, 12))
    assert outer.step == 6 and len(landed) == 1


def test_leaving_by_an_error_drops_what_is_pending() -> None:
    model = small_model()
    outer, optimizer = alone(model, methods.diloco(every=4, delay=4), on_round=(landed := []).append)
    with pytest.raises(KeyError), outer:
        inner_steps(model, optimizer, 0, range(6))
        before = flat(model)
        raise KeyError
    assert not landed and torch.equal(flat(model), before)


class Awkward(nn.Module):
    """Frozen, tied, half-precision, empty, 0-d and non-contiguous parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(4, 4, bias=False)
        self.tied = nn.Linear(4, 4, bias=False)
        self.tied.weight = self.first.weight
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
        self.low = nn.Parameter(torch.randn(4, dtype=torch.bfloat16))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.turned = nn.Parameter(torch.randn(4, 6).T)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.tied(self.first(x)) * self.scale + self.low.float() + self.frozen
        return (hidden @ self.turned.T).square().mean() + self.empty.sum()


@pytest.mark.parametrize("delay", [0, 2])
def test_awkward_parameters_take_part(delay: int) -> None:
    def work(network: SimulatedNetwork) -> dict[str, Tensor]:
        model = Awkward()
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
        method = Method(Schedule(every=3, delay=delay), Everyone(), outer=Average)
        with method.attach(model, optimizer, network) as outer:
            assert isinstance(outer, OuterLoop)
            assert [anchor.dtype for anchor in outer.anchors] == [torch.float32]
            assert outer.anchors[0].numel() == 16 + 4 + 0 + 1 + 24
            for step in range(3 + delay):
                generator = torch.Generator().manual_seed(10 * network.rank + step)
                model(torch.randn(5, 4, generator=generator)).backward()
                optimizer.step()
                optimizer.zero_grad()
        return {name: p.detach().clone() for name, p in model.named_parameters()}

    one, other = Simulation(2).run(work)
    assert torch.equal(one["frozen"], torch.ones(4))
    for name in one:
        assert torch.isfinite(one[name]).all()
        assert torch.equal(one[name], other[name]) == (delay == 0 or name in ("frozen", "empty")), name


def test_a_state_goes_round_where_the_first_parameter_is_empty() -> None:
    def begun() -> tuple[nn.Module, OuterLoop, torch.optim.Optimizer]:
        model = nn.ParameterDict({"0": nn.Parameter(torch.empty(0, 3)), "1": nn.Parameter(torch.ones(2, 2))})
        return model, *alone(model, methods.diloco(every=2), lr=0.1)

    one, other = begun(), begun()
    for step in range(6):
        if step == 3:
            for own, given in zip(other, one, strict=True):
                own.load_state_dict(copy.deepcopy(given.state_dict()))
        for model, _, optimizer in (one, other)[: 1 + (step > 2)]:
            model["1"].grad = torch.full((2, 2), step + 1.0)  # type: ignore[index]
            optimizer.step()
    assert torch.equal(one[0]["1"], other[0]["1"]) and torch.equal(one[1].anchors[0], other[1].anchors[0])  # type: ignore[index]


def test_half_precision_weights_move_by_steps_smaller_than_their_rounding() -> None:
    """The float32 anchor adds up what bfloat16 weights cannot hold."""
    model = nn.Linear(1, 1, bias=False).bfloat16()
    nn.init.ones_(model.weight)
    factory = lambda anchors: torch.optim.SGD(anchors, lr=0.1)  # noqa: E731
    outer, optimizer = alone(model, Method(Schedule(every=1), Everyone(), outer=factory), lr=0.0)
    for _ in range(30):
        model.weight.grad = torch.zeros_like(model.weight)
        with torch.no_grad():
            model.weight -= 2**-7  # one bfloat16 step below 1; a tenth of it rounds back to 1
        optimizer.step()
    assert outer.anchors[0].item() < 0.98 and model.weight.item() < 0.99


def test_fragments_hold_whole_layers_strided_and_every_parameter_once() -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(5, 3)
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3)) for _ in range(4))
            self.head = nn.Linear(3, 5)

    model = Deep()
    names = {parameter: name for name, parameter in model.named_parameters()}
    fragments = [[names[p] for p in fragment.parameters] for fragment in split(model, 3)]
    layers = [sorted({re.sub(r"(\.\d)?\.(weight|bias)$", "", name) for name in fragment}) for fragment in fragments]
    assert layers == [["embedding", "layers.2"], ["layers.0", "layers.3"], ["head", "layers.1"]]
    assert sorted(itertools.chain(*fragments)) == sorted(names.values())
    with pytest.raises(UserError, match="fragments is 7, but the model has only 6 layers"):
        split(model, 7)


def test_progress_made_while_a_round_is_under_way_is_kept() -> None:
    """One replica, plain averaging: the mean is what it sent, so a delayed landing must change nothing."""
    method = Method(Schedule(every=6, delay=4), Everyone(), outer=Average)
    delayed = Simulation(1).run(replica(lambda: method, steps=23))[0]
    without = Simulation(1).run(replica(methods.local, steps=23))[0]
    torch.testing.assert_close(delayed.weights, without.weights, rtol=0, atol=1e-5)


def test_any_torch_optimizer_can_be_the_outer_one() -> None:
    def run(outer: Any) -> Tensor:
        return (
            Simulation(2).run(replica(lambda: Method(Schedule(every=5), Everyone(), outer=outer), steps=20))[0].weights
        )

    plain = run(lambda anchors: torch.optim.SGD(anchors, lr=1.0))
    torch.testing.assert_close(plain, run(Average), rtol=0, atol=1e-6)
    assert not torch.equal(plain, run(lambda anchors: torch.optim.Adam(anchors, lr=0.01)))


def test_a_codec_halves_the_bytes() -> None:
    def traffic(codec: Dense) -> tuple[Traffic, Tensor]:
        def work(network: SimulatedNetwork) -> tuple[Traffic, Tensor]:
            method = Method(Schedule(every=5), RandomGroups(2), codec, outer=partial(torch.optim.SGD, lr=0.7))
            return network.traffic, replica(lambda: method, steps=20)(network).weights

        return Simulation(4).run(work)[0]

    (full, exact), (half, rounded) = traffic(Dense()), traffic(Dense(torch.bfloat16))
    headers = 4 * 3 * 56  # of three layers of so few parameters that they count; a round each five steps
    assert half.bytes_sent - headers == pytest.approx(full.bytes_sent / 2, rel=0.05)
    torch.testing.assert_close(exact, rounded, rtol=0, atol=0.02)
    assert not torch.equal(exact, rounded)


@pytest.mark.parametrize("outer", [GossipNesterov, Average])
def test_whole_weights_are_not_rounded_and_a_refusal_leaves_no_hook(outer: Any) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for codec in (Dense(torch.bfloat16), ErrorFeedback(Quantize(bits=8))):
        method = Method(Schedule(every=5), RandomGroups(2), codec, outer=outer)
        with pytest.raises(UserError, match=r"sends whole weights, in which .* would round small steps away"):
            method.attach(model, optimizer, SimulatedNetwork.alone())
    inner_steps(model, optimizer, 0, range(2))
    assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks


def test_an_odd_replica_sits_out() -> None:
    seen = Simulation(3).run(replica(lambda: methods.noloco(every=2), steps=40))
    for number in range(20):
        assert sorted(result.rounds[number].outcome for result in seen) == ["averaged", "averaged", "sat out"]


def test_replicas_that_start_apart_are_told() -> None:
    def work(network: SimulatedNetwork) -> None:
        model = small_model()
        if network.rank == 1:
            nn.init.zeros_(next(model.parameters()))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with methods.noloco(every=2).attach(model, optimizer, network):
            inner_steps(model, optimizer, 0, range(3))

    with pytest.raises(DisagreementError, match="starts from other weights"):
        Simulation(2).run(work)


@pytest.mark.parametrize("make", [lambda: methods.noloco(every=4), lambda: methods.diloco(every=4), methods.ddp])
def test_nan_is_never_sent_and_the_sick_replica_recovers(make: Any) -> None:
    """Replica 1's weights (under ddp: its gradient) become NaN once, within its second round."""

    def work(network: SimulatedNetwork) -> tuple[Tensor, list[str]]:
        model = small_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        rounds: list[Any] = []
        with make().attach(model, optimizer, network, on_round=rounds.append) as outer:
            inner_steps(model, optimizer, network.rank, range(6))
            if network.rank == 1:
                if isinstance(outer, OuterLoop):
                    nn.init.constant_(next(model.parameters()), float("nan"))
                else:
                    next(model.parameters()).grad = torch.full_like(next(model.parameters()), float("inf"))
                    optimizer.step()
            elif not isinstance(outer, OuterLoop):
                optimizer.step()
            inner_steps(model, optimizer, network.rank, range(6, 16))
        return flat(model), [round.outcome for round in rounds]

    seen = Simulation(2).run(work)
    assert all(torch.isfinite(weights).all() for weights, _ in seen)
    assert [outcomes.count("no progress offered") for _, outcomes in seen] == [0, 1]
    assert (seen[0][0] - seen[1][0]).norm() < 0.5


def test_a_replica_that_never_recovers_stops_after_three_rounds() -> None:
    model = small_model()
    outer, optimizer = alone(model, methods.diloco(every=4))
    with (
        pytest.raises(DivergedError, match=r"3 rounds in a row; the last time: the weights are not finite, at step 12"),
        outer,
    ):
        for step in range(40):
            nn.init.constant_(next(model.parameters()), float("inf"))
            inner_steps(model, optimizer, 0, range(step, step + 1))


def test_a_spoiled_round_goes_back_to_the_anchor() -> None:
    model = small_model()
    outer, optimizer = alone(model, methods.diloco(every=4, outer_momentum=0.0))
    with outer:
        inner_steps(model, optimizer, 0, range(4))
        anchor = outer.anchors[0].clone()
        inner_steps(model, optimizer, 0, range(4, 6))
        outer.spoil("loss is nan")
        inner_steps(model, optimizer, 0, range(6, 8))
        assert torch.equal(flat(model), anchor) and torch.equal(outer.anchors[0], anchor)


def test_the_outer_state_is_two_copies_and_one_message_in_flight() -> None:
    def tensors_alive() -> int:
        storages = [t.untyped_storage() for t in gc.get_objects() if type(t) is Tensor]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    model = nn.Linear(1000, 1000, bias=False)
    size = 4_000_000
    gc.collect()  # or what earlier tests have left would vanish meanwhile
    before = tensors_alive()
    outer, _ = alone(model, Method(Schedule(every=2), Everyone(), outer=GossipNesterov))
    seen: list[int] = []
    average = outer.outer.step_with  # type: ignore[union-attr]

    def spying(anchor: Tensor, mean: Tensor) -> None:
        average(anchor, mean)
        seen.append(tensors_alive() - before)

    outer.outer.step_with = spying  # type: ignore[union-attr, method-assign]
    outer._after_inner_step()
    outer._after_inner_step()
    assert len(seen) == 1 and 3 * size <= seen[0] <= 3 * size + 100_000
    assert tensors_alive() - before <= 2 * size + 100_000


def test_outer_state_can_live_elsewhere() -> None:
    model = small_model()
    outer, _ = alone(model, methods.diloco(), outer_device="meta")
    assert outer.anchors[0].device.type == "meta" and next(model.parameters()).device.type == "cpu"
