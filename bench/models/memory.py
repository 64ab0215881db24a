"""Does fitting a model into memory take what is predicted, gain what is published, and train larger models?
`simulated`: the simulator beside KARMA's and AutoHete's ratios, published in arXiv 2008.11421 and 2503.01890 and quoted
second-hand, on models and machines of which only the size is known. So the first tables stand for KARMA's comparison:
16 alike layers of width 4096 and 8192 tokens on three devices. The other stands for AutoHete's: its two models on a
device of 40 GB, with tokens for each model and one rate of the host that nobody has published: these three were fitted
to its six rows, so that they say less than the first tables do. "Noted" is what an earlier simulator of the same kind
gave. `caps`: the most that steps on this machine's processor hold by torch's own tracker, beside the cap and what was
predicted; moments stay near, since the tracker cannot tell memory that is far from near. `seconds`: steps beside steps
that keep everything, in turns, with far memory that is as slow as it is told to be; transformers' own offload copies at
the same speed. `search`: the plans that the search finds beside the fastest of all plans, found by trying all of them,
for chains of up to six unlike layers of random costs and caps. `largest`: the layers of a Llama that train in so much
memory, which processes are held to, with and without `--memory`: as many as two small ones let expect. Takes a minute
for the first, ten for `caps`, half an hour for `seconds`, five for `search` and hours for `largest`.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, get_args

from bench.lib.all_plans import cap_between, deep, over_the_fastest
from bench.lib.fitted import Shape, Trained, ratios, slow_copies
from bench.lib.largest import largest
from bench.lib.store import Store
from bench.lib.table import Cell, Part, Table
from farflung.errors import UserError
from farflung.memory.plan import NOTHING, LayerCost, LayerPlan, Mode, Plan, Profile
from farflung.memory.search import leanest, search
from farflung.memory.step import Step, simulate

GROUPS = 16
"""Layers; of a deeper model, so many groups of them."""
SAVED, INPUT = 34, 2
"""Bytes of each token and hidden number that a layer saves, and of its input, in 16 bits with fused attention."""
LETTERS: dict[Mode, str] = {"keep": "K", "recompute": "R", "move": "O", "recompute-moved": "X"}

DEVICES = {
    "H100": (400e12, 50e9, {60: (1.11, 1.15, 1.04), 40: (1.29, 1.23, 1.10), 20: (1.62, 1.29, 1.18)}),
    "A100": (140e12, 22e9, {60: (1.03, 1.15, 1.02), 40: (1.17, 1.23, 1.08), 20: (1.32, 1.29, 1.15)}),
    "V100": (45e12, 12e9, {60: (1.00, 1.15, 1.00), 40: (1.00, 1.23, 1.00), 20: (1.06, 1.29, 1.05)}),
}
"""Operations and copied bytes a second; and noted, by share of memory: moved only, computed again only, best."""

NEAR, FAR = 50e9, 1.6e9
"""Parameters that a step of AdamW updates a second, on the device and on the host."""
MEMORY, FIXED = 40e9, 2e9
"""Bytes of AutoHete's device, and of what else is on it."""
MODELS = {"4.0B": (2304, 64, 18_432, (1.62, 1.23)), "8.2B": (3072, 72, 10_240, (1.81, 1.38))}
"""Width, layers, tokens; and noted, over all optimizers far: without clipping, and with it."""
PRIORITY = 1.21


Name = Literal["simulated", "caps", "seconds", "search", "largest"]


@dataclass(frozen=True)
class Options:
    parts: tuple[Name, ...] = get_args(Name)
    """What to ask."""
    devices: tuple[str, ...] = tuple(DEVICES)
    """For KARMA's comparison."""
    models: tuple[str, ...] = tuple(MODELS)
    """For AutoHete's."""
    caps: tuple[int, ...] = (80, 60, 40, 25, 15)
    """Percent of the memory that keeping all takes, for `caps` and `seconds`."""
    precisions: tuple[str, ...] = ("float32", "bfloat16")
    """For `caps`."""
    speeds: tuple[float, ...] = (1, 3, 9)
    """For `seconds`: forward passes of a layer that pass while what it saves moves one way."""
    turns: int = 5
    """For `seconds`: how often each plan's step is timed; the median counts."""
    shape: Shape = field(default_factory=Shape)
    """The Llama of `caps` and `seconds`."""
    cases: int = 200
    """For `search`."""
    gigabytes: tuple[float, ...] = (4, 8, 16)
    """For `largest`; 16 take 75 GB of disk and an hour or two."""
    width: int = 1024
    """Of the Llama of `largest`."""
    tokens: int = 2048
    """In a step of `largest`."""


SMOKE = Options(("simulated", "caps", "search"), ("V100",), models=(), caps=(60,), shape=Shape(32, 6, 16, 64), cases=3)


def run(options: Options, store: Store) -> Iterator[Part]:
    parts: dict[Name, Callable[[Options, Store], Iterator[Part]]] = {
        "simulated": simulated,
        "caps": caps,
        "seconds": seconds,
        "search": searches,
        "largest": largest_models,
    }
    for part in options.parts:
        yield from parts[part](options, store)


def simulated(options: Options, _: Store) -> Iterator[Part]:
    for device in options.devices:
        columns = {"memory, %": ".0f", "plan": "", "time / keeping all": ".3f", "noted": ".2f", "apart, %": "+.1f"}
        yield Table(columns, list(karma(device)), f"{device}, {GROUPS} layers: time over that of keeping all")
    yield "published: KARMA 1.52 times as fast as other out-of-core methods, on average over six models of convolutions"
    if options.models:
        columns = {"model": "", "gain": "", "times as fast": ".3f", "noted": ".2f", "apart, %": "+.1f"}
        rows = [row for model in options.models for row in autohete(model)]
        yield Table(columns, rows, "A100 of 40 GB: the best plan, over all optimizers far")
        yield "published: AutoHete 1.85 times as fast as ZeRO-Offload on one device; its priority alone 1.16 to 1.24"


def caps(options: Options, _: Store) -> Iterator[Part]:
    def row(trained: Trained, profile: Profile, most: int, share: int) -> tuple[Cell, ...]:
        cap = share * most // 100
        try:
            plan = search(profile, cap, clip=True, states=("near",))
        except UserError:
            least = leanest(profile, clip=True, states=("near",)).peak_bytes
            return share, f"none fits in less than {least / most:.1%}", None, None, None
        with trained.planned(plan, profile, copies):
            peak = trained.peak()
        return share, letters(plan), peak / 1e6, peak / cap, peak / plan.peak_bytes

    copies = slow_copies(math.inf)
    columns = {"cap, %": ".0f", "plan": "", "peak, MB": ".1f", "peak / cap": ".3f", "peak / predicted": ".3f"}
    for precision in options.precisions:
        trained = Trained(options.shape, precision)
        profile, most = trained.profile(copies), trained.peak()
        rows = (row(trained, profile, most, share) for share in options.caps)
        yield Table(columns, rows, f"{precision}: peaks by torch's MemTracker; keeping all takes {most / 1e6:.1f} MB")


def seconds(options: Options, _: Store) -> Iterator[Part]:
    trained = Trained(options.shape)
    trained.step()
    layer = trained.profile(slow_copies(math.inf)).layers[0]
    columns = {"plan": "", "memory, %": ".0f", "measured": ".3f", "predicted": ".3f", "apart, %": "+.1f"}
    for speed in options.speeds:
        bytes_s = layer.saved_bytes / (speed * layer.forward_s)
        title = f"far memory of {bytes_s / 1e6:.0f} MB/s, a layer in {speed:g} forward passes: time over keeping all's"
        yield Table(columns, timed(trained, bytes_s, options), title)


def timed(trained: Trained, bytes_s: float, options: Options) -> Iterator[tuple[Cell, ...]]:
    """The plans that are chosen, and others without a choice."""
    copies = slow_copies(bytes_s)
    profile = trained.profile(copies)
    count, prefetch = len(profile.layers), 2 * profile.layers[0].saved_bytes

    def alike(mode: Mode) -> Plan:
        step = simulate(profile, layers := (LayerPlan(mode),) * count, prefetch_bytes=prefetch, clip=True)
        return Plan(layers, prefetch, step.peak_bytes, step.seconds)

    keeps, *plans = (alike(mode) for mode in LETTERS)
    for share in options.caps:
        with suppress(UserError):  # there is too little memory for any
            plans.append(search(profile, share * keeps.peak_bytes // 100, clip=True, states=("near",)))

    def planned(plan: Plan) -> float:
        with trained.planned(plan, profile, copies):
            return trained.seconds()

    def offloading() -> float:
        with trained.offloading(bytes_s):
            return trained.seconds()

    others: list[Callable[[], float]] = [offloading, *(partial(planned, plan) for plan in plans)]
    offloaded, *found = ratios(trained.seconds, others, options.turns)
    yield "transformers' offload", None, offloaded, None, None
    for plan, measured in zip(plans, found, strict=True):
        predicted = plan.seconds / keeps.seconds
        peak = 100 * plan.peak_bytes / keeps.peak_bytes
        yield letters(plan), peak, measured, predicted, 100 * (measured / predicted - 1)


def searches(options: Options, _: Store) -> Iterator[Part]:
    ratios = list(over_the_fastest(options.cases))
    optimal = sum(ratio < 1 + 1e-9 for ratio in ratios)
    worst = f"the worst takes {max(ratios):.4f} times as long"
    yield f"of {len(ratios)} plans of up to 6 layers, {optimal} are the fastest of all; {worst}"
    for state, what in ((0, "modes"), (100, "modes, and what the optimizer needs")):
        draw = random.Random(1)
        profile = deep(draw, state)
        cap = cap_between(draw, profile)
        began = time.perf_counter()
        search(profile, cap, clip=True)
        yield f"a search over {len(profile.layers)} layers' {what}: {time.perf_counter() - began:.2f} s"


def largest_models(options: Options, store: Store) -> Iterator[Part]:
    columns = {"memory, GB": ".1f", "with": "", "layers": "d", "parameters, millions": ".0f", "times": ".2f"}
    columns |= {"one more tenth": "", "peak, GB": ".2f", "step, s": ".1f"}
    title = f"layers of width {options.width} that train with {options.tokens} tokens in a step"
    rows = (row for gigabytes in options.gigabytes for row in largest(gigabytes, options.width, options.tokens, store))
    yield Table(columns, rows, title)


def karma(device: str) -> Iterator[tuple[Cell, ...]]:
    """The fastest with some modes only, then with all, at each share of the memory that keeping all takes."""
    flops, rate, noted = DEVICES[device]
    one_layer = replace(layer(4096, 8192, flops), weight_bytes=0, gradient_bytes=0, moment_bytes=0, near_step_s=0.0)
    profile = Profile((one_layer,) * GROUPS, NOTHING, NOTHING, rate, rate, 0)
    kept = simulate(profile, (LayerPlan(),) * GROUPS, prefetch_bytes=0, clip=True)
    allowed: list[tuple[Mode, ...]] = [("keep", "move"), ("keep", "recompute"), tuple(LETTERS)]
    for share, expected in noted.items():
        for modes, one in zip(allowed, expected, strict=True):
            plan = search(profile, share * kept.peak_bytes // 100, clip=True, modes=modes, states=("near",))
            yield compared(share, letters(plan), plan.seconds / kept.seconds, one)


def autohete(model: str) -> Iterator[tuple[Cell, ...]]:
    """The best plan over all optimizers far and all computed again; and the order of updates alone."""
    width, layers, tokens, noted = MODELS[model]
    flops, rate, _ = DEVICES["A100"]
    group = layer(width, tokens, flops, layers // GROUPS)
    profile = Profile((group,) * GROUPS, NOTHING, NOTHING, rate, rate, int(FIXED))

    def far(smallest_first: bool) -> Step:
        plan = (LayerPlan("recompute", "optimizer-far"),) * GROUPS
        return simulate(profile, plan, prefetch_bytes=0, clip=True, smallest_first=smallest_first)

    for clip, one in zip((False, True), noted, strict=True):
        plan = search(profile, int(MEMORY), clip=clip)
        yield compared(model, "best, clipping" if clip else "best", far(True).seconds / plan.seconds, one)
    yield compared(model, "smallest layer first alone", far(False).seconds / far(True).seconds, PRIORITY)


def layer(width: int, tokens: int, flops: float, group: int = 1) -> LayerCost:
    """So many layers of a decoder as one, with 12 parameters for each two hidden numbers, in 16 bits under AdamW."""
    parameters = 12 * width * width * group
    forward = 2 * parameters * tokens / flops
    values = width * tokens * group
    sizes = (SAVED * values, INPUT * values, 2 * parameters, 2 * parameters, 12 * parameters)
    return LayerCost(forward, 2 * forward, *sizes, parameters / NEAR, parameters / FAR)


def compared(first: Cell, name: str, ours: float, noted: float) -> tuple[Cell, ...]:
    return first, name, ours, noted, 100 * (ours / noted - 1)


def letters(plan: Plan) -> str:
    return "".join(LETTERS[layer.mode] for layer in plan.layers)
