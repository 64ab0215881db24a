"""The fastest methods and layouts on given machines, and why others fail: `farflung plan`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from farflung.errors import UserError
from farflung.outer import message_bytes
from farflung.planner.architecture import Architecture, architecture_of
from farflung.planner.choices import Choice, Feasibility, Infeasible, choices
from farflung.planner.cost import blocked_seconds, exchange
from farflung.planner.machines import Cluster, read_cluster
from farflung.planner.memory import memory_bytes
from farflung.planner.options import PlanOptions
from farflung.planner.placement import Problem, chains, search
from farflung.planner.step import boundary_bytes, island_bytes, step_seconds

PLACED = 3
"""How many of the best layouts are placed on uneven links."""


@dataclass(frozen=True)
class Plan:
    """What a choice costs, in seconds and bytes; the price is None where machines have none.

    Args:
        slower: how many times as long a step takes as one that keeps all in memory would.
        exchange: a round's exchange, all fragments one after the other.
        bytes_sent, bytes_inside: between islands, and between the stages of all islands, in the whole run.
        store: what the folder's requests and bytes cost, where replicas meet in one.
        placed: whether the stages lie where links suit them.
    """

    choice: Choice
    memory: float
    step: float
    slower: float
    exchange: float
    round: float
    blocked: float
    tokens_per_second: float
    hours: float
    bytes_sent: float
    bytes_inside: float
    price: float | None
    store: float | None = None
    placed: bool = False


def plan(options: PlanOptions) -> tuple[list[Plan], list[Infeasible], Cluster]:
    """All choices that work, the fastest first; and those that fail. Raises UserError."""
    cluster = replace(read_cluster(options.machines), through_folder=options.folder)
    model = architecture_of(options.model, options.sequence_length, options.tokenizer or "bytes")
    fitting = Feasibility(model, cluster, options.far_folder)
    plans, failures = [], []
    for choice in choices(options, model, cluster):
        if isinstance(choice, Infeasible):
            failures.append(choice)
        elif isinstance(checked := fitting.checked(choice), Infeasible):
            failures.append(checked)
        else:
            plans.append(estimate(checked, model, cluster, options.tokens))
    if not plans:
        raise _nothing_fits(options, failures)
    plans.sort(key=lambda plan: (plan.hours, plan.memory))
    if options.search_s and len(cluster.sites) > 1:
        best = [optimise_placement(plan, model, cluster, options) for plan in plans[:PLACED]]
        plans = sorted([*best, *plans[PLACED:]], key=lambda plan: (plan.hours, plan.memory))
    return plans, failures, cluster


def _nothing_fits(options: PlanOptions, failures: Sequence[Infeasible]) -> UserError:
    """The error, with the layout of most stages and shards, which came nearest."""
    nearest = max(failures, key=lambda failure: failure.layout.stages * failure.layout.shards if failure.layout else 0)
    return UserError(
        f"{options.model} cannot be trained on {options.machines}: {nearest.method} on {nearest.where}: "
        f"{nearest.reason}; give more workers or memory, other methods, or another --batch-tokens"
    )


def estimate(choice: Choice, model: Architecture, cluster: Cluster, tokens: float) -> Plan:
    """What a choice costs for so many tokens."""
    settings, layout, schedule = choice.settings, choice.layout, choice.method.schedule
    island, length = settings.island, settings.workload.sequence_length
    model = model.constrained(island.boundary, island.stages, settings.run.seed)
    kept = step = step_seconds(model, cluster, layout, island, length)
    if choice.fit:
        step = step_seconds(model, cluster, layout, island, length, choice.fit.slower)
    exchanged = exchange(model, choice.method, cluster, layout)
    steps = schedule.every or 1
    blocked = blocked_seconds(choice.method, exchanged, step)
    round_seconds = steps * step + blocked
    round_tokens = steps * island.batch_size * length * layout.replicas
    rate = round_tokens / round_seconds
    hours = tokens / rate / 3600
    rounds = tokens / round_tokens
    hourly = cluster.price(layout.machines(cluster))
    return Plan(
        choice=choice,
        memory=choice.fit.peak_bytes if choice.fit else memory_bytes(model, island, choice.method, length),
        step=step,
        slower=step / kept,
        exchange=exchanged.seconds * schedule.fragments,
        round=round_seconds,
        blocked=blocked / round_seconds,
        tokens_per_second=rate,
        hours=hours,
        bytes_sent=exchanged.bytes_sent * schedule.fragments * rounds,
        bytes_inside=island_bytes(model, island, length) * layout.replicas * steps * rounds,
        price=None if hourly is None else hourly * hours,
        store=exchanged.price * schedule.fragments * rounds if cluster.through_folder else None,
    )


def optimise_placement(plan: Plan, model: Architecture, cluster: Cluster, options: PlanOptions) -> Plan:
    """The plan with its stages where links suit them best, if that is faster."""
    choice, layout = plan.choice, plan.choice.layout
    schedule = choice.method.schedule
    if layout.stages == 1 or layout.replicas == 1:
        return plan
    island, length = choice.settings.island, choice.settings.workload.sequence_length
    trained = model.constrained(island.boundary, layout.stages, choice.settings.run.seed)
    # Shards stay together on one machine; a unit is their first.
    units = [layout.islands[r][s * layout.shards] for r in range(layout.replicas) for s in range(layout.stages)]
    machines = [cluster.workers[unit] for unit in units]
    kept = trained.kept_cells(layout.stages, layout.shards)
    problem = Problem(
        latency=cluster.latency[np.ix_(machines, machines)],
        bandwidth=cluster.bandwidth[np.ix_(machines, machines)],
        groups=layout.stages,
        dp_bytes=max(message_bytes(choice.method, cells, layout.replicas) for cells in kept),
        pp_bytes=float(boundary_bytes(model, island, length) * island.parts),
        every=schedule.every or 1,
        delay_seconds=schedule.delay * plan.step,
        pairs=not choice.method.topology.identical,
    )
    _, groups = search(problem, options.search_s / PLACED)
    islands = tuple(
        tuple(units[device] + shard for device in chain for shard in range(layout.shards))
        for chain in chains(problem, groups)
    )
    moved = replace(choice, layout=replace(layout, islands=islands))
    other = estimate(moved, model, cluster, options.tokens)
    return replace(other, placed=True) if other.hours < plan.hours else plan
