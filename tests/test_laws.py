"""Laws that hold for every method, codec, merge, delay, number of fragments and replicas, optimizer and dtype.

Hypothesis picks the combinations, the same ones in each run; all of them are held on the simulated network.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from problem import flat, inner_steps, small_model
from registered import MERGES
from test_accidents import lose_one
from torch import Tensor, nn

from farflung import methods
from farflung.codecs import codec_named
from farflung.errors import UserError
from farflung.methods import Method
from farflung.networks import SimulatedNetwork, Simulation
from farflung.outer import OuterLoop, Round, bytes_per_parameter, traffic_per_hop

law = settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))

CODECS = (
    "float32",
    "bfloat16",
    "float16",
    "int8",
    "ef-int4",
    "ef-int2",
    "e4m3",
    "ef-e3m0",
    "ef-topk5",
    "ef-lowrank2-int8",
)
MODULO = ("modulo4", "modulo4x2")
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": partial(torch.optim.AdamW, lr=1e-2),
    "sgd": partial(torch.optim.SGD, lr=1e-2),
    "momentum": partial(torch.optim.SGD, lr=1e-2, momentum=0.9, nesterov=True),
    "adagrad": partial(torch.optim.Adagrad, lr=1e-2),
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
EVERY = 6
OF_ALL = sorted(name for name, merge in MERGES.items() if not (merge.only_sent or merge.turn))
"""The merges that go with every method and codec."""


@dataclass(frozen=True)
class Case:
    """One combination."""

    kind: str
    codec: str
    merge: str
    delay: int
    fragments: int
    replicas: int
    optimizer: str
    dtype: str

    def method(self, **settings: Any) -> Method:
        """The method, a new one each time, since codecs remember."""
        make = getattr(methods, self.kind)
        return make(
            every=EVERY,
            delay=self.delay,
            fragments=self.fragments,
            codec=codec_named(self.codec),
            merge=self.merge,
            **settings,
        )

    def model(self) -> nn.Module:
        return small_model(DTYPES[self.dtype])


@st.composite
def cases(draw: st.DrawFn, kinds: tuple[str, ...] = ("diloco", "noloco"), replicas: tuple[int, int] = (2, 4)) -> Case:
    kind = draw(st.sampled_from(kinds))
    merge = draw(st.sampled_from(OF_ALL))
    fragments = draw(st.sampled_from((1, 1, 2, 3)))
    return Case(
        kind=kind,
        codec=draw(st.sampled_from(CODECS + (MODULO if kind == "noloco" else ()))),
        merge=merge,
        delay=EVERY if MERGES[merge].eager else draw(st.integers(0, EVERY)),
        fragments=fragments,
        replicas=draw(st.integers(*replicas)),
        optimizer=draw(st.sampled_from(sorted(OPTIMIZERS))),
        dtype=draw(st.sampled_from(sorted(DTYPES))),
    )


@dataclass
class Seen:
    """What one replica has come to."""

    weights: Tensor
    anchors: Tensor
    rounds: list[Round]


def train(
    network: SimulatedNetwork,
    case: Case,
    steps: int,
    data: Callable[[int], int] = lambda rank: rank,
    before: Callable[[int, nn.Module], None] = lambda step, model: None,
) -> Seen:
    model = case.model()
    optimizer = OPTIMIZERS[case.optimizer](model.parameters())
    rounds: list[Round] = []
    with case.method().attach(model, optimizer, network, on_round=rounds.append) as outer:
        assert isinstance(outer, OuterLoop)
        for step in range(steps):
            before(step, model)
            inner_steps(model, optimizer, data(network.rank), range(step, step + 1))
    return Seen(flat(model), torch.cat(outer.anchors), rounds)


@pytest.mark.slow
@law
@given(case=cases())
def test_equal_replicas_stay_equal(case: Case) -> None:
    """On equal data: bit for bit where the method says so or nothing is rounded, else within rounding.

    Who sits out in a round makes no outer step, and so is not equal: then the number of replicas is even.
    """
    assume(case.kind == "diloco" or case.replicas % 2 == 0)
    seen = Simulation(case.replicas).run(lambda network: train(network, case, 5 * EVERY, data=lambda rank: 7))
    moved = float((seen[0].weights - flat(case.model())).norm())
    for other in seen[1:]:
        if case.kind == "diloco" or case.codec == "float32":
            assert torch.equal(other.weights, seen[0].weights)
        else:
            assert float((other.weights - seen[0].weights).norm()) < 0.3 * moved


@pytest.mark.slow
@law
@given(case=cases(kinds=("diloco",)))
def test_anchors_are_equal_bit_for_bit_whatever_replicas_see(case: Case) -> None:
    assume(not MERGES[case.merge].eager)
    seen = Simulation(case.replicas).run(lambda network: train(network, case, 5 * EVERY))
    for other in seen[1:]:
        assert torch.equal(other.anchors, seen[0].anchors)


@pytest.mark.slow
@law
@given(case=cases(), step=st.floats(1e-4, 0.1))
def test_constant_progress_arrives_whole(case: Case, step: float) -> None:
    """An equal step each time, on all replicas: the outer optimizer with rate 1 must come as far, but for what is owed.

    At most two rounds' progress may still be under way or owed by error feedback; without it, a codec's own rounding is
    lost, which is a 16th for e4m3.
    """
    assume(case.merge in ("kept", "eager") and (case.replicas % 2 == 0 or case.kind == "diloco"))
    exact = torch.finfo(DTYPES[case.dtype]).eps < 1e-3
    assume(exact or case.merge == "kept")

    def work(network: SimulatedNetwork) -> Tensor:
        model = nn.Linear(16, 16, bias=False).to(DTYPES[case.dtype])
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        method = replace(case, fragments=1).method(outer_lr=1.0, outer_momentum=0.0)
        with method.attach(model, optimizer, network) as outer:
            for _ in range(rounds * EVERY):
                model.weight.grad = torch.full_like(model.weight, -step)
                optimizer.step()
        assert isinstance(outer, OuterLoop)
        return outer.anchors[0].double() / step

    rounds = 40 if "topk" in case.codec or "int2" in case.codec else 12
    rounded = float(torch.tensor(step, dtype=DTYPES[case.dtype])) / step
    rounding = (1 / 16 if case.codec == "e4m3" else 0.02) * rounds * EVERY
    owed = (20 if "topk" in case.codec else 2) * EVERY if case.codec.startswith("ef-") else rounding
    inner = 0 if exact else 0.3 * rounds * EVERY  # bfloat16 weights lose small steps in the inner optimizer
    for moved in Simulation(case.replicas).run(work):
        assert float((moved - rounded * rounds * EVERY).abs().mean()) <= owed + inner + 0.01 * rounds * EVERY


@pytest.mark.slow
@law
@given(case=cases(kinds=("diloco",), replicas=(3, 4)), rank=st.integers(0, 2), number=st.integers(2, 4))
def test_a_lost_round_heals(case: Case, rank: int, number: int) -> None:
    assume(not MERGES[case.merge].eager)

    def work(network: SimulatedNetwork) -> Seen:
        lose_one(network, rank, f"round {number} of")
        return train(network, case, 8 * EVERY)

    seen = Simulation(case.replicas).run(work)
    assert any(round.outcome == "peer lost" for round in seen[rank].rounds)
    for other in seen[1:]:
        assert torch.equal(other.anchors, seen[0].anchors)
    assert all(round.outcome == "averaged" for one in seen for round in one.rounds if round.round > number + 1)


@pytest.mark.slow
@law
@given(
    case=cases(), rank=st.integers(0, 1), at=st.integers(EVERY + 1, 3 * EVERY), value=st.sampled_from(("nan", "inf"))
)
def test_what_is_not_finite_stays_at_home(case: Case, rank: int, at: int, value: str) -> None:
    def work(network: SimulatedNetwork) -> Seen:
        def before(step: int, model: nn.Module) -> None:
            if step == at and network.rank == rank:
                nn.init.constant_(list(model.parameters())[-2], float(value))

        return train(network, case, 5 * EVERY, before=before)

    for number, one in enumerate(Simulation(case.replicas).run(work)):
        assert torch.isfinite(one.weights).all() and torch.isfinite(one.anchors).all()
        spoilt = {round.round for round in one.rounds if round.outcome == "no progress offered"}
        assert bool(spoilt) == (number == rank) or (number == rank and at > 3 * EVERY - case.fragments)
        assert all(r.outcome in ("averaged", "sat out", "no progress offered") for r in one.rounds)


@pytest.mark.slow
@law
@given(case=cases(replicas=(2, 3)), at=st.integers(1, 3 * EVERY))
def test_a_state_goes_round_at_any_step(case: Case, at: int) -> None:
    def work(network: SimulatedNetwork, interrupted: bool) -> Tensor:
        model = case.model()
        optimizer = OPTIMIZERS[case.optimizer](model.parameters())
        with case.method().attach(model, optimizer, network) as outer:
            inner_steps(model, optimizer, network.rank, range(at))
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), outer.state_dict()))
            if not interrupted:
                inner_steps(model, optimizer, network.rank, range(at, 4 * EVERY))
        if interrupted:
            model = case.model()
            optimizer = OPTIMIZERS[case.optimizer](model.parameters())
            with case.method().attach(model, optimizer, network) as outer:
                model.load_state_dict(saved[0])
                optimizer.load_state_dict(saved[1])
                outer.load_state_dict(saved[2])
                inner_steps(model, optimizer, network.rank, range(at, 4 * EVERY))
        return flat(model)

    whole = Simulation(case.replicas).run(lambda network: work(network, False))
    parts = Simulation(case.replicas).run(lambda network: work(network, True))
    for one, other in zip(whole, parts, strict=True):
        assert torch.equal(one, other)


@pytest.mark.slow
@law
@given(case=cases())
def test_bytes_are_those_that_are_printed(case: Case) -> None:
    """A square matrix; what `farflung methods` says of a message, over the hops that a group's size asks for."""
    rounds, width = 3, 768  # so that chunks fill the parts of up to four replicas
    case = replace(case, fragments=1, dtype="float32")
    assume("lowrank" not in case.codec)  # its share depends on the matrix's size

    def work(network: SimulatedNetwork) -> tuple[int, list[Round]]:
        torch.manual_seed(0)
        model = nn.Linear(width, width, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        seen: list[Round] = []
        with case.method().attach(model, optimizer, network, on_round=seen.append):
            for step in range(rounds * EVERY):
                model.weight.grad = torch.randn(width, width, generator=torch.Generator().manual_seed(step))
                optimizer.step()
        return network.traffic.bytes_sent, seen

    method = case.method()
    for sent, seen in Simulation(case.replicas).run(work):
        groups = [len(round.group) for round in seen if round.group]
        message = bytes_per_parameter(method) * width * width
        due = sum(sum(traffic_per_hop(method.codec, method.averaging, n)) * (n - 1) * message for n in groups)
        assert sent == pytest.approx(due, rel=0.03)


def test_every_case_can_be_attached() -> None:
    """What the laws leave out is refused by name, not skipped: a codec that reads by the receiver's values."""
    with pytest.raises(UserError, match="would drift apart"):
        methods.diloco(codec=codec_named("modulo4"))
