"""The simulator of a step: against one that goes second by second, and known answers."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import get_args

import pytest
from slow_step import SlowStep

from farflung.memory.plan import LayerCost, LayerPlan, Mode, Profile, State
from farflung.memory.step import simulate

NOTHING = LayerCost(0, 0, 0, 0, 0, 0, 0, 0, 0)


def random_cost(draw: random.Random) -> LayerCost:
    """Whole numbers; bytes take whole seconds at 1 or 2 of them a second."""
    inputs = 2 * draw.randint(1, 4)
    return LayerCost(
        forward_s=draw.randint(1, 9),
        backward_s=draw.randint(1, 18),
        saved_bytes=inputs + 2 * draw.randint(1, 12),
        input_bytes=inputs,
        weight_bytes=2 * draw.randint(1, 10),
        gradient_bytes=2 * draw.randint(1, 10),
        moment_bytes=2 * draw.randint(1, 20),
        near_step_s=draw.randint(1, 3),
        far_step_s=draw.randint(1, 20),
    )


def random_profile(draw: random.Random, most: int = 6) -> Profile:
    costs = tuple(random_cost(draw) for _ in range(draw.randint(1, most)))
    return Profile(costs, random_cost(draw), random_cost(draw), draw.choice([1, 2]), draw.choice([1, 2]), 100)


def random_plan(draw: random.Random, profile: Profile, states: tuple[State, ...]) -> tuple[LayerPlan, ...]:
    return tuple(LayerPlan(draw.choice(get_args(Mode)), draw.choice(states)) for _ in profile.layers)


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("states", [("near",), get_args(State)])
def test_a_step_is_what_it_is_second_by_second(states: tuple[State, ...], clip: bool) -> None:
    draw = random.Random(17)
    for case in range(60):
        profile = random_profile(draw)
        plan, prefetch = random_plan(draw, profile, states), draw.randint(0, 60)
        step = simulate(profile, plan, prefetch_bytes=prefetch, clip=clip)
        expected = SlowStep(profile, plan, prefetch, clip).run()
        assert (step.seconds, step.peak_bytes) == expected, f"case {case}: {profile} {plan} {prefetch}"
