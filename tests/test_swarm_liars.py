"""Liars in a swarm: what each says that cannot be is refused, or routed around, and the run goes on unharmed."""

from __future__ import annotations

import asyncio
import io
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from patience import patience
from swarm_here import SwarmHere
from test_swarm_training import OPTIMIZERS, SAMPLES, WIDTH, Swarm, alone, assert_equal, train, work_of
from test_swarm_visits import Make, made  # noqa: F401

from farflung.networks.internet.contact.streams import RequestRefusedError
from farflung.networks.peers.frames import FrameError
from farflung.networks.simulator.event_loop import run_in_virtual_time
from farflung.swarm import signs
from farflung.swarm.letters import FalseLetterError, Forward, Gradient, LostError, Microbatch
from farflung.swarm.moves import FASTER, next_move, share_under_way, standings
from farflung.swarm.own_steps import OwnSteps
from farflung.swarm.peer import MOST_REASONS, StagePeer
from farflung.swarm.questions import QUESTION, Questions
from farflung.swarm.routers import ThroughputRouter
from farflung.swarm.seat import HELD_OUT
from farflung.swarm.simulated import SimulatedPost, in_virtual_seconds
from farflung.swarm.steps_together import taken_state
from farflung.swarm.synchronous import LONGEST_REIGN, Report, Synchronous, Term
from farflung.swarm.work import Learnt, StageWork, Usual


async def stays(version: int, givers: list[int]) -> None:
    raise LostError("it was left out, and stays where it is")


def hides_what_it_has_learnt(seat: Synchronous) -> None:
    """It reports nothing, and when others have learnt from it in its place, it gives it to its mates."""
    true = seat.report

    async def report(term: Term) -> Report:
        told = await true(term)
        return Report(told.term, told.stage, told.version, frozenset(), told.under_way)

    seat.report = report  # type: ignore[method-assign]


def gives_less_than_it_reports(seat: Synchronous) -> None:
    async def learnt_now() -> Learnt:
        return Learnt.nothing(dict(seat.work.learnt.sums))

    seat.learnt_now = learnt_now  # type: ignore[method-assign]


def has_nobody_lead_after_it(seat: Synchronous) -> None:
    """It tells its mate of a leader that nobody can follow."""
    true = seat.report

    async def report(term: Term) -> Report:
        others = list(seat.members.living().values())
        await asyncio.gather(*(one.report((1 << 52, 5)) for one in others if one.peer != 3), return_exceptions=True)  # type: ignore[attr-defined]
        return await true(term)

    seat.report = report  # type: ignore[method-assign]


@pytest.mark.parametrize("lies", [hides_what_it_has_learnt, gives_less_than_it_reports, has_nobody_lead_after_it])
@pytest.mark.parametrize("seed", range(2))
def test_a_liar_among_a_stages_peers_changes_no_step(lies: Any, seed: int) -> None:
    swarm, liar = Swarm([2, 3, 2], OPTIMIZERS["adamw"], random.Random(seed)), 3

    async def trained() -> None:
        training = asyncio.ensure_future(train(swarm, 6, 6, []))
        await asyncio.sleep(0)
        swarm.seats[liar].fetch = stays
        lies(swarm.seats[liar])
        await training

    run_in_virtual_time(trained())
    swarm.post.kill(liar)
    assert_equal(swarm, alone(3, OPTIMIZERS["adamw"], 6, 6)[0])


@pytest.mark.parametrize("lie", [lambda packet: packet[:, :2], lambda packet: packet * torch.nan], ids=["shape", "nan"])
def test_a_microbatch_whose_activations_somebody_spoils_is_run_again_by_others(lie: Any) -> None:
    swarm, liar = Swarm([2, 2, 2], OPTIMIZERS["adamw"], random.Random(0), patience=30.0), 2
    spoilt: list[Microbatch] = []

    async def trained() -> None:
        training = asyncio.ensure_future(train(swarm, 6, 6, []))
        await asyncio.sleep(0)
        true = swarm.works[liar].forward

        def forward(one: Forward) -> Any:
            spoilt.append(one.microbatch)
            return lie(true(one))

        swarm.works[liar].forward = forward  # type: ignore[method-assign]
        await training

    run_in_virtual_time(trained())
    heads = [swarm.post.peers[head] for head in range(2)]
    assert spoilt and sum(head.struck.get("late", 0) for head in heads) > 0, "it has delivered nothing"
    assert_equal(swarm, alone(3, OPTIMIZERS["adamw"], 6, 6)[0])


def test_a_later_leader_is_followed_and_none_that_nobody_could_follow() -> None:
    swarm = Swarm([1, 1], OPTIMIZERS["sgd"], random.Random(0))

    async def asked() -> None:
        swarm.begin()
        seat = swarm.seats[1]
        assert (await seat.report((7, 2))).term == (7, 2)
        assert (await seat.report((1 << 52, 3))).term == (7, 2)
        assert (await seat.report((7 + LONGEST_REIGN, 3))).term == (7 + LONGEST_REIGN, 3)

    run_in_virtual_time(asked())


def state(**changed: Any) -> dict[str, Any]:
    """A mate's after a step, but for what is `changed` of its first parameter."""
    work = work_of(0, 2, OPTIMIZERS["adamw"])
    optimizer = work.optimizer
    assert optimizer is not None
    for one in work.piece.parameters():
        one.grad = torch.ones_like(one)
    optimizer.step()
    told = {"model": dict(work.piece.named_parameters()), "optimizer": optimizer.state_dict()}
    first = next(iter(told["model"]))
    if "weights" in changed:
        told["model"][first] = changed["weights"](told["model"][first].detach())
    if "kept" in changed:
        told["optimizer"]["state"][0]["exp_avg"] = changed["kept"](told["optimizer"]["state"][0]["exp_avg"])
    if "at" in changed:
        told["optimizer"]["state"][changed["at"]] = told["optimizer"]["state"][0]
    return told


def as_bytes(told: Any) -> bytes:
    content = io.BytesIO()
    torch.save(told, content)
    return content.getvalue()


FALSE_STATES: dict[str, bytes] = {
    "nothing": b"",
    "no state": b"junk" * 100,
    "half a state": as_bytes(state())[:2000],
    "another thing": as_bytes([1, 2]),
    "a parameter less": as_bytes({"model": {}, "optimizer": {"state": {}}}),
    "weights that are not finite": as_bytes(state(weights=lambda one: one * torch.nan)),
    "weights of another shape": as_bytes(state(weights=lambda one: one[0])),
    "momentum that is not finite": as_bytes(state(kept=lambda one: one * torch.inf)),
    "momentum of another shape": as_bytes(state(kept=lambda one: one.flatten())),
    "momentum that is none": as_bytes(state(kept=lambda one: "x")),
    "a parameter more": as_bytes(state(at=99)),
}


@pytest.mark.parametrize("lie", FALSE_STATES)
def test_a_state_that_a_mate_cannot_have_is_refused(lie: str) -> None:
    own = work_of(0, 2, OPTIMIZERS["adamw"])
    assert own.optimizer is not None
    with pytest.raises(FrameError):
        taken_state(FALSE_STATES[lie], dict(own.piece.named_parameters()), own.optimizer)


def test_a_mates_state_is_taken_but_for_its_optimizers_settings() -> None:
    own, told = work_of(0, 2, OPTIMIZERS["adamw"]), state()
    told["optimizer"]["param_groups"][0]["lr"] = 1e9
    assert own.optimizer is not None
    taken = taken_state(as_bytes(told), dict(own.piece.named_parameters()), own.optimizer)
    own.optimizer.load_state_dict(taken["optimizer"])
    assert own.optimizer.param_groups[0]["lr"] == 0.01
    for number, kept in told["optimizer"]["state"].items():
        assert torch.equal(own.optimizer.state_dict()["state"][number]["exp_avg"], kept["exp_avg"])
    assert all(torch.equal(taken["model"][name], one) for name, one in told["model"].items())


@given(st.lists(st.floats(1.0, 100.0), min_size=3, max_size=30), st.integers(0, 10))
def test_what_is_far_larger_than_usual_is_not_believed_however_often_it_comes(sizes: list[float], often: int) -> None:
    usual = Usual()
    assert all(usual.takes(size) for size in sizes)
    assert not any(usual.takes(1e6) for _ in range(often))
    assert usual.takes(sizes[0])


def test_of_what_is_usual_nothing_is_known_at_first_or_while_all_is_zero() -> None:
    usual = Usual()
    assert [usual.takes(size) for size in (0.0, 0.0, 0.0, 5.0)] == [True] * 4
    assert not Usual().takes(2e3, usual=1.0) and Usual().takes(2e3)


def forwarded(work: StageWork, microbatch: Microbatch, gradient: float) -> None:
    """Takes a microbatch through a first stage, and a gradient of one value back."""
    forward = Forward(microbatch, 0, work.version)
    work.forward(forward)
    work.backward(forward, Gradient(torch.full((SAMPLES, WIDTH), gradient)))


def test_a_gradient_that_makes_ones_own_far_too_large_is_not_learnt_from() -> None:
    work = work_of(0, 2, OPTIMIZERS["sgd"])
    for number in range(4):
        forwarded(work, Microbatch(0, number), 1.0)
    before = {name: one.clone() for name, one in work.learnt.sums.items()}
    with pytest.raises(LostError, match="far too large"):
        forwarded(work, Microbatch(0, 9), 1e6)
    assert work.learnt_from() == {Microbatch(0, number) for number in range(4)}
    assert all(torch.equal(one, before[name]) for name, one in work.learnt.sums.items())


@pytest.mark.parametrize("microbatch", [Microbatch(3, 0), Microbatch(0, 0, stream=7)], ids=["step", "stream"])
def test_a_step_that_all_take_together_learns_from_its_own_samples_alone(microbatch: Microbatch) -> None:
    with pytest.raises(FalseLetterError, match="of another step"):
        forwarded(work_of(0, 2, OPTIMIZERS["sgd"]), microbatch, 1.0)
    forwarded(work_of(0, 2, OPTIMIZERS["sgd"], alone=1), microbatch, 1.0)


def test_a_microbatch_that_comes_again_after_a_step_is_not_learnt_from_again() -> None:
    work = work_of(0, 2, OPTIMIZERS["sgd"], alone=100)
    forwarded(work, Microbatch(0, 0), 1.0)
    work.step()
    forwarded(work, Microbatch(0, 0), 1.0)
    assert not work.learnt.samples and not any(one.any() for one in work.learnt.sums.values())
    forwarded(work, Microbatch(0, 1), 1.0)
    assert work.learnt_from() == {Microbatch(0, 1)}


def test_one_that_says_to_be_quickest_by_far_has_nobody_move() -> None:
    honest = [(rank, rank % 2, 1.0) for rank in range(6)]
    assert next_move(standings([*honest, (9, 0, 1e15)]), 2) == next_move(standings([*honest, (9, 0, 16.0)]), 2)
    assert standings([*honest, (9, 0, 1e15)])[9].speed == FASTER
    assert standings([*honest, (8, 0, 0.0), (9, 0, 1e15)])[8].speed == 1.0, "who has none counts as the middle one"


def test_one_that_says_to_be_slower_than_nothing_has_nobody_move() -> None:
    honest = [(rank, rank % 2, 1.0) for rank in range(6)]
    assert standings([*honest, (9, 0, -1e15)]) == standings([*honest, (9, 0, 0.0)])
    assert next_move(standings([*honest, (9, 0, -1e15)]), 2) is None
    peers = standings([(0, 0, 1.0), (9, 1, -1.0)])
    assert share_under_way(peers, 0, 2, 2.0) == 4, "and a head goes on"


def test_a_head_that_names_many_streams_has_no_stage_wait_for_more_microbatches() -> None:
    heads, work = [1], work_of(1, 2, OPTIMIZERS["sgd"], alone=1)
    peers = SimpleNamespace(info={"step": 0})
    seat = SimpleNamespace(work=work, stage=1, parts=4, peers=peers, serving=lambda stage: [] if stage else heads)
    steps = OwnSteps(seat, 100, at_once=False)  # type: ignore[arg-type]

    def enough(step: int, streams: int) -> bool:
        work.learnt.samples = {Microbatch(step, number, number % streams + 10 * step): SAMPLES for number in range(4)}
        return steps.enough(over=False) and bool(steps.take())

    assert all(enough(step, streams=4) for step in range(5))
    heads.append(2)
    assert not enough(5, streams=2), "two heads start twice as many"


@pytest.mark.slow
def test_nobody_leads_but_heads_in_their_own_name(made: Make) -> None:  # noqa: F811
    swarm = made([1, 2])
    here, liar = swarm.of(1)
    own = Synchronous(here.stage, here.work, None, None, None)  # type: ignore[arg-type]
    Questions(here.peers, own, lambda: (0, b""), SAMPLES, 6, 100, patience(20)).open()
    rank, target = liar.peers.identity.rank, liar.peers.members.by_rank[here.peers.identity.rank]

    def orders(stage: int, term: Term, **told: Any) -> None:
        here.peers.members.by_rank[rank].stage = stage

        async def ordered() -> None:
            async with liar.peers.stream(target) as stream:
                await stream.tell({"kind": QUESTION, "term": term, **told})
                await signs.heard(stream, patience(20))

        liar.peers.background.run(ordered(), patience(60))

    with pytest.raises(RequestRefusedError, match="only a head leads"):
        orders(1, (1 << 40, rank), ask="settle")
    assert not here.peers.guard.refused
    lies: list[dict[str, Any]] = [
        {"ask": "settle", "term": (1, rank + 1)},
        {"ask": "catch up", "term": (0, rank), "version": 101, "givers": []},
    ]
    for lie in lies:
        with pytest.raises(RequestRefusedError):
            orders(0, **lie)
    assert here.peers.guard.refused == {"bad request": len(lies)}
    orders(0, (1, rank), ask="report")
    assert here.work.version == 0


@pytest.mark.slow
def test_no_stage_learns_from_held_out_samples_or_from_others_under_two_names(tmp_path: Path) -> None:
    swarm = SwarmHere(tmp_path, [0], stages=2)
    try:
        seat = swarm.seat(swarm.trainers[0])
        for number in (HELD_OUT, seat.parts):
            with pytest.raises(FalseLetterError, match="has not so many"):
                forward = Forward(Microbatch(0, number), 0, 0)
                seat.peers.background.run(seat._served(forward, None), patience(20))  # type: ignore[arg-type]
    finally:
        swarm.close()


def test_however_many_reasons_a_liar_makes_up_few_are_kept_and_all_are_counted() -> None:
    work, post = work_of(0, 2, OPTIMIZERS["sgd"]), SimulatedPost()
    device = in_virtual_seconds(0.0, 0.0)
    peer = StagePeer(0, 2, work, device, post.of(0), ThroughputRouter([1]), 100.0, lambda: 0.0)
    for number in range(1000):
        peer._pass_by(1, LostError(f"reason {number}"), 1.0)
    assert sum(peer.struck.values()) == 1000 and len(peer.struck) <= MOST_REASONS + 1
