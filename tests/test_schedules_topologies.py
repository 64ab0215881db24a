from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farflung.errors import UserError
from farflung.outer import Everyone, RandomGroups, Schedule, group_of


@given(every=st.integers(1, 60), data=st.data())
def test_each_fragment_starts_once_every_so_many_steps(every: int, data: st.DataObject) -> None:
    fragments = data.draw(st.integers(1, every))
    schedule = Schedule(every, fragments)
    starts = [schedule.first(fragment) for fragment in range(fragments)]
    assert len({start % every for start in starts}) == fragments  # never two fragments on the link at once
    assert schedule.first(0) == every and all(1 <= start <= every for start in starts)


def test_without_rounds_nothing_starts() -> None:
    assert Schedule(every=None).first(0) == 0


@pytest.mark.parametrize("schedule", [Schedule(6, 2, 3), Schedule("2s", delay="1s"), Schedule(8, final=4, steps=100)])
def test_rounds_so_many_times_as_far_apart_are_some_of_the_others(schedule: Schedule) -> None:
    rarer = schedule.times(3)
    assert schedule.every and rarer.every == 3 * schedule.every
    assert (rarer.delay, rarer.fragments, rarer.by_clock) == (schedule.delay, schedule.fragments, schedule.by_clock)
    assert [rarer.every_at(step) for step in (0, 100)] == [3 * schedule.every_at(step) for step in (0, 100)]
    assert schedule.times(1) == schedule and Schedule().times(3) == Schedule()


@given(every=st.integers(1, 60), share=st.floats(0.01, 1.0), data=st.data())
def test_a_shortened_schedule_keeps_room_for_all_fragments_and_for_its_delay(
    every: int, share: float, data: st.DataObject
) -> None:
    schedule = Schedule(every, data.draw(st.integers(1, every)), data.draw(st.integers(0, every)))
    shorter, delay = schedule.shortened(share)
    assert schedule.fragments <= shorter <= every
    assert 0 <= delay <= shorter and (delay == shorter) == (schedule.delay == every)
    assert schedule.shortened(1.0) == (every, schedule.delay)


def test_rounds_grow_rarer_by_equal_factors() -> None:
    schedule = Schedule(every=4, final=64, steps=100)
    assert [schedule.every_at(step) for step in (0, 25, 50, 75, 100, 130)] == [4, 8, 16, 32, 64, 64]
    assert [Schedule(every=9, steps=100).every_at(step) for step in (0, 100)] == [9, 9]


@pytest.mark.parametrize("settings", [(0,), (5, 1, 6), (5, 6), (5, 0), (5, 1, -1), (5, 1, 3, 2), (5, 3, 0, 2)])
def test_impossible_schedules_are_refused(settings: tuple[int, ...]) -> None:
    with pytest.raises(UserError):
        Schedule(*settings)


@pytest.mark.parametrize("name", ["every", "fragments", "delay", "final", "steps"])
@pytest.mark.parametrize("value", ["3", 2.5, True])
def test_schedules_are_of_whole_numbers(name: str, value: Any) -> None:
    """Or of times: then a text without a unit is none."""
    remedy = {"every": "give inner steps", "delay": "give both"}.get(name) if isinstance(value, str) else None
    with pytest.raises(UserError, match=f"{name} is {value!r}.*{remedy or 'it must be a whole number'}"):
        Schedule(**{"every": 5, name: value})


@given(replicas=st.integers(1, 40), size=st.integers(2, 9), seed=st.integers(0, 9), round=st.integers(0, 50))
def test_random_groups_divide_the_members(replicas: int, size: int, seed: int, round: int) -> None:
    members = tuple(range(replicas))
    topology = RandomGroups(size, seed)
    groups = {rank: group_of(rank, topology.groups(members, f"round {round}")) for rank in members}
    sitting_out = [rank for rank in members if not groups[rank]]
    assert len(sitting_out) == (replicas % size == 1)
    for rank in members:
        if groups[rank]:
            assert rank in groups[rank]
            assert all(groups[other] == groups[rank] for other in groups[rank])
            assert 2 <= len(groups[rank]) <= size


@given(replicas=st.integers(2, 40), size=st.integers(2, 5), round=st.integers(0, 50), data=st.data())
def test_who_has_heard_of_a_loss_and_who_has_not_find_the_same_groups_of_others(
    replicas: int, size: int, round: int, data: st.DataObject
) -> None:
    """Else a round in which one is lost would be lost for most: each would wait for others than wait for it."""
    members, topology = tuple(range(replicas)), RandomGroups(size, 3)
    lost = data.draw(st.sets(st.sampled_from(members[:-1]), max_size=replicas // 2))
    left = tuple(rank for rank in members if rank not in lost)
    before, after = (topology.groups(ranks, f"round {round}") for ranks in (members, left))
    assert {group for group in before if not lost & {*group}} <= {*after}
    together = [rank for group in after for rank in group]
    assert {*together} <= {*left} and len(together) == len({*together}) >= len(left) - 1
    assert all(2 <= len(group) <= size and list(group) == sorted(group) for group in after)


def test_pairs_change_from_round_to_round_and_with_the_seed() -> None:
    members = tuple(range(8))
    partners = {group_of(0, RandomGroups(2, 0).groups(members, f"round {r}")) for r in range(60)}
    assert len(partners) == 7
    one, other = (
        [group_of(0, RandomGroups(2, seed).groups(members, f"round {r}")) for r in range(20)] for seed in (0, 1)
    )
    assert one != other


def test_everyone_is_one_group() -> None:
    assert Everyone().groups((0, 2, 5), "round 1") == [(0, 2, 5)]


@pytest.mark.parametrize("size", [1, 2.0, "2"])
def test_a_group_is_of_a_whole_number_of_replicas(size: Any) -> None:
    with pytest.raises(UserError, match=f"group_size is {size}; give a whole number, of at least 2 replicas"):
        RandomGroups(size)
