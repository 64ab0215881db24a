"""What a swarm on given machines would do, and what limits it: `farflung plan --swarm`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from farflung.errors import UserError
from farflung.pipeline.check import check
from farflung.planner.architecture import Architecture, architecture_of
from farflung.planner.command import flags
from farflung.planner.machines import Cluster, read_cluster
from farflung.planner.memory import RESERVED, activation_bytes
from farflung.planner.options import SwarmOptions
from farflung.planner.step import boundary_bytes
from farflung.settings import Settings
from farflung.swarm.moves import BYTES_A_PARAMETER
from farflung.swarm.peer import IN_FLIGHT
from farflung.workloads.base import Span

MOST_STAGES = 64
NEARLY = 0.95
"""Of boundaries that give this part of the best speed, the first that was asked for is taken."""


@dataclass(frozen=True)
class Rate:
    """Microbatches a second of one worker in one stage: what it can compute, and what its network carries."""

    computes: float
    carries: float

    @property
    def speed(self) -> float:
        """Both at a time."""
        return min(self.computes, self.carries)


Kind = tuple[tuple[Rate | None, ...], str]
"""What workers that are alike can do in each stage, None where they have too little memory; and what to call them."""


@dataclass(frozen=True)
class SwarmPlan:
    """Which workers serve which stage.

    Args:
        serving: for each stage how many workers of each kind.
        left: workers that are too small for any stage.
        slow: workers that would hold the others up.
        memory: that a worker needs in each stage, bytes.
        tokens: of a microbatch.
    """

    boundary: str
    spans: Sequence[Span]
    serving: Sequence[Counter[Kind]]
    left: Counter[Kind]
    slow: Counter[Kind]
    memory: Sequence[float]
    tokens: int

    @cached_property
    def capacities(self) -> list[float]:
        """Microbatches a second of each stage, all its peers busy; the swarm does as many as the slowest one."""
        return [_capacity(kinds, stage) for stage, kinds in enumerate(self.serving)]

    @property
    def tokens_per_second(self) -> float:
        """All of the swarm."""
        return min(self.capacities) * self.tokens

    @property
    def limit(self) -> str:
        """What holds the swarm up."""
        stage = self.capacities.index(min(self.capacities))
        carried = [(rate.carries < rate.computes) * count for rate, count in _rates(self.serving[stage], stage)]
        what = "networks" if 2 * sum(carried) > self.serving[stage].total() else "computing"
        return f"{what} of stage {stage}"


def swarm_plans(options: SwarmOptions) -> tuple[SwarmPlan, list[SwarmPlan]]:
    """The plan to take; and of each boundary the best, the fastest first. Raises UserError."""
    cluster = read_cluster(options.machines)
    model = architecture_of(options.model, options.sequence_length, options.tokenizer or "bytes")
    found = []
    for boundary in _possible(options):
        plans = _of_boundary(boundary, model, cluster, options)
        found += [max(plans, key=lambda plan: (plan.tokens_per_second, -len(plan.spans)))] if plans else []
    if not found:
        raise UserError(
            f"{options.model} cannot be trained by a swarm on {options.machines}: no cut gives each stage a worker "
            "with enough memory; give more workers or memory, or add --recompute"
        )
    best = max(plan.tokens_per_second for plan in found)
    chosen = next(plan for plan in found if plan.tokens_per_second >= NEARLY * best)
    return chosen, sorted(found, key=lambda plan: -plan.tokens_per_second)


def settings_of(options: SwarmOptions, boundary: str, stages: int) -> Settings:
    """What a planned swarm is begun with."""
    tokenizer = {"tokenizer": options.tokenizer} if options.tokenizer else {}
    return Settings.of(
        model=options.model,
        sequence_length=options.sequence_length,
        swarm=True,
        stages=stages,
        batch_size=options.micro_batch * IN_FLIGHT * stages,
        boundary=boundary,
        precision=options.precision,
        recompute=options.recompute,
        **tokenizer,
    )


def _possible(options: SwarmOptions) -> list[str]:
    """The boundaries that a swarm may have with this model. Raises UserError where there is none."""
    possible, refused = [], None
    for boundary in options.boundary_names:
        settings = settings_of(options, boundary, options.stages or 2)
        try:
            check(settings.island, settings.made_workload(), settings.run.seed)
            possible.append(boundary)
        except UserError as error:
            refused = error
    if refused and not possible:
        raise refused
    return possible


def _of_boundary(boundary: str, model: Architecture, cluster: Cluster, options: SwarmOptions) -> list[SwarmPlan]:
    most = min(len(cluster.workers), len(model.layers), MOST_STAGES)
    counts = [stages for stages in range(2, most + 1) if options.stages in (None, stages)]
    return [plan for stages in counts if (plan := _with_stages(stages, boundary, model, cluster, options))]


def _with_stages(
    stages: int, boundary: str, model: Architecture, cluster: Cluster, options: SwarmOptions
) -> SwarmPlan | None:
    """None where some stage has no worker."""
    island = settings_of(options, boundary, stages).island
    length, spans = options.sequence_length, model.spans(stages)
    memory = [
        BYTES_A_PARAMETER * sum(part.parameters for part in model.parts(span))
        + IN_FLIGHT * activation_bytes(model, island, length, stage, span)
        + RESERVED
        for stage, span in enumerate(spans)
    ]
    tokens = options.micro_batch * length
    flops = [tokens * model.flops_per_token(span, length, options.recompute) for span in spans]
    packet = boundary_bytes(model, island, length) * (1 + cluster.network.headers)
    sent = [packet * ((not span.first) + (not span.last)) for span in spans]
    kinds = Counter(_kind(worker, cluster, memory, flops, sent) for worker in range(len(cluster.workers)))
    serving = served(kinds, stages)
    left = kinds - sum(serving, Counter())
    if not all(serving):
        return None
    quick = without_slow(serving)
    slow = sum(serving, Counter()) - sum(quick, Counter())
    return SwarmPlan(boundary, spans, quick, left, slow, memory, tokens)


def _kind(
    worker: int, cluster: Cluster, memory: Sequence[float], flops: Sequence[float], sent: Sequence[float]
) -> Kind:
    machine = cluster.workers[worker]
    here = cluster.each[machine]
    ways = [way for other, way in enumerate(cluster.bandwidth[machine]) if other != machine]
    carried = max(ways, default=cluster.bandwidth[machine, machine]) / (here.workers if ways else 1)
    rates = [
        Rate(cluster.flops(worker) / work, carried / nbytes) if room <= here.memory_gb * 1e9 else None
        for room, work, nbytes in zip(memory, flops, sent, strict=True)
    ]
    return tuple(rates), f"{here.memory_gb:g} GB {here.site}"


def served(kinds: Counter[Kind], stages: int) -> list[Counter[Kind]]:
    """Deals workers out to stages so that the slowest stage is as fast as can be found by moves and swaps.

    Those that can serve the fewest stages choose first, and of these the fastest.
    """
    serving: list[Counter[Kind]] = [Counter() for _ in range(stages)]

    def first(kind: Kind) -> tuple[int, float]:
        rates = [rate for rate in kind[0] if rate]
        return len(rates), -max((rate.speed for rate in rates), default=0.0)

    for kind in sorted(kinds.elements(), key=first):
        able = [stage for stage, rate in enumerate(kind[0]) if rate]
        if able:
            serving[min(able, key=lambda stage: _capacity(serving[stage], stage))][kind] += 1
    while better := max(_changes(serving), key=_slowest_first, default=None):
        if _slowest_first(better) <= _slowest_first(serving):
            break
        serving = better
    return serving


def without_slow(serving: Sequence[Counter[Kind]]) -> list[Counter[Kind]]:
    """Who serves which stage, without those that make it slower.

    So many microbatches are under way at a time, and each worker has one of them in hand. Where it takes longer for one
    than the others do for all of them, these do more without it.
    """
    quick = [Counter(kinds) for kinds in serving]
    while found := [one for stage in range(len(quick)) for one in _too_slow(quick, stage)]:
        _, stage, kind = min(found, key=lambda one: one[0])
        quick[stage] -= Counter([kind])
    return quick


def _too_slow(serving: Sequence[Counter[Kind]], stage: int) -> Iterator[tuple[float, int, Kind]]:
    """Speed, stage and kind of the workers of a stage without which the others do more."""
    for kind, rate in _each(serving[stage], stage):
        rest = [*serving]
        rest[stage] = serving[stage] - Counter([kind])
        others = min(_capacity(kinds, number) for number, kinds in enumerate(rest))
        if rate.speed * IN_FLIGHT * len(rest) * rest[0].total() < others:
            yield rate.speed, stage, kind


def _changes(serving: Sequence[Counter[Kind]]) -> Iterator[list[Counter[Kind]]]:
    """All that comes of one worker's move to the slowest stage, or of its swap with one from there."""
    needy = min(range(len(serving)), key=lambda stage: _capacity(serving[stage], stage))
    for stage, kinds in enumerate(serving):
        if stage == needy:
            continue
        for kind in kinds:
            for back in (None, *serving[needy]):
                if kind[0][needy] is None or (back and back[0][stage] is None):
                    continue
                changed = list(serving)
                changed[stage] = kinds - Counter([kind]) + Counter([back] if back else [])
                changed[needy] = serving[needy] - Counter([back] if back else []) + Counter([kind])
                yield changed


def _slowest_first(serving: Sequence[Counter[Kind]]) -> list[float]:
    return sorted(round(_capacity(kinds, stage), 12) for stage, kinds in enumerate(serving))


def _each(kinds: Counter[Kind], stage: int) -> Iterator[tuple[Kind, Rate]]:
    for kind in kinds:
        rate = kind[0][stage]
        assert rate is not None
        yield kind, rate


def _rates(kinds: Counter[Kind], stage: int) -> Iterator[tuple[Rate, int]]:
    for kind, rate in _each(kinds, stage):
        yield rate, kinds[kind]


def _capacity(kinds: Counter[Kind], stage: int) -> float:
    return sum(rate.speed * count for rate, count in _rates(kinds, stage))


def told(chosen: SwarmPlan, plans: Sequence[SwarmPlan], options: SwarmOptions) -> list[str]:
    """The plans in lines: each boundary's best, and where the chosen one cuts the model."""
    wide = max(len("boundary"), *(len(plan.boundary) for plan in plans))
    lines = [f"{'boundary':{wide}}  stages    tokens/s  limited by"]
    for plan in plans:
        figures = f"{len(plan.spans):6}  {plan.tokens_per_second:10,.0f}"
        lines.append(f"{plan.boundary:{wide}}  {figures}  {plan.limit}")
    lines += ["", f"with boundary {chosen.boundary}:"]
    for stage, (span, kinds) in enumerate(zip(chosen.spans, chosen.serving, strict=True)):
        ends = ("embeddings and " if span.first else "") + f"layers {span.begin} to {span.end - 1}"
        part = ends + (" and the head" if span.last else "")
        able = f"{chosen.capacities[stage]:.2f} microbatches/s"
        lines.append(f"  stage {stage}: {part}; {chosen.memory[stage] / 1e9:.1f} GB; {_named(kinds)}; {able}")
    if chosen.left:
        lines.append(f"  too small for a stage: {_named(chosen.left)}; more --stages are smaller ones")
    if chosen.slow:
        lines.append(f"  better left out: {_named(chosen.slow)}; so slow that the others would wait for them")
    begins = flags(settings_of(options, chosen.boundary, len(chosen.spans)))
    return [
        *lines,
        "",
        "to begin it (add --data):",
        f"  farflung invite --name NAME --ticket NAME.ticket {begins}",
    ]


def _named(kinds: Counter[Kind]) -> str:
    counts = sorted((what, count) for (_, what), count in kinds.items())
    return ", ".join(f"{count} of {what}" for what, count in counts)
