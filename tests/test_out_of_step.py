"""Peers that are out of step with each other come to meet again."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from folder_seats import mean_of, met, seats
from hypothesis import given
from hypothesis import strategies as st
from patience import patience
from problem import inner_steps, small_model
from test_internet import Run, live, pair

from farflung.methods import Method
from farflung.networks import Network, Party
from farflung.networks.base import BESIDE
from farflung.networks.peers.pace import Patience
from farflung.outer import Average, AveragedMoments, MixedAnchors, Schedule

__all__ = ["live", "pair"]

ALONE = Party((), {}, alone="nobody")
ALONE_BY_A_HOST = Party((1,), {1: 1.0}, alone="nobody")
EVERY_S = 10.0
"""Seconds between the rounds of each."""


class Clock:
    """Time as a test tells it."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@given(st.floats(0, EVERY_S), st.sampled_from([ALONE, ALONE_BY_A_HOST]))
def test_one_that_is_ahead_by_less_than_a_round_soon_waits_for_the_other(apart_s: float, alone: Party) -> None:
    """The one behind never waits, since the other has passed; nor does the one ahead, if that comes too late."""
    with pytest.MonkeyPatch.context() as patch:
        clock = Clock()
        patch.setattr("farflung.networks.peers.pace.time", clock)
        ahead, waits = Patience(60.0), list[float]()
        while not waits or waits[-1] < apart_s:
            assert len(waits) < 4
            waits.append(ahead.seconds(f"round {len(waits)} of 0"))
            ahead.ended(alone)
            clock.now += EVERY_S


@pytest.mark.parametrize(
    "party",
    [Party((1, 2), {1: 1.0, 2: 1.0}), Party((), {}, behind=True), Party((), {}, alone="left over")],
    ids=["a pair", "behind", "left over"],
)
def test_one_that_has_met_others_waits_for_a_share_of_the_time_again(
    party: Party, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr("farflung.networks.peers.pace.time", clock)
    one, waits = Patience(60.0), list[float]()
    for came_to in (ALONE, ALONE, ALONE, party, ALONE):
        waits.append(one.seconds("round 1 of 0"))
        one.ended(came_to)
        clock.now += EVERY_S
    assert waits == [5.0, 2.5, EVERY_S, EVERY_S, 2.5]
    clock.now += 1000.0
    assert one.seconds("round 1 of 0") == 60.0


def test_one_that_was_to_meet_nobody_is_not_out_of_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as one with a slow link, which stays out of most rounds."""
    clock = Clock()
    monkeypatch.setattr("farflung.networks.peers.pace.time", clock)
    one = Patience(60.0)
    for _ in range(4):
        one.seconds("round 1 of 0")
        one.ended(ALONE_BY_A_HOST, wanted=(1,))
        clock.now += EVERY_S
    assert one.seconds("round 1 of 0") == 2.5


def test_those_who_have_just_met_wait_for_each_other_from_one_round_to_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    monkeypatch.setattr("farflung.networks.peers.pace.time", clock)
    one, waits = Patience(60.0), list[float]()
    for seconds in (0.1, EVERY_S, 1000.0, 0.0):
        waits.append(one.seconds(f"moments{BESIDE}round {len(waits)} of 0"))
        clock.now += seconds
    assert waits == [20.0, 5.0, EVERY_S, 60.0]


def test_in_a_folder_one_that_comes_alone_again_and_again_waits_longer(tmp_path: Path) -> None:
    with seats(f"memory://{tmp_path.name}-{time.monotonic_ns()}/run", tmp_path, 2) as run:
        one, other = run.open
        pair = tuple(sorted(network.rank for network in run.open))

        def next_wait() -> int:
            one._patience._met["0"] = time.monotonic() - 4.0
            return round(one._patience.seconds("next of 0"))

        other.peers.info["trains"] = False
        other.peers.beat()
        for number, waits in ((1, 1), (2, 4), (3, 4)):
            run.look()
            (party,) = met([one], f"round {number} of 0", lambda _, party: party, wanted=pair)
            assert (party.group, party.alone, next_wait()) == ((), "nobody", waits)
        other.peers.info["trains"] = True
        other.peers.beat()
        run.look()
        assert [mean.tolist() for mean in mean_of(run.open, "round 4 of 0", 2)] == [[0.5] * 2] * 2
        assert next_wait() == 1


def test_on_the_internet_one_that_comes_alone_again_and_again_waits_longer(
    pair: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its host, be it another or itself, says that it is a group of one."""
    one, other = pair.peers
    wanted = tuple(sorted((one.rank, other.rank)))
    patience_of_one = Patience(60.0)
    monkeypatch.setattr(one, "_patience", patience_of_one)
    monkeypatch.setattr(one.peers.members.by_rank[other.rank], "trains", False)
    waits = []
    for number in range(4):
        meeting = one.meet(wanted, f"round {number} of those apart", 5, 1.0, "", lambda party: party)
        assert meeting.wait(patience(20)).alone == "nobody"
        patience_of_one._met["those apart"] = time.monotonic() - 4.0
        waits.append(round(patience_of_one.seconds("next of those apart")))
    assert waits == [1, 4, 4, 4]


def test_what_goes_along_with_rounds_is_waited_for_by_rhythms_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Anchors are sent right after moments, which says nothing of how long others may take to come."""
    keys: list[str] = []
    seconds = Patience.seconds

    def noted(self: Patience, key: str) -> float:
        keys.append(key)
        return seconds(self, key)

    def work(seat: Network) -> None:
        model = small_model()
        optimizer = torch.optim.AdamW(model.parameters())
        along = (AveragedMoments((("exp_avg", 1),)), MixedAnchors())
        with Method(Schedule(2), outer=Average, companions=along).attach(model, optimizer, seat):
            inner_steps(model, optimizer, 0, range(4))

    monkeypatch.setattr(Patience, "seconds", noted)
    with seats(f"memory://{tmp_path.name}/run", tmp_path, 2) as run, ThreadPoolExecutor(2) as pool:
        list(pool.map(work, run.open))
        rhythms = run.open[0]._patience._met
    assert len(rhythms) == 3, keys
