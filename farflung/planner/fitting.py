"""Runs that fit into a worker's memory only by a plan of it: what of which layer moves or is computed again."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from farflung.memory.fitted import described
from farflung.memory.plan import LayerCost, LayerPlan, Plan, Profile, State
from farflung.memory.search import leanest, search
from farflung.memory.step import simulate
from farflung.pipeline.settings import IslandSettings
from farflung.planner.architecture import Architecture, Block
from farflung.planner.memory import COPY, LOGITS, RESERVED
from farflung.planner.saved import counted
from farflung.planner.step import sequences_of
from farflung.settings import Settings
from farflung.workloads.base import Span

STATES: tuple[State, ...] = ("near", "moments-far")
"""Where training can have a layer's state."""


@dataclass(frozen=True)
class Fit:
    """A plan that fits, and how many times as long a step takes as one that keeps all would."""

    plan: Plan
    ratio: float

    @property
    def told(self) -> str:
        """In words."""
        needed = f"{self.plan.peak_bytes / 1e9:.3g} GB at {self.ratio:.2f} of the time of keeping all"
        return f"fits in {needed}: {described(self.plan)}"


@dataclass(frozen=True)
class Worker:
    """The memory of the smallest, bytes; the operations and the bytes to and from the host of the slowest, a second."""

    memory: float
    flops: float
    host_bytes: float


class Fitting:
    """Plans of one model's memory, each searched for once."""

    def __init__(self, model: Architecture) -> None:
        self._model = model
        self._known: dict[tuple[Worker, int, int, str], Fit | None] = {}

    def fit(self, island: IslandSettings, length: int, worker: Worker) -> Fit | None:
        """With anchors and outer state on the host. None where no plan fits, or none is made for such an island."""
        if island.divided or island.recompute or island.offload or island.compile or island.swarm:
            return None
        key = worker, sequences_of(island), island.parts, island.precision
        if key not in self._known:
            self._known[key] = self._searched(self._profile(island, length, worker), worker, island)
        return self._known[key]

    def _searched(self, profile: Profile, worker: Worker, island: IslandSettings) -> Fit | None:
        clip = island.clip > 0
        if leanest(profile, clip=clip, states=STATES).peak_bytes > worker.memory:
            return None
        plan = search(profile, int(worker.memory), clip=clip, states=STATES)

        def seconds(layers: tuple[LayerPlan, ...]) -> float:
            return simulate(profile, layers, prefetch_bytes=plan.prefetch_bytes, clip=clip).seconds

        # Moments come and go once a step, which is several passes where it has microbatches.
        one_pass = seconds(tuple(LayerPlan(layer.mode) for layer in plan.layers))
        step = one_pass * (island.parts - 1) + plan.seconds
        return Fit(plan, step / (island.parts * seconds((LayerPlan(),) * len(plan.layers))))

    def _profile(self, island: IslandSettings, length: int, worker: Worker) -> Profile:
        """Of one microbatch; the gradients of several are there all the time."""
        model, sequences = self._model, sequences_of(island)
        tokens, one = sequences * length, island.parts == 1
        saved = counted(model, sequences, length, island.precision)

        def cost(block: Block, span: Span, saves: int) -> LayerCost:
            forward = model.flops_per_token(span, length) * tokens / worker.flops / 3
            weights = COPY * block.parameters
            sizes = (saves, min(saves, saved.input), weights, weights * one, 2 * weights)
            return LayerCost(forward, 2 * forward, *sizes, near_step_s=0.0, far_step_s=0.0)

        layers = tuple(
            cost(block, Span(number, number + 1, first=False, last=False), saves)
            for number, (block, saves) in enumerate(zip(model.layers, saved.layers, strict=True))
        )
        before = cost(model.first, Span(0, 0, first=True, last=False), 0)
        head = cost(model.last, Span(0, 0, first=False, last=True), tokens * model.vocabulary * LOGITS)
        fixed = int(RESERVED) + (0 if one else COPY * model.parameters)
        return Profile(layers, before, head, worker.host_bytes, worker.host_bytes, fixed)


def with_memory(settings: Settings, exchanges: bool, worker: Worker) -> Settings:
    """The settings of a run that is to fit into a worker's memory, its anchors and outer state, if any, on the host."""
    told = f"{math.floor((worker.memory - RESERVED) / 1e6)}MB"
    rounds = replace(settings.rounds, outer_device="cpu") if exchanges else settings.rounds
    return replace(settings, island=replace(settings.island, memory=told), rounds=rounds)
