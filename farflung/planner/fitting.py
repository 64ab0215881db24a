"""Runs that fit into a worker's memory only by a plan of it: what of which layer is far or is computed again."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from farflung.hooks.shared_memory import SHARED
from farflung.memory.fitted import choices_of, described, far_bytes
from farflung.memory.plan import NOTHING, LayerCost, LayerPlan, Plan, Profile
from farflung.memory.profile import AHEAD, through_files
from farflung.memory.search import leanest, search
from farflung.memory.step import simulate
from farflung.outer import Method, kept_bytes
from farflung.planner.architecture import Architecture, Block
from farflung.planner.memory import COPY, LOGITS, RESERVED, apart, copied_bytes, frozen_bytes
from farflung.planner.saved import counted
from farflung.planner.step import sequences_of
from farflung.planner.updates import updates_of
from farflung.settings import Settings
from farflung.workloads.base import Span

RUNTIME = {"gpu": RESERVED, "cpu": 0.42e9}
"""Bytes that a worker's runtime takes, by its device: a process on a processor has libraries and data."""


@dataclass(frozen=True)
class Worker:
    """The least that any worker of a layout has.

    Args:
        device: gpu or cpu.
        memory: bytes.
        flops: operations a second.
        host_bytes: copied to what is far and back, both ways at once, bytes a second.
        host_flops: operations a second of its part of the host.
        host_steps: parameters a second for which that makes a step of AdamW.
        far_folder: where what is far lies; "" for the host's memory.
    """

    device: str
    memory: float
    flops: float
    host_bytes: float
    host_flops: float
    host_steps: float
    far_folder: str

    @property
    def told(self) -> str:
        """What is assumed of the host, in words."""
        steps, flops, copies = self.host_steps / 1e6, self.host_flops / 1e12, self.host_bytes / 1e9
        told = f"a host steps {steps:.3g} million parameters a second, computes {flops:.3g} TFLOP/s"
        return f"{told} and copies {copies:.3g} GB/s each way"


@dataclass(frozen=True)
class Fit:
    """A plan of each stage's memory.

    Args:
        worker: what it is made for.
        slower: how many times as long each stage computes as it would with all kept and near.
        far_bytes: what is far of a stage, at most.
    """

    worker: Worker
    plans: tuple[Plan, ...]
    slower: tuple[float, ...]
    far_bytes: float

    @property
    def peak_bytes(self) -> int:
        """Of a worker's memory, at most."""
        return max(plan.peak_bytes for plan in self.plans)

    def told(self, ratio: float) -> str:
        """In words, where a step takes so many times as long."""
        layers = tuple(layer for plan in self.plans for layer in plan.layers)
        cost = f"{self.peak_bytes / 1e9:.3g} GB at {ratio:.2f} of the time of keeping all"
        far = f" with {self.far_bytes / 1e9:.3g} GB a worker far" if self.far_bytes else ""
        return f"fits in {cost}{far}: {described(layers)}"


class Fitting:
    """Plans of memory such as training makes, each searched for once."""

    def __init__(self) -> None:
        self._known: dict[tuple[Profile, float, bool, tuple[str, ...]], Plan] = {}

    def fit(self, model: Architecture, settings: Settings, method: Method, worker: Worker) -> Fit:
        """The plans found, which may need more than there is. On a GPU with anchors and outer state on the host."""
        island = settings.island
        stages = [Stage(model, settings, method, worker, *one) for one in enumerate(model.spans(island.stages))]
        near_gradients = bool(method.dealing) or island.divided
        modes, states = choices_of(worker.device, bool(worker.far_folder), near_gradients)
        multiplies = any(updates_of(method.inner, layer.shapes, in_layers=True).flops for layer in model.layers)
        if island.shard > 1 and multiplies:  # matrices, whose rows come together at once
            states = states[:1]
        clip = island.clip > 0

        def keeping(stage: Stage) -> float:
            layers = (LayerPlan(),) * len(stage.profile.layers)
            return simulate(stage.profile, layers, prefetch_bytes=0, clip=clip).seconds

        def plan(stage: Stage) -> Plan:
            key = stage.profile, worker.memory, clip, states
            if key not in self._known:
                self._known[key] = search(stage.profile, int(worker.memory), clip=clip, modes=modes, states=states)
            return self._known[key]

        plans = [leanest(stage.profile, clip=clip, modes=modes, states=states) for stage in stages]
        if all(one.peak_bytes <= worker.memory for one in plans):
            plans = [plan(stage) for stage in stages]
        seconds = [one.seconds / keeping(stage) for one, stage in zip(plans, stages, strict=True)]
        far = max(stage.far_bytes(one) for one, stage in zip(plans, stages, strict=True))
        return Fit(worker, tuple(plans), tuple(seconds), far)


class Stage:
    """What a stage's step takes: one of its microbatches, and the optimizer's step.

    Attributes:
        profile: as training would measure it.
    """

    def __init__(
        self, model: Architecture, settings: Settings, method: Method, worker: Worker, number: int, span: Span
    ) -> None:
        island, self._length = settings.island, settings.workload.sequence_length
        self._model, self._worker, self._inner, self._shards = model, worker, method.inner, island.shard
        self._sums_up = island.shard > 1 and island.parts > 1  # gradients, before they are shared out
        sequences = sequences_of(island)
        self._tokens, self._in_flight = sequences * self._length, island.in_flight(number)
        saved = counted(model, sequences, self._length, island.precision)
        self._spared = saved.spared
        # A processor is its own host; blocks of gradients, and what is dealt out, may have to be on the device.
        near = worker.device == "cpu" or method.outer is None or bool(method.dealing)
        rounds = kept_bytes(method, model.stage_cells(span), in_blocks=not island.divided) / island.shard
        self._rounds_far = 0.0 if near else rounds
        fixed = RUNTIME[worker.device] + saved.working + rounds * near
        numbers = range(span.begin, span.end)
        logits = self._tokens * model.vocabulary * LOGITS
        self.profile = Profile(
            layers=tuple(self._layer(number, saved.layers[number], saved.input) for number in numbers),
            before=self._cost(model.first, 0.0, 0) if span.first else NOTHING,
            head=self._cost(model.last, self._forward_s(0, last=True), logits) if span.last else NOTHING,
            out_bytes_s=worker.host_bytes,
            in_bytes_s=worker.host_bytes,
            fixed_bytes=int(fixed) + copied_bytes(model, span) + frozen_bytes(model, span) + self._gathered(span),
            beside=False,
            in_flight=self._in_flight,
            passes=island.parts,
        )

    def far_bytes(self, plan: Plan) -> float:
        """What is far of it."""
        layers = zip(self.profile.layers, plan.layers, strict=True)
        return self._rounds_far + sum(far_bytes(cost, layer, self._in_flight) for cost, layer in layers)

    def _gathered(self, span: Span) -> int:
        """Bytes of what shards have whole: weights and gradients outside of layers, and weights of a layer or a few.

        On a processor, that of the memory through which they swap, too.
        """
        if self._shards == 1:
            return 0
        outside, layers = apart(self._model, span)
        on_gpu = self._worker.device == "gpu"
        return COPY * (2 * outside + (1 + AHEAD * on_gpu) * max(layers)) + SHARED * (not on_gpu)

    def _layer(self, number: int, saved_bytes: int, input_bytes: int) -> LayerCost:
        cost = self._cost(self._model.layers[number], self._forward_s(number, last=False), saved_bytes, layer=True)
        spared_s = self._spared * 2 * self._model.layers[number].work * self._tokens / self._worker.flops
        cost = replace(cost, input_bytes=min(saved_bytes, input_bytes), spared_s=spared_s)
        rate = self._worker.host_bytes
        return through_files(cost, rate, rate) if self._worker.device == "cpu" else cost

    def _forward_s(self, begin: int, last: bool) -> float:
        """Of a layer, or of the head."""
        span = Span(begin, begin if last else begin + 1, first=False, last=last)
        operations: float = self._model.flops_per_token(span, self._length) * self._tokens / 3
        return operations / self._worker.flops

    def _cost(self, block: Block, forward_s: float, saved_bytes: int, layer: bool = False) -> LayerCost:
        worker, updates = self._worker, updates_of(self._inner, block.shapes, layer)
        weights = COPY * updates.values // self._shards
        values, flops = updates.values / self._shards, updates.flops / self._shards
        far_step_s = values / worker.host_steps + flops / worker.host_flops
        # What a GPU's own step takes besides products of matrices is little.
        near_step_s = far_step_s if worker.device == "cpu" else flops / worker.flops
        gradients = COPY * updates.values if layer and self._sums_up else weights
        sizes = (saved_bytes, 0, weights, gradients, updates.moment_bytes // self._shards)
        return LayerCost(forward_s, 2 * forward_s, *sizes, near_step_s, far_step_s)


def with_memory(settings: Settings, exchanges: bool, worker: Worker) -> Settings:
    """The settings of a run that is to fit into a worker's memory, its anchors and outer state, if any, on the host."""
    on_gpu = worker.device == "gpu"
    # What a GPU's runtime takes is not torch's to give.
    told = f"{math.floor((worker.memory - RESERVED * on_gpu) / 1e6)}MB"
    rounds = replace(settings.rounds, outer_device="cpu") if exchanges and on_gpu else settings.rounds
    island = replace(settings.island, memory=told, far_folder=worker.far_folder)
    return replace(settings, island=island, rounds=rounds)
