"""Where a run begins: anew, or at the newest checkpoint that all of its replicas have."""

from __future__ import annotations

import os
import shutil
import socket
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from farflung.config import Config, UserError, read_toml
from farflung.files import write_text
from farflung.pipeline import Layout, Place
from farflung.training import checkpoint, events

NEW, RESUMED, AGAIN = "new", "resumed", "again"
"""How a machine begins: in an empty folder; where the user says so; or because torchrun has started it once more."""
SHOWN = 6
"""Of steps and replicas, so many are named in a message."""


@dataclass(frozen=True)
class Standing:
    """What one process finds in its run folder.

    Args:
        replica: its own.
        machine: where the folder is; the same for processes that share it.
        steps: at which it has a checkpoint to go on from.
        trained: whether there is anything that beginning anew would lose.
        way: how its machine begins; "" for processes that leave this to another one there.
    """

    replica: int
    machine: str
    steps: tuple[int, ...]
    trained: bool
    way: str = ""

    @classmethod
    def of(cls, folder: Path, replica: int, seat: str, way: str = "") -> Standing:
        """What is in a folder now for a process with this seat: its own file, or all parts of its replica."""
        machine = f"{socket.gethostname()}, node {os.environ.get('GROUP_RANK', 0)}, {folder.resolve()}"
        steps = tuple(
            step
            for step in sorted(checkpoint.steps_of(folder, replica))
            if checkpoint.path_of(folder, step, seat).exists() or checkpoint.complete(folder, step, replica)
        )
        return cls(replica, machine, steps, bool(steps) or events.tell_of_training(folder), way)


def first_step(standings: Sequence[Standing], folder: Path) -> int | None:
    """The step after which all go on; 0 for the beginning of a run that has lost nothing, None for a new one.

    Raises UserError where going on would lose what there is.
    """
    ways = {standing.way for standing in standings} - {""}
    if ways == {NEW}:
        return None
    common = set.intersection(*(set(standing.steps) for standing in standings))
    if common and NEW not in ways:
        return max(common)
    if ways == {AGAIN} or not any(standing.trained for standing in standings):
        return 0
    raise UserError(
        f"{folder} cannot go on: no checkpoint is there of all replicas ({_described(standings)}); "
        f"copy what is missing from other machines or a backup, or begin anew with: {restart_command(folder)}"
    )


OF_A_MACHINE = frozenset(
    {"out", "data", "device", "outer_device", "offload", "log_every", "keep_checkpoints", "starting", "deadline"}
)
"""Settings in which machines may differ; data may lie elsewhere."""


def common_settings(config: Config) -> dict[str, Any]:
    """The settings that must be the same everywhere."""
    return {name: value for name, value in vars(config).items() if name not in OF_A_MACHINE}


def refuse_unlike(settings: Mapping[str, dict[str, Any]]) -> None:
    """Refuses to train with `common_settings` that differ, given by what each process is called. Raises UserError."""
    (first, own), *others = settings.items()
    for name, value in own.items():
        for other, theirs in others:
            if theirs.get(name) != value:
                raise UserError(
                    f"{name} is {value!r} for {first} and {theirs.get(name)!r} for {other}; "
                    "start all machines with the same settings"
                )


def local_step(config: Config, folder: Path) -> int:
    """The step that a run goes on from whose replicas all keep their files in this folder. Raises UserError.

    The checkpoints of replicas that have died are not waited for.
    """
    died = events.died(folder)
    layout = Layout.of(config)
    seats = [(replica, layout.seat(Place(replica))) for replica in range(config.replicas)]
    standings = [Standing.of(folder, replica, seat, RESUMED) for replica, seat in seats]
    return first_step([one for one in standings if one.replica not in died] or standings, folder) or 0


def refuse_other_replicas(config: Config, folder: Path) -> None:
    """Refuses to go on with another number of replicas than there are. Raises UserError."""
    path = folder / "config.toml"
    before = read_toml(path).replicas if path.exists() else config.replicas
    if before != config.replicas:
        processes = before * config.stages * config.shard
        raise UserError(
            f"{folder} is a run of {before} replicas, and {config.replicas} are started; start {processes} processes "
            f"with these stages and shards, or begin anew with: {restart_command(folder)}"
        )


def clear(folder: Path) -> None:
    """Removes what a run has left, but for its settings. Raises UserError while it is being trained."""
    for path in folder.glob("events/*.jsonl"):
        events.locked(path).close()
    for name in ("summary.json", "report.html"):
        (folder / name).unlink(missing_ok=True)
    for name in ("events", "checkpoints"):
        shutil.rmtree(folder / name, ignore_errors=True)


def restart_command(folder: Path) -> str:
    """What begins a run anew in the folder of an old one."""
    return f"farflung train --resume {folder} --restart"


def begun_by_this_launch(folder: Path) -> bool:
    """Whether the torchrun that has started this process has begun the run in a folder, in an earlier attempt."""
    path = _launch_file(folder)
    return path.exists() and path.read_text() == _launch()


def note_launch(folder: Path) -> None:
    """Takes down which torchrun begins the run, if one does."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        write_text(_launch_file(folder), _launch())


def _launch_file(folder: Path) -> Path:
    return folder / "logs" / f"launch-{socket.gethostname()}"


def _launch() -> str:
    """What tells one torchrun on this machine from all others: its process, and since when it has run."""
    agent = os.getppid()
    try:
        since = Path(f"/proc/{agent}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        since = "?"  # where the system does not say, numbers of processes do not come again soon
    return f"{os.environ.get('TORCHELASTIC_RUN_ID')} {agent} {since}"


def _described(standings: Iterable[Standing]) -> str:
    """Who has which steps, in a line."""
    having: dict[tuple[tuple[int, ...], str], set[int]] = {}
    for standing in standings:
        having.setdefault((tuple(standing.steps), standing.machine.partition(",")[0]), set()).add(standing.replica)
    told = []
    for (steps, host), replicas in list(having.items())[:SHOWN]:
        who = f"replica{'s' if len(replicas) > 1 else ''} {_listed(sorted(replicas))} on {host}"
        what = f"steps {_listed(steps[-SHOWN:])}" if len(steps) > 1 else f"step {steps[0]}" if steps else "none"
        told.append(f"{who}: {what}")
    return "; ".join(told) + ("; …" if len(having) > SHOWN else "")


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:SHOWN])) + (" …" if len(numbers) > SHOWN else "")


def writing(layout: Layout, machines: Sequence[str]) -> dict[str, int]:
    """The replica that writes, on each machine, what all have in common; given each process's machine.

    It is the first replica that is there whole, or else the first that has a part there.
    """
    chosen = {}
    for machine in dict.fromkeys(machines):
        here = Counter(layout.place(process).replica for process, other in enumerate(machines) if other == machine)
        chosen[machine] = min(here, key=lambda replica: (here[replica] < layout.island, replica))
    return chosen


def telling(layout: Layout, machines: Sequence[str]) -> set[int]:
    """The first process of each machine that has a part of the replica that writes there."""
    of = writing(layout, machines)
    first: dict[str, int] = {}
    for process, machine in enumerate(machines):
        if layout.place(process).replica == of[machine]:
            first.setdefault(machine, process)
    return set(first.values())
