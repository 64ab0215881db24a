"""What a replica suffers in mid-round: NaN, lost rounds, partitions. Others are untouched, and it comes back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from problem import flat, inner_steps, small_model
from torch import Tensor, nn

from farflung import methods
from farflung.codecs import Quantize
from farflung.methods import Method
from farflung.networks import Conditions, PeerLostError, SimulatedNetwork, Simulation
from farflung.networks.simulator.conditions import Cut
from farflung.outer import OuterLoop, Round

NAN = float("nan")


def poison(model: nn.Module) -> None:
    nn.init.constant_(next(model.parameters()), NAN)


def trained(
    network: SimulatedNetwork,
    method: Method,
    steps: int,
    before: Callable[[int, nn.Module, OuterLoop], None],
    deadline: float = 60,
) -> tuple[Tensor, list[Round], OuterLoop]:
    """The small problem, with something done before each step."""
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rounds: list[Round] = []
    with method.attach(model, optimizer, network, on_round=rounds.append, deadline_s=deadline) as outer:
        assert isinstance(outer, OuterLoop)
        for step in range(steps):
            before(step, model, outer)
            inner_steps(model, optimizer, network.rank, range(step, step + 1))
    return flat(model), rounds, outer


EAGER = {
    "diloco": lambda: methods.eager_diloco(every=4),
    "int8": lambda: methods.eager_diloco(every=4, codec=Quantize(bits=8)),
    "noloco": lambda: methods.noloco(every=4, delay=4, merge="eager", group_size=3),
}
DELAYED = {
    f"{method} {merge}": lambda method=method, merge=merge: getattr(methods, method)(every=4, delay=2, merge=merge)
    for method in ("diloco", "noloco")
    for merge in ("kept", "dropped", "mixed")
}


WHOLE_ROUND_LATER = {
    f"{method} dropped a round later": lambda method=method: getattr(methods, method)(every=4, delay=4, merge="dropped")
    for method in ("diloco", "noloco")
}


@pytest.mark.parametrize(
    "make", [pytest.param(make, id=name) for name, make in (EAGER | DELAYED | WHOLE_ROUND_LATER).items()]
)
@pytest.mark.parametrize("at", [5, *(pytest.param(at, marks=pytest.mark.slow) for at in (6, 7, 8))])
def test_nan_stays_at_home_whatever_the_merge(make: Callable[[], Method], at: int) -> None:
    """One of three replicas has NaN in its weights once; in that round it offers nothing, and nobody else notices."""

    def work(network: SimulatedNetwork) -> tuple[Tensor, list[Round], OuterLoop]:
        def before(step: int, model: nn.Module, outer: OuterLoop) -> None:
            if step == at and network.rank == 1:
                poison(model)

        return trained(network, make(), 21, before)

    seen = Simulation(3).run(work)
    for rank, (weights, rounds, outer) in enumerate(seen):
        assert torch.isfinite(weights).all() and all(torch.isfinite(anchor).all() for anchor in outer.anchors)
        assert len(rounds) == 5
        nothing = [round for round in rounds if round.outcome == "no progress offered"]
        assert len(nothing) == (rank == 1), [(round.round, round.outcome) for round in rounds]
        assert all(round.outcome in ("averaged", "sat out") for round in rounds if round not in nothing)


@pytest.mark.parametrize("harm", ["weights", "spoil"])
def test_a_spoilt_replica_is_restored_whole_and_all_fragments_of_the_round_say_so(harm: str) -> None:
    """All is back before any other fragment's round, and so is the state of both optimizers."""
    back: list[bool] = []

    def work(network: SimulatedNetwork) -> list[Round]:
        model = small_model()
        matrices = [p for p in model.parameters() if p.dim() == 2]
        vectors = [p for p in model.parameters() if p.dim() == 1]
        optimizers = [torch.optim.SGD(vectors, lr=1e-2, momentum=0.9), torch.optim.AdamW(matrices, lr=1e-2)]
        rounds: list[Round] = []
        method = methods.diloco(every=8, fragments=2)
        with method.attach(model, optimizers, network, on_round=rounds.append) as outer:
            assert isinstance(outer, OuterLoop)
            for step in range(30):
                if step == 13 and network.rank == 1:
                    poison(model) if harm == "weights" else outer.spoil("loss is nan")
                inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * network.rank + step))
                model(inputs).square().mean().backward()
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
                if step == 15 and network.rank == 1:  # after the first round since then
                    back.append(all(torch.isfinite(p).all() for p in model.parameters()))
                    back.append(not any(optimizer.state for optimizer in optimizers))
        return rounds

    calm, sick = Simulation(2).run(work)
    assert back == [True, True]
    assert {round.outcome for round in calm} == {"averaged"}
    spoilt = {round.round for round in sick if round.outcome == "no progress offered"}
    (number,) = spoilt
    after = [round for round in sick if round.round == number and round.started_step >= 14]
    assert after and all(round.outcome == "no progress offered" for round in after)


def test_statistics_that_a_bad_batch_has_spoilt_are_restored_too() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with methods.diloco(every=3).attach(model, optimizer, SimulatedNetwork.alone()):
        for step in range(9):
            inputs = torch.randn(5, 4, generator=torch.Generator().manual_seed(step))
            model(inputs * (NAN if step == 4 else 1.0)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert all(torch.isfinite(value).all() for value in model.state_dict().values())


def test_a_mean_beyond_what_numbers_hold_is_dropped_by_all() -> None:
    def work(network: SimulatedNetwork) -> tuple[Tensor, list[Round]]:
        model = nn.Linear(2, 1, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        rounds: list[Round] = []
        with methods.diloco(every=1, outer_momentum=0.0).attach(model, optimizer, network, on_round=rounds.append):
            for huge in (3e38, 1.0):
                model.weight.grad = torch.full((1, 2), huge)
                optimizer.step()
        return flat(model), rounds

    for weights, rounds in Simulation(3).run(work):
        assert torch.isfinite(weights).all()
        assert [round.outcome for round in rounds] == ["peer lost", "averaged"]
        assert "not finite" in rounds[0].reason


ALIKE: dict[str, Callable[[], Method]] = {
    "diloco": lambda: methods.diloco(every=4),
    "delayed": lambda: methods.diloco(every=4, delay=2),
    "fragments": lambda: methods.diloco(every=4, fragments=2),
    "int8": lambda: methods.diloco(every=4, codec=Quantize(bits=8)),
    "dilocox": lambda: methods.dilocox(every=4),
    "sparseloco": lambda: methods.sparseloco(every=4),
    "eager": lambda: methods.eager_diloco(every=4),
}


class Missed:
    """A pending exchange of which nothing comes."""

    finished_at = 0.0

    def __init__(self, own: Callable[[], None]) -> None:
        self._own = own

    def done(self) -> bool:
        return True

    def wait(self, timeout: float) -> Any:
        self._own()
        raise PeerLostError((0,), "replica 0 was late")


def lose_one(network: SimulatedNetwork, rank: int, round: str) -> None:
    """Makes one replica miss what the others send it in a round; they get what it sends."""
    exchange, relay, all_reduce = network.exchange, network.scatter_combine_gather, network.all_reduce

    def chosen(key: str) -> bool:
        return network.rank == rank and key.startswith(round) and "healed" not in key

    def lossy_all_reduce(tensor: Tensor, group: Any, key: str) -> Any:
        own, pending = tensor.clone(), all_reduce(tensor, group, key)
        return Missed(lambda: (pending.wait(60), tensor.copy_(own))) if chosen(key) else pending  # type: ignore

    def lossy(send: Callable[..., Any]) -> Callable[..., Any]:
        def sent(packet: Any, group: Any, key: str, *more: Any) -> Any:
            pending = send(packet, group, key, *more)
            return Missed(lambda: None) if chosen(key) else pending

        return sent

    network.all_reduce = lossy_all_reduce  # type: ignore[method-assign]
    network.exchange, network.scatter_combine_gather = lossy(exchange), lossy(relay)  # type: ignore[method-assign]


@pytest.mark.parametrize("name", ALIKE)
def test_a_round_that_one_replica_lost_is_healed_in_the_next(name: str) -> None:
    """Replica 1 misses round 3: anchors are then apart, and equal to the bit once round 4 has landed."""
    spread: dict[int, list[Tensor]] = {}

    def work(network: SimulatedNetwork) -> list[Round]:
        lose_one(network, 1, "round 3 of")

        def before(step: int, model: nn.Module, outer: OuterLoop) -> None:
            if step % 4 == 3:
                spread.setdefault(step, []).append(torch.cat([anchor.clone() for anchor in outer.anchors]))

        return trained(network, ALIKE[name](), 40, before)[1]

    seen = Simulation(3).run(work)
    lost = [round for round in seen[1] if round.outcome == "peer lost"]
    assert {round.round for round in lost} == {3}
    apart = {
        step: float((torch.stack(anchors).amax(0) - torch.stack(anchors).amin(0)).max())
        for step, anchors in spread.items()
    }
    assert max(apart.values()) > 1e-4
    if name == "eager":  # each has its own fresh part in it: as near as without an accident
        assert apart[39] < 3 * apart[11]
    else:
        assert apart[39] == 0 and apart[31] == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["diloco", "int8", "dilocox", "eager"])
def test_after_a_cut_has_healed_anchors_are_equal_again(name: str) -> None:
    def work(network: SimulatedNetwork) -> tuple[Tensor, list[int], list[Round]]:
        _, rounds, outer = trained(network, ALIKE[name](), 60, lambda *_: None)
        return torch.cat(outer.anchors), [round.group for round in rounds], rounds

    cut = Conditions(step_ms=1000, cuts=(Cut(replicas=(2, 3), from_s=10.5, until_s=30.5),))
    seen = Simulation(4, cut).run(work)
    groups = [set(groups) for _, groups, _ in seen]
    assert all((0, 1, 2, 3) in known for known in groups) and (2, 3) in groups[2]
    anchors = torch.stack([anchor for anchor, _, _ in seen])
    if name == "eager":
        assert float((anchors.amax(0) - anchors.amin(0)).max()) < 0.02
    else:
        assert all(torch.equal(anchor, anchors[0]) for anchor in anchors)


def of_slow_links(until_s: float) -> Conditions:
    """Steps of a second in ten, exchanges of about one, and replica 3 cut off: it trains on, and waits for nobody."""
    megabits = 8 * flat(small_model()).nbytes / 1e6
    return Conditions(step_ms=100, latency_ms=0, bandwidth_mbps=megabits, cuts=(Cut((3,), 0.5, until_s),))


def waited(rounds: list[Round]) -> list[float]:
    return [round.landed - round.waited_from for round in rounds]


@pytest.mark.parametrize("method", [methods.diloco, methods.noloco], ids=["diloco", "noloco"])
def test_one_that_is_ahead_after_a_cut_is_waited_for_by_nobody(method: Callable[..., Method]) -> None:
    def work(network: SimulatedNetwork) -> tuple[Tensor, list[Round]]:
        _, rounds, outer = trained(network, method(every=10), 300, lambda *_: None)
        return torch.cat(outer.anchors), rounds

    seen = Simulation(4, of_slow_links(until_s=12.0)).run(work)
    ahead = {round.round for round in seen[3][1] if round.group in ((3,), ())}
    assert len(ahead) > 4
    for rank, (_, rounds) in enumerate(seen):
        assert {round.outcome for round in rounds[-10:]} == {"averaged"}
        assert max(waited(rounds)) < (40 if rank == 3 else 10)
    anchors = [anchor for anchor, _ in seen]
    if method is methods.diloco:
        assert all(round.outcome == "averaged" for _, rounds in seen for round in rounds)
        assert all(torch.equal(anchor, anchors[0]) for anchor in anchors)


def test_one_that_has_ended_while_it_was_cut_off_is_not_missed() -> None:
    def work(network: SimulatedNetwork) -> list[Round]:
        _, rounds, _ = trained(network, methods.diloco(every=10), 200, lambda *_: None)
        return rounds

    *others, alone = Simulation(4, of_slow_links(until_s=25.0)).run(work)
    assert alone[-1].landed < 25
    for rounds in others:
        assert len(rounds) == 20 and rounds[-1].landed > 35
        assert {round.outcome for round in rounds} == {"averaged"} and rounds[-1].group == (0, 1, 2)


def test_who_finds_others_waiting_in_two_groups_comes_to_the_one_that_all_come_to() -> None:
    """Replica 3 waits at its last round for 1 and 2, since 0 was cut off when it came; 0 waits there without it."""

    def work(network: SimulatedNetwork) -> list[Round]:
        return trained(network, methods.diloco(every=10), 100, lambda *_: None)[1]

    slow = of_slow_links(until_s=9.5)
    conditions = replace(slow, cuts=(*slow.cuts, Cut((0,), 9.5, 15.0)))
    last = [rounds[-1] for rounds in Simulation(4, conditions).run(work)]
    assert last[3].started < 15 < min(one.started for one in last[:3])
    assert sorted(one.outcome for one in last) == ["averaged"] * 3 + ["peer lost"]


OF_ALL_KINDS = {
    "diloco": lambda: methods.diloco(every=10),
    "streaming-diloco": lambda: methods.streaming_diloco(every=10, fragments=2, delay=3),
    "eager-diloco": lambda: methods.eager_diloco(every=10),
    "noloco": lambda: methods.noloco(every=10),
    "groups of three": lambda: methods.noloco(every=10, group_size=3),
    "factored-gossip": lambda: methods.factored_gossip(every=10),
}


@st.composite
def cuts_among(draw: st.DrawFn, replicas: int) -> list[Cut]:
    """Some cuts of a few seconds, one after the other or at once."""
    found, begins = [], 0.0
    for _ in range(draw(st.integers(1, 4))):
        begins += draw(st.floats(0.3, 8.0))
        ends = begins + draw(st.floats(0.5, 15.0))
        ranks = draw(st.lists(st.integers(0, replicas - 1), min_size=1, max_size=replicas - 1, unique=True))
        found.append(Cut(tuple(ranks), begins, ends))
        begins = draw(st.sampled_from([begins, ends]))
    return found


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(
    name=st.sampled_from(sorted(OF_ALL_KINDS)),
    cuts=cuts_among(4),
    speeds=st.lists(st.sampled_from([1.0, 0.7]), min_size=4, max_size=4),
    messages_a_second=st.sampled_from([0.5, 1.0, 5.0]),
)
def test_whatever_is_cut_off_nobody_waits_for_one_that_does_not_come(
    name: str, cuts: list[Cut], speeds: list[float], messages_a_second: float
) -> None:
    """A wait lasts as long as others are cut off, behind or on the wire: never a whole deadline.

    Of 500 steps the last ten rounds begin after 40 s at the earliest: who was cut off before is met there again.
    """

    def work(network: SimulatedNetwork) -> list[Round]:
        return trained(network, OF_ALL_KINDS[name](), 500, lambda *_: None, deadline=300)[1]

    megabits = 8 * flat(small_model()).nbytes / 1e6 * messages_a_second
    conditions = Conditions(step_ms=100, bandwidth_mbps=megabits, cuts=tuple(cuts), speeds=tuple(speeds))
    for rounds in Simulation(4, conditions).run(work):
        assert max(waited(rounds)) < 300
        if all(cut.until_s < 36 for cut in cuts):
            assert {round.outcome for round in rounds[-10:]} <= {"averaged", "sat out"}


@pytest.mark.parametrize("name", ["diloco", "int8", "dilocox", "eager"])
def test_one_that_was_late_by_several_deadlines_catches_up(name: str) -> None:
    """It must not wait for those who gave its rounds up, or it would stay as late as it is."""

    def work(network: SimulatedNetwork) -> tuple[Tensor, list[Round]]:
        def before(step: int, model: nn.Module, outer: OuterLoop) -> None:
            if step == 9 and network.rank == 1:
                for _ in range(90):
                    network.advance()

        _, rounds, outer = trained(network, ALIKE[name](), 60, before, deadline=3.0)
        return torch.cat(outer.anchors), rounds

    seen = Simulation(3, Conditions(step_ms=100)).run(work)
    anchors = torch.stack([anchor for anchor, _ in seen])
    for _, rounds in seen:
        assert {round.outcome for round in rounds[-6:]} == {"averaged"}
    assert name == "eager" or all(torch.equal(anchor, anchors[0]) for anchor in anchors)


def test_schedules_that_adapt_come_together_again() -> None:
    """After lost rounds all start their rounds at the same steps, as often as each other."""
    basis = torch.linalg.qr(torch.randn(32, 32, generator=torch.Generator().manual_seed(1))).Q

    def work(network: SimulatedNetwork) -> list[tuple[int, int | None]]:
        lose_one(network, 1, "round 4 of")
        model = nn.Linear(32, 32, bias=False)
        nn.init.ones_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        rounds: list[Round] = []
        method = methods.dilocox(every=8, outer_momentum=0.0)
        with method.attach(model, optimizer, network, on_round=rounds.append):
            for step in range(120):
                rank = 16 if step < 24 else 2
                model.weight.grad = 0.01 * basis[:, :rank] @ basis[:rank]
                optimizer.step()
        return [(round.started_step, round.every) for round in rounds]

    one, other, third = Simulation(3, Conditions(step_ms=100, latency_ms=20)).run(work)
    assert one[-3:] == other[-3:] == third[-3:]
    assert one[-1][1] is not None and one[-1][1] < 8
