"""Starting a run's replicas: as processes, as one of torchrun's processes, or simulated in this one."""

from __future__ import annotations

import functools
import os
import re
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import cast

import torch
from torch.distributed import HashStore
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from farflung import scoped
from farflung.cores import usable_cores
from farflung.errors import UserError, disk_errors
from farflung.files import event_files
from farflung.networks import ReplicaDiedError, SimulatedNetwork, Simulation, TorchNetwork
from farflung.pipeline import Mesh
from farflung.pipeline.check import check
from farflung.pipeline.compiling import check_compiler
from farflung.settings import Settings
from farflung.signals import Interrupt, Interrupted, on_stop_signals, stop_signals
from farflung.training import beginning, checkpoint
from farflung.training.agreement import all_gather_facts, other_data, refuse_other_settings
from farflung.training.batched import check_batched
from farflung.training.cautions import cautions
from farflung.training.core import check_core
from farflung.training.dealing import check_dealing
from farflung.training.dealt_tables import check_tables
from farflung.training.failures import OneLine, failure_of
from farflung.training.finish import Endings, ended_together, finish, write_events, write_results
from farflung.training.forks import import_ahead, none_left, run_module, starting
from farflung.training.kept import Coordination, Kept
from farflung.training.limits import check_clock, check_groups, check_memory, check_observer, check_profile
from farflung.training.observing import observe_replicas, stop_alone
from farflung.training.showing import Shown
from farflung.training.stopping import Stop, StoppedError
from farflung.training.terminal import STARTED_HERE, looks_by_itself, say, share_terminal
from farflung.training.trainer import Trainer


def prepare(settings: Settings, folder: Path, resume: bool, restart: bool = False) -> None:
    """Refuses settings that cannot work, and writes config.toml. Raises UserError.

    To `restart` removes the run that is in the folder; the settings are found to be good before that.
    """
    if resume or restart:
        beginning.refuse_observers_own(settings, folder)
        beginning.refuse_while_trained(folder)
    else:
        beginning.refuse_occupied(folder)
    check_settings(settings)
    for line in cautions(settings):
        say(line)
    if restart:
        beginning.clear(folder)
    elif resume:
        beginning.refuse_other_replicas(settings, folder)
        if not settings.network.kind.elastic:
            beginning.refuse_edited(settings, folder)
            beginning.local_step(settings, folder)
    beginning.write_settings(settings, folder)


def is_begun(folder: Path) -> bool:
    """Whether there is a run in a folder."""
    return bool(event_files(folder))


def check_settings(settings: Settings) -> None:
    """Refuses settings that cannot work, as far as can be seen before the start. Raises UserError."""
    settings.method()
    check_groups(settings)
    check_core(settings)
    check_dealing(settings)
    check_tables(settings)
    check_profile(settings)
    check_network(settings)
    check_clock(settings)
    check_observer(settings)
    workload = settings.made_workload()
    workload.check()
    _check_island(settings)
    check_memory(settings)
    check(settings.island, workload, settings.run.seed)
    if pick_device(settings.run.device, 0).type == "cpu" and settings.island.compile:
        check_compiler()


def prepare_data(settings: Settings) -> None:
    """Has the data made ready once, where a workload can, before the replicas ask for it. Raises UserError."""
    getattr(settings.made_workload(), "prepare", lambda: None)()


def _check_island(settings: Settings) -> None:
    """Refuses what the processes of an island cannot do with other settings. Raises UserError."""
    island = settings.island
    if island.gateway and not settings.network.kind.elastic:
        raise UserError("gateway is for peers on the internet; leave it out")
    if island.swarm and not settings.network.kind.elastic:
        raise UserError("a swarm is of peers on the internet; begin it with farflung invite, or leave out --swarm")
    if island.swarm and island.stepping == "synchronous" and settings.rounds.method != "local":
        raise UserError(
            f"method is {settings.rounds.method!r}, but peers whose steps are synchronous are equal without rounds; "
            "choose --method local"
        )
    if island.swarm and settings.inner.tail_average:
        raise UserError("nobody has all of a swarm's weights to judge their tail average; leave out --tail-average")
    if settings.network.kind.simulate and (island.divided or island.offload):
        what = "stages and shards need" if island.divided else "offload needs"
        raise UserError(f"{what} real processes; leave out --network simulated")
    if island.batched_replicas:
        check_batched(settings)


def check_network(settings: Settings) -> None:
    """Refuses settings that another network is for. Raises UserError."""
    if settings.rounds.robust != "mean" and not settings.network.kind.elastic:
        raise UserError(f"robust is {settings.rounds.robust!r}, but only peers on the internet need it; leave it out")
    settings.network.simulated_conditions()
    if settings.run.shares == "apart" and settings.network.kind.elastic:
        raise UserError("shares is 'apart', but on the internet the number of replicas is not known; leave it out")


def run_simulated(settings: Settings, folder: Path, resume: bool) -> None:
    """All replicas in this process, under a virtual clock.

    Raises StoppedError, UserError and whatever training raises.
    """
    # With another number sums may differ in their last bits; small matrices gain nothing from it, but many at once do.
    torch.set_num_threads(cores_for(1) if settings.island.batched_replicas else 1)
    simulate, run = settings.network.kind.simulate or Simulation, settings.run
    more = (run.observers,) if run.observers else ()  # other packages' networks may not know them
    simulation = simulate(run.replicas, settings.network.simulated_conditions(), *more)
    store = HashStore()
    stop = Stop(store, range(run.replicas), range(run.replicas))
    workload = settings.made_workload()
    kept = Kept(store, lambda: simulation.cluster.living, settings.figure)
    step = beginning.local_step(settings, folder) if resume else None
    endings = Endings()

    def replica(network: SimulatedNetwork) -> None:
        device = pick_device(run.device, network.rank)
        if network.rank >= run.replicas:
            return observe_replicas(settings, network, network, step, stop_alone(), device, workload)
        if step and step not in (steps := checkpoint.steps_of(folder, network.rank)):
            kept.tell(network.rank, dict.fromkeys(steps))
            network.stay_dead()
        coordination = Coordination(stop, kept, Shown.of(settings, network))
        trainer = Trainer(settings, network, folder, coordination, device, step, workload)
        logs.callback(trainer.log.events.close)  # the last one's end may have waited for room on the disk
        try:
            trainer.train()
            return endings.finish(trainer)
        except ReplicaDiedError:
            trainer.log.end("died")
            raise

    with ExitStack() as logs, stopping_on_signals(stop):
        simulation.run(replica)
        endings.check()


@functools.partial(record, error_handler=OneLine())
def run_torch_replica(
    settings: Settings,
    folder: Path,
    resume: bool,
    restart: bool,
    prepared: Callable[[], None],
    begun: Callable[[], None],
) -> bool:
    """This process's part of a replica, or an observer, under torchrun. Raises as `run_simulated` does.

    Tells when this machine is `prepared`, and when the run has `begun` in the folder. Returns whether it has written
    the summary for its machine.
    """
    way = _way(settings, folder, resume, restart)
    prepared()
    use_cores_of(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    opened = settings.network.kind.open(settings.network.starting, settings.network.deadline)
    network = cast(TorchNetwork, opened)  # what starts processes offers what it does
    mesh, process = settings.mesh(), network.process
    observes = process >= mesh.processes
    stop = stop_alone() if observes else Stop(network.store, range(mesh.processes), [process])
    with stopping_on_signals(stop):
        refuse_other_settings(network, settings)
        step, machines = _first_step(settings, folder, way, network)
        begun()
        if way == beginning.RESUMED:
            beginning.write_settings(settings, folder)  # which may be other ones, in what may change
        if observes:
            device = pick_device(settings.run.device, local_rank())
            observe_replicas(settings, network, network.among([process]), step, stop, device)
        tells = not observes and _train(settings, folder, network, stop, step, machines)
    network.close()
    return tells


def _first_step(settings: Settings, folder: Path, way: str, network: TorchNetwork) -> tuple[int | None, dict[int, str]]:
    """The step that all replicas resume from, None for a new run, and the machine of each of their processes.

    Raises UserError.
    """
    mesh, process = settings.mesh(), network.process
    replica, stem = process, f"replica-{process}"  # an observer has no part in what replicas have written
    if process < mesh.processes:
        replica, stem = mesh.coordinates(process).replica, mesh.file_stem(mesh.coordinates(process))
    own = beginning.Standing.of(folder, replica, stem, way)
    told = all_gather_facts(network, vars(own), "standings", settings.network.deadline).values()
    standings = [beginning.Standing(**one) for one in told][: mesh.processes]
    step = beginning.first_step(standings, folder)
    if beginning.RESTARTED in {standing.way for standing in standings}:
        _clear_machines(settings, folder, way, network)
    return step, {process: standing.machine for process, standing in enumerate(standings)}


def _train(
    settings: Settings, folder: Path, everyone: TorchNetwork, stop: Stop, step: int | None, machines: Mapping[int, str]
) -> bool:
    """Trains this process's part, to the end; whether it has written the summary for its machine."""
    mesh, deadline = settings.mesh(), settings.network.deadline
    network = everyone.between(range(mesh.processes)) if settings.run.observers else everyone
    kept = Kept(network.store, lambda: range(mesh.processes), settings.figure)
    coordination = Coordination(stop, kept, Shown.of(settings, everyone))
    device = pick_device(settings.run.device, local_rank())
    trainer = Trainer(settings, network, folder, coordination, device, step)
    with closing(trainer.log.events):
        differ = other_data(network, trainer.workload.digest(), deadline)
        if differ and network.process in beginning.summary_writers(mesh, machines):
            told = "machines hold other data than each other; validation losses are not of the same samples"
            trainer.log.warn(told)
        trainer.train()
        return _finish_with_those_left(trainer, network, mesh, machines)


def _finish_with_those_left(trainer: Trainer, network: TorchNetwork, mesh: Mesh, machines: Mapping[int, str]) -> bool:
    """Ends a run of processes, of which some may be lost; whether this one has written the summary for its machine."""
    summary = finish(trainer, lambda ended: ended_together(ended, network, mesh, trainer.settings.network.deadline))
    missing = summary["missing"]
    machines = {process: name for process, name in machines.items() if mesh.coordinates(process).replica not in missing}
    tells = network.process in beginning.summary_writers(mesh, machines)
    if tells and missing:
        lost = ", ".join(map(str, missing))
        trainer.log.warn(f"replicas lost: {lost}; the averaged weights and the summary are of the others")
    if mesh.coordinates(network.process).replica in beginning.writing_replicas(mesh, machines).values():
        write_results(trainer, summary, tells)
    if network.process == min(machines):
        trainer.show_the_end()
    write_events(trainer)
    return tells


def _way(settings: Settings, folder: Path, resume: bool, restart: bool) -> str:
    """How this process's machine begins, which its first process prepares; "" for the others. Raises UserError."""
    if local_rank() > 0:
        return ""
    way = beginning.RESUMED if resume else beginning.NEW
    if STARTED_HERE in os.environ:
        return way
    # The others come no further meanwhile than joining.
    return _prepare_machine(settings, folder, beginning.RESTARTED if restart else way)


def _prepare_machine(settings: Settings, folder: Path, way: str) -> str:
    """What is to be done once on each machine before its processes join. Returns how it begins. Raises UserError."""
    if way in (beginning.NEW, beginning.RESTARTED) and beginning.begun_by_this_launch(folder):
        way = beginning.AGAIN
    if way == beginning.NEW:
        prepare(settings, folder, resume=False)
        beginning.note_launch(folder)
    else:
        if way != beginning.AGAIN:
            beginning.refuse_while_trained(folder)
        check_settings(settings)
        if way != beginning.RESTARTED:
            beginning.refuse_other_replicas(settings, folder)
            beginning.refuse_edited(settings, folder)
    return way


def _clear_machines(settings: Settings, folder: Path, way: str, network: TorchNetwork) -> None:
    """Removes the old runs, once all processes have come and agreed to begin anew. Raises UserError, on all alike."""
    fault = ""
    if way == beginning.RESTARTED:
        try:
            beginning.clear(folder)
            beginning.write_settings(settings, folder)
        except UserError as error:
            fault = str(error)
    if faults := list(filter(None, all_gather_facts(network, fault, "cleared", settings.network.deadline).values())):
        raise UserError(faults[0])
    if way == beginning.RESTARTED:
        beginning.note_launch(folder)


def launch_torch(settings: Settings, folder: Path, resume: bool) -> None:
    """All of a run's processes on this machine. Raises as `run_processes`."""
    arguments = ["--resume", str(folder)] if resume else [str(folder / "config.toml")]
    run_processes(settings, folder, ["train", *arguments])


def run_processes(settings: Settings, folder: Path, arguments: Sequence[str]) -> None:
    """So many processes as settings have, with the same arguments of farflung, by torch's elastic launcher.

    Raises StoppedError, UserError or RunFailedError.
    """
    share_terminal()
    environment = {
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        "OMP_NUM_THREADS": str(cores_for(settings.mesh().processes)),
        STARTED_HERE: str(os.getpid()),
    }
    with disk_errors(f"write to {folder}", "make room, or choose another folder with --out"):
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        logs = tempfile.mkdtemp(dir=folder / "logs")
    # Torch before 2.13 has no setting for it, and kills who has not ended after half a minute.
    with scoped.environment(TORCH_ELASTIC_SHUTDOWN_TIMEOUT=str(round(2 * settings.network.deadline))):
        launcher = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=settings.mesh().processes + settings.run.observers,
            run_id=folder.name,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=logs, redirects=Std.ALL),
            start_method=import_ahead().get_start_method(),
            signals_to_handle=",".join(number.name for number in (*stop_signals(), signal.SIGQUIT)),
        )
    try:
        with (
            scoped.quiet("torch.distributed.elastic"),
            scoped.quiet("torch.multiprocessing.spawn"),
            scoped.environment(**environment),
            on_stop_signals(Interrupt()),  # until torch sets handlers of its own, which then go again
            none_left(2 * settings.network.deadline),  # torch ends none while it still starts others
            starting(),
        ):
            elastic_launch(launcher, run_module)(dict(os.environ), ["farflung", *arguments])
    except (SignalException, Interrupted) as error:
        raise StoppedError("stopped by a signal") from error
    except ChildFailedError as error:
        raise failure_of(error, folder, settings.mesh()) from error


def local_rank() -> int:
    """This process's number among those that were started together on this machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


@contextmanager
def stopping_on_signals(stop: Stop) -> Iterator[None]:
    """Ctrl-C and similar signals ask for a stop; a second one while stopping changes nothing."""
    with stop.listening(), on_stop_signals(stop.request):
        looks_by_itself()
        yield


def pick_device(name: str, local_rank: int) -> torch.device:
    """The device that a setting names; `auto` and `cuda` take a machine's GPUs in turn. Raises UserError."""
    if name in ("auto", "cuda") and torch.cuda.is_available():
        return torch.device("cuda", local_rank % torch.cuda.device_count())
    if name == "auto":
        return torch.device("cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        first_line = str(error).partition("\n")[0]
        raise UserError(f"device {name!r} cannot be used: {first_line}; try --device auto") from error
    return device


def cores_for(replicas: int) -> int:
    """How many of this machine's cores each of its replicas gets, unless OMP_NUM_THREADS says."""
    if re.fullmatch("[0-9]+", threads := os.environ.get("OMP_NUM_THREADS", "")):
        return int(threads)
    return max(1, usable_cores() // replicas)


def use_cores_of(replicas: int) -> None:
    """Lets torch use one replica's share of the cores."""
    torch.set_num_threads(cores_for(replicas))


def launch_all(settings: Settings, folder: Path, resume: bool) -> None:
    """All replicas, in this process or in others that it starts. Raises what these raise."""
    (run_simulated if settings.network.kind.simulate else launch_torch)(settings, folder, resume)
