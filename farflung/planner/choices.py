"""The runs that the planner compares: methods, settings and layouts, and why some of them cannot work."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from farflung.codecs import codec_named
from farflung.errors import UserError
from farflung.methods import RoundSettings, chosen, defaults_of
from farflung.outer import Method
from farflung.pipeline.check import check
from farflung.planner.architecture import Architecture
from farflung.planner.fitting import Fit, Fitting, Worker, with_memory
from farflung.planner.layout import Layout
from farflung.planner.machines import Cluster
from farflung.planner.memory import memory_bytes
from farflung.planner.options import PlanOptions
from farflung.planner.simulation import method_names
from farflung.settings import Settings

ALONE = "local"
"""The method of a single island."""


@dataclass(frozen=True)
class Choice:
    """One run: the settings that `farflung train` would get, the workers, and how it fits, where only a plan does."""

    settings: Settings
    layout: Layout
    fit: Fit | None = None

    @cached_property
    def method(self) -> Method:
        """The settings' method. Raises UserError."""
        return self.settings.method()


@dataclass(frozen=True)
class Infeasible:
    """A method in a layout that cannot work, or with a codec in any, and why."""

    method: str
    layout: Layout | None
    reason: str

    @property
    def where(self) -> str:
        """The layout, in words."""
        return self.layout.describe() if self.layout else "any layout"


def choices(options: PlanOptions, model: Architecture, cluster: Cluster) -> Iterator[Choice | Infeasible]:
    """Every method with every setting asked for, in every layout of the machines."""
    asked = list(_ways(options))
    ways = [way for way in asked if not isinstance(way, Infeasible)]
    yield from (way for way in asked if isinstance(way, Infeasible))
    for layout in layouts(model, cluster):
        sequences = int(options.batch_tokens) // options.sequence_length
        together = layout.replicas * layout.shards * options.micro_batch
        for method, every, codec in ways if layout.replicas > 1 else [(ALONE, None, None)]:
            if sequences < together:
                reason = f"too few sequences: {sequences} a step for {together} that train at the same time"
                yield Infeasible(method, layout, reason)
                continue
            if cluster.through_folder and layout.stages * layout.shards > 1:
                yield Infeasible(method, layout, "peers of several processes are not planned through a folder yet")
                continue
            known = defaults_of(method)
            try:
                settings = Settings.of(
                    model=options.model,
                    tokenizer=options.tokenizer,
                    sequence_length=options.sequence_length,
                    batch_size=sequences // together * layout.shards * options.micro_batch,
                    method=method,
                    every=every if "every" in known else None,
                    delay=options.delay if "delay" in known else None,
                    codec=codec if "codec" in known else None,
                    stages=layout.stages,
                    shard=layout.shards,
                    microbatches=sequences // together,
                    boundary=options.boundary if layout.stages > 1 else "float32",
                    precision=options.precision,
                    recompute=options.recompute,
                    offload=options.offload,
                    replicas=layout.replicas,
                    steps=math.ceil(options.tokens / (sequences // together * together * options.sequence_length)),
                )
                made = settings.method()
                if cluster.through_folder and layout.replicas > 1:
                    made.check_elastic()
            except UserError as error:
                yield Infeasible(method, layout, str(error))
            else:
                yield Choice(settings, layout)


def _ways(options: PlanOptions) -> Iterator[tuple[str, int | None, str | None] | Infeasible]:
    """Each combination of a method's name, steps between rounds, and a codec; or why the two do not go together.

    Raises UserError for a codec that there is not, and for a setting that no method has.
    """
    for codec in options.codec_names:
        if codec:
            codec_named(codec)
    names = method_names(options.methods)
    _refuse_unused(options, names)
    for name in names:
        known = defaults_of(name)
        for codec in options.codec_names if "codec" in known else [None]:
            try:
                chosen(RoundSettings(method=name, codec=codec))
            except UserError as error:
                yield Infeasible(name, None, str(error))
                continue
            for every in options.everys if "every" in known else [None]:
                yield name, every, codec


def _refuse_unused(options: PlanOptions, names: list[str]) -> None:
    """Raises UserError for what is asked for, and no method has."""
    given = {"every": bool(options.every), "delay": options.delay is not None, "codec": bool(options.codecs)}
    for setting, asked in given.items():
        if asked and not any(setting in defaults_of(name) for name in names):
            field = "codecs" if setting == "codec" else setting
            raise UserError(
                f"{field} changes nothing: none of {', '.join(names)} has it; leave it out, or add a method that has it"
            )


def layouts(model: Architecture, cluster: Cluster) -> Iterator[Layout]:
    """Layouts with stages and shards in powers of two, and as many islands as the workers make, taken in order."""
    workers = len(cluster.workers)
    together = math.gcd(*(machine.workers for machine in cluster.each))
    for stages in _powers(min(workers, len(model.layers))):
        for shards in _powers(min(together, workers // stages)):
            if together % shards:
                continue
            size = stages * shards
            replicas = workers // size
            islands = tuple(tuple(range(size * number, size * (number + 1))) for number in range(replicas))
            yield Layout(replicas, stages, shards, islands)


def _powers(most: int) -> list[int]:
    return [2**power for power in range(max(most, 1).bit_length())]


class Feasibility:
    """Says why choices cannot work; what does not depend on the method is checked once for each layout."""

    def __init__(self, model: Architecture, cluster: Cluster, far_folder: str) -> None:
        self._model, self._cluster, self._far_folder = model, cluster, far_folder
        self._refused: dict[tuple[int, int], str] = {}
        self._fitting = Fitting()

    def checked(self, choice: Choice) -> Choice | Infeasible:
        """A choice that can work, as it is or with a plan of its memory; or why it cannot."""
        settings, layout = choice.settings, choice.layout
        island, length = settings.island, settings.workload.sequence_length
        place = layout.stages, layout.shards
        if place not in self._refused:
            self._refused[place] = self._refusal(choice)
        if self._refused[place]:
            return Infeasible(settings.rounds.method, layout, self._refused[place])
        model = self._model.constrained(island.boundary, island.stages, settings.run.seed)
        needed, worker = memory_bytes(model, island, choice.method, length), self._worker(layout)
        if needed <= worker.memory:
            return choice
        reason = f"does not fit: {needed / 1e9:.3g} GB of {worker.memory / 1e9:.3g}"
        if unplanned := island.unplanned or self._unlike(layout):
            told = f"{reason}, and no plan of memory is made with {unplanned}"
            return Infeasible(settings.rounds.method, layout, told)
        fit = self._fitting.fit(model, settings, choice.method, worker)
        if fit.peak_bytes > worker.memory:
            told = f"{reason}, and {fit.peak_bytes / 1e9:.3g} with a plan of the memory"
            return Infeasible(settings.rounds.method, layout, told)
        return replace(choice, settings=with_memory(settings, choice.method.exchanges, worker), fit=fit)

    def _unlike(self, layout: Layout) -> str:
        """Devices that are not planned together, if any."""
        devices = {self._cluster.each[number].device for number in layout.machines(self._cluster)}
        return " beside ".join(sorted(devices)) if len(devices) > 1 else ""

    def _worker(self, layout: Layout) -> Worker:
        machines = [self._cluster.each[number] for number in layout.machines(self._cluster)]
        flops = min(self._cluster.flops(worker) for island in layout.islands for worker in island)
        device = machines[0].device
        return Worker(
            device=device,
            memory=min(machine.memory_gb for machine in machines) * 1e9,
            flops=flops,
            host_bytes=min(machine.host_gbps for machine in machines) * 125e6,
            host_flops=flops if device == "cpu" else min(machine.host_tflops for machine in machines) * 1e12,
            host_steps=min(machine.host_steps for machine in machines),
            far_folder=self._far_folder,
        )

    def _refusal(self, choice: Choice) -> str:
        """The refusal of training itself, if any."""
        try:
            check(choice.settings.island, choice.settings.made_workload(), choice.settings.run.seed)
        except UserError as error:
            return str(error)
        return ""
