"""The simulator of a step: against one that goes second by second, and known answers."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import get_args

import pytest
from slow_step import SlowStep

from farflung.memory.plan import LayerCost, LayerPlan, Mode, Profile, State
from farflung.memory.step import Step, simulate

NOTHING = LayerCost(0, 0, 0, 0, 0, 0, 0, 0, 0)


def random_cost(draw: random.Random) -> LayerCost:
    """Whole numbers; bytes take whole seconds at 1 or 2 of them a second."""
    inputs = 2 * draw.randint(1, 4)
    forward = draw.randint(1, 9)
    return LayerCost(
        forward_s=forward,
        backward_s=draw.randint(1, 18),
        saved_bytes=inputs + 2 * draw.randint(1, 12),
        input_bytes=inputs,
        weight_bytes=2 * draw.randint(1, 10),
        gradient_bytes=2 * draw.randint(1, 10),
        moment_bytes=2 * draw.randint(1, 20),
        near_step_s=draw.randint(1, 3),
        far_step_s=draw.randint(1, 20),
        step_bytes=2 * draw.randint(0, 20),
        spared_s=draw.randint(0, forward - 1),
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


# Known answers: layers that are alike, each 2 seconds forward and 4 back, 100 bytes saved and 10 of input

LAYER = LayerCost(2, 4, 100, 10, 0, 0, 0, 0, 0)
COUNT = 5


def alike(layer: LayerCost = LAYER, rate: float = 10.0) -> Profile:
    return Profile((layer,) * COUNT, NOTHING, NOTHING, rate, rate, 0)


def step_of(profile: Profile, mode: Mode, state: State = "near", prefetch: int = 10**9, clip: bool = True) -> Step:
    return simulate(profile, (LayerPlan(mode, state),) * COUNT, prefetch_bytes=prefetch, clip=clip)


def test_what_is_kept_takes_its_time_and_memory_and_what_is_computed_again_its_forward_twice() -> None:
    assert step_of(alike(), "keep") == Step(COUNT * 6, COUNT * 100)
    assert step_of(alike(), "recompute") == Step(COUNT * 8, COUNT * 10 + 90)
    spared = replace(LAYER, spared_s=0.5)
    assert step_of(replace(alike(), layers=(spared,) * COUNT), "recompute").seconds == COUNT * 7.5


def test_what_is_moved_is_bound_by_copies_or_by_computing() -> None:
    # The first forward pass, all copies out, all copies in, the last backward pass.
    assert step_of(alike(), "move").seconds == 2 + COUNT * 10 + COUNT * 10 + 4
    # Without prefetch, a layer's copies and passes follow each other, one layer at a time.
    assert step_of(alike(), "move", prefetch=100) == Step(COUNT * (2 + 10) + COUNT * (10 + 4), 100)
    # Fast copies cost nothing but those of the last layer, whose backward pass comes at once.
    assert step_of(alike(rate=100.0), "move").seconds == COUNT * 6 + 1 + 1
    # Of inputs alone: the last one out and in, and forward again.
    assert step_of(alike(), "recompute-moved") == Step(COUNT * 8 + 1 + 1, COUNT * 10 + 90)


def test_updates_on_the_host_hide_behind_the_backward_pass_only_without_clipping() -> None:
    layer = replace(LAYER, weight_bytes=10, gradient_bytes=10, moment_bytes=20, near_step_s=1, far_step_s=3)
    assert step_of(alike(layer), "keep").seconds == COUNT * 7
    # With clipping: the first layer's gradient leaves, all are updated, in part behind the forward pass.
    assert step_of(alike(layer), "keep", "optimizer-far").seconds == COUNT * 6 + 1 + 3 * COUNT + 1 - 2 * (COUNT - 1)
    # Without: only the last to come, the first layer's.
    assert step_of(alike(layer), "keep", "optimizer-far", clip=False).seconds == COUNT * 6 + 1 + 3 + 1


def test_the_smallest_layer_first_lets_the_next_forward_pass_begin_before_the_last_update_ends() -> None:
    layer = replace(LAYER, weight_bytes=10, gradient_bytes=10, moment_bytes=20, far_step_s=3)
    plan = (LayerPlan("keep", "optimizer-far"),) * COUNT
    late = simulate(alike(layer), plan, prefetch_bytes=0, clip=True, smallest_first=False)
    assert late.seconds == COUNT * 6 + 1 + 3 * COUNT + 1
    assert simulate(alike(layer), plan, prefetch_bytes=0, clip=True).seconds == late.seconds - 2 * (COUNT - 1)


def test_where_the_host_does_not_update_beside_the_computing_the_next_step_waits_for_all_updates() -> None:
    layer = replace(LAYER, weight_bytes=10, gradient_bytes=10, moment_bytes=20, near_step_s=1, far_step_s=3)
    profile = replace(alike(layer), beside=False)
    for clip in (False, True):
        step = step_of(profile, "recompute", "optimizer-far", clip=clip)
        # Another backward pass ends, a gradient leaves, each layer is updated, the last one's weights come back.
        assert step.seconds == COUNT * 8 + 1 + 3 * COUNT + 1
        # Weights and inputs, and in the backward pass what is saved and two layers' gradients.
        assert step.peak_bytes == COUNT * (10 + 10) + 90 + 10
    far = step_of(profile, "recompute", "weights-far")
    assert far.peak_bytes < COUNT * 10 + 90 + 10 + 3 * 10


def test_what_comes_from_a_file_takes_its_pages_too_while_it_is_copied() -> None:
    layer = replace(LAYER, gradient_bytes=10, moment_bytes=1000, near_step_s=1, step_bytes=7)
    profile = alike(layer, rate=1e6)
    for beside, near in ((True, 1000), (False, 2000)):
        step = step_of(replace(profile, beside=beside), "recompute", "moments-far", prefetch=0)
        assert step.peak_bytes == COUNT * 10 + near + 7


def test_passes_in_flight_and_gradients_of_passes_before_are_there_all_the_time() -> None:
    layer = replace(LAYER, weight_bytes=10, gradient_bytes=10, moment_bytes=20, near_step_s=1, far_step_s=3)
    one, several = alike(layer), replace(alike(layer), in_flight=3, passes=2)
    state = COUNT * (10 + 20 + 10)
    for mode, stays, again in (("keep", 100, 0), ("recompute", 10, 90), ("move", 0, 100)):
        found = step_of(several, mode, prefetch=0)
        assert found.seconds == step_of(one, mode, prefetch=0).seconds - COUNT * layer.near_step_s / 2
        assert found.peak_bytes == state + 3 * COUNT * stays + again


def test_of_a_steps_passes_each_has_its_part_of_what_the_updates_take() -> None:
    layer = replace(LAYER, weight_bytes=10, gradient_bytes=10, moment_bytes=20, near_step_s=1, far_step_s=3)
    one = replace(alike(layer), beside=False)
    four = replace(one, passes=4)
    # The last layer's gradient leaves in each pass; all are updated, and the last one's weights come back, once a step.
    assert step_of(one, "keep", "optimizer-far").seconds == COUNT * 6 + 1 + 3 * COUNT + 1
    assert step_of(four, "keep", "optimizer-far").seconds == COUNT * 6 + 1 + (3 * COUNT + 1) / 4
    moments = [step_of(profile, "keep", "moments-far").seconds - COUNT * 6 for profile in (one, four)]
    assert moments[1] == moments[0] / 4 > 0
