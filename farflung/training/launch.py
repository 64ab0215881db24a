"""Starting a run's replicas: as processes, as one of torchrun's processes, or simulated in this one."""

from __future__ import annotations

import functools
import os
import re
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from farflung import formats, methods, scoped
from farflung.config import Config, to_toml
from farflung.errors import UserError, disk_errors
from farflung.events import EndEvent
from farflung.files import write_text
from farflung.formats import RUN_FOLDER
from farflung.networks import Conditions, ReplicaDiedError, SimulatedNetwork, Simulation, TorchNetwork, conditions_named
from farflung.pipeline import Layout, check
from farflung.training import checkpoint
from farflung.training.alike import other_text, refuse_other_settings
from farflung.training.beginning import (
    AGAIN,
    NEW,
    RESTARTED,
    RESUMED,
    Standing,
    begun_by_this_launch,
    clear,
    first_step,
    local_step,
    note_launch,
    refuse_other_replicas,
    refuse_while_trained,
    telling,
    writing,
)
from farflung.training.events import holds_a_run
from farflung.training.failures import OneLine, failure_of
from farflung.training.finish import Endings, finish, write_results
from farflung.training.gather import gather
from farflung.training.kept import Kept
from farflung.training.stopping import Stop, StoppedError
from farflung.training.survivors import ended_together
from farflung.training.terminal import STARTED_HERE, say
from farflung.training.trainer import Trainer
from farflung.workloads import data, models, tokenizers
from farflung.workloads.text import documents


def prepare(config: Config, folder: Path, resume: bool, restart: bool = False) -> None:
    """Refuses what cannot work before anything is started, and writes config.toml. Raises UserError.

    To `restart` removes the run that is in the folder; the settings are found to be good before that.
    """
    check_settings(config)
    if line := without_rounds(config):
        say(line)
    if restart:
        clear(folder)
    elif resume:
        refuse_other_replicas(config, folder)
        if config.network != "internet":
            local_step(config, folder)
    elif any(folder.glob("events/*.jsonl")):
        raise holds_a_run(folder)
    write_settings(config, folder)


def check_settings(config: Config) -> None:
    """Refuses what cannot work, as far as can be seen before anything is started. Raises UserError."""
    methods.settled(config)
    check_network(config)
    conditions_of(config)
    tokenizer = tokenizers.load(config.tokenizer)
    models.model_config(config, tokenizer)
    check(config, tokenizer)
    pick_device(config.device, 0)
    next(documents(config.data, config.text_column), None)


def without_rounds(config: Config) -> str:
    """What to say of a run that ends before its first round; "" for others."""
    schedule = methods.from_config(config).schedule
    first = min(schedule.first(fragment) for fragment in range(schedule.fragments))
    if first <= config.steps:
        return ""
    return f"no round will be held: the first comes after step {first} of {config.steps}; give a smaller --every"


def write_settings(config: Config, folder: Path) -> None:
    """Writes config.toml. Raises UserError."""
    with disk_errors(f"write to {folder}", "choose another folder with --out"):
        folder.mkdir(parents=True, exist_ok=True)
        version = f"{formats.KEY} = {RUN_FOLDER.version}\n"
        write_text(folder / "config.toml", version + to_toml(methods.settled(config)))


def check_network(config: Config) -> None:
    """Refuses settings that another network is for. Raises UserError."""
    if config.robust != "mean" and config.network != "internet":
        raise UserError(f"robust is {config.robust!r}, but only peers on the internet need it; leave it out")
    for name in ("conditions", "bandwidth_mbps", "latency_ms", "step_ms"):
        if getattr(config, name) not in ("", None) and config.network != "simulated":
            raise UserError(
                f"{name} is {getattr(config, name)!r}, but real links are as they are; add --network simulated"
            )
    if config.shares == "apart" and config.network == "internet":
        raise UserError(
            "shares is 'apart', but on the internet nobody knows how many replicas there will be; leave it out"
        )


def run_simulated(config: Config, folder: Path, resume: bool) -> None:
    """All replicas in this process, under a virtual clock.

    Raises StoppedError, UserError and whatever training raises.
    """
    torch.set_num_threads(1)  # with another number, sums may differ in their last bits
    simulation = Simulation(config.replicas, conditions_of(config))
    store = HashStore()
    stop = Stop(store, range(config.replicas), range(config.replicas))
    kept = Kept(store, lambda: simulation.world.living)
    step = local_step(config, folder) if resume else None
    text = data.load(config, tokenizers.load(config.tokenizer))
    endings = Endings()

    def replica(network: SimulatedNetwork) -> None:
        if step and step not in (steps := checkpoint.steps_of(folder, network.rank)):
            kept.tell(network.rank, steps)
            network.stay_dead()
        trainer = Trainer(config, network, folder, stop, kept, pick_device(config.device, network.rank), step, text)
        with closing(trainer.events):
            try:
                trainer.train()
                endings.finish(trainer)
            except ReplicaDiedError:
                trainer.events.write(EndEvent(step=trainer.step, reason="died"))
                raise

    with stopping_on_signals(stop):
        simulation.run(replica)


def conditions_of(config: Config) -> Conditions:
    """What the simulated network is to be like. Raises UserError."""
    conditions = conditions_named(config.conditions) if config.conditions else Conditions()
    changes = {name: getattr(config, name) for name in ("bandwidth_mbps", "latency_ms", "step_ms")}
    return replace(conditions, **{name: value for name, value in changes.items() if value is not None})


@functools.partial(record, error_handler=OneLine())
def run_torch_replica(
    config: Config, folder: Path, resume: bool, restart: bool = False, begun: Callable[[], None] = lambda: None
) -> bool:
    """This process's part of a replica, under torchrun. Raises as `run_simulated` does.

    Tells when the run has `begun` in the folder. Returns whether it has written the summary for its machine.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    way = ""
    if local_rank == 0:
        way = RESUMED if resume else NEW
        if STARTED_HERE not in os.environ:
            # The others come no further meanwhile than joining.
            way = _prepare_machine(config, folder, RESTARTED if restart else way)
    use_cores_of(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    network = TorchNetwork.from_env(config.starting)
    layout = Layout.of(config)
    place = layout.place(network.process)
    everyone = range(layout.processes)
    stop = Stop(network.store, everyone, [network.process], launcher=os.getppid())
    with stopping_on_signals(stop):
        refuse_other_settings(network, config)
        own = Standing.of(folder, place.replica, layout.seat(place), way)
        standings = [Standing(**told) for told in gather(network, vars(own), "standings", config.deadline).values()]
        step = first_step(standings, folder)
        if RESTARTED in {standing.way for standing in standings}:
            _clear_machines(config, folder, way, network)
        begun()
        if way == RESUMED:
            write_settings(config, folder)  # which may be other ones, in what may change
        kept = Kept(network.store, lambda: everyone)
        trainer = Trainer(config, network, folder, stop, kept, pick_device(config.device, local_rank), step)
        machines = {process: standing.machine for process, standing in enumerate(standings)}
        with closing(trainer.events):
            if other_text(network, trainer.held_out, config.deadline) and network.process in telling(layout, machines):
                trainer.warn("machines hold other text than each other; validation losses are not of the same text")
            trainer.train()
            tells = _finish_with_those_left(trainer, network, layout, machines)
    network.close()
    return tells


def _finish_with_those_left(
    trainer: Trainer, network: TorchNetwork, layout: Layout, machines: Mapping[int, str]
) -> bool:
    """Ends a run of processes, of which some may be lost; whether this one has written the summary for its machine."""
    summary = finish(trainer, lambda ended: ended_together(ended, network, layout, trainer.config.deadline))
    missing = summary["missing"]
    machines = {process: name for process, name in machines.items() if layout.place(process).replica not in missing}
    tells = network.process in telling(layout, machines)
    if tells and missing:
        lost = ", ".join(map(str, missing))
        trainer.warn(f"replicas lost: {lost}; the averaged weights and the summary are of the others")
    if layout.place(network.process).replica in writing(layout, machines).values():
        write_results(trainer, summary, tells)
    return tells


def _prepare_machine(config: Config, folder: Path, way: str) -> str:
    """What is to be done once on each machine before its processes join. Returns how it begins. Raises UserError."""
    if way in (NEW, RESTARTED) and begun_by_this_launch(folder):
        way = AGAIN
    if way == NEW:
        prepare(config, folder, resume=False)
        note_launch(folder)
    else:
        check_settings(config)
        if way == RESTARTED:
            refuse_while_trained(folder)
        else:
            refuse_other_replicas(config, folder)
    return way


def _clear_machines(config: Config, folder: Path, way: str, network: TorchNetwork) -> None:
    """Removes the old runs, once all processes have come and agreed to begin anew. Raises UserError, on all alike."""
    fault = ""
    if way == RESTARTED:
        try:
            clear(folder)
            write_settings(config, folder)
        except UserError as error:
            fault = str(error)
    if faults := list(filter(None, gather(network, fault, "cleared", config.deadline).values())):
        raise UserError(faults[0])
    if way == RESTARTED:
        note_launch(folder)


def launch_torch(config: Config, folder: Path, resume: bool) -> None:
    """All processes on this machine, with torch's elastic launcher.

    Raises StoppedError, UserError or RunFailedError.
    """
    environment = {
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        "OMP_NUM_THREADS": str(cores_for(Layout.of(config).processes)),
        STARTED_HERE: "1",
    }
    (folder / "logs").mkdir(exist_ok=True)
    launcher = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=Layout.of(config).processes,
        run_id=folder.name,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(log_dir=tempfile.mkdtemp(dir=folder / "logs"), redirects=Std.ALL),
        shutdown_timeout=round(2 * config.deadline),
        signals_to_handle=",".join(number.name for number in (*stop_signals(), signal.SIGQUIT)),
    )
    arguments = ["--resume", str(folder)] if resume else [str(folder / "config.toml")]
    try:
        with scoped.quiet("torch.distributed.elastic"), scoped.environment(**environment):
            elastic_launch(launcher, sys.executable)("-m", "farflung", "train", *arguments)
    except SignalException as error:
        raise StoppedError("stopped by a signal") from error
    except ChildFailedError as error:
        raise failure_of(error, folder, Layout.of(config)) from error


def stop_signals() -> list[signal.Signals]:
    """Those that ask for a stop; the end of a terminal does not where nohup has seen to that."""
    hangs_up = signal.getsignal(signal.SIGHUP) != signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hangs_up else [])]


@contextmanager
def stopping_on_signals(stop: Stop) -> Iterator[None]:
    """Ctrl-C and its kin ask for a stop; a second one while stopping is the same wish."""
    before = {number: signal.signal(number, stop.request) for number in stop_signals()}
    try:
        with stop.listening():
            yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def pick_device(name: str, local_rank: int) -> torch.device:
    """The device that a setting names; `auto` takes a machine's GPUs in turn when there are any. Raises UserError."""
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda", local_rank % torch.cuda.device_count())
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
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // replicas)


def use_cores_of(replicas: int) -> None:
    """Lets torch use one replica's share of the cores."""
    torch.set_num_threads(cores_for(replicas))
