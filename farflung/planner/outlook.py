"""What a run would be, before it trains: `farflung train --dry-run`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from farflung.cells import Cell, cells_among
from farflung.cores import usable_cores
from farflung.durations import TICKS_PER_SECOND, duration
from farflung.errors import counted
from farflung.outer import Method, added_bytes, message_bytes, traffic_per_hop
from farflung.pipeline.settings import IslandSettings
from farflung.planner.architecture import Architecture, architecture
from farflung.planner.memory import RESERVED, memory_bytes
from farflung.planner.table import figures
from farflung.settings import Settings
from farflung.workloads import Language, Workload

SIDE, SECONDS = 1024, 0.2
"""The side of the matrices that a device's speed is measured with, and for how long."""
RUNTIME = f"{RESERVED / 1e9:g} GB of it for the runtime"


def outlook(settings: Settings, device: torch.device) -> list[tuple[str, str]]:
    """What is trained, sent and needed, and how long its steps take here at least; a name and a text each.

    Measures the device for a moment, and reads no data. Raises UserError for settings that do not go together.
    """
    run, island, method = settings.run, settings.island, settings.method()
    workload = settings.made_workload()
    outline = workload.outline()
    model = architecture(settings.workload.model, outline) if isinstance(workload, Language) else None
    parameters = sum(one.numel() for one in outline.parameters())
    units = workload.units_per_sample * island.batch_size * run.replicas
    on_top = "; rows of the dealt tables come on top" if _deals_tables(workload) else ""
    rows = [
        ("model", f"{getattr(settings.workload, 'model', run.workload)}, {parameters:,} parameters"),
        ("replicas", f"{run.replicas}, {_processes(settings)}"),
        ("trained on", _trained_on(settings, units, workload.units)),
        ("rounds", _rounds(settings, method, _places(settings, workload, model, outline)) + on_top),
    ]
    if model:
        rows.append(("memory", f"{figures(_memory(settings, model, method) / 1e9)} GB a process at most, {RUNTIME}"))
    rate = _flops_per_second(device, island.precision) * _devices(device)
    step_s = _work(settings, workload, model, parameters) * units / rate
    here = f"all on this machine's {device.type} at {figures(rate / 1e9)} GFLOP/s"
    return [*rows, ("time", _time(settings, step_s, here))]


def _time(settings: Settings, step_s: float, here: str) -> str:
    """How long all steps take, of which all replicas' take so long together; by the clock, they are as many as fit."""
    run, pace = settings.run, settings.network.simulated_conditions()
    if not settings.by_clock:
        return f"{duration(step_s * run.steps)} or more for the steps, {here}; rounds come on top"
    lasts = run.steps / TICKS_PER_SECOND
    if not settings.network.kind.simulate:
        return f"{duration(lasts)} and a step at most; {duration(step_s)} or more a step, {here}"
    steps = sum(lasts / pace.step_seconds(rank) for rank in range(run.replicas)) / run.replicas
    told = f"{duration(step_s * steps)} or more for the steps of {duration(lasts)} of the simulated clock"
    return f"{told}, {here}; rounds come on top"


def _processes(settings: Settings) -> str:
    """How many processes the replicas are."""
    if settings.network.kind.simulate:
        return "in one process"
    return f"{counted(settings.mesh().processes, 'process')} in all"


def _trained_on(settings: Settings, units: int, name: str) -> str:
    """What all replicas train on in the run, where that can be told before."""
    if settings.by_clock:
        return f"{units:,} {name} in a step of all; each replica takes as many steps as it has time for"
    steps = settings.run.steps
    return f"{units * steps:,} {name}: {counted(steps, 'step')} of {units:,}"


def _memory(settings: Settings, model: Architecture, method: Method) -> float:
    """The most bytes that any process needs; a simulated run's has all replicas in it."""

    def need(island: IslandSettings) -> float:
        trained = model.constrained(island.boundary, island.stages, settings.run.seed)
        return memory_bytes(trained, island, method, settings.workload.sequence_length)

    most = max(need(settings.island.of(shape)) for shape in set(settings.mesh().shapes))
    replicas = settings.run.replicas if settings.network.kind.simulate else 1
    return RESERVED + replicas * (most - RESERVED)


def _rounds(settings: Settings, method: Method, places: Sequence[Sequence[Cell]]) -> str:
    """How many there are, and what each replica sends in them."""
    replicas, name = settings.run.replicas, settings.rounds.method
    every, seconds = method.schedule.every, method.schedule.seconds
    if not method.exchanges or every is None or replicas == 1:
        return f"none ({name})"
    members = max(map(len, method.topology.groups(tuple(range(replicas)), "dry run")))
    size = sum(message_bytes(method, cells, members) for cells in places)
    sent = (members - 1) * sum(traffic_per_hop(method.codec, method.averaging, members)) * size
    sent += sum(added_bytes(method, cells, replicas) for cells in places)
    count = settings.run.steps // every
    between = counted(every, "step") if seconds is None else duration(seconds)
    told = f"{count} of {name}, each {between}"
    return f"{told}; a replica sends {figures(sent / 1e6)} MB in one, {figures(count * sent / 1e6)} MB in all"


def _places(settings: Settings, workload: Any, model: Architecture | None, outline: nn.Module) -> list[list[Cell]]:
    """The cells that each process of a replica exchanges."""
    shape = settings.mesh().shapes[0]
    if model is None:
        averaged = workload.tables_and_rest(outline)[1] if _deals_tables(workload) else outline
        return [cells_among([[tuple(one.shape) for one in averaged.parameters()]])]
    trained = model.constrained(settings.island.boundary, shape.stages, settings.run.seed)
    return trained.kept_cells(shape.stages, shape.shards)


def _deals_tables(workload: Workload) -> bool:
    """Whether replicas deal tables out, and the method averages the rest alone."""
    return bool(getattr(workload, "crossing", ""))


def _work(settings: Settings, workload: Workload, model: Architecture | None, parameters: int) -> float:
    """Operations for one unit, forward and backward; where nobody counts them, as many as at least."""
    if model is None:
        count = getattr(workload, "operations", lambda _: None)
        return float(count(settings.island.recompute) or 6.0 * parameters)
    (whole,) = model.spans(1)
    return model.flops_per_token(whole, settings.workload.sequence_length, settings.island.recompute)


def _flops_per_second(device: torch.device, precision: str) -> float:
    """Operations a second in products of matrices."""
    matrix = torch.ones(SIDE, SIDE, device=device, dtype=getattr(torch, precision))
    began, count = time.monotonic(), 0
    while (took := time.monotonic() - began) < SECONDS or count < 2:
        (matrix @ matrix)[0, 0].item()  # which waits for the device
        count += 1
    return 2.0 * SIDE**3 * count / took


def _devices(device: torch.device) -> float:
    """How many times what was measured this machine has."""
    if device.type == "cuda":
        return torch.cuda.device_count()
    return usable_cores() / torch.get_num_threads() if device.type == "cpu" else 1
