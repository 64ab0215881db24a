"""Which machine takes which part of which replica, when links are uneven (DT-FM, arXiv 2206.01288).

Devices are split into groups of equal size. A group holds one pipeline stage; each member serves it for one replica.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations

import numpy as np

from farflung.errors import UserError
from farflung.planner.paths import Matrix, best_matching, shortest_path

Groups = tuple[tuple[int, ...], ...]
"""The devices of each group, sorted within."""


@dataclass(frozen=True)
class Problem:
    """What a placement is judged by.

    Args:
        latency: one way between devices, seconds; (n, n).
        bandwidth: between devices, bytes a second; (n, n), what is on the diagonal does not count.
        groups: how many stages.
        dp_bytes: what a stage's replicas average.
        pp_bytes: what passes from stage to stage.
        every, delay_seconds: steps between rounds, and how much of an exchange training hides.
        pairs: whether a round is between two replicas only.

    Raises UserError where the devices cannot be split into so many equal groups.
    """

    latency: Matrix
    bandwidth: Matrix
    groups: int
    dp_bytes: float
    pp_bytes: float
    every: int = 1
    delay_seconds: float = 0.0
    pairs: bool = False
    _edges: dict[frozenset[tuple[int, ...]], float] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.groups < 1 or self.devices % self.groups:
            raise UserError(f"{self.devices} devices cannot be split into {self.groups} groups of equal size")

    @property
    def devices(self) -> int:
        """How many there are."""
        return len(self.latency)

    @property
    def size(self) -> int:
        """Devices in a group."""
        return self.devices // self.groups

    @cached_property
    def dp_seconds(self) -> Matrix:
        """Seconds in which two replicas of a stage exchange their part of the average, there and back."""
        share = self.dp_bytes if self.pairs else self.dp_bytes / self.size
        return self._there_and_back(share)

    @cached_property
    def pp_seconds(self) -> Matrix:
        """Seconds in which two devices pass activations on and gradients back."""
        return self._there_and_back(self.pp_bytes)

    def _there_and_back(self, nbytes: float) -> Matrix:
        seconds = 2 * (self.latency + nbytes / self.bandwidth)
        np.fill_diagonal(seconds, 0.0)
        return seconds

    def cost(self, placement: Groups) -> float:
        """Seconds of a step: the pipeline's, and a step's share of a round's seconds that are not hidden."""
        average = max(self._average(group) for group in placement)
        return self.pipeline(placement)[0] + max(0.0, average - self.delay_seconds) / self.every

    def pipeline(self, placement: Groups) -> tuple[float, tuple[int, ...]]:
        """The shortest open path through all groups, and the groups in its order."""
        edges = np.zeros((len(placement), len(placement)))
        for (i, one), (j, other) in combinations(enumerate(placement), 2):
            edges[i, j] = edges[j, i] = self.edge(one, other)
        return shortest_path(edges)

    def edge(self, one: tuple[int, ...], other: tuple[int, ...]) -> float:
        """The largest cost in the best matching of two groups' devices."""
        key = frozenset((one, other))
        if key not in self._edges:
            self._edges[key], _ = best_matching(self.pp_seconds[np.ix_(one, other)])
        return self._edges[key]

    def _average(self, group: tuple[int, ...]) -> float:
        inside = self.dp_seconds[np.ix_(group, group)]
        if self.pairs and len(group) > 1:
            return float(inside.sum() / (len(group) * (len(group) - 1)))
        return float(inside.sum(1).max())


def chains(problem: Problem, placement: Groups) -> list[tuple[int, ...]]:
    """The devices of each replica, group by group in the order given, along the best matchings."""
    replicas: list[tuple[int, ...]] = [(device,) for device in placement[0]]
    for group in placement[1:]:
        last = [replica[-1] for replica in replicas]
        _, rows = best_matching(problem.pp_seconds[np.ix_(last, group)])
        following = {row: group[column] for column, row in rows.items()}
        replicas = [(*replica, following[row]) for row, replica in enumerate(replicas)]
    return replicas


def random_placement(problem: Problem, random: np.random.Generator) -> Groups:
    """A balanced split by chance."""
    parts = random.permutation(problem.devices).reshape(problem.groups, problem.size)
    return tuple(tuple(sorted(map(int, part))) for part in parts)


def search(
    problem: Problem, seconds: float = 20.0, seed: int = 0, population: int = 9, children: int = 40
) -> tuple[float, Groups]:
    """The cheapest split found, and its seconds a step; the groups come in the pipeline's order.

    A child is a parent with a few places taken from another parent. It is improved by swaps, and replaces the worse
    parent if it is better. A third of the first splits have near devices apart and a third together, since a matching
    only gets cheaper once all of its devices fit. Ends after so many children, or when the time is over.
    """
    random = np.random.default_rng(seed)
    ends = time.monotonic() + seconds
    nearness = 1.0 / np.maximum(problem.pp_seconds, 1e-12)
    np.fill_diagonal(nearness, 0.0)

    def better(placement: Groups) -> tuple[float, Groups]:
        return _improved(problem, placement, random, ends)

    starts: list[Callable[[Groups], Groups]] = [
        lambda p: p,
        lambda p: _spread(p, nearness),
        lambda p: _spread(p, -nearness),
    ]
    living = [better(starts[n % len(starts)](random_placement(problem, random))) for n in range(population)]
    for _ in range(children):
        if time.monotonic() > ends:
            break
        one, other = random.choice(len(living), 2, replace=False)
        child = better(_child(living[one][1], living[other][1], random))
        worse = max(one, other, key=lambda n: living[n][0])
        if child < living[worse]:
            living[worse] = child
    cost, placement = min(living)
    return cost, tuple(placement[group] for group in problem.pipeline(placement)[1])


def _spread(placement: Groups, nearness: Matrix) -> Groups:
    """Swaps devices between groups as long as that moves the devices inside of groups farther apart."""
    groups = [list(group) for group in placement]
    owner = {device: number for number, group in enumerate(groups) for device in group}
    inside = np.stack([nearness[:, group].sum(1) for group in groups], 1)
    for _ in range(10 * len(owner)):
        own = np.array([owner[device] for device in range(len(owner))])
        # By how much groups are less near inside when devices d and e change places.
        leaving = inside[np.arange(len(own)), own]
        gain = leaving[:, None] + leaving[None, :] - inside[:, own] - inside[:, own].T + 2 * nearness
        gain[own[:, None] == own[None, :]] = -np.inf
        one, other = np.unravel_index(int(gain.argmax()), gain.shape)
        if gain[one, other] <= 1e-9 * abs(leaving).max():
            break
        for device, source, target in ((one, own[one], own[other]), (other, own[other], own[one])):
            groups[source].remove(int(device))
            groups[target].append(int(device))
            owner[int(device)] = int(target)
            inside[:, source] -= nearness[:, device]
            inside[:, target] += nearness[:, device]
    return tuple(tuple(sorted(group)) for group in groups)


def _child(one: Groups, other: Groups, random: np.random.Generator) -> Groups:
    """The first parent with a few places of the second, balanced again by moving devices at random."""
    size, count = len(one[0]), sum(map(len, one))
    owner = {device: number for number, group in enumerate(one) for device in group}
    theirs = {device: number for number, group in enumerate(other) for device in group}
    for device in random.choice(count, max(1, count // 8), replace=False):
        owner[int(device)] = theirs[int(device)]
    groups: list[list[int]] = [[] for _ in one]
    homeless = []
    for device in random.permutation(count):
        group = groups[owner[int(device)]]
        if len(group) < size:
            group.append(int(device))
        else:
            homeless.append(int(device))
    for group in groups:
        while len(group) < size:
            group.append(homeless.pop())
    return tuple(tuple(sorted(group)) for group in groups)


def _improved(problem: Problem, placement: Groups, random: np.random.Generator, ends: float) -> tuple[float, Groups]:
    """Swaps members of two groups when that is cheaper: first those with the nearest neighbours, then others."""
    cost = problem.cost(placement)
    for first, second in random.permutation(list(combinations(range(len(placement)), 2))):
        for one, other in _swaps(problem, placement[first], placement[second], random):
            if time.monotonic() > ends:
                return cost, placement
            changed = list(placement)
            changed[first] = _swapped(placement[first], one, other)
            changed[second] = _swapped(placement[second], other, one)
            candidate = tuple(changed)
            if (cheaper := problem.cost(candidate)) < cost:
                cost, placement = cheaper, candidate
                break
    return cost, placement


def _swaps(
    problem: Problem, first: tuple[int, ...], second: tuple[int, ...], random: np.random.Generator
) -> Iterator[tuple[int, int]]:
    """Which devices to try to swap: one of each group's fastest pair inside, and one of each at random."""
    if len(first) > 1:
        yield _of_fastest(problem, first), _of_fastest(problem, second)
    yield int(random.choice(first)), int(random.choice(second))


def _of_fastest(problem: Problem, group: tuple[int, ...]) -> int:
    inside = problem.pp_seconds[np.ix_(group, group)] + np.diag(np.full(len(group), np.inf))
    return group[int(inside.argmin()) // len(group)]


def _swapped(group: tuple[int, ...], leaves: int, comes: int) -> tuple[int, ...]:
    return tuple(sorted((*(device for device in group if device != leaves), comes)))
