"""What rounds by the clock, observers, groups, traces, folders and plans of memory cannot go together with."""

from __future__ import annotations

from farflung.errors import UserError
from farflung.memory.room import check_words
from farflung.settings import Settings


def check_clock(settings: Settings) -> None:
    """Refuses rounds by the clock of a run that counts none, or whose replicas take their steps together.

    Raises UserError.
    """
    every, island = settings.rounds.every, settings.island
    if not settings.by_clock:
        return
    if settings.run.rounds is None:
        raise UserError(f"every is {every}, so that rounds end the run, and not steps; say how many with --rounds")
    together = {
        "routes random": island.routes == "random",
        "swarm": island.swarm,
        "batched_replicas": island.batched_replicas,
    }
    if what := next((name for name, chosen in together.items() if chosen), None):
        raise UserError(f"every is {every}, but with {what} replicas step together; give --every in inner steps")
    if settings.network.kind.simulate and not settings.network.simulated_conditions().step_ms:
        raise UserError(f"every is {every}, but steps of 0 ms take no time, so that no round comes; give --step-ms")


def check_observer(settings: Settings) -> None:
    """Refuses an observer of what nobody can observe. Raises UserError."""
    run, island = settings.run, settings.island
    if not (run.observe or run.observers):
        return
    if run.observe and not settings.network.kind.elastic:
        raise UserError(
            "with --observe one joins a run on the internet, or of train --independent: give it to farflung join, with "
            "that run's ticket; a run of one's own has --observers"
        )
    if run.observers and (settings.network.kind.elastic or settings.network.independent):
        raise UserError(
            "peers that come and go are observed by one more, which joins with: farflung join TICKET --observe; leave "
            "out --observers"
        )
    if island.divided or island.swarm:
        raise UserError("an observer has the whole model in one process; leave out --stages, --shard and --swarm")
    if not settings.method().exchanges:
        raise UserError(f"method is {settings.rounds.method!r}, whose peers exchange nothing that one could observe")
    if settings.method().dealing:
        raise UserError(
            f"method is {settings.rounds.method!r}, of whose model each replica trains a part; leave it out"
        )


def check_folder(settings: Settings) -> None:
    """Refuses what peers that meet in a folder cannot do. Raises UserError."""
    island = settings.island
    if settings.network.network != "folder":
        return
    if island.swarm:
        raise UserError("stages of a swarm call each other, and peers in a folder do not; leave out --at or --swarm")
    if island.divided and not island.gateway:
        raise UserError("in a folder an island's first process speaks for the others; add --gateway")


def check_memory(settings: Settings) -> None:
    """Refuses plans of memory for what none is made for yet. Raises UserError."""
    island = settings.island
    check_words(island.memory)
    if not island.memory:
        if island.far_folder:
            raise UserError("far_folder is where a plan of memory moves things; add --memory auto, or leave it out")
        return
    if settings.network.kind.simulate:
        raise UserError("memory is of real processes, and simulated replicas share one; leave out --memory")
    if what := island.unplanned:
        raise UserError(f"memory is {island.memory!r}, which {what} cannot be planned with; leave out one of them")


def check_groups(settings: Settings) -> None:
    """Refuses groups that there are too few replicas for, where their number is known. Raises UserError."""
    size, replicas = settings.rounds.group_size, settings.run.replicas
    if size is not None and size > replicas and not settings.network.kind.elastic:
        raise UserError(f"group_size is {size}, but replicas is {replicas}; choose a group_size of at most {replicas}")


def check_profile(settings: Settings) -> None:
    """Refuses to trace steps that there are not, or of replicas that share a process. Raises UserError."""
    run = settings.run
    if run.profile and settings.network.kind.simulate:
        raise UserError(f"profile is {run.profile}, but simulated replicas take turns in one process; leave it out")
    if run.profile and run.profiled[-1] > run.steps:
        raise UserError(f"profile is {run.profile}, but the run has {run.steps} steps; give steps up to {run.steps}")
