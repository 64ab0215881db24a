import pytest
from hypothesis import given
from hypothesis import strategies as st

from farflung.config import UserError
from farflung.outer import Everyone, RandomGroups, Schedule


@given(every=st.integers(1, 60), data=st.data())
def test_each_fragment_starts_once_every_so_many_steps(every: int, data: st.DataObject) -> None:
    fragments = data.draw(st.integers(1, every))
    schedule = Schedule(every, fragments)
    first = data.draw(st.integers(1, 500))
    starts = [schedule.starting(step) for step in range(first, first + every)]
    assert sorted(p for started in starts for p in started) == list(range(fragments))
    assert max(map(len, starts)) == 1  # never two fragments on the link at once


def test_without_rounds_nothing_starts() -> None:
    assert all(Schedule(every=None).starting(step) == [] for step in range(100))


@pytest.mark.parametrize("settings", [(0,), (5, 1, 6), (5, 6), (5, 0), (5, 1, -1)])
def test_impossible_schedules_are_refused(settings: tuple[int, ...]) -> None:
    with pytest.raises(UserError):
        Schedule(*settings)


@given(replicas=st.integers(1, 40), size=st.integers(2, 9), seed=st.integers(0, 9), round=st.integers(0, 50))
def test_random_groups_divide_the_members(replicas: int, size: int, seed: int, round: int) -> None:
    members = tuple(range(replicas))
    topology = RandomGroups(size, seed)
    groups = {rank: topology.group(rank, members, f"round {round}") for rank in members}
    sitting_out = [rank for rank in members if not groups[rank]]
    assert len(sitting_out) == (replicas % size == 1)
    for rank in members:
        if groups[rank]:
            assert rank in groups[rank]
            assert all(groups[other] == groups[rank] for other in groups[rank])
            assert 2 <= len(groups[rank]) <= size


def test_pairs_change_from_round_to_round_and_with_the_seed() -> None:
    members = tuple(range(8))
    partners = {RandomGroups(2, 0).group(0, members, f"round {r}") for r in range(60)}
    assert len(partners) == 7
    one, other = ([RandomGroups(2, seed).group(0, members, f"round {r}") for r in range(20)] for seed in (0, 1))
    assert one != other


def test_everyone_is_one_group() -> None:
    assert Everyone().group(2, (0, 2, 5), "round 1") == (0, 2, 5)
