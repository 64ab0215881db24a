"""Does the simulator of a step's memory give what KARMA and AutoHete say is gained by moving and computing again?
Published ratios are arXiv 2008.11421's and 2503.01890's, quoted second-hand, on models and machines of which only the
size is known. So the first tables stand for KARMA's comparison: 16 alike layers of width 4096 and 8192 tokens on three
devices. The other stands for AutoHete's: its two models on a device of 40 GB, with tokens for each model and one rate
of the host that nobody has published: these three were fitted to its six rows, so that they say less than the first
tables do. "Noted" is what an earlier simulator of the same kind gave. Takes a minute.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from bench.lib.store import Store
from bench.lib.table import Cell, Part, Table
from farflung.memory.plan import LayerCost, LayerPlan, Mode, Plan, Profile
from farflung.memory.search import search
from farflung.memory.step import Step, simulate

NOTHING = LayerCost(0, 0, 0, 0, 0, 0, 0, 0, 0)
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


@dataclass(frozen=True)
class Options:
    devices: tuple[str, ...] = tuple(DEVICES)
    """For KARMA's comparison."""
    models: tuple[str, ...] = tuple(MODELS)
    """For AutoHete's."""


SMOKE = Options(devices=("V100",), models=())


def run(options: Options, store: Store) -> Iterator[Part]:
    for device in options.devices:
        columns = {"memory, %": ".0f", "plan": "", "time / keeping all": ".3f", "noted": ".2f", "apart, %": "+.1f"}
        yield Table(columns, list(karma(device)), f"{device}, {GROUPS} layers: time over that of keeping all")
    yield "published: KARMA 1.52 times as fast as other out-of-core methods, on average over six models of convolutions"
    if options.models:
        columns = {"model": "", "gain": "", "times as fast": ".3f", "noted": ".2f", "apart, %": "+.1f"}
        rows = [row for model in options.models for row in autohete(model)]
        yield Table(columns, rows, "A100 of 40 GB: the best plan, over all optimizers far")
        yield "published: AutoHete 1.85 times as fast as ZeRO-Offload on one device; its priority alone 1.16 to 1.24"


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
