"""What `farflung plan` prints of its plans."""

from __future__ import annotations

from collections.abc import Sequence

from farflung.durations import duration
from farflung.planner.choices import Infeasible
from farflung.planner.machines import Cluster
from farflung.planner.plan import Plan
from farflung.planner.table import Column, Table, figures, percent


def best_per_method(plans: Sequence[Plan], count: int) -> list[Plan]:
    """The best few, then the best of each method that is not among them."""
    best: dict[str, Plan] = {}
    for plan in plans:
        best.setdefault(plan.choice.settings.rounds.method, plan)
    return [*plans[:count], *(plan for plan in best.values() if plan not in plans[:count])]


def plan_table(plans: Sequence[Plan], cluster: Cluster) -> Table:
    """The plans, numbered."""
    numbers = {id(plan): number for number, plan in enumerate(plans, start=1)}

    def name(plan: Plan) -> str:
        return f"{numbers[id(plan)]} {plan.choice.settings.rounds.method}" + ("*" if plan.placed else "")

    store = Column("folder", cluster.folder.currency, lambda plan: plan.store, figures)
    columns = (
        Column("plan", "", name),
        Column("islands", "replicas", lambda plan: plan.choice.layout.replicas),
        Column("stages", "each", lambda plan: plan.choice.layout.stages),
        Column("shards", "a stage", lambda plan: plan.choice.layout.shards),
        Column("H", "steps", lambda plan: plan.choice.method.schedule.every),
        Column("codec", "", lambda plan: plan.choice.settings.rounds.codec or "own"),
        Column("memory", "GB a worker", lambda plan: plan.memory / 1e9, figures),
        Column("step", "s", lambda plan: plan.step, figures),
        Column("exchange", "s", lambda plan: plan.exchange, figures),
        Column("round", "s", lambda plan: plan.round, figures),
        Column("speed", "tokens/s", lambda plan: plan.tokens_per_second, figures),
        Column("blocked", "% of time", lambda plan: plan.blocked, percent),
        Column("time", "in all", lambda plan: duration(3600 * plan.hours)),
        Column("in rounds", "TB in all", lambda plan: plan.bytes_sent / 1e12, figures),
        Column("by stages", "TB in all", lambda plan: plan.bytes_inside / 1e12, figures),
        *([Column("cost", cluster.currency, lambda plan: plan.price, figures)] if cluster.currency else []),
        *([store] if cluster.through_folder else []),
    )
    return Table(columns, plans)


def fitted(plans: Sequence[Plan]) -> list[str]:
    """A line for each plan that takes a plan of the memory, below what is assumed of the hosts."""
    lines: dict[str, list[str]] = {}
    for number, plan in enumerate(plans, start=1):
        if fit := plan.choice.fit:
            assumed = f"with a plan of the memory (docs: Memory), where {fit.worker.told}:"
            lines.setdefault(assumed, []).append(f"  {number} {fit.told(plan.slower)}")
    return [line for assumed, told in lines.items() for line in (assumed, *told)]


def reasons(failures: Sequence[Infeasible]) -> list[str]:
    """One line for each layout and reason, with the methods that failed so."""
    methods: dict[str, list[str]] = {}
    for failure in failures:
        methods.setdefault(f"{failure.where}: {failure.reason}", []).append(failure.method)
    return [f"{shape} ({', '.join(dict.fromkeys(names))})" for shape, names in methods.items()]


def where(plan: Plan, cluster: Cluster) -> list[str]:
    """The machines of each island's stages, by site."""
    lines = []
    layout = plan.choice.layout
    for number, island in enumerate(layout.islands):
        machines = [cluster.workers[island[stage * layout.shards]] for stage in range(layout.stages)]
        lines.append(f"island {number}: {', '.join(cluster.name(machine) for machine in machines)}")
    return lines
