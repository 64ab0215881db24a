"""What goes along with rounds, among peers on the internet and in a folder; and what would have kept others waiting."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from folder_seats import seats
from patience import patience, until
from problem import flat, inner_steps, small_model
from test_internet import Run
from torch import Tensor, nn

from farflung import methods
from farflung.adamw import FAST, PrimalAveraging
from farflung.inner import MEAN_STEP, MuonAdamW
from farflung.methods import Method
from farflung.networks import Network, Party, SimulatedNetwork, Simulation
from farflung.networks.base import BESIDE
from farflung.outer import (
    AlignedSteps,
    Average,
    AveragedMoments,
    MixedAnchors,
    Round,
    Schedule,
    Session,
    added_bytes,
    message_bytes,
    traffic_per_hop,
)
from farflung.outer.fragments import split

EVERY = 5
MOMENTS = AveragedMoments((("exp_avg", 1), ("momentum_buffer", 1), ("exp_avg_sq", 2)))


def averaged(*companions: Any, **choices: Any) -> Method:
    return Method(Schedule(EVERY), outer=Average, companions=companions, **choices)


def muon(model: nn.Module) -> torch.optim.Optimizer:
    return MuonAdamW(model.named_parameters(), lr=0.01, align=0.5)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def primal(model: nn.Module) -> torch.optim.Optimizer:
    return PrimalAveraging(model.parameters(), lr=1e-2)


CASES: dict[str, tuple[Method, Callable[[nn.Module], torch.optim.Optimizer]]] = {
    "moments": (averaged(MOMENTS), muon),
    "alignment": (averaged(AlignedSteps()), muon),
    "mixing": (methods.factored_gossip(every=EVERY), adamw),
    "primal": (methods.gpa(every=EVERY), primal),
}
ALL = averaged(MOMENTS, AlignedSteps(), MixedAnchors())


@dataclass
class Seen:
    """What one replica ended with, and what its optimizer kept after each round."""

    weights: Tensor
    kept: dict[str, Tensor]
    rounds: list[Round] = field(default_factory=list)
    after: dict[int, dict[str, Tensor]] = field(default_factory=dict)


def kept_by(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """All tensors that it keeps, by the numbers of their parameters."""
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    states = [(number, optimizer.state[one]) for number, one in enumerate(parameters) if one in optimizer.state]
    return {f"{kind} of {n}": t.clone() for n, state in states for kind, t in state.items() if isinstance(t, Tensor)}


def train(
    network: Network,
    case: tuple[Method, Callable[[nn.Module], torch.optim.Optimizer]],
    number: int,
    goes_on: Callable[[Session, list[Round]], bool],
    begin: Callable[[Session], Any] = lambda outer: None,
    step_s: float = 0.0,
    learn: Callable[..., Any] = inner_steps,
) -> Seen:
    """Trains on data of its own number while it goes on."""
    method, make = case
    model = small_model()
    optimizer = make(model)
    seen, ends = Seen(torch.empty(0), {}), time.monotonic() + patience(60)

    def landed(round: Round) -> None:
        seen.rounds.append(round)
        seen.after[round.round] = kept_by(optimizer)

    options = {"weighting": "even", "deadline_s": patience(10), "on_round": landed}
    with method.attach(model, optimizer, network, **options) as outer:  # type: ignore[arg-type]
        begin(outer)
        while goes_on(outer, seen.rounds):
            assert time.monotonic() < ends, seen.rounds
            time.sleep(step_s)
            learn(model, optimizer, number, range(outer.step, outer.step + 1))
    seen.weights, seen.kept = flat(model), kept_by(optimizer)
    return seen


@dataclass
class Peers:
    """A run of peers that come and go."""

    join: Callable[[], Any]
    open: list[Any]

    def meet(self, count: int) -> None:
        """So many more come, and all hear of all."""
        for _ in range(count):
            self.join()
        until(lambda: all(len(peer.members()) == len(self.open) for peer in self.open))


@pytest.fixture(params=["internet", "folder"])
def peers(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Peers]:
    if request.param == "internet":
        with closing(Run(tmp_path)) as run:
            yield Peers(run.join, run.peers)
        return
    with seats(f"memory://{tmp_path.name}-{time.monotonic_ns()}/run", tmp_path, 0) as run:

        def join() -> None:
            run.sit(f"peer-{len(run.open)}")
            run.look()

        yield Peers(join, run.open)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_peers_end_as_replicas_that_stay(peers: Peers, name: str) -> None:
    """Whose weights are those of replicas under torch.distributed, to the bit, as test_networks.py holds."""
    steps, together = 4 * EVERY, threading.Barrier(2)

    def goes_on(outer: Session, _: list[Round]) -> bool:
        return outer.step < steps

    def in_step(outer: Session, rounds: list[Round]) -> bool:
        together.wait(patience(20))  # who is some steps behind the others would leave some out
        time.sleep(0.1)  # and so would who seems to be, since notes in a folder are not read at every moment
        return goes_on(outer, rounds)

    wanted = Simulation(2).run(lambda network: train(network, CASES[name], network.rank, goes_on))
    peers.meet(2)
    with ThreadPoolExecutor(2) as pool:
        work = [pool.submit(train, peer, CASES[name], number, in_step) for number, peer in enumerate(peers.open)]
        seen = [one.result() for one in work]
    for own, other in zip(seen, wanted, strict=True):
        assert [round.outcome for round in own.rounds] == ["averaged"] * 4
        torch.testing.assert_close(own.weights, other.weights, rtol=1e-5, atol=1e-6)
        assert own.kept.keys() == other.kept.keys()
        for kind, value in own.kept.items():
            torch.testing.assert_close(value, other.kept[kind], rtol=1e-4, atol=1e-6, msg=kind)


@pytest.mark.slow
def test_one_comes_late_and_another_leaves_in_mid_run(peers: Peers) -> None:
    """All who hold a round have the same moments after it, of the same steps, and follow the same mean step."""
    peers.meet(2)
    others_met, left, done = threading.Event(), threading.Event(), threading.Event()
    first, second = peers.open

    def until_done(_: Session, __: list[Round]) -> bool:
        return not done.is_set()

    def until_three_have_met(_: Session, rounds: list[Round]) -> bool:
        if any(len(round.group) > 1 for round in rounds):
            others_met.set()
        return sum(len(round.group) == 3 for round in rounds) < 3

    def late() -> Seen:
        others_met.wait(patience(30))
        peers.join()
        return train(peers.open[-1], (ALL, muon), 2, until_done, lambda outer: outer.catch_up(patience(20)), 0.03)

    def leaves() -> Seen:
        seen = train(second, (ALL, muon), 1, until_three_have_met, step_s=0.03)
        second.close()
        left.set()
        return seen

    def last(_: Session, rounds: list[Round]) -> bool:
        sizes = [len(round.group) for round in rounds if round.outcome == "averaged"]
        if left.is_set() and sizes[-2:] == [2, 2]:
            done.set()
        return not done.is_set()

    with ThreadPoolExecutor(3) as pool:
        work = [pool.submit(train, first, (ALL, muon), 0, last, step_s=0.03), pool.submit(leaves), pool.submit(late)]
        everyone = [one.result() for one in work]
    compared = 0
    for number, round in ((round.round, round) for round in everyone[0].rounds if round.outcome == "averaged"):
        there = [one.after[number] for one in everyone if number in one.after and _held(one, number, round.group)]
        for one in there[1:]:
            alike = [kind for kind in there[0] if _is_averaged(kind, number) and kind in one]
            assert alike
            for kind in alike:
                torch.testing.assert_close(one[kind], there[0][kind], rtol=1e-5, atol=1e-7, msg=f"{kind}, {number}")
            compared += 1
    assert compared > 5
    assert any(MEAN_STEP in kind for kind in everyone[2].kept), "the late one follows the others' steps, too"


def ones(model: nn.Module, optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """A step on gradients of ones, by which moments and changes are what their number of steps makes of them."""
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def gently(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4)


def met_late(peers: Peers, method: Method, ahead_by: int) -> list[Seen]:
    """Two that train, and one that comes so many steps later, until all have met; the two wait for it to come."""
    peers.meet(2)
    begun, come, done = threading.Event(), threading.Event(), threading.Event()

    def ahead(network: Any, number: int) -> Seen:
        def goes_on(outer: Session, _: list[Round]) -> bool:
            if outer.step >= ahead_by:
                begun.set()
                until(lambda: network.wanted or come.is_set() or done.is_set())
                time.sleep(0.03)
            return not done.is_set()

        return train(network, (method, gently), number, goes_on, learn=ones)

    def takes_state(outer: Session) -> None:
        assert outer.catch_up(patience(20))
        come.set()

    def until_met(_: Session, rounds: list[Round]) -> bool:
        return not any(round.group for round in rounds)

    with ThreadPoolExecutor(2) as pool:
        two = [pool.submit(ahead, one, number) for number, one in enumerate(peers.open)]
        try:
            assert begun.wait(patience(30))
            peers.meet(1)
            late = train(peers.open[2], (method, gently), 2, until_met, takes_state, 0.03, ones)
        finally:
            done.set()
    return [*(one.result() for one in two), late]


@pytest.mark.slow
def test_a_newcomer_believes_moments_of_many_more_steps_than_its_own(peers: Peers) -> None:
    """They are a hundred times as large as its own: as large as its own will be."""
    *ahead, late = met_late(peers, averaged(AveragedMoments((("exp_avg_sq", 1),))), 2000)
    met = next(round for round in late.rounds if round.group)
    assert (met.outcome, met.reason, len(met.group)) == ("averaged", "", 3)
    for kind, value in late.after[met.round].items():
        if kind.startswith(("exp_avg_sq of", "step of")):
            for one in ahead:
                torch.testing.assert_close(value, one.after[met.round][kind], rtol=1e-6, atol=0)


@pytest.mark.slow
def test_a_newcomer_believes_changes_of_many_more_steps_than_its_own(tmp_path: Path) -> None:
    """Of a round of which it has trained but the last step or two."""
    with closing(Run(tmp_path)) as run:
        everyone = met_late(Peers(run.join, run.peers), methods.diloco(every=1000, codec="int8"), 990)
    met = next(round for round in everyone[2].rounds if round.group)
    told = [(one.outcome, one.reason) for seen in everyone for one in seen.rounds if one.group == met.group]
    assert told == [("averaged", "")] * len(met.group)


@pytest.mark.slow
def test_who_came_late_to_a_round_is_waited_for_beside_it(peers: Peers) -> None:
    """It is further by then than the others are, and that it trains may be news to them."""
    peers.meet(2)
    first, late = peers.open
    both = first.members()
    late.stand_by(33)
    first.stand_by(30)
    until(lambda: first.peers.members.by_rank[late.rank].step == 33)
    first.peers.members.by_rank[late.rank].trains = False

    def meets(one: Any, step: int) -> Any:
        """Tells the others its step, as soon as it knows whom."""
        said, key = torch.tensor([step], dtype=torch.uint8), f"moments{BESIDE}round 6"

        def told(party: Party) -> list[int]:
            heard = one.exchange(said, party.group, f"{key}, steps").wait(patience(10))
            return sorted(int(word) for word in heard.values())

        return one.meet(both, key, step, 1.0, "", told)

    waits = meets(first, 30)
    time.sleep(1.5)
    comes = meets(late, 33)
    assert [one.wait(patience(20)) for one in (waits, comes)] == [[30, 33], [30, 33]]


def _held(one: Seen, number: int, group: tuple[int, ...]) -> bool:
    return any(round.round == number and (round.group, round.outcome) == (group, "averaged") for round in one.rounds)


def _is_averaged(kind: str, number: int) -> bool:
    what = kind.partition(" of ")[0]
    return what in ("exp_avg", "momentum_buffer", "step") or (what == "exp_avg_sq" and number % 2 == 0)


def test_nobody_waits_for_the_moments_of_one_that_was_spoilt() -> None:
    """It has none any more, and the others average theirs."""

    def work(network: SimulatedNetwork) -> tuple[list[Round], dict[str, Tensor]]:
        model, rounds = small_model(), list[Round]()
        optimizer = adamw(model)
        with averaged(MOMENTS).attach(model, optimizer, network, on_round=rounds.append):
            inner_steps(model, optimizer, network.rank, range(EVERY - 1))
            if network.rank == 2:
                with torch.no_grad():
                    model[0].weight.fill_(torch.nan)
            inner_steps(model, optimizer, network.rank, range(EVERY - 1, EVERY))
        return rounds, kept_by(optimizer)

    (rounds, one), (_, other), (spoilt, _) = Simulation(3).run(work)
    assert [round.outcome for round in rounds] == ["averaged"]
    assert [round.outcome for round in spoilt] == ["no progress offered"]
    assert all(torch.equal(one[kind], other[kind]) for kind in one if "exp_avg of" in kind)


def test_moments_of_unlike_numbers_of_steps_are_averaged_with_these() -> None:
    """As of a replica that comes late: what divides them goes along, or they would seem many times as large."""

    def work(network: SimulatedNetwork) -> dict[str, Tensor]:
        model = small_model()
        optimizer = adamw(model)
        if network.rank:
            begin = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            inner_steps(model, optimizer, 1, range(30))
            model.load_state_dict(begin)
        with averaged(AveragedMoments((("exp_avg_sq", 1),))).attach(model, optimizer, network):
            inner_steps(model, optimizer, network.rank, range(EVERY))
        return kept_by(optimizer)

    for kept in Simulation(2).run(work):
        assert all(float(kept[kind]) == EVERY + 15 for kind in kept if kind.startswith("step"))


def test_a_parameter_without_a_gradient_on_one_replica_keeps_nobody_from_averaging() -> None:
    def work(network: SimulatedNetwork) -> dict[str, Tensor]:
        model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        for parameter in model.parameters():
            nn.init.ones_(parameter)
        optimizer = adamw(model)
        with averaged(MOMENTS).attach(model, optimizer, network):
            for step in range(EVERY):
                sum(layer(torch.ones(1, 4) * (step + network.rank)).sum() for layer in model[network.rank :]).backward()
                optimizer.step()
                optimizer.zero_grad()
        return kept_by(optimizer)

    one, other = Simulation(2).run(work)
    assert len(one) > len(other)
    shared = [kind for kind in other if kind.startswith("exp_avg of")]
    assert shared and all(torch.equal(one[kind], other[kind]) for kind in shared)


def test_who_sits_out_a_round_goes_on_with_the_last_mean_step() -> None:
    """Of three in pairs one is left over, and nobody went anywhere without it."""

    def work(network: SimulatedNetwork) -> list[tuple[bool, float]]:
        model, told = small_model(), list[tuple[bool, float]]()
        optimizer = muon(model)
        method = replace(methods.noloco(every=EVERY), companions=(AlignedSteps(),))

        def landed(round: Round) -> None:
            steps = [value for kind, value in kept_by(optimizer).items() if kind.startswith(MEAN_STEP)]
            told.append((bool(round.group), float(sum(step.norm() for step in steps))))

        with method.attach(model, optimizer, network, on_round=landed):
            inner_steps(model, optimizer, network.rank, range(6 * EVERY))
        return told

    seen = Simulation(3).run(work)
    out = [(at, told) for told in seen for at, (held, _) in enumerate(told) if not held and at]
    assert out
    for at, told in out:
        assert told[at][1] == told[at - 1][1]


@pytest.mark.parametrize("companion", [AlignedSteps(), MixedAnchors()])
def test_any_outer_optimizer_goes_with_what_is_noted_of_anchors(companion: Any) -> None:
    """Those of torch that look whether they have kept anything yet find nothing of others'."""

    def work(network: SimulatedNetwork) -> Tensor:
        model = small_model()
        optimizer = muon(model)
        method = Method(Schedule(EVERY), outer=partial(torch.optim.Adam, lr=0.01), companions=(companion,))
        with method.attach(model, optimizer, network):
            inner_steps(model, optimizer, network.rank, range(3 * EVERY))
        return flat(model)

    one, other = Simulation(2).run(work)
    assert torch.isfinite(one).all() and torch.equal(one, other)


def test_fast_weights_follow_when_others_state_is_taken() -> None:
    """Else the next step would put back what it has taken the place of."""
    given: list[Any] = []

    def work(network: SimulatedNetwork) -> None:
        model = small_model()
        optimizer = primal(model)
        with methods.gpa(every=EVERY).attach(model, optimizer, network) as outer:
            inner_steps(model, optimizer, network.rank, range(EVERY + 2))
            weights = outer._weights[0]  # type: ignore[attr-defined]
            weights.write(weights.anchor)
            outer._along.taken(outer._rounds.syncs[0], weights)  # type: ignore[attr-defined]
            given.append((weights.anchor.clone(), flat(model), kept_by(optimizer)))

    Simulation(2).run(work)
    for anchor, shown, kept in given:
        fast = torch.cat([value.flatten() for kind, value in kept.items() if kind.startswith(FAST)])
        assert torch.equal(fast, shown) and torch.equal(shown.sort().values, anchor.sort().values)


@pytest.mark.parametrize(
    ("method", "make"),
    [
        (replace(methods.des_loc(every=1), companions=(AveragedMoments((("exp_avg", 1), ("exp_avg_sq", 2))),)), adamw),
        (replace(methods.des_loc(every=1), companions=(AveragedMoments((("exp_avg", 2), ("exp_avg", 3))),)), adamw),
        (methods.factored_gossip(every=1), adamw),
        (methods.gpa(every=1), primal),
    ],
)
def test_what_is_sent_besides_messages_is_counted(method: Method, make: Any) -> None:
    """But for a few words of each round: who has which kinds, and what anchors sum up to."""
    rounds, replicas = 6, 4

    def work(network: SimulatedNetwork) -> int:
        model = small_model()
        optimizer = make(model)
        with method.attach(model, optimizer, network):
            inner_steps(model, optimizer, network.rank, range(rounds))
            return network.traffic.bytes_sent

    sent = sum(Simulation(replicas).run(work)) / replicas / rounds
    cells = split(small_model(), 1)[0].cells
    members = max(map(len, method.topology.groups(tuple(range(replicas)), "any")))
    hops = (members - 1) * sum(traffic_per_hop(method.codec, method.averaging, members))
    told = hops * message_bytes(method, cells, members) + added_bytes(method, cells, replicas)
    assert told <= sent * 1.001 and sent < told + 200 * (replicas - 1)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("at", [4, 7])
def test_who_goes_back_to_a_state_in_mid_run_does_it_all_again(name: str, at: int) -> None:
    """What was under way when it went back is of rounds that count no more."""
    method, make = CASES[name]

    def work(network: SimulatedNetwork, goes_back: bool) -> Tensor:
        model = small_model()
        optimizer = make(model)
        with method.attach(model, optimizer, network) as outer:
            things = (model, optimizer, outer)
            inner_steps(model, optimizer, network.rank, range(at))
            saved = copy.deepcopy([thing.state_dict() for thing in things])
            if goes_back:
                inner_steps(model, optimizer, network.rank, range(at, at + EVERY + 1))
                for thing, state in zip(things, saved, strict=True):
                    thing.load_state_dict(state)
            inner_steps(model, optimizer, network.rank, range(at, 4 * EVERY))
        return flat(model)

    whole, again = (Simulation(3).run(partial(work, goes_back=back)) for back in (False, True))
    assert all(torch.equal(one, other) for one, other in zip(whole, again, strict=True))
