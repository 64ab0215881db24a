"""What `farflung plan` prints of its plans."""

from __future__ import annotations

from collections.abc import Sequence

from farflung.planner.choices import Infeasible
from farflung.planner.machines import Cluster
from farflung.planner.plan import Plan
from farflung.planner.table import Column, Table, figures, percent


def best_per_method(plans: Sequence[Plan], count: int) -> list[Plan]:
    """The best few, and below them the best of each method that is not among them."""
    best: dict[str, Plan] = {}
    for plan in plans:
        best.setdefault(plan.choice.settings.rounds.method, plan)
    return [*plans[:count], *(plan for plan in best.values() if plan not in plans[:count])]


def plan_table(plans: Sequence[Plan], currency: str) -> Table:
    """The plans, numbered, a unit under every column's name."""
    columns = (
        Column("plan"),
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
        Column("in rounds", "TB in all", figures),
        Column("by stages", "TB in all", figures),
        *([Column("cost", currency, figures)] if currency else []),
    )
    rows = [
        (
            f"{number} {plan.choice.settings.rounds.method}" + ("*" if plan.placed else ""),
            plan.choice.layout.replicas,
            plan.choice.layout.stages,
            plan.choice.layout.shards,
            plan.choice.method.schedule.every,
            plan.choice.settings.rounds.codec or "own",
            plan.memory / 1e9,
            plan.step,
            plan.exchange,
            plan.round,
            plan.tokens_per_second,
            plan.blocked,
            plan.hours,
            plan.bytes_sent / 1e12,
            plan.bytes_inside / 1e12,
            *([plan.price] if currency else []),
        )
        for number, plan in enumerate(plans, start=1)
    ]
    return Table(columns, rows)


def reasons(failures: Sequence[Infeasible]) -> list[str]:
    """One line for each layout and reason, with the methods that it concerns."""
    methods: dict[str, list[str]] = {}
    for failure in failures:
        methods.setdefault(f"{failure.layout.describe()}: {failure.reason}", []).append(failure.method)
    return [f"{shape} ({', '.join(dict.fromkeys(names))})" for shape, names in methods.items()]


def where(plan: Plan, cluster: Cluster) -> list[str]:
    """The machines of each island's stages, by site."""
    lines = []
    layout = plan.choice.layout
    for number, island in enumerate(layout.islands):
        machines = [cluster.workers[island[stage * layout.shards]] for stage in range(layout.stages)]
        lines.append(f"island {number}: {', '.join(cluster.name(machine) for machine in machines)}")
    return lines
