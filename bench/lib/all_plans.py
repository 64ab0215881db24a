"""The search for a plan of memory beside all plans that there are, for chains of layers of random costs."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator
from itertools import product
from typing import get_args

from farflung.memory.plan import NOTHING, LayerCost, LayerPlan, Mode, Profile
from farflung.memory.search import leanest, search
from farflung.memory.step import simulate

Layers = tuple[LayerPlan, ...]


def over_the_fastest(cases: int) -> Iterator[float]:
    """Seconds of the plan that a search finds, over those of the fastest of all modes; up to six unlike layers."""
    draw = random.Random(24)
    for _ in range(cases):
        profile = chain(draw, 6, 0)
        cap = cap_between(draw, profile)
        plans = product(map(LayerPlan, get_args(Mode)), repeat=len(profile.layers))
        found = search(profile, cap, clip=True)
        assert found.peak_bytes <= cap
        yield found.seconds / fastest(profile, cap, plans, True)


def deep(draw: random.Random, state: int) -> Profile:
    """96 unlike layers."""
    return Profile(tuple(unlike(draw, state) for _ in range(96)), NOTHING, NOTHING, 50.0, 50.0, 0)


def unlike(draw: random.Random, state: int) -> LayerCost:
    """A layer of any cost; `state` bytes at most of weights, gradients and moments each."""
    saved = draw.randint(40, 400)
    forward = draw.uniform(0.5, 5)
    weights = draw.randint(0, state)
    return LayerCost(
        forward_s=forward,
        backward_s=forward * draw.uniform(1.5, 2.5),
        saved_bytes=saved,
        input_bytes=int(saved * draw.uniform(0.03, 0.3)),
        weight_bytes=weights,
        gradient_bytes=weights,
        moment_bytes=2 * weights,
        near_step_s=weights / 400,
        far_step_s=weights / draw.choice([20, 100]),
        spared_s=forward * draw.uniform(0, 0.4),
    )


def chain(draw: random.Random, most: int, state: int) -> Profile:
    costs = tuple(unlike(draw, state) for _ in range(draw.randint(1, most)))
    rate = sum(cost.saved_bytes for cost in costs) / sum(cost.forward_s for cost in costs) / draw.uniform(0.3, 4)
    return Profile(costs, NOTHING, NOTHING, rate, rate * draw.choice([1, 1, 2]), 10)


def fastest(profile: Profile, cap: int, plans: Iterable[Layers], clip: bool) -> float:
    """Of all plans, each with as much prefetch as fits and with shares of that."""
    best = math.inf
    computing = sum(cost.forward_s + cost.backward_s for cost in profile.layers)
    for plan in plans:
        pairs = list(zip(profile.layers, plan, strict=True))
        again = sum(cost.again_s for cost, layer in pairs if layer.mode.startswith("recompute"))
        if computing + again >= best:
            continue
        stay = sum(cost.saved_bytes for cost, layer in pairs if layer.mode == "keep")
        stay += sum(cost.input_bytes for cost, layer in pairs if layer.mode == "recompute")
        if (most := cap - profile.fixed_bytes - stay) < 0:
            continue
        for share in (1, 0.8, 0.6, 0.4, 0.2, 0):
            step = simulate(profile, plan, prefetch_bytes=int(share * most), clip=clip)
            if step.peak_bytes <= cap:
                best = min(best, step.seconds)
                if share == 1:
                    break
    return best


def cap_between(draw: random.Random, profile: Profile) -> int:
    """A cap between the least that works and what keeping all takes."""
    kept = simulate(profile, (LayerPlan(),) * len(profile.layers), prefetch_bytes=0, clip=True).peak_bytes
    least = leanest(profile, clip=True).peak_bytes
    return least + int(draw.random() * (kept - least))
