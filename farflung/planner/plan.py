"""Which method and layout to run on given machines, and why others fail: `farflung plan`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from farflung.codecs import codec_named
from farflung.config import UserError
from farflung.methods import RECIPES, settings_of
from farflung.outer import Method
from farflung.planner.architecture import Architecture, architecture_of
from farflung.planner.cost import HALF, Batch, Layout, blocked_seconds, exchange, memory_bytes, step_seconds
from farflung.planner.machines import Cluster, read_cluster
from farflung.planner.placement import Problem, chains, search
from farflung.planner.simulation import names_of
from farflung.planner.sizes import packet_bytes
from farflung.planner.table import Column, Table, figures, percent


@dataclass(frozen=True)
class PlanOptions:
    """What is to be trained, on what."""

    model: str
    """A preset (micro, tiny, small, llama-125m, llama-1.3b, llama-6.8b), or anything that AutoConfig loads."""
    machines: Path
    """A TOML file of machines and links (see the README)."""
    tokens: float
    """Tokens to train on, such as 100e9."""
    methods: str = "ddp,diloco,noloco,dilocox,nolocox"
    """Names, with commas between: see `farflung methods`."""
    every: str = ""
    """Inner steps between rounds to try, with commas between; unset: each method's own default."""
    codecs: str = ""
    """Codecs to try besides each method's own, with commas between, such as bfloat16,int8."""
    batch_tokens: float = 524288
    """Tokens that all replicas together train on in one inner step."""
    sequence_length: int = 1024
    """Tokens in one sequence."""
    micro_batch: int = 1
    """Sequences that pass through a pipeline together."""
    place: float = 10.0
    """Longest search for where the best layouts' stages go on uneven links, seconds; 0 leaves them as they come."""
    show: int = 10
    """Layouts to show."""

    def __post_init__(self) -> None:
        """Refuses what cannot be. Raises UserError."""
        for name in ("tokens", "batch_tokens", "sequence_length", "micro_batch", "show"):
            value = getattr(self, name)
            if not (value >= 1 and math.isfinite(value)):
                raise UserError(f"{name} is {value}; it must be at least 1")
        if not (self.place >= 0 and math.isfinite(self.place)):
            raise UserError(f"place is {self.place}; it must be at least 0")


@dataclass(frozen=True)
class Choice:
    """One method with its settings, in one layout."""

    method_name: str
    method: Method
    codec_name: str
    layout: Layout


@dataclass(frozen=True)
class Plan:
    """What a choice costs. Seconds and bytes; the price is None without prices."""

    choice: Choice
    memory: float
    step: float
    exchange: float
    round: float
    blocked: float
    tokens_per_second: float
    hours: float
    bytes_sent: float
    price: float | None
    placed: bool = False


@dataclass(frozen=True)
class Failure:
    """A choice that cannot be, and why."""

    choice: Choice
    reason: str


def plan(options: PlanOptions) -> tuple[list[Plan], list[Failure], Cluster]:
    """All choices that work, the fastest first; and those that fail. Raises UserError."""
    cluster = read_cluster(options.machines)
    model = architecture_of(options.model, options.sequence_length)
    batch = Batch(int(options.batch_tokens), options.sequence_length, options.micro_batch)
    plans, failures = [], []
    for choice in choices(options, model, cluster):
        if reason := unfit(choice, model, cluster, batch):
            failures.append(Failure(choice, reason))
        else:
            plans.append(priced(choice, model, cluster, batch, options.tokens))
    if not plans:
        raise _nothing_fits(options, failures)
    plans.sort(key=lambda plan: (plan.hours, plan.memory))
    if options.place and len(cluster.sites) > 1:
        best = [placed(plan, model, cluster, batch, options) for plan in plans[:PLACED]]
        plans = sorted([*best, *plans[PLACED:]], key=lambda plan: (plan.hours, plan.memory))
    return plans, failures, cluster


def _nothing_fits(options: PlanOptions, failures: Sequence[Failure]) -> UserError:
    """With the layout that came nearest: of most stages and shards."""
    nearest = max(failures, key=lambda failure: failure.choice.layout.stages * failure.choice.layout.shards)
    layout = nearest.choice.layout
    return UserError(
        f"{options.model} cannot be trained on {options.machines}: {nearest.choice.method_name} on {layout.replicas} "
        f"islands of {layout.stages} stages x {layout.shards} shards: {nearest.reason}; "
        "give more workers or memory, or other methods"
    )


PLACED = 3
"""Of the best layouts, so many are placed on uneven links."""


def choices(options: PlanOptions, model: Architecture, cluster: Cluster) -> Iterator[Choice]:
    """Every method with every setting asked for, in every layout of the machines."""
    everys = [_whole(text, "every") for text in options.every.split(",") if text.strip()]
    codecs = [text.strip() for text in options.codecs.split(",") if text.strip()]
    for name in names_of(options.methods):
        known = settings_of(name)
        settings = [{"every": every} for every in everys] if everys and "every" in known else [{}]
        encoded = [(None, ""), *((codec_named(codec), codec) for codec in codecs if "codec" in known)]
        for setting in settings:
            for codec, codec_name in encoded:
                extra = {**setting, **({"codec": codec} if codec else {})}
                method = RECIPES[name](**extra)
                for layout in layouts(model, cluster):
                    yield Choice(name, method, codec_name or "own", layout)


def _whole(text: str, name: str) -> int:
    if not text.strip().isdigit() or int(text) < 1:
        raise UserError(f"{name} is {text.strip()!r}; give whole numbers of at least 1, with commas between")
    return int(text)


def layouts(model: Architecture, cluster: Cluster) -> Iterator[Layout]:
    """Stages and shards in powers of two; as many islands as the workers, taken in order, make."""
    workers = len(cluster.workers)
    together = math.gcd(*(machine.workers for machine in cluster.each))
    for stages in _powers(min(workers, model.layers)):
        for shards in _powers(min(together, workers // stages)):
            if together % shards:
                continue
            size = stages * shards
            replicas = workers // size
            islands = tuple(tuple(range(size * number, size * (number + 1))) for number in range(replicas))
            yield Layout(replicas, stages, shards, islands)


def _powers(most: int) -> list[int]:
    return [2**power for power in range(max(most, 1).bit_length())]


def unfit(choice: Choice, model: Architecture, cluster: Cluster, batch: Batch) -> str:
    """Why a choice cannot be; empty if it can."""
    if choice.layout.replicas == 1 and choice.method.schedule.every is not None:
        return "one island only: there is nobody to hold rounds with"
    if not batch.microbatches(choice.layout):
        sequences = batch.tokens // batch.sequence_length
        wanted = choice.layout.replicas * choice.layout.shards * batch.micro_batch
        return f"too few sequences: {sequences} a step for {wanted} that train at the same time"
    needed = memory_bytes(model, choice.method, choice.layout, batch)
    available = min(cluster.each[machine].memory_gb for machine in choice.layout.machines(cluster)) * 1e9
    if needed > available:
        return f"does not fit: {needed / 1e9:.3g} GB of {available / 1e9:.3g}"
    return ""


def priced(choice: Choice, model: Architecture, cluster: Cluster, batch: Batch, tokens: float) -> Plan:
    """What a choice costs for so many tokens."""
    schedule = choice.method.schedule
    step = step_seconds(model, cluster, choice.layout, batch)
    exchanged = exchange(model, choice.method, cluster, choice.layout)
    steps = schedule.every or 1
    blocked = blocked_seconds(choice.method, exchanged.seconds, step)
    round_seconds = steps * step + blocked
    rate = steps * _tokens_a_step(choice.layout, batch) / round_seconds
    hours = tokens / rate / 3600
    hourly = cluster.price(choice.layout.machines(cluster))
    return Plan(
        choice=choice,
        memory=memory_bytes(model, choice.method, choice.layout, batch),
        step=step,
        exchange=exchanged.seconds,
        round=round_seconds,
        blocked=blocked / round_seconds,
        tokens_per_second=rate,
        hours=hours,
        bytes_sent=exchanged.bytes_sent * hours * 3600 / round_seconds,
        price=None if hourly is None else hourly * hours,
    )


def _tokens_a_step(layout: Layout, batch: Batch) -> int:
    """What whole microbatches make of the batch."""
    whole = batch.microbatches(layout) * layout.replicas * layout.shards
    return whole * batch.micro_batch * batch.sequence_length


def placed(plan: Plan, model: Architecture, cluster: Cluster, batch: Batch, options: PlanOptions) -> Plan:
    """The same layout with its stages where links suit them best, if that is faster."""
    layout, schedule = plan.choice.layout, plan.choice.method.schedule
    if layout.stages == 1 or layout.replicas == 1:
        return plan
    # Shards stay together on one machine: a unit is the first of them.
    units = [layout.islands[r][s * layout.shards] for r in range(layout.replicas) for s in range(layout.stages)]
    machines = [cluster.workers[unit] for unit in units]
    largest = max(model.stage_shapes(layout.stages), key=lambda shapes: sum(map(math.prod, shapes)))
    passed = batch.micro_batch * batch.sequence_length * model.hidden * HALF * batch.microbatches(layout)
    problem = Problem(
        latency=cluster.latency[np.ix_(machines, machines)],
        bandwidth=cluster.bandwidth[np.ix_(machines, machines)],
        groups=layout.stages,
        dp_bytes=packet_bytes(plan.choice.method.codec, largest),
        pp_bytes=float(passed),
        every=schedule.every or 1,
        delay_seconds=schedule.delay * plan.step,
        pairs=not plan.choice.method.topology.alike,
    )
    _, groups = search(problem, options.place / PLACED)
    islands = tuple(
        tuple(units[device] + shard for device in chain for shard in range(layout.shards))
        for chain in chains(problem, groups)
    )
    moved = replace(plan.choice, layout=replace(layout, islands=islands))
    other = priced(moved, model, cluster, batch, options.tokens)
    return replace(other, placed=True) if other.hours < plan.hours else plan


def shown(plans: Sequence[Plan], count: int) -> list[Plan]:
    """The best few, and below them the best of each method that is not among them."""
    best: dict[str, Plan] = {}
    for plan in plans:
        best.setdefault(plan.choice.method_name, plan)
    return [*plans[:count], *(plan for plan in best.values() if plan not in plans[:count])]


def table_of(plans: Sequence[Plan], currency: str) -> Table:
    """The plans, a unit under every column's name."""
    columns = (
        Column("method"),
        Column("islands", "replicas"),
        Column("stages", "each"),
        Column("shards", "a stage"),
        Column("H", "steps"),
        Column("codec"),
        Column("memory", "GB a worker", figures),
        Column("step", "s", figures),
        Column("exchange", "s", figures),
        Column("round", "s", figures),
        Column("speed", "tokens/s", figures),
        Column("blocked", "% of time", percent),
        Column("time", "hours", figures),
        Column("sent", "TB in all", figures),
        *([Column("cost", currency, figures)] if currency else []),
    )
    rows = [
        (
            plan.choice.method_name + ("*" if plan.placed else ""),
            plan.choice.layout.replicas,
            plan.choice.layout.stages,
            plan.choice.layout.shards,
            plan.choice.method.schedule.every,
            plan.choice.codec_name,
            plan.memory / 1e9,
            plan.step,
            plan.exchange,
            plan.round,
            plan.tokens_per_second,
            plan.blocked,
            plan.hours,
            plan.bytes_sent / 1e12,
            *([plan.price] if currency else []),
        )
        for plan in plans
    ]
    return Table(columns, rows)


def reasons(failures: Sequence[Failure]) -> list[str]:
    """One line for each layout and reason, with the methods that it concerns."""
    methods: dict[str, list[str]] = {}
    for failure in failures:
        layout = failure.choice.layout
        shape = f"{layout.replicas} islands of {layout.stages} stages x {layout.shards} shards: {failure.reason}"
        methods.setdefault(shape, []).append(failure.choice.method_name)
    return [f"{shape} ({', '.join(dict.fromkeys(names))})" for shape, names in methods.items()]


def where(plan: Plan, cluster: Cluster) -> list[str]:
    """The machines of each island's stages, by site."""
    lines = []
    layout = plan.choice.layout
    for number, island in enumerate(layout.islands):
        machines = [cluster.workers[island[stage * layout.shards]] for stage in range(layout.stages)]
        places = [f"{cluster.each[machine].site} {machine}" for machine in machines]
        lines.append(f"island {number}: {', '.join(places)}")
    return lines
