"""Where a run starts: from the beginning, or at the newest checkpoint that all of its replicas have."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import socket
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from farflung import formats
from farflung.errors import UserError, disk_errors
from farflung.files import event_files, lock_holders, write_text
from farflung.formats import RUN_FOLDER
from farflung.pipeline import Mesh, MeshCoordinates
from farflung.settings import Settings, names_that_may_differ, read_settings, settings_toml
from farflung.tables import AFTER_RESUME, BETWEEN_MACHINES
from farflung.training import checkpoint, events
from farflung.training.failures import RUN_ERRORS
from farflung.training.stopping import StoppedError

NEW, RESTARTED, RESUMED, AGAIN = "new", "restarted", "resumed", "again"
"""How a machine starts: in an empty folder; again from the beginning; resuming a run; or restarted by torchrun."""
SHOWN = 6
"""The most steps or replicas that a message names."""


@dataclass(frozen=True)
class Standing:
    """What one process finds in its run folder.

    Args:
        replica: its own.
        machine: where the folder is; the same for processes that share it.
        steps: at which it has a checkpoint to go on from.
        trained: whether there is anything that beginning anew would lose.
        way: how its machine begins; "" for processes that leave this to another one there.
        damaged: the files of its replica's checkpoints that cannot be used.
    """

    replica: int
    machine: str
    steps: tuple[int, ...]
    trained: bool
    way: str = ""
    damaged: tuple[str, ...] = ()

    @classmethod
    def of(cls, folder: Path, replica: int, stem: str, way: str = "") -> Standing:
        """A folder's content for a process, by the stem of its files: its own parts, or all of its replica."""
        machine = f"{socket.gethostname()}, node {os.environ.get('GROUP_RANK', 0)}, {folder.resolve()}"
        steps = tuple(checkpoint.sound_steps(folder, replica, stem))
        damaged = tuple(str(path) for path in checkpoint.damaged(folder, replica, max(steps, default=0)))
        trained = bool(steps or damaged) or events.tell_of_training(folder.glob("events/*.jsonl"))
        return cls(replica, machine, steps, trained, way, damaged)


def first_step(standings: Sequence[Standing], folder: Path) -> int | None:
    """The step after which all resume; 0 for the beginning of a run without lost work, None for a new run.

    Raises UserError where resuming would lose work.
    """
    ways = {standing.way for standing in standings} - {""}
    if ways <= {NEW, RESTARTED}:
        return None
    if RESTARTED in ways:
        anew, on = (
            _who([standing for standing in standings if standing.way in kinds])
            for kinds in ((NEW, RESTARTED), (RESUMED, AGAIN))
        )
        raise UserError(f"{anew} would begin anew, but {on} would go on; give --restart on all machines or on none")
    common = set.intersection(*(set(standing.steps) for standing in standings))
    if common and NEW not in ways:
        return max(common)
    if ways == {AGAIN} or not any(standing.trained for standing in standings):
        return 0
    raise UserError(
        f"{folder} cannot go on: no checkpoint is there of all replicas ({_described(standings)}); "
        f"copy what is missing from other machines or a backup, or begin anew with: {restart_command(folder)}"
    )


def local_step(settings: Settings, folder: Path) -> int:
    """The step that a run goes on from whose replicas all keep their files in this folder. Raises UserError.

    The checkpoints of replicas that have died are not waited for.
    """
    died = events.died(folder)
    mesh = settings.mesh()
    stems = [(replica, mesh.file_stem(MeshCoordinates(replica))) for replica in range(settings.run.replicas)]
    standings = [Standing.of(folder, replica, stem, RESUMED) for replica, stem in stems]
    return first_step([one for one in standings if one.replica not in died] or standings, folder) or 0


def refuse_other_replicas(settings: Settings, folder: Path) -> None:
    """Refuses to go on with another number of replicas than there are. Raises UserError."""
    path = folder / "config.toml"
    before = read_settings(path).run.replicas if path.exists() else settings.run.replicas
    if before != settings.run.replicas:
        island, now = settings.island, settings.run.replicas
        remedy = "give so many islands" if island.islands else f"start {before * island.processes} processes"
        raise UserError(
            f"{folder} is a run of {before} replicas, and {now} are started; {remedy} with these stages and shards, or "
            f"begin anew with: {restart_command(folder)}"
        )


def refuse_observers_own(settings: Settings, folder: Path) -> None:
    """Refuses to go on with the folder of a run's observer, which trains nothing. Raises UserError."""
    if settings.run.observe and not settings.network.kind.elastic:
        raise UserError(
            f"{folder} is an observer's, which goes on with its run: {events.resume_command(folder.parent)}"
        )


def begun_with(folder: Path) -> Path:
    """The file with the settings that a run was begun with, or goes on with: what config.toml held then."""
    return folder / "logs" / "config.toml"


def write_settings(settings: Settings, folder: Path) -> None:
    """Writes config.toml, and what tells when it was edited. Raises UserError."""
    with disk_errors(f"write to {folder}", "choose another folder with --out"):
        folder.mkdir(parents=True, exist_ok=True)
        version = f"{formats.KEY} = {RUN_FOLDER.version}\n"
        for path in (folder / "config.toml", begun_with(folder)):
            write_text(path, f"{version}\n{settings_toml(settings.settled())}")


def refuse_edited(settings: Settings, folder: Path) -> None:
    """Refuses to go on with settings that somebody has edited since, where a run keeps them. Raises UserError."""
    if not (path := begun_with(folder)).exists():
        return  # by a release that kept no second file of them
    before, now = read_settings(path).flat(), settings.settled().flat()
    # What peers may each choose, such as where the model lies, stays as it was where one has begun.
    free = {name for where in (AFTER_RESUME, BETWEEN_MACHINES) for name in names_that_may_differ(where, settings)}
    free |= {*vars(settings.network)}
    for name in sorted((before.keys() | now.keys()) - free):
        if before.get(name) != now.get(name):
            raise UserError(
                f"{folder / 'config.toml'} has been edited: {name} is {_told(now.get(name))}, but this run was begun "
                f"with {_told(before.get(name))}; change it back, or begin anew with: {restart_command(folder)}"
            )


def _told(value: object) -> str:
    return "unset" if value is None else repr(value)


def refuse_occupied(folder: Path) -> None:
    """Refuses a new run in the folder of another one, or of a model. Raises UserError."""
    if event_files(folder):
        raise events.holds_a_run(folder)
    if (folder / "config.json").exists():
        raise UserError(f"{folder} holds a model, which a run would mix with; choose another folder with --out")


def refuse_while_trained(folder: Path) -> None:
    """Refuses to touch a run that another process trains. Raises UserError."""
    with disk_errors(f"write to {folder}", "see to it, or begin a run in another folder with --out"):
        for path in event_files(folder):
            with contextlib.suppress(FileNotFoundError):  # another machine shares the folder, and has removed it
                events.locked(path).close()


def clear(folder: Path) -> None:
    """Removes a run's files, except its settings. Raises UserError where it is being trained, or stays."""
    with disk_errors(f"remove the old run in {folder}", "see to it, or begin anew in another folder with --out"):
        refuse_while_trained(folder)
        for name in ("summary.json", "report.html"):
            (folder / name).unlink(missing_ok=True)
        others = ("checkpoints", "memory", "profile", "trackers", "tensorboard")
        below = (path for kind in ("replica", "observer") for path in folder.glob(f"{kind}-*"))
        # What is left of a run is known by its events.
        for path in (*(folder / name for name in others), *below, folder / "events"):
            ends = time.monotonic() + events.ENDING_SECONDS
            while path.exists():
                try:
                    shutil.rmtree(path)
                except OSError as error:  # another machine shares the folder: it was quicker, or has just looked there
                    if error.errno not in (errno.ENOENT, errno.ENOTEMPTY) or time.monotonic() > ends:
                        raise
                    time.sleep(0.05)


@contextlib.contextmanager
def left_as_it_was(folder: Path) -> Iterator[None]:
    """Removes what a new run in which nothing was trained has put into its folder, and the folder if it made that.

    It stays where the user is told how to go on with it; and a ticket, with the key of the peer to which that leads.
    """
    begun, there, before = bool(event_files(folder)), folder.exists(), set(folder.glob("*"))
    try:
        yield
    except BaseException as error:
        trained = any(folder.rglob("*.pt")) or events.tell_of_training(event_files(folder))
        if not (begun or trained or _others_train(folder) or isinstance(error, (StoppedError, *RUN_ERRORS))):
            told = {folder / name for name in ("peer.key", "run.ticket")}
            for path in set(folder.glob("*")) - before - (told if all(path.exists() for path in told) else set()):
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink()
            if folder.exists() and not there:
                with contextlib.suppress(OSError):  # another process of the run is not done yet
                    folder.rmdir()
        raise


def _others_train(folder: Path) -> bool:
    """Whether processes that this one has not started hold a run in a folder: of two that began one, the other came."""
    holders = lock_holders() or {}
    held = (holders.get(path.stat().st_ino) for path in event_files(folder))
    return any(process is not None and process != os.getpid() for process in held)


def how_to_go_on(folder: Path) -> str:
    """What to tell the user of a run that has ended early, by what is in its folder."""
    machines = int(os.environ.get("GROUP_WORLD_SIZE", "1"))
    on_all = f"torchrun on all {machines} machines as before, and -m " if machines > 1 else ""
    if not folder.is_dir():
        return f"{folder} is not there; where it was moved, go on from its new place: farflung train --resume FOLDER"
    if steps := checkpoint.whole_steps(folder):
        return f"its last checkpoint is of step {steps[0]}; go on with: {on_all}{events.resume_command(folder)}"
    if not events.tell_of_training(folder.glob("events/*.jsonl")):
        return f"go on with: {on_all}{events.resume_command(folder)}"
    return f"there is no checkpoint to go on from; begin anew with: {on_all}{restart_command(folder)}"


def restart_command(folder: Path) -> str:
    """The command that starts a run again from the beginning."""
    return f"{events.resume_command(folder)} --restart"


def begun_by_this_launch(folder: Path) -> bool:
    """Whether the torchrun that has started this process has begun the run in a folder, in an earlier attempt."""
    path = _launch_file(folder)
    return path.exists() and path.read_bytes() == _launch().encode()


def note_launch(folder: Path) -> None:
    """Records which torchrun starts the run, if one does."""
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


def _described(standings: Sequence[Standing]) -> str:
    """Which replicas have which steps, and which files are damaged, in a line."""
    having: dict[tuple[tuple[int, ...], str], list[Standing]] = {}
    for standing in standings:
        having.setdefault((tuple(standing.steps), _host(standing)), []).append(standing)
    told = []
    for (steps, _), replicas in list(having.items())[:SHOWN]:
        what = f"steps {_listed(steps[-SHOWN:])}" if len(steps) > 1 else f"step {steps[0]}" if steps else "none"
        told.append(f"{_who(replicas)}: {what}")
    if damaged := sorted({path for standing in standings for path in standing.damaged}):
        told.append(f"damaged: {_listed(damaged)}")
    return "; ".join(told) + ("; …" if len(having) > SHOWN else "")


def _who(standings: Iterable[Standing]) -> str:
    """Replicas and where they are, in words."""
    on: dict[str, set[int]] = {}
    for standing in standings:
        on.setdefault(_host(standing), set()).add(standing.replica)
    told = [
        f"replica{'s' if len(r) > 1 else ''} {_listed(sorted(r))} on {host}" for host, r in list(on.items())[:SHOWN]
    ]
    return " and ".join(told) + (" …" if len(on) > SHOWN else "")


def _host(standing: Standing) -> str:
    return standing.machine.partition(",")[0]


def _listed(numbers: Sequence[object]) -> str:
    return ", ".join(map(str, numbers[:SHOWN])) + (" …" if len(numbers) > SHOWN else "")


def writing_replicas(mesh: Mesh, machines: Mapping[int, str]) -> dict[str, int]:
    """The replica that writes, on each machine, what all have in common; given the machine of each process there is.

    It is the first replica that is there whole, or else the first that has a part there.
    """
    chosen = {}
    for machine in dict.fromkeys(machines.values()):
        here = Counter(mesh.coordinates(process).replica for process, other in machines.items() if other == machine)
        chosen[machine] = min(here, key=lambda replica: (here[replica] < mesh.shape(replica).processes, replica))
    return chosen


def summary_writers(mesh: Mesh, machines: Mapping[int, str]) -> set[int]:
    """The first process of each machine that has a part of the replica that writes there."""
    of = writing_replicas(mesh, machines)
    first: dict[str, int] = {}
    for process, machine in machines.items():
        if mesh.coordinates(process).replica == of[machine]:
            first.setdefault(machine, process)
    return set(first.values())
