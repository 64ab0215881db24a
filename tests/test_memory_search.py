"""The search for a plan: against all plans that there are, at caps of every size."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from itertools import product
from typing import get_args

import pytest

from bench.lib.all_plans import Layers, cap_between, chain, deep, fastest, over_the_fastest
from farflung.errors import UserError
from farflung.memory.plan import NOTHING, LayerCost, LayerPlan, Mode, Profile, State
from farflung.memory.search import MOST, leanest, search
from farflung.memory.step import Step, simulate


def test_the_search_finds_the_fastest_of_all_modes() -> None:
    """`bench run memory --parts search` has five times as many cases."""
    ratios = list(over_the_fastest(40))
    assert max(ratios) < 1.01
    assert sum(ratio < 1 + 1e-9 for ratio in ratios) >= 39


@pytest.mark.parametrize("clip", [True, False])
def test_the_search_finds_the_fastest_of_all_modes_and_states(clip: bool) -> None:
    draw = random.Random(7)
    for _ in range(8):
        profile = chain(draw, 2, 100)
        cap = cap_between(draw, profile)
        kinds = [LayerPlan(mode, state) for mode, state in product(get_args(Mode), get_args(State))]
        best = fastest(profile, cap, product(kinds, repeat=len(profile.layers)), clip)
        assert search(profile, cap, clip=clip).seconds < 1.01 * best


def test_what_a_plan_predicts_is_what_its_step_takes() -> None:
    draw = random.Random(3)
    for _ in range(10):
        profile = chain(draw, 6, 100)
        plan = search(profile, cap_between(draw, profile), clip=False)
        step = simulate(profile, plan.layers, prefetch_bytes=plan.prefetch_bytes, clip=False)
        assert (plan.seconds, plan.peak_bytes) == (step.seconds, step.peak_bytes)


def test_a_cap_that_is_too_small_is_told_with_the_smallest_that_works() -> None:
    draw = random.Random(11)
    for _ in range(8):
        profile = chain(draw, 4, 100)
        least = leanest(profile, clip=True).peak_bytes
        with pytest.raises(UserError, match="give at least") as refused:
            search(profile, least // 2, clip=True)
        told = re.search(r"at least ([\d.e-]+) GB", str(refused.value))
        assert told and least <= float(told[1]) * 1e9 <= 1.005 * least  # processes are not the same at each start
        cap = round(float(told[1]) * 1e9)
        assert search(profile, cap, clip=True).peak_bytes <= cap


def test_what_a_process_takes_at_all_times_may_be_a_hundredth_more_at_its_next_start() -> None:
    profile = replace(chain(random.Random(13), 3, 0), fixed_bytes=400 * 10**6)
    with pytest.raises(UserError, match="give at least") as refused:
        search(profile, 10**6, clip=True)
    told = re.search(r"at least ([\d.]+) GB", str(refused.value))
    more = replace(profile, fixed_bytes=404 * 10**6)
    assert told and leanest(more, clip=True).peak_bytes < float(told[1]) * 1e9 < 410 * 10**6


def test_no_plan_needs_less_than_the_smallest_cap_that_is_told() -> None:
    draw = random.Random(12)
    for _ in range(5):
        profile = chain(draw, 3, 0)
        plans = product(map(LayerPlan, get_args(Mode)), repeat=len(profile.layers))
        peaks = [simulate(profile, plan, prefetch_bytes=0, clip=True).peak_bytes for plan in plans]
        assert leanest(profile, clip=True).peak_bytes == min(peaks)


@pytest.mark.parametrize("state", [0, 100])
def test_a_search_over_96_layers_ends(state: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(1)
    profile, layers = deep(draw, state), 0

    def counted(profile: Profile, plan: Layers, *, prefetch_bytes: int, clip: bool) -> Step:
        nonlocal layers
        layers += len(plan)
        return simulate(profile, plan, prefetch_bytes=prefetch_bytes, clip=clip)

    monkeypatch.setattr("farflung.memory.search.simulate", counted)
    cap = cap_between(draw, profile)
    layers = 0
    plan = search(profile, cap, clip=True)
    assert plan.peak_bytes <= cap
    assert layers <= MOST + 96 * 20  # and those of the last plan, made to fit


def test_layers_that_are_alike_are_kept_last_and_moved_and_computed_again_in_turn() -> None:
    """As KARMA does: where half of what moving takes hides behind computing, both, and neither for the last layers."""
    layer = LayerCost(1, 2, 100, 6, 0, 0, 0, 0, 0)
    profile = Profile((layer,) * 12, NOTHING, NOTHING, 36.0, 36.0, 0)
    plan = search(profile, 600, clip=True)
    modes = [one.mode for one in plan.layers]
    assert modes[-3:] == ["keep"] * 3 and {"move"} < set(modes[:-3])
    for mode in ("recompute", "move"):
        only = search(profile, 600, clip=True, modes=("keep", mode))
        assert plan.seconds < only.seconds
