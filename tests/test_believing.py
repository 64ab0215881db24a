"""Whom a newcomer to a run on the internet believes, where one of three or four members lies about the run's state."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from patience import patience, until
from test_false_states import training
from test_internet import Run
from torch import Tensor

from farflung.networks import PeerLostError, SharedState
from farflung.networks.internet import InternetNetwork
from farflung.networks.internet.contact.streams import PeerStream, RequestRefusedError
from farflung.networks.internet.states.fetching import ASKED
from farflung.networks.internet.states.snapshots import Snapshots
from farflung.networks.peers import manifests
from farflung.networks.peers.believing import STRETCHES, by_spread, signs_for
from farflung.networks.peers.frames import LARGEST_FRAME, FrameError
from farflung.networks.peers.manifests import Manifest
from farflung.networks.peers.members import Member
from farflung.testing.liars import Liar, manifest_of

slow = pytest.mark.slow

State = dict[str, Tensor]
LENGTHS = {"anchor of 0": 3000, "anchor of 1": 5, "momentum_buffer of 0": 3000, "momentum_buffer of 1": 5}


def model(seed: int) -> State:
    chance = torch.Generator().manual_seed(seed)
    return {name: torch.randn(length, generator=chance) for name, length in LENGTHS.items()}


def near(state: State, seed: int) -> State:
    """Another replica's, after some rounds of gossip."""
    return {
        name: value + 0.05 * drift for (name, value), drift in zip(state.items(), model(seed).values(), strict=True)
    }


def bytes_of(state: State) -> bytes:
    return torch.cat(list(state.values())).numpy().tobytes()


HONEST = model(0)
SCALED = {name: 3 * value for name, value in HONEST.items()}
ONE_CELL = {**HONEST, "momentum_buffer of 0": -HONEST["momentum_buffer of 0"]}
LIES: dict[str, Callable[[Liar], None]] = {
    "scaled values": lambda liar: offer(liar, SCALED),
    "another model's values": lambda liar: offer(liar, model(1)),
    "one cell turned over": lambda liar: offer(liar, ONE_CELL),
    "other values than it says": lambda liar: offer(liar, SCALED, said=HONEST, step=8),
    "other values than its sketches": lambda liar: offer(liar, SCALED, sketched=near(HONEST, 9), step=8),
    "the furthest step": lambda liar: offer(liar, SCALED, step=900),
}


def offer(liar: Liar, state: State, said: State | None = None, sketched: State | None = None, step: int = 7) -> None:
    described = manifest_of(bytes_of(said or state), list(LENGTHS.items()), step=step, history="a")
    liar.serve(described, bytes_of(state), bytes_of(sketched or state))


@pytest.fixture
def run(tmp_path: Path, quick: None) -> Iterator[Run]:
    made = Run(tmp_path)
    made.join(trains=False)
    yield made
    made.close()


def fetched(
    run: Run, states: list[State], identical: bool, histories: str = "aaa", liars: int = 0
) -> tuple[InternetNetwork, SharedState]:
    """A newcomer, and what it has fetched once it knows the liars and members with these states."""
    members = [run.join() for _ in states]
    newcomer = run.join(trains=False)
    with contextlib.ExitStack() as stack:
        for member, state, history in zip(members, states, histories, strict=False):
            told = SharedState(state, {"step": 7, "until": 10**6, "history": history})
            stack.enter_context(training(member, told))
        until(lambda: len(newcomer.peers.members.training()) == len(states) + liars)
        return newcomer, newcomer.fetch(identical).wait(patience(60))


@slow
@pytest.mark.parametrize("identical", [True, False], ids=["equal", "gossip"])
@pytest.mark.parametrize(
    ("lie", "honest"), [*product(LIES, [2]), *product(["scaled values", "one cell turned over"], [3])]
)
def test_one_that_lies_is_struck_and_the_others_state_taken(
    run: Run, liar: Liar, lie: str, honest: int, identical: bool
) -> None:
    states = [HONEST if identical else near(HONEST, seed) for seed in range(2, 2 + honest)]
    LIES[lie](liar)
    newcomer, state = fetched(run, states, identical, liars=1)
    for name, value in state.tensors.items():
        assert any(torch.equal(value, one[name]) for one in states), name
    assert state.facts["step"] == 7 and state.tensors.keys() == LENGTHS.keys()
    assert newcomer.refused["bad state"] + newcomer.refused["bad piece"] >= 1
    assert newcomer._states._refused == {liar.peers.identity.peer}


@slow
@pytest.mark.parametrize("head", [{"size": -1}, {"size": 3}, {"size": 1 << 40}, {}])
def test_one_whose_sketches_cannot_be_read_is_struck_and_the_others_state_taken(
    run: Run, liar: Liar, head: dict[str, int]
) -> None:
    offer(liar, SCALED)

    async def answer(stream: PeerStream, _: Any) -> None:
        await stream.tell(head)
        stream.writer.write(b"abc")
        await stream.reader.read(1)

    liar.peers.handlers["sketch"] = answer
    states = [near(HONEST, seed) for seed in (2, 3)]
    newcomer, state = fetched(run, states, False, liars=1)
    assert any(torch.equal(state.tensors["anchor of 0"], one["anchor of 0"]) for one in states)
    assert newcomer._states._refused == {liar.peers.identity.peer}


@slow
def test_where_nobody_keeps_its_state_long_enough_to_be_compared_nobody_is_believed(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*_: Any) -> None:
        raise RequestRefusedError("this snapshot is kept no longer")

    monkeypatch.setattr(Snapshots, "_on_sketch", refuse)
    with pytest.raises(PeerLostError, match="no peer shows that its state is near the others'"):
        fetched(run, [near(HONEST, seed) for seed in (2, 3, 4)], False)


@pytest.mark.parametrize("name", ["id", "history"])
def test_a_state_with_a_name_that_is_too_long_to_be_told_again_is_none(name: str) -> None:
    """Whom a newcomer asked with it would be blamed for a request that cannot be sent."""
    told = manifest_of(bytes_of(HONEST), list(LENGTHS.items()), history="a")
    assert manifests.manifest_of(told, 1 << 20, 100).history == "a"
    part = told if name == "id" else told["facts"]
    part[name] = "x" * (LARGEST_FRAME // ASKED)
    with pytest.raises(FrameError):
        manifests.manifest_of(told, 1 << 20, 100)


@slow
@pytest.mark.parametrize("identical", [True, False])
def test_of_honest_members_nobody_is_struck(run: Run, identical: bool) -> None:
    """Of three with equal anchors one has missed a round; of three that gossip, two have just become the same."""
    states = [HONEST, HONEST, near(HONEST, 2)]
    newcomer, state = fetched(run, states, identical, "aab")
    assert all(torch.equal(state.tensors[name], HONEST[name]) for name in LENGTHS)
    assert not newcomer._states._refused and state.facts["history"] == "a"


@slow
def test_members_whose_rounds_have_all_differed_are_believed_where_they_are_near(run: Run) -> None:
    states = [near(HONEST, seed) for seed in range(3)]
    newcomer, state = fetched(run, states, True, "abc")
    assert any(all(torch.equal(state.tensors[name], one[name]) for name in LENGTHS) for one in states), "one's whole"
    assert not newcomer._states._refused


@slow
def test_two_that_differ_are_told_of_in_one_line(run: Run) -> None:
    newcomer, state = fetched(run, [HONEST, SCALED], True)
    assert any(all(torch.equal(state.tensors[name], one[name]) for name in LENGTHS) for one in (HONEST, SCALED))
    (line,) = [line for line in run.told if "different states" in line]
    assert "\n" not in line and "join again when a third peer trains" in line
    assert not newcomer._states._refused


def voices(states: list[Tensor], seed: str) -> tuple[Any, ...]:
    """Sources with one tensor each, and their sketches."""
    count = len(states[0])
    members = [Member(str(n), n, "", "", "", ()) for n in range(len(states))]
    sources = [(m, Manifest("", (str(m.rank),), (("anchor of 0", count),), 0, "")) for m in members]
    signs = signs_for(seed, [4 * count])
    return sources, [signs.sketch(state.numpy().view("u1").data)[None] for state in states], signs


@given(
    seed=st.integers(0, 10**6),
    honest=st.integers(2, 6),
    count=st.sampled_from([1, 7, 16, 100, 5000]),
    drift=st.floats(1e-6, 0.3),
)
def test_the_spread_holds_all_that_are_honest_and_no_other_model(
    seed: int, honest: int, count: int, drift: float
) -> None:
    chance = torch.Generator().manual_seed(seed)
    base = torch.randn(count, generator=chance).sign()  # no value is near nought
    states = [base + drift * (0.5 + torch.rand(count, generator=chance)) for _ in range(honest)]
    sources, sketches, signs = voices([*states, -20 * base], str(seed))
    believed = by_spread(sources, sketches, signs)
    assert [member.rank for member in believed.false] == [honest]
    assert len(believed.sources) == honest


@pytest.mark.parametrize("count", [10, 1000, 100_000])
def test_sketches_are_as_far_apart_as_what_they_are_of(count: int) -> None:
    one, other = torch.randn(2, count, generator=torch.Generator().manual_seed(1))
    told = []
    for seed in range(100):
        _, (a, b), _ = voices([one, other], str(seed))
        assert a.shape == (1, STRETCHES)
        told.append((a - b).square().sum())
    assert torch.stack(told).mean().sqrt() == pytest.approx(float((one - other).norm()), rel=0.1)
