"""Whose turn it is to lead the steps that all take together."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from farflung.swarm.turns import QUIET_SECONDS, Turns
from farflung.swarm.waits import LATE


def test_a_leader_under_whom_no_step_is_taken_gives_way_after_a_minute_and_does_not_lead_again() -> None:
    turns = Turns(first_s=500.0)
    for step in range(5):
        assert turns.leader([3, 1, 2], step, float(step)) == 1
    assert turns.leader([3, 1, 2], 4, 4.0 + QUIET_SECONDS) == 1
    assert turns.leader([3, 1, 2], 4, 4.1 + QUIET_SECONDS) == 2
    for step in range(5, 50):
        assert turns.leader([3, 1, 2], step, 60.0 + step) == 2
    assert turns.leader([3, 1], 49, 110.0) == 3, "it has left, and who was passed by is not asked again"
    assert turns.leader([1], 49, 111.0) == 1, "but where nobody else is there"


@given(st.lists(st.floats(0.0, 1e4), min_size=1, max_size=40), st.integers(2, 5))
def test_nobody_gives_way_whose_steps_take_no_more_than_some_times_as_long_as_before(
    seconds: list[float], heads: int
) -> None:
    turns, now, took = Turns(first_s=seconds[0]), 0.0, [seconds[0] / LATE]
    turns.leader(range(heads), 0, now)
    for step, wanted in enumerate(seconds):
        took.append(min(wanted, max(QUIET_SECONDS, LATE * max(took[-32:]))) * (1 - 1e-9))
        assert turns.leader(range(heads), step, now + took[-1]) == 0
        now += took[-1]
        assert turns.leader(range(heads), step + 1, now) == 0


def test_where_all_were_passed_by_each_has_twice_as_long() -> None:
    turns, led, now = Turns(first_s=0.0), [], 0.0
    turns.leader([1, 2], 0, now)
    while len(led) < 1000:
        now += 1.0
        led.append(turns.leader([1, 2], 0, now))
    changes = [number for number in range(1, len(led)) if led[number] != led[number - 1]]
    spans = [later - before for before, later in pairwise(changes)]
    assert spans == sorted(spans) and spans[-1] >= 2 * spans[0] >= 2 * QUIET_SECONDS
