"""Placement on uneven links: against brute force, and against known answers."""

from collections.abc import Iterator
from itertools import combinations, pairwise, permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farflung.errors import UserError
from farflung.planner.paths import best_matching, shortest_path
from farflung.planner.placement import Groups, Problem, random_placement, search

quickly = settings(max_examples=30, deadline=None)


def uneven(devices: int, seed: int, **settings: object) -> Problem:
    random = np.random.default_rng(seed)
    latency, bandwidth = random.uniform(0, 0.2, (devices, devices)), random.uniform(1e7, 1e9, (devices, devices))
    return Problem((latency + latency.T) / 2, (bandwidth + bandwidth.T) / 2, dp_bytes=1e8, pp_bytes=5e7, **settings)  # type: ignore[arg-type]


def every_placement(devices: tuple[int, ...], size: int) -> Iterator[Groups]:
    """All splits into groups of equal size, each once."""
    if not devices:
        yield ()
        return
    for others in combinations(devices[1:], size - 1):
        group = (devices[0], *others)
        for rest in every_placement(tuple(device for device in devices if device not in group), size):
            yield (group, *rest)


@pytest.mark.parametrize("groups", [2, 4])
@pytest.mark.parametrize("seed", range(3))
def test_for_8_machines_the_search_finds_what_brute_force_does(groups: int, seed: int) -> None:
    problem = uneven(8, seed, groups=groups)
    splits = list(every_placement(tuple(range(8)), problem.size))
    assert len(splits) == {2: 35, 4: 105}[groups]
    best = min(problem.cost(split) for split in splits)
    assert search(problem, seconds=20)[0] == pytest.approx(best)


def by_definition(problem: Problem, placement: tuple[tuple[int, ...], ...]) -> float:
    """The sheet's formulas, tried out in full."""

    def link(d: int, e: int, nbytes: float) -> float:
        return 2 * (problem.latency[d, e] + nbytes / problem.bandwidth[d, e])

    share = problem.dp_bytes / len(placement[0])
    dp = max(sum(link(d, e, share) for e in group if e != d) for group in placement for d in group)

    def edge(one: tuple[int, ...], other: tuple[int, ...]) -> float:
        return min(max(link(d, e, problem.pp_bytes) for d, e in zip(one, o, strict=True)) for o in permutations(other))

    paths = permutations(placement)
    return dp + min(sum(edge(a, b) for a, b in pairwise(path)) for path in paths)


@quickly
@given(seed=st.integers(0, 10_000), groups=st.sampled_from([2, 3, 4]))
def test_the_cost_is_that_of_the_definition(seed: int, groups: int) -> None:
    problem = uneven(2 * groups if groups > 2 else 6, seed, groups=groups)
    placement = random_placement(problem, np.random.default_rng(seed))
    assert problem.cost(placement) == pytest.approx(by_definition(problem, placement))


@quickly
@given(seed=st.integers(0, 10_000), size=st.integers(1, 5))
def test_bottleneck_matching_and_path_are_the_best_of_all(seed: int, size: int) -> None:
    costs = np.random.default_rng(seed).integers(0, 9, (size, size)).astype(float)
    orders = list(permutations(range(size)))
    assert best_matching(costs)[0] == min(max(costs[row, order[row]] for row in range(size)) for order in orders)
    edges = costs + costs.T
    length, order = shortest_path(edges)
    lengths = [sum(edges[a, b] for a, b in pairwise(path)) for path in orders]
    assert length == min(lengths) and sorted(order) == list(range(size))
    assert length == sum(edges[a, b] for a, b in pairwise(order))


def test_in_one_data_centre_pipelines_stay_inside_hosts() -> None:
    host = np.repeat(np.arange(4), 4)
    near = host[:, None] == host[None, :]
    problem = Problem(np.zeros((16, 16)), np.where(near, 1e10, 1e8), groups=4, dp_bytes=1e8, pp_bytes=1e9)
    _, placement = search(problem, seconds=20)
    assert all(sorted(host[list(group)]) == [0, 1, 2, 3] for group in placement)


def test_rare_rounds_and_delays_make_averages_cheap() -> None:
    each_step, rarely, delayed = (uneven(8, 1, groups=2, **s) for s in ({}, {"every": 50}, {"delay_seconds": 1e9}))
    placement = random_placement(each_step, np.random.default_rng(0))
    pipeline = each_step.pipeline(placement)[0]
    average = each_step.cost(placement) - pipeline
    assert rarely.cost(placement) == pytest.approx(pipeline + average / 50)
    assert delayed.cost(placement) == pytest.approx(pipeline)
    in_pairs = uneven(8, 1, groups=2, pairs=True)
    links = [in_pairs.dp_seconds[np.ix_(group, group)][~np.eye(4, dtype=bool)].mean() for group in placement]
    assert in_pairs.cost(placement) == pytest.approx(pipeline + max(links))


def test_the_same_seed_finds_the_same() -> None:
    assert search(uneven(12, 5, groups=3), seed=3) == search(uneven(12, 5, groups=3), seed=3)


def test_devices_that_cannot_be_split_evenly_are_told() -> None:
    with pytest.raises(UserError, match="7 devices cannot be split into 2 groups"):
        uneven(7, 0, groups=2)
