"""Peers that come late to a run without rounds, and what a swarm does without some of its peers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from patience import patience, until
from problem import flat, inner_steps, small_model
from swarm_here import SwarmHere
from test_internet import Run, two_peers, unspoilt

from farflung import methods
from farflung.events import EndEvent, EvaluationEvent, StepEvent
from farflung.networks import SharedState
from farflung.networks.internet import read_ticket
from farflung.networks.internet.states import fetching, snapshots
from farflung.swarm import turns
from farflung.swarm.leading import Leader
from farflung.swarm.letters import Microbatch
from farflung.training.own_ticket import ticket_kept
from farflung.training.stopping import StoppedError


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    yield from two_peers(tmp_path_factory.mktemp("pair"))


@pytest.fixture
def pair(live: Run, monkeypatch: pytest.MonkeyPatch) -> Run:
    return unspoilt(live, monkeypatch)


def test_who_comes_late_to_a_run_without_rounds_asks_for_no_anchors(pair: Run) -> None:
    late, ahead = pair.peers
    late.peers.members.heard_step(ahead.rank, 500)
    over = threading.Event()

    def gives() -> bool:
        """What a swarm's peers have of steps that are taken together: no anchors of this model."""
        asked = False
        while not over.wait(0.01):
            if ahead.wanted:
                asked = True
                ahead.give(SharedState({"anchor of 0.weight": torch.ones(4)}, {"step": 500, "until": 501}))
        return asked

    with ThreadPoolExecutor(1) as pool:
        giving = pool.submit(gives)
        try:
            model, reference = small_model(), small_model()
            optimizer, plain = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, reference))
            with methods.local().attach(model, optimizer, late) as outer:
                inner_steps(model, optimizer, 0, range(6))
                assert outer.step >= 500
        finally:
            over.set()
        assert not giving.result(patience(20))
    inner_steps(reference, plain, 0, range(6))
    assert torch.equal(flat(model), flat(reference))
    assert not late.refused


@pytest.mark.slow
def test_who_fails_in_the_midst_of_a_step_lets_go_of_the_weights_and_the_others_go_on(tmp_path: Path) -> None:
    swarm = SwarmHere(tmp_path, [0, 1, 1], steps=6)
    failing = swarm.trainers[2]

    def fails(*_: object) -> None:
        if failing.step == 3:
            raise RuntimeError("as a step may")

    failing.optimizer.register_step_pre_hook(fails)
    try:
        *going_on, failed = swarm.train()
        with pytest.raises(RuntimeError, match="as a step may"):
            failed.result(patience(60))
        weights = swarm.seat(failing).weights
        assert weights.acquire(timeout=patience(5)), "else its threads wait for ever, and its process with them"
        weights.release()
        swarm.run.peers[2].close()
        for one in going_on:
            one.result(patience(60))
        assert [one.step for one in swarm.trainers] == [6, 6, 3]
    finally:
        swarm.close()


@pytest.mark.slow
def test_a_head_tells_of_no_loss_while_nobody_serves_the_stage_behind_it(tmp_path: Path) -> None:
    swarm = SwarmHere(tmp_path, [0], stages=2, stepping="local", method="noloco", eval_every=1)
    try:
        (head,) = swarm.train()
        until(lambda: swarm.seat(swarm.trainers[0]).passes > 0)
        swarm.trainers[0].stop.request()
        with pytest.raises(StoppedError):
            head.result(patience(60))
    finally:
        swarm.close()
    told = swarm.events(swarm.trainers[0])
    assert any(isinstance(event, EndEvent) for event in told)
    assert not [event for event in told if isinstance(event, StepEvent | EvaluationEvent)]


@pytest.mark.slow
def test_a_leader_that_leads_no_more_though_it_is_there_is_followed_by_another_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick: None
) -> None:
    monkeypatch.setattr(turns, "QUIET_SECONDS", patience(1))
    swarm = SwarmHere(tmp_path, [0, 0, 1], steps=8)
    heads = sorted(swarm.trainers[:2], key=lambda one: one.network.rank)
    leads, is_taken = Leader.step, []

    async def some(leader: Leader, step: int, microbatches: list[Microbatch]) -> None:
        if leader.number == heads[0].network.rank and step >= 3:
            await asyncio.Event().wait()
        is_taken.append((leader.number, step))
        await leads(leader, step, microbatches)

    monkeypatch.setattr(Leader, "step", some)
    try:
        for one in swarm.train():
            one.result(patience(60))
    finally:
        swarm.close()
    first, second = (one.network.rank for one in heads)
    assert {step for number, step in is_taken if number == second} >= set(range(3, 8)) and first != second
    assert all(step < 3 for number, step in is_taken if number == first)


def test_a_ticket_to_who_is_there_is_kept_before_the_first_step(pair: Run, tmp_path: Path) -> None:
    with ticket_kept(pair.peers[0], tmp_path / "run.ticket"):
        assert read_ticket(tmp_path / "run.ticket").addresses == pair.peers[0].invitation().addresses


@pytest.mark.slow
def test_who_waits_for_microbatches_gives_its_state_to_one_that_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick: None
) -> None:
    """Else one that begins waits for a peer that waits, by way of other stages, for this one."""
    for module in (fetching, snapshots):
        monkeypatch.setattr(module, "FRESH_SECONDS", 3600.0)
    swarm = SwarmHere(tmp_path, [0, 1], stepping="local", method="noloco", deadline=3600.0)
    try:
        head, gone = swarm.trainers
        swarm.train()
        until(lambda: head.step > 2)
        gone.network.close()  # type: ignore[attr-defined]
        seat = swarm.seat(head)
        until(lambda: not seat.serving(1))
        late = swarm.run.join(stage=0)
        until(late.peers.members.training)
        found = late.fetch(identical=False).wait(patience(15))
        assert found is not None and found.facts["step"] == head.step
    finally:
        for one in swarm.trainers:
            one.stop.request()
        swarm.close()


@pytest.mark.slow
def test_a_head_judges_and_writes_no_longer_when_a_stage_has_nobody_any_more(tmp_path: Path, quick: None) -> None:
    swarm = SwarmHere(tmp_path, [0, 1], stepping="local", method="noloco", deadline=3600.0)
    try:
        head, gone = swarm.trainers
        swarm.train()
        until(lambda: head.step > 2)
        assert head.island.evaluate() is not None and head.island.sample()
        gone.network.close()  # type: ignore[attr-defined]
        with ThreadPoolExecutor(1) as pool:
            try:
                assert pool.submit(head.island.evaluate).result(patience(60)) is None
                assert pool.submit(head.island.sample).result(patience(60)) == ""
            finally:
                head.stop.request()
    finally:
        swarm.close()
