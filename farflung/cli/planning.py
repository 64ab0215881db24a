"""farflung plan, farflung simulate and farflung recommend: what would be, without training anything."""

from __future__ import annotations

from pathlib import Path

from farflung.cli.arguments import free_folder, parse, under_new_names
from farflung.errors import UserError, counted, disk_errors
from farflung.files import event_files
from farflung.planner.options import PlanOptions, RecommendOptions, SimulateOptions, SwarmOptions
from farflung.tables import new_names


def plan(arguments: list[str]) -> None:
    """Show what training would cost on given machines, by method and layout; or with --swarm, what a swarm would do."""
    if "--swarm" in arguments:
        _plan_swarm(arguments)
        return
    arguments = under_new_names(arguments, new_names([PlanOptions]))
    options = parse(PlanOptions, arguments, "plan", plan.__doc__)

    from farflung.planner.command import commands
    from farflung.planner.plan import plan as make_plans
    from farflung.planner.printed import best_per_method, fitted, plan_table, reasons, where

    plans, failures, cluster = make_plans(options)
    listed = best_per_method(plans, options.show)
    print(f"farflung: {options.model}, {options.tokens:,.0f} tokens, {counted(len(cluster.workers), 'worker')}\n")
    print(plan_table(listed, cluster).text())
    if plans[0].placed:
        print("\n* stages placed on the links that suit them; the best:")
        print("\n".join(f"  {line}" for line in where(plans[0], cluster)))
    if lines := fitted(listed):
        print("\n" + "\n".join(lines))
    told = "URL is the folder" if options.folder else "HOST0 is the address of the machine of node rank 0"
    print(f"\nto start them ({told}; add --data):")
    for number, one in enumerate(listed, start=1):
        print("\n".join(f"  {number} {line}" for line in commands(one.choice, cluster)))
    if failures:
        lines = reasons(failures)
        print("\nnot possible:")
        print("\n".join(f"  {line}" for line in lines[: options.show]))
        if len(lines) > options.show:
            print(f"  and {len(lines) - options.show} more; see them with --show {len(lines)}")


def _plan_swarm(arguments: list[str]) -> None:
    options = parse(SwarmOptions, arguments, "plan", plan.__doc__)

    from farflung.planner.swarm import swarm_plans, told

    chosen, plans = swarm_plans(options)
    print("\n".join(told(chosen, plans, options)))


def simulate(arguments: list[str]) -> None:
    """Show how long rounds would take for up to thousands of replicas, under given conditions; trains nothing."""
    options = parse(SimulateOptions, arguments, "simulate", simulate.__doc__)
    folder = options.out or free_folder("simulation", "simulation.html")
    _refuse_taken(folder)

    from farflung.planner.page import write_simulation
    from farflung.planner.simulation import pace_line, simulation_table, write_events
    from farflung.planner.simulation import simulate as time_methods

    results = time_methods(options)
    size = f"{options.params:,.0f} parameters" if options.params else options.model
    replicas, rounds = counted(options.replicas, "replica"), counted(options.rounds, "round")
    described = f"{replicas} of {size}, {rounds}, conditions {options.conditions}"
    print(f"farflung: {described}\n\n{simulation_table(results).text()}\n")
    print(f"{pace_line(results, options.conditions)}\n")
    with disk_errors(f"write to {folder}", "give another folder with --out"):
        write_events(results, folder / "events")
        write_simulation(results, described, folder / "simulation.html")
    print(f"farflung: pictures in {folder / 'simulation.html'}, each round in {folder / 'events'}")


def recommend(arguments: list[str]) -> None:
    """Say which method, codec and steps between rounds suit given links, and what gap to expect; trains nothing."""
    options = parse(RecommendOptions, arguments, "recommend", recommend.__doc__)

    from farflung.planner.recommend import recommend as candidates_for
    from farflung.planner.recommend import told

    links = f"links of {options.link} with {options.latency_ms:g} ms of latency"
    replicas = counted(options.replicas, "replica")
    print(f"farflung: {replicas} of {options.params:,.0f} parameters, steps of {options.step_ms:g} ms, {links}\n")
    print(told(candidates_for(options), options))


def _refuse_taken(folder: Path) -> None:
    """Refuses a folder with what another command has written, and may not be lost. Raises UserError."""
    simulated = (folder / "simulation.html").exists()
    if simulated or (folder / "config.toml").exists() or event_files(folder):
        what = "a simulation" if simulated else "a run"
        raise UserError(f"{folder} already holds {what}; choose another folder with --out")
