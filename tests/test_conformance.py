"""What every method, merge and topology promises, whichever there are; networks have theirs in test_networks.py."""

from __future__ import annotations

import functools
import random
from collections import Counter
from dataclasses import fields
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from problem import Result, flat, gone_on, inner_steps, replica, small_model
from registered import MERGES, METHODS, TOPOLOGIES, made
from torch import Tensor, nn

from farflung.errors import UserError
from farflung.methods import Method, RoundSettings, chosen
from farflung.networks import SimulatedNetwork, Simulation
from farflung.outer import Merge, MixedAnchors, OuterLoop, Topology, group_of, merges

each_method = pytest.mark.parametrize("name", METHODS)

EVERY, STEPS = 5, 30


@functools.cache
def trained(name: str) -> list[Result]:
    """What four replicas on data of their own come to."""
    return Simulation(4).run(replica(lambda: made(name, every=EVERY), STEPS))


# Methods


def starts(method: Method) -> Counter[tuple[int, int]]:
    """The fragments and steps in which the schedule has rounds start."""
    schedule = method.schedule
    every = schedule.every or STEPS + 1
    firsts = {fragment: schedule.first(fragment) or STEPS + 1 for fragment in range(schedule.fragments)}
    return Counter((fragment, step) for fragment, first in firsts.items() for step in range(first, STEPS + 1, every))


@each_method
def test_rounds_are_held_when_the_schedule_says_and_all_are_averaged(name: str) -> None:
    """Where steps adapt, rounds come no later than that."""
    method, start = made(name, every=EVERY), flat(small_model())
    for result in trained(name):
        assert torch.isfinite(result.weights).all() and not torch.equal(result.weights, start)
        assert {round.outcome for round in result.rounds} == ({"averaged"} if method.exchanges else set())
        held = Counter((round.fragment, round.started_step) for round in result.rounds)
        if method.adapt and method.adapt.steps:
            assert held.total() >= starts(method).total()
        else:
            assert held == starts(method)
        assert all(round.group == (0, 1, 2, 3) or not method.topology.identical for round in result.rounds)
        traffic = result.outer.network.traffic
        assert (traffic.bytes_sent > 0) == (traffic.bytes_received > 0) == method.exchanges


def anchors(result: Result) -> Tensor:
    """What a method keeps equal: its anchors; without rounds, the weights themselves."""
    outer = result.outer
    return torch.cat(outer.anchors) if isinstance(outer, OuterLoop) and outer.method.exchanges else result.weights


@each_method
def test_replicas_are_equal_bit_for_bit_where_the_topology_says_so_and_nowhere_else(name: str) -> None:
    """An eager merge's anchors have each replica's own fresh part in them; mixed anchors end as their mean."""
    method, seen = made(name, every=EVERY), trained(name)
    equal = method.exchanges and method.topology.identical and not method.merge.eager
    equal |= any(isinstance(companion, MixedAnchors) for companion in method.companions)
    assert all(torch.equal(anchors(result), anchors(seen[0])) for result in seen) == equal


@each_method
def test_equal_replicas_stay_equal(name: str) -> None:
    """On the same data: bit for bit, unless what is read depends on the receiver's values."""
    method = made(name, every=EVERY)

    def work(network: SimulatedNetwork) -> Tensor:
        model = small_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with made(name, every=EVERY).attach(model, optimizer, network):
            inner_steps(model, optimizer, 7, range(STEPS))
        return flat(model)

    first, *others = Simulation(4).run(work)
    moved = float((first - flat(small_model())).norm())
    assert moved > 0.1
    for other in others:
        if method.topology.identical or method.codec.traits.lossless:
            assert torch.equal(other, first)
        else:
            assert float((other - first).norm()) < 0.3 * moved


def moved(name: str, **settings: Any) -> Tensor:
    """How far the weights of four replicas have come, by steps of 1, 2, 3 and 4; one row each."""

    def work(network: SimulatedNetwork) -> Tensor:
        model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(3))).double()
        for weight in model.parameters():
            nn.init.zeros_(weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with made(name, every=EVERY, outer_lr=1.0, outer_momentum=0.0, **settings).attach(model, optimizer, network):
            for _ in range(STEPS):
                for weight in model.parameters():
                    weight.grad = torch.full_like(weight, -1.0 - network.rank)
                optimizer.step()
        return flat(model)

    return torch.stack(Simulation(4).run(work))


@each_method
def test_constant_progress_arrives_whole_with_a_codec_that_loses_nothing(name: str) -> None:
    """All replicas together have come as far as their steps; where they must be alike, each as far as the mean."""
    method = made(name, every=EVERY, codec="float32")
    came = moved(name, codec="float32")
    if method.codec.traits.lossless:
        torch.testing.assert_close(came.mean(0), torch.full((192,), 2.5 * STEPS).double(), rtol=1e-5, atol=0)
    if method.topology.identical and method.exchanges and not method.schedule.delay:
        assert torch.equal(came[0], came[3])
    assert method.exchanges == (float(came[0].mean()) > 1.05 * STEPS), "the slowest is drawn along by the others"


@pytest.mark.slow
@each_method
def test_constant_progress_is_not_overdone_nor_held_up_for_long_by_the_methods_own_codec(name: str) -> None:
    """Sparse codecs send a value now and then, and some forget a part of the rest."""
    came = float(moved(name).mean())
    assert 0.2 * 2.5 * STEPS < came < 1.02 * 2.5 * STEPS


@each_method
@pytest.mark.parametrize("at", [pytest.param(7, marks=pytest.mark.slow), 12])
def test_a_state_goes_round_through_a_file(name: str, at: int) -> None:
    """Between rounds, and amid delays."""

    whole, parts = gone_on(lambda: made(name, every=EVERY), at, 20, 3)
    for (weights, rounds), (again, rounds_again) in zip(whole, parts, strict=True):
        assert torch.equal(weights, again) and rounds == rounds_again


@each_method
def test_settings_that_say_nothing_give_the_recipe_as_it_is(name: str) -> None:
    method, recipe = chosen(RoundSettings(method=name)), made(name)
    assert {field.name for field in fields(method)} >= {"schedule", "topology", "codec", "outer", "merge"}
    for field in fields(method):
        assert repr(getattr(method, field.name)) == repr(getattr(recipe, field.name)), field.name


@each_method
def test_open_networks_take_a_method_or_are_told_in_a_line_what_to_use(name: str) -> None:
    try:
        made(name).check_elastic()
    except UserError as refused:
        assert "on the internet" in str(refused) and "\n" not in str(refused)
    else:
        assert made(name).outer is not None


# Merges


def test_every_merge_has_a_name() -> None:
    kinds = {kind for kind in vars(merges).values() if isinstance(kind, type) and kind.__module__ == merges.__name__}
    assert {type(merge) for merge in MERGES.values()} == kinds - {Merge} and len(kinds) > 4


def vectors(seed: int, count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(9, generator=generator, dtype=torch.float64) for _ in range(count)]


@pytest.mark.parametrize("name", MERGES)
@given(seed=st.integers(0, 999))
def test_a_merge_is_where_the_anchor_is_when_nothing_was_trained_and_moves_with_all(name: str, seed: int) -> None:
    merge = MERGES[name]
    now, start, anchor, shift = vectors(seed, 4)
    kept = start if merge.needs_start else None

    def merged(now: Tensor, start: Tensor | None, anchor: Tensor) -> Tensor:
        return merge.merge(now.clone(), None if start is None else start.clone(), anchor.clone()).clone()

    assert merged(now, kept, anchor).shape == anchor.shape
    torch.testing.assert_close(merged(anchor, anchor if merge.needs_start else None, anchor), anchor)
    torch.testing.assert_close(
        merged(now + shift, None if kept is None else kept + shift, anchor + shift), merged(now, kept, anchor) + shift
    )


@pytest.mark.parametrize("name", MERGES)
def test_a_merge_keeps_what_it_is_given_but_the_weights(name: str) -> None:
    merge = MERGES[name]
    now, start, anchor = vectors(1, 3)
    before = start.clone(), anchor.clone()
    merge.merge(now, start if merge.needs_start else None, anchor)
    assert torch.equal(start, before[0]) and torch.equal(anchor, before[1])


# Topologies


def test_the_topologies_of_all_methods_are_tested() -> None:
    assert {type(made(name).topology) for name in METHODS} <= set(TOPOLOGIES.values())


members_of = st.sets(st.integers(0, 1000), min_size=1, max_size=12).map(lambda ranks: tuple(sorted(ranks)))


@pytest.mark.parametrize("name", TOPOLOGIES)
@given(members=members_of, number=st.integers(0, 99))
def test_a_topology_puts_each_member_in_one_group_at_most(name: str, members: tuple[int, ...], number: int) -> None:
    topology: Topology = TOPOLOGIES[name]()
    groups = topology.groups(members, f"round {number} of fragment 0")
    taken = [rank for group in groups for rank in group]
    assert len(taken) == len(set(taken)) and set(taken) <= set(members)
    assert (groups and all(group == tuple(sorted(group)) != () for group in groups)) or len(members) == 1
    for rank in members:
        assert group_of(rank, groups) == next((group for group in groups if rank in group), ())
    if topology.identical:
        assert set(taken) == set(members), "replicas of one model all take part"


@pytest.mark.parametrize("name", TOPOLOGIES)
@given(members=members_of, number=st.integers(0, 99))
def test_a_topology_is_a_pure_function_on_which_all_replicas_agree(
    name: str, members: tuple[int, ...], number: int
) -> None:
    """Each replica has an object of its own, and has drawn other random numbers."""
    told = []
    for rank in range(3):
        random.seed(rank)
        torch.manual_seed(rank)
        topology: Topology = TOPOLOGIES[name]()
        if rank:
            topology.groups((1, 2, 3), "another round")
        told.append(topology.groups(members, f"round {number}"))
    assert told[0] == told[1] == told[2]


@pytest.mark.parametrize("name", TOPOLOGIES)
@pytest.mark.parametrize("replicas", [2, 3, 5, 8])
def test_nobody_sits_out_for_long(name: str, replicas: int) -> None:
    topology: Topology = TOPOLOGIES[name]()
    members = tuple(range(replicas))
    rounds = [topology.groups(members, f"round {number}") for number in range(60)]
    for rank in members:
        assert sum(len(group_of(rank, groups)) > 1 for groups in rounds) > 30


def test_groups_are_the_same_on_every_machine_and_in_every_version() -> None:
    """Else peers of two versions would wait for each other in vain."""
    topology = TOPOLOGIES["RandomGroups"]
    assert topology(2, 0).groups(tuple(range(8)), "round 1") == [(4, 5), (1, 6), (2, 7), (0, 3)]
    peers = tuple((1 << 30) + rank for rank in (2, 3, 5, 7, 11, 13, 17))
    found = topology(3, 5).groups(peers, "round 2 of fragment 1")
    assert [tuple(rank - (1 << 30) for rank in group) for group in found] == [(2, 11, 13), (5, 7, 17)]
    assert topology(3, 5).groups((2, 3, 5, 7, 11, 13, 17), "round 2 of fragment 1") == [(2, 7), (3, 11, 13), (5, 17)]
