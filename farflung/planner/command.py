"""The commands that start a run as it was planned."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from itertools import chain, groupby

from farflung.planner.choices import Choice
from farflung.planner.machines import Cluster
from farflung.settings import Settings

FOLDER = "runs/planned"
"""The run folder; under torchrun, every machine has to be told."""

PORT = 29500


@dataclass(frozen=True)
class Start:
    """Processes of a run that one machine starts: the number of their first worker there, and how many."""

    machine: int
    first: int
    count: int


def commands(choice: Choice, cluster: Cluster) -> list[str]:
    """What starts a run: one command, or one for each node rank of torchrun; or those of a ticket and its peers."""
    if cluster.through_folder and choice.layout.replicas > 1:
        return _peers(choice.settings)
    train = f"farflung train {flags(choice.settings)}"
    starts = _starts(choice, cluster)
    if len(starts) == 1:
        return [train]
    names = [cluster.name(start.machine) for start in starts]
    neighbours = len(set(names)) < len(names)  # a machine has several commands
    if not neighbours and len({start.count for start in starts}) == 1:
        torchrun = _torchrun(len(starts), "RANK", starts[0])
        return [f"{torchrun} -m {train} --out {FOLDER}   # RANK from 0: {', '.join(names)}"]
    found = []
    for rank, (name, start) in enumerate(zip(names, starts, strict=True)):
        devices, folder = "", FOLDER
        if neighbours:
            numbers = ",".join(map(str, range(start.first, start.first + start.count)))
            devices, folder = f"CUDA_VISIBLE_DEVICES={numbers} ", f"{FOLDER}-{rank}"
        found.append(f"on {name}: {devices}{_torchrun(len(starts), str(rank), start)} -m {train} --out {folder}")
    return found


def _peers(settings: Settings) -> list[str]:
    """A run of peers that meet in a folder: memory is each one's own, and so many of them join."""
    usual = Settings()
    island = usual.island
    shared = settings.changed(replicas=usual.run.replicas, memory=island.memory, far_folder=island.far_folder)
    each = {"--memory": settings.island.memory, "--far-folder": settings.island.far_folder}
    own = "".join(f" {flag} {shlex.quote(value)}" for flag, value in each.items() if value)
    return [
        f"farflung invite --name NAME --at URL --ticket NAME.ticket {flags(shared)}",
        f"farflung join NAME.ticket{own}   # on each of {settings.run.replicas} workers",
    ]


def _torchrun(nodes: int, rank: str, start: Start) -> str:
    return (
        f"torchrun --nnodes {nodes} --node-rank {rank} --nproc-per-node {start.count} "
        f"--master-addr HOST0 --master-port {PORT}"
    )


def _starts(choice: Choice, cluster: Cluster) -> list[Start]:
    """The run's processes in order, joined where neighbours lie on one machine."""
    workers = list(chain.from_iterable(choice.layout.islands))
    starts: list[Start] = []
    for machine, group in groupby(workers, key=lambda worker: cluster.workers[worker]):
        numbers = [worker - cluster.workers.index(machine) for worker in group]
        starts.append(Start(machine, numbers[0], len(numbers)))
    return starts


def flags(settings: Settings) -> str:
    """The method, and the settings that are not at their defaults, as flags."""
    words = []
    for name, value in ({"method": settings.rounds.method} | settings.changes()).items():
        flag = "--" + name.replace("_", "-")
        words += [flag] if value is True else [flag, shlex.quote(str(value))]
    return " ".join(words)
