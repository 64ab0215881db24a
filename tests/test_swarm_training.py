"""Swarms that train real, small models in virtual time, beside one process that has the whole model."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import itertools
import random
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from patience import patience
from torch import Tensor, nn

from farflung.codecs import codec_named
from farflung.networks.simulator.event_loop import run_in_virtual_time
from farflung.pipeline.boundaries import Boundary
from farflung.swarm.leading import Leader, believed
from farflung.swarm.letters import Forward, Gradient, LostError, Microbatch
from farflung.swarm.peer import StagePeer
from farflung.swarm.processor import Processor
from farflung.swarm.routers import ThroughputRouter
from farflung.swarm.simulated import SimulatedPost, TimeAlone, in_virtual_seconds
from farflung.swarm.synchronous import Participant, Report, Synchronous, Term
from farflung.swarm.work import Learnt, StageWork

SAMPLES, WIDTH = 3, 6
Optimizer = Callable[[Any], torch.optim.Optimizer]


class Piece(nn.Module):
    """One stage of a small model."""

    def __init__(self, last: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 1 if last else WIDTH))

    def forward(self, entering: Tensor, batch: Tensor | None = None) -> Tensor:
        return self.layers(entering)

    def loss(self, leaving: Tensor, batch: Tensor) -> Tensor:
        return (leaving - batch.sum(1, keepdim=True).sin()).square().mean()


def pieces(stages: int) -> list[Piece]:
    torch.manual_seed(3)
    return [Piece(stage == stages - 1) for stage in range(stages)]


def batch_of(microbatch: Microbatch) -> Tensor:
    seed = 10_000 * microbatch.step + 100 * microbatch.stream + microbatch.number
    return torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(seed))


def boundary() -> Boundary:
    return Boundary(torch.Size((SAMPLES, WIDTH)), codec_named("float32"))


def work_of(stage: int, stages: int, optimizer: Optimizer, alone: int = 0) -> StageWork:
    piece = pieces(stages)[stage]
    before, after = boundary() if stage else None, boundary() if stage < stages - 1 else None
    return StageWork(piece, batch_of, optimizer(piece.parameters()), before, after, alone)


def alone(stages: int, optimizer: Optimizer, steps: int, microbatches: int) -> tuple[list[Piece], list[float]]:
    """One process with the large batch: nothing but torch."""
    made = pieces(stages)
    one = optimizer([p for piece in made for p in piece.parameters()])
    losses = []
    for step in range(steps):
        batch = torch.cat([batch_of(Microbatch(step, number)) for number in range(microbatches)])
        leaving = batch
        for piece in made:
            leaving = piece(leaving)
        loss = made[-1].loss(leaving, batch)
        loss.backward()
        losses.append(loss.item())
        one.step()
        one.zero_grad()
    return made, losses


@dataclass
class Swarm:
    """Peers of a swarm in virtual time; a member list that all of them see at once."""

    sizes: list[int]
    optimizer: Optimizer
    random: random.Random
    patience: float = 1000.0
    works: dict[int, StageWork] = field(default_factory=dict)
    seats: dict[int, Synchronous] = field(default_factory=dict)
    learnt: Counter[tuple[int, Microbatch]] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.post = SimulatedPost(lambda a, b: self.random.uniform(0, 0.2))
        self.stage_of = dict(enumerate(s for s, size in enumerate(self.sizes) for _ in range(size)))

    def begin(self) -> None:
        clock = asyncio.get_running_loop().time
        stages = len(self.sizes)
        for peer, stage in self.stage_of.items():
            work = self.works[peer] = work_of(stage, stages, self.optimizer)
            behind = [one for one, own in self.stage_of.items() if own == stage + 1]
            router = ThroughputRouter(behind) if behind else None
            quick = in_virtual_seconds(self.random.uniform(0.1, 1), self.random.uniform(0.1, 2))
            made = StagePeer(stage, stages, work, quick, self.post.of(peer), router, self.patience, clock)
            self.post.peers[peer] = made
            self.seats[peer] = Synchronous(made, work, self, partial(self.step, work), self.fetch)

    async def step(self, work: StageWork, learnt: Learnt) -> None:
        work.step(learnt)

    async def fetch(self, version: int, givers: list[int]) -> None:
        raise AssertionError("nobody is behind")

    def living(self) -> dict[int, Participant]:
        return {peer: Asked(self, peer) for peer in sorted(self.post.peers)}

    def kill(self) -> None:
        able = [p for p in self.post.peers if sum(self.stage_of[q] == self.stage_of[p] for q in self.post.peers) > 1]
        if able:
            self.post.kill(self.random.choice(able))


@dataclass
class Noted:
    """A stage's work that notes with which version of the weights each microbatch came forward."""

    work: StageWork
    came: dict[Microbatch, int] = field(default_factory=dict)
    learnt: list[Microbatch] = field(default_factory=list)

    def forward(self, forward: Forward) -> Any:
        self.came[forward.microbatch] = self.work.version
        return self.work.forward(forward)

    def check(self, gradient: Gradient) -> None:
        self.work.check(gradient)

    def backward(self, forward: Forward, gradient: Gradient) -> Gradient:
        self.learnt.append(forward.microbatch)
        return self.work.backward(forward, gradient)

    def take_back(self, forward: Forward) -> None:
        self.work.take_back(forward)

    def forget(self, forward: Forward) -> None:
        self.work.forget(forward)


@dataclass
class Asked:
    """A peer, as another one asks it."""

    swarm: Swarm
    peer: int

    def __getattr__(self, name: str) -> Any:
        seat = self.swarm.seats[self.peer]

        async def asked(*given: Any) -> Any:
            # What a leader has ordered is under way, and comes, though the leader is gone.
            order = asyncio.ensure_future(self.swarm.post.ask(-1, self.peer, lambda: getattr(seat, name)(*given)))
            order.add_done_callback(lambda done: done.cancelled() or done.exception())
            return await asyncio.shield(order)

        return asked


async def train(
    swarm: Swarm, steps: int, microbatches: int, deaths: list[float], terms: tuple[float, ...] = ()
) -> list[float]:
    swarm.begin()
    losses, numbers = [], itertools.count()
    killing = [asyncio.get_running_loop().call_later(when, swarm.kill) for when in deaths]
    for step in range(steps):
        # A leader that dies is followed by another: each time a new one, that knows nothing.
        names = [Microbatch(step, number) for number in range(microbatches)]
        for term in (*terms, None):
            leader = Leader(swarm, len(swarm.sizes), next(numbers))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(leader.step(step, names), term)
        losses.append(sum(leader.losses.get(name, 0.0) for name in names) / microbatches)
    for one in killing:
        one.cancel()
    return losses


def assert_equal(swarm: Swarm, reference: list[Piece]) -> None:
    for peer in swarm.post.peers:
        ours = swarm.works[peer].piece.state_dict()
        for name, theirs in reference[swarm.stage_of[peer]].state_dict().items():
            torch.testing.assert_close(ours[name], theirs, rtol=1e-5, atol=1e-5)


OPTIMIZERS: dict[str, Optimizer] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_taken_together_equal_one_process_with_the_large_batch(name: str) -> None:
    swarm = Swarm([2, 2, 2, 2], OPTIMIZERS[name], random.Random(0))
    losses = run_in_virtual_time(train(swarm, 20, 8, []))
    reference, theirs = alone(4, OPTIMIZERS[name], 20, 8)
    assert losses == pytest.approx(theirs, rel=1e-5, abs=1e-5)
    assert len(swarm.post.peers) == 8
    assert_equal(swarm, reference)


@pytest.mark.parametrize("seed", range(12))
def test_deaths_in_mid_step_change_nothing(seed: int) -> None:
    chance = random.Random(seed)
    sizes = [chance.randint(2, 3) for _ in range(chance.randint(2, 4))]
    swarm = Swarm(sizes, OPTIMIZERS["adamw"], chance)
    deaths = sorted(chance.uniform(0, 120) for _ in range(4))
    run_in_virtual_time(train(swarm, 20, 6, deaths))
    reference, _ = alone(len(sizes), OPTIMIZERS["adamw"], 20, 6)
    assert len(swarm.post.peers) < sum(sizes)
    assert_equal(swarm, reference)


@pytest.mark.parametrize("seed", range(6))
def test_whoever_follows_a_leader_that_stops_in_mid_step_finds_out_how_far_it_came(seed: int) -> None:
    chance = random.Random(seed)
    swarm = Swarm([2, 2, 3], OPTIMIZERS["adamw"], chance)
    terms = tuple(chance.uniform(0, 8) for _ in range(3))
    run_in_virtual_time(train(swarm, 12, 5, [chance.uniform(0, 60)], terms))
    assert_equal(swarm, alone(3, OPTIMIZERS["adamw"], 12, 5)[0])


@pytest.mark.parametrize("seed", range(4))
def test_late_peers_change_nothing(seed: int) -> None:
    swarm = Swarm([2, 2, 2], OPTIMIZERS["sgd"], random.Random(seed), patience=2.0)
    run_in_virtual_time(train(swarm, 10, 6, [20.0]))
    assert any(peer.struck.get("late") for peer in swarm.post.peers.values())
    assert_equal(swarm, alone(3, OPTIMIZERS["sgd"], 10, 6)[0])


@pytest.mark.parametrize("seed", range(3))
def test_a_peer_that_lies_about_its_weights_or_gives_nothing_to_its_mates_changes_nothing(seed: int) -> None:
    swarm = Swarm([2, 2, 2], OPTIMIZERS["adamw"], random.Random(seed))
    refuses, boasts = 3, 4

    async def trained() -> None:
        training = asyncio.ensure_future(train(swarm, 8, 6, []))
        await asyncio.sleep(0)
        silent, boastful = swarm.seats[refuses], swarm.seats[boasts]

        async def nothing() -> Learnt:
            raise LostError("a gradient that is far too large")

        async def far_ahead(term: Term) -> Report:
            return Report((1 << 40, 0), 2, 10**6, frozenset(), 0)

        async def stays(version: int, givers: list[int]) -> None:
            raise LostError("it was left out, and stays where it is")

        silent.learnt_now, silent.fetch, boastful.report = nothing, stays, far_ahead  # type: ignore[method-assign]
        await training

    run_in_virtual_time(trained())
    for liar in (refuses, boasts):
        swarm.post.kill(liar)
    assert_equal(swarm, alone(3, OPTIMIZERS["adamw"], 8, 6)[0])


@pytest.mark.parametrize("seconds", [1e6, 500.0], ids=["never", "late"])
@pytest.mark.parametrize("questions", ["report", "gather", "step", "run", "report gather step run"])
def test_a_peer_that_is_late_on_purpose_costs_some_deadlines_and_changes_nothing(
    questions: str, seconds: float
) -> None:
    swarm, steps = Swarm([3, 2, 2], OPTIMIZERS["adamw"], random.Random(1), patience=60.0), 12
    slow = 2 if "run" in questions else 4

    def late(answer: Callable[..., Any]) -> Callable[..., Any]:
        async def answers(*given: Any) -> Any:
            await asyncio.sleep(seconds)
            return await answer(*given)

        return answers

    async def stays(version: int, givers: list[int]) -> None:
        raise LostError("it was left out, and stays where it is")

    async def trained() -> float:
        swarm.begin()
        seat = swarm.seats[slow]
        seat.fetch = stays
        for name in questions.split():
            setattr(seat, name, late(getattr(seat, name)))
        leader = Leader(swarm, 3, 0)
        for step in range(steps):
            await leader.step(step, [Microbatch(step, number) for number in range(6)])
        return asyncio.get_running_loop().time()

    undisturbed = 150.0
    assert run_in_virtual_time(trained()) < undisturbed + 300
    swarm.post.kill(slow)
    assert_equal(swarm, alone(3, OPTIMIZERS["adamw"], steps, 6)[0])


@pytest.mark.parametrize("away", [3, 4])
def test_one_that_is_away_for_a_moment_comes_back_with_what_was_run_again_meanwhile(away: int) -> None:
    swarm = Swarm([1, 2, 2], OPTIMIZERS["adamw"], random.Random(2), patience=60.0)

    async def trained() -> None:
        swarm.begin()
        seat, leader, looks = swarm.seats[away], Leader(swarm, 3, 0), itertools.count()
        report = seat.report

        async def missed_once(term: Term) -> Report:
            if seat.work.learnt_from() and next(looks) == 0:
                raise LostError("the network was away")
            return await report(term)

        async def fetched(version: int, givers: list[int]) -> None:
            theirs = swarm.works[givers[0]]
            seat.work.piece.load_state_dict(theirs.piece.state_dict())
            assert seat.work.optimizer and theirs.optimizer
            seat.work.optimizer.load_state_dict(copy.deepcopy(theirs.optimizer.state_dict()))
            seat.work.begin_at(version)

        seat.report, seat.fetch = missed_once, fetched  # type: ignore[method-assign]
        leader._leave_out = lambda peer: None  # type: ignore[method-assign]  # as one that has only begun to lead
        for step in range(4):
            await leader.step(step, [Microbatch(step, number) for number in range(6)])
        await leader.bring_up(4)
        assert next(looks) > 1

    run_in_virtual_time(trained())
    assert_equal(swarm, alone(3, OPTIMIZERS["adamw"], 4, 6)[0])


def test_a_stages_only_peer_is_asked_again_however_often_it_did_not_answer() -> None:
    swarm = Swarm([2, 1], OPTIMIZERS["sgd"], random.Random(0))

    async def trained() -> None:
        swarm.begin()
        looks, report = itertools.count(), swarm.seats[2].report

        async def at_last(term: Term) -> Report:
            if next(looks) < 10:
                raise LostError("gone")
            return await report(term)

        swarm.seats[2].report = at_last  # type: ignore[method-assign]
        leader = Leader(swarm, 2, 0)
        for step in range(2):
            await leader.step(step, [Microbatch(step, number) for number in range(4)])

    run_in_virtual_time(trained())
    assert_equal(swarm, alone(2, OPTIMIZERS["sgd"], 2, 4)[0])


def test_of_few_peers_each_is_believed_and_of_many_not_one_that_is_far_ahead_alone() -> None:
    def claims(*versions: int) -> dict[int, Report]:
        return {peer: Report((0, 0), 0, version, frozenset(), 0) for peer, version in enumerate(versions)}

    assert believed(claims(9, 1, 1)).keys() == {0, 1, 2}, "two came back, and the third is the furthest"
    assert believed(claims(9, 5, 4, 4)).keys() == {1, 2, 3}
    assert believed(claims(6, 5, 5, 4)).keys() == {0, 1, 2, 3}, "in the midst of a step"
    assert believed(claims(9, 9, 5, 4)).keys() == {0, 1, 2, 3}


def passed_on(works: list[StageWork], forward: Forward) -> tuple[list[Forward], Gradient]:
    """Takes a microbatch through all stages, and its gradient back."""
    forwards = []
    for stage, work in enumerate(works):
        forward = Forward(forward.microbatch, stage, works[stage].version, None, forward.packet)
        forwards.append(forward)
        forward = Forward(forward.microbatch, stage + 1, 0, None, work.forward(forward))
    gradient = Gradient()
    for work, one in zip(reversed(works), reversed(forwards), strict=True):
        gradient = work.backward(one, gradient)
    return forwards, gradient


def test_what_is_judged_is_computed_as_in_evaluation_and_leaves_nothing() -> None:
    piece = pieces(2)[0]
    piece.layers.append(nn.Dropout(0.5))
    work = StageWork(piece, batch_of, None, None, boundary(), alone=1)
    judged = Forward(Microbatch(0, 0), 0, 0, frozenset())
    packet = work.forward(judged)
    assert packet is not None
    assert work.backward(judged, Gradient(None, 2.5)) == Gradient(None, 2.5)
    assert piece.training and not work.learnt.samples
    torch.testing.assert_close(packet, piece.layers[:-1](batch_of(judged.microbatch)).detach())


def test_a_piece_has_its_own_weights_while_others_are_computed_with() -> None:
    """Another thread that looked at it then had found that its tensors were not those that the optimizer trains."""
    piece = pieces(2)[0]
    own, seen = list(piece.parameters()), []
    piece.layers[1].register_forward_hook(lambda *_: seen.append(list(map(id, piece.parameters()))))
    work = StageWork(piece, batch_of, None, None, boundary(), alone=1)
    work.forward(Forward(Microbatch(0, 0), 0, 0))
    assert seen == [list(map(id, own))]


def test_what_is_taken_back_was_never_learnt() -> None:
    works = [work_of(stage, 3, OPTIMIZERS["sgd"]) for stage in range(3)]
    passed_on(works, Forward(Microbatch(0, 0), 0, 0))
    before = [copy.deepcopy(work.learnt) for work in works]
    forwards, _ = passed_on(works, Forward(Microbatch(0, 1), 0, 0))
    for work, forward, then in zip(works, forwards, before, strict=True):
        work.take_back(forward)
        assert work.learnt.samples == then.samples
        for name, total in work.learnt.sums.items():
            torch.testing.assert_close(total, then.sums[name])


def test_a_microbatch_that_comes_again_is_learnt_from_once() -> None:
    works = [work_of(stage, 2, OPTIMIZERS["sgd"]) for stage in range(2)]
    passed_on(works, Forward(Microbatch(0, 0), 0, 0))
    before = [copy.deepcopy(work.learnt) for work in works]
    again, _ = passed_on(works, Forward(Microbatch(0, 0), 0, 0))
    for taken_back in (False, True):
        for work, forward, then in zip(works, again, before, strict=True):
            if taken_back:
                work.take_back(forward)
            assert work.learnt.samples == then.samples and work.learnt.losses == then.losses
            assert all(torch.equal(one, then.sums[name]) for name, one in work.learnt.sums.items())


def test_what_is_dropped_in_the_midst_of_its_backward_pass_is_taken_back() -> None:
    entered, goes_on = threading.Event(), threading.Event()

    class Slow(TimeAlone):
        def backward(self, forward: Forward, gradient: Gradient) -> Gradient:
            entered.set()
            assert goes_on.wait(patience(10))
            return super().backward(forward, gradient)

    async def main() -> list[Forward]:
        work, clock = Slow(), asyncio.get_running_loop().time
        processor = Processor(lambda _, computes: asyncio.to_thread(computes))
        peer = StagePeer(0, 1, work, processor, SimulatedPost().of(0), None, patience(10), clock)
        serving = asyncio.ensure_future(peer.start(Microbatch(0, 0), 0))
        await asyncio.to_thread(entered.wait, patience(10))
        serving.cancel()
        await asyncio.sleep(0.01)
        goes_on.set()
        await asyncio.wait([serving])
        await asyncio.sleep(0.1)  # for a pass that nobody waits for
        return work.learnt

    assert asyncio.run(main()) == []


def test_a_microbatchs_gradient_is_that_of_the_weights_of_its_forward_pass_whatever_steps_come_between() -> None:
    work = work_of(0, 2, OPTIMIZERS["adamw"], alone=100)
    then = copy.deepcopy(work.piece)
    old = Forward(Microbatch(0, 0), 0, 0)
    work.forward(old)
    for number in range(1, 4):
        other = Forward(Microbatch(0, number), 0, work.version)
        work.forward(other)
        work.backward(other, Gradient(torch.randn(SAMPLES, WIDTH)))
        work.step()
    coming = torch.randn(SAMPLES, WIDTH)
    work.backward(old, Gradient(coming))
    then(batch_of(old.microbatch)).backward(coming)
    for name, parameter in then.named_parameters():
        torch.testing.assert_close(work.learnt.sums[name], parameter.grad)


async def own_steps(stages: int, microbatches: int) -> list[Noted]:
    """One peer a stage, each of which steps after every microbatch; as many are under way as there are stages."""
    clock, post = asyncio.get_running_loop().time, SimulatedPost()
    noted = [Noted(work_of(stage, stages, OPTIMIZERS["sgd"], alone=1)) for stage in range(stages)]
    for stage, work in enumerate(noted):
        router = ThroughputRouter([stage + 1]) if stage < stages - 1 else None
        device = in_virtual_seconds(1.0, 1.0)
        post.peers[stage] = StagePeer(stage, stages, work, device, post.of(stage), router, 1000.0, clock)
    room = asyncio.Semaphore(stages)

    async def one(number: int) -> None:
        async with room:
            await post.spawn(0, post.peers[0].start(Microbatch(0, number), 0))

    await asyncio.gather(*(one(number) for number in range(microbatches)))
    return noted


def test_stages_that_step_by_themselves_descend_along_gradients_that_are_late_by_their_distance_to_the_end() -> None:
    stages, microbatches = 4, 30
    noted = run_in_virtual_time(own_steps(stages, microbatches))
    # The last stage's gradients are never late, and those of the others by no more than there are stages behind.
    late = [[work.learnt.index(m) - work.came[m] for m in work.learnt[8:]] for work in noted]
    assert [max(each) for each in late] == [3, 2, 1, 0]
    # Plain torch: each stage's weights at each step, and the whole model's gradient at the weights that were passed.
    reference = pieces(stages)
    optimizers = [OPTIMIZERS["sgd"](piece.parameters()) for piece in reference]
    history = [[copy.deepcopy(piece)] for piece in reference]
    taken = [0] * stages
    while any(steps < microbatches for steps in taken):
        # The next step of a stage that can be computed: all versions that its microbatch has met are known.
        stage = next(
            stage
            for stage in range(stages)
            if taken[stage] < microbatches
            and all(work.came[noted[stage].learnt[taken[stage]]] < len(history[s]) for s, work in enumerate(noted))
        )
        microbatch = noted[stage].learnt[taken[stage]]
        met = [copy.deepcopy(history[s][work.came[microbatch]]) for s, work in enumerate(noted)]
        leaving = batch = batch_of(microbatch)
        for piece in met:
            leaving = piece(leaving)
        met[-1].loss(leaving, batch).backward()
        for ours, theirs in zip(reference[stage].parameters(), met[stage].parameters(), strict=True):
            ours.grad = theirs.grad
        optimizers[stage].step()
        history[stage].append(copy.deepcopy(reference[stage]))
        taken[stage] += 1
    for work, piece in zip(noted, reference, strict=True):
        for name, weights in piece.state_dict().items():
            torch.testing.assert_close(work.work.piece.state_dict()[name], weights, rtol=1e-5, atol=1e-5)
