"""Who moves between a swarm's stages, and what days of coming and going leave of what the peers could do."""

from __future__ import annotations

import asyncio
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farflung.networks.simulator.event_loop import run_in_virtual_time
from farflung.swarm.letters import Microbatch
from farflung.swarm.lives import Lives, share_of_optimal
from farflung.swarm.moves import (
    GOES_SECONDS,
    STAY_SECONDS,
    STEADY_SECONDS,
    Restlessness,
    Standing,
    Successors,
    capacities,
    next_move,
    share_under_way,
    stage_for_newcomer,
    standings,
)
from farflung.swarm.peer import StagePeer
from farflung.swarm.routers import ThroughputRouter
from farflung.swarm.simulated import Links, SimulatedPost, TimeAlone, in_virtual_seconds

STAGES = 3
SWARMS = st.dictionaries(
    st.integers(0, 50),
    st.builds(Standing, st.integers(0, STAGES - 1), st.sampled_from([0.5, 1.0, 2.0, 3.7])),
    min_size=1,
    max_size=9,
)


def test_who_cannot_take_an_empty_stage_over_is_passed_by_and_who_is_on_its_way_is_waited_for() -> None:
    successors, peers = Successors(), {0: Standing(0), 1: Standing(0), 2: Standing(1), 3: Standing(1)}

    def due(now: float, gone: int = -1) -> int | None:
        move = successors.move({one: at for one, at in peers.items() if one != gone}, 3, now)
        assert move is None or move.stage == 2
        return move.peer if move else None

    assert [due(100.0), due(100.0 + GOES_SECONDS - 1)] == [0, 0]
    assert due(100.0 + GOES_SECONDS) == 1, "0 stays, so it has not the memory"
    assert due(101.0 + GOES_SECONDS, gone=1) is None, "it is on its way"
    assert due(100.0 + 2 * GOES_SECONDS, gone=1) == 2, "it does not come"
    successors.clear()
    assert due(1000.0) == 0


def test_a_quick_head_has_more_microbatches_under_way_and_none_can_take_the_others_theirs() -> None:
    unlike = {
        stage * 4 + place: Standing(stage, speed) for stage in range(4) for place, speed in enumerate((1, 1, 2, 4))
    }
    assert [share_under_way(unlike, head, 4, 2) for head in range(4)] == [4, 4, 8, 16]
    alike = dict(enumerate(Standing(stage) for stage, count in enumerate((3, 4, 6, 3)) for _ in range(count)))
    assert [share_under_way(alike, head, 4, 2) for head in range(3)] == [11, 11, 11]
    assert [share_under_way({0: Standing(0), 1: Standing(1)}, 0, 2, each) for each in (1, 2)] == [2, 4]
    liar = standings([(0, 0, 1.0), (1, 0, 1e12), (2, 1, 1.0), (3, 1, 1.0)])
    assert [share_under_way(liar, head, 2, 2) for head in range(2)] == [2, 8]


@given(SWARMS)
def test_a_move_raises_the_neediest_stage_and_empties_none(peers: dict[int, Standing]) -> None:
    before = capacities(peers, STAGES)
    move = next_move(peers, STAGES)
    possible = []
    for peer, stage in itertools.product(peers, range(STAGES)):
        mates = sum(one.stage == peers[peer].stage for one in peers.values())
        if stage == before.index(min(before)) != peers[peer].stage and mates > (2 if min(before) else 1):
            after = capacities(peers | {peer: Standing(stage, peers[peer].speed)}, STAGES)
            possible.append((min(after[stage], after[peers[peer].stage]), peer))
    best = max((least for least, _ in possible), default=0.0)
    if best <= min(before) * 1.05:
        assert move is None
    else:
        assert move is not None
        assert (best, move.peer) in possible
        assert move.stage == before.index(min(before))


@given(SWARMS)
def test_moves_come_to_an_end_and_leave_no_stage_empty_that_could_be_served(peers: dict[int, Standing]) -> None:
    for _ in range(100):
        move = next_move(peers, STAGES)
        if move is None:
            break
        peers = peers | {move.peer: Standing(move.stage, peers[move.peer].speed)}
    else:
        raise AssertionError("peers move for ever")
    if len(peers) >= STAGES:
        assert min(capacities(peers, STAGES)) > 0


def test_an_empty_stage_takes_one_of_two_but_never_the_last() -> None:
    move = next_move({1: Standing(0), 2: Standing(0), 3: Standing(2)}, STAGES)
    assert move is not None
    assert (move.peer, move.stage) == (1, 1)
    assert next_move({1: Standing(0), 3: Standing(2)}, STAGES) is None


def test_a_newcomer_goes_where_least_can_be_done() -> None:
    assert stage_for_newcomer({}, STAGES) == 0
    assert stage_for_newcomer({1: Standing(0, 3.0), 2: Standing(1, 1.0), 3: Standing(2, 0.5)}, STAGES) == 2


def test_who_lives_for_ever_does_all_it_could() -> None:
    for_ever = Lives(12, 4, up_s=1e12, down_s=1e-3)
    assert share_of_optimal(for_ever, 10.0, 0) == pytest.approx(1.0)


def test_moves_help_and_looking_more_often_helps_more() -> None:
    looks: list[float | None] = [None, 300.0, 60.0, 0.0]
    shares = [share_of_optimal(Lives(64, 16, moves_every_s=every), 24.0, 0) for every in looks]
    assert shares == sorted(shares)
    assert shares[-1] > shares[0] + 0.05


def test_packets_wait_for_each_other_on_a_link() -> None:
    """Ten microbatches of 1 MB over 8 Mbit/s take a second each way for each, and both ways at the same time."""

    async def main() -> float:
        loop = asyncio.get_running_loop()
        post = SimulatedPost(links=Links(lambda _: 8.0, 1e6))
        quick = in_virtual_seconds(0.0, 0.0)
        post.peers[0] = StagePeer(0, 2, TimeAlone(), quick, post.of(0), ThroughputRouter([1]), 1e6, loop.time)
        post.peers[1] = StagePeer(1, 2, TimeAlone(), in_virtual_seconds(0.0, 0.0), post.of(1), None, 1e6, loop.time)
        await asyncio.gather(*(post.peers[0].start(Microbatch(0, number), 0) for number in range(10)))
        return loop.time()

    assert run_in_virtual_time(main()) == pytest.approx(11.0)


def test_a_peer_moves_once_the_same_move_was_best_for_a_while_and_not_soon_after_it_came() -> None:
    crowded = {0: Standing(0), 1: Standing(0), 2: Standing(0), 3: Standing(1)}
    even = {0: Standing(0), 1: Standing(0), 2: Standing(1), 3: Standing(1)}
    peers = [Restlessness(rank, 2, 0.0) for rank in crowded]

    def moves(now: float, known: dict[int, Standing]) -> list[int | None]:
        return [peer.stage(known, now) for peer in peers]

    assert moves(1.0, crowded) == [None] * 4
    assert moves(1.0 + STEADY_SECONDS, crowded) == [None] * 4, "they have just come"
    assert sorted(map(str, moves(STAY_SECONDS, crowded))) == ["1", "None", "None", "None"], "one at a time"
    assert moves(STAY_SECONDS + 1, even) == [None] * 4
    assert moves(STAY_SECONDS + 2, crowded) == [None] * 4, "it has changed meanwhile"
    quicker = crowded | {1: Standing(0, 1.1)}
    assert moves(STAY_SECONDS + 1 + STEADY_SECONDS, quicker) == [None] * 4
    assert any(moves(STAY_SECONDS + 2 + STEADY_SECONDS, crowded)), "who of a stage is the quickest does not matter"


def test_who_has_not_computed_yet_counts_as_quick_as_the_others() -> None:
    assert standings([(1, 0, 2.0), (2, 1, 0.0), (3, 1, 4.0)])[2] == Standing(1, 3.0)
    assert standings([(1, 0, 0.0)]) == {1: Standing(0, 1.0)}
