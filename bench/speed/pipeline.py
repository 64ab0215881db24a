"""How near does a pipeline of four stages come to the ideal 1F1B schedule, on this machine's cores?
In the ideal, the physical limit, each stage's passes take what they take in one thread, messages take nothing, and
stages that compute at the same time share the cores evenly; cores that are all busy are each slower than one alone,
so passes are timed both ways. All figures are of the gradients of one batch, without the optimizer. Takes five
minutes.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import mean, median

import torch

from bench.lib.store import Store
from bench.lib.table import Cell, Part, Table
from farflung.networks import TorchNetwork
from farflung.pipeline.assemble import assemble
from farflung.pipeline.build import pieces_of
from farflung.pipeline.division import division_of
from farflung.settings import Settings, read_settings, settings_toml
from farflung.testing.hosts import LOOPBACK, torch_everywhere
from farflung.workloads import Language
from farflung.workloads.decoder import Piece


@dataclass(frozen=True)
class Options:
    model: str = "small"
    """What is trained."""
    stages: int = 4
    """Processes of one replica."""
    microbatches: int = 8
    """Parts of a batch."""
    sequences: int = 2
    """Sequences of a microbatch."""
    steps: int = 20
    """Batches; the medians are told."""


SMOKE = Options("micro", stages=2, microbatches=2, sequences=1, steps=2)


def settings(options: Options) -> Settings:
    return Settings.of(
        model=options.model,
        replicas=1,
        stages=options.stages,
        microbatches=options.microbatches,
        batch_size=options.microbatches * options.sequences,
        clip=0.0,
    )


def worker(config: Settings, steps: int) -> None:
    """Prints the seconds of each step of one process."""
    torch.set_num_threads(1)
    network = TorchNetwork.from_env()
    workload = Language(config.workload)
    island, _ = assemble(config.island, workload, network, config.mesh(), 0, config.network, torch.device("cpu"))
    for step in range(steps + 2):
        torch.distributed.barrier()
        began = time.monotonic()
        island.gradients(step)
        if step >= 2:
            print(time.monotonic() - began, flush=True)


Passes = list[tuple[float, float]]


def all_pass_seconds(config: Settings, steps: int) -> Passes:
    """What each stage's forward and backward pass of one microbatch take, in this process's one thread."""
    torch.set_num_threads(1)
    workload = Language(config.workload)
    division = division_of(config.island, workload, seed=0)
    return [
        pass_seconds(piece.train(), config, steps)
        for stage in range(config.island.stages)
        for piece in pieces_of(config.island, workload, division, stage, seed=0)
    ]


def busy_pass_seconds(config: Settings, steps: int, cores: int) -> Passes:
    """The same while as many processes as there are cores do it; the mean of their medians."""
    with ProcessPoolExecutor(cores, mp_context=get_context("spawn")) as pool:
        seen = list(pool.map(all_pass_seconds, [config] * cores, [steps] * cores))
    return [(mean(f for f, _ in stage), mean(b for _, b in stage)) for stage in zip(*seen, strict=True)]


def pass_seconds(piece: Piece, config: Settings, steps: int) -> tuple[float, float]:
    """What a piece's forward and backward pass of one microbatch take."""
    size = (config.island.batch_size // config.island.parts, config.workload.sequence_length)
    forward, backward = [], []
    for _ in range(steps):
        tokens = torch.randint(256, size)
        entering = tokens if piece.span.first else torch.randn(*size, piece.model.config.hidden_size).requires_grad_()
        began = time.monotonic()
        leaving = piece(entering)
        if piece.span.last:
            leaving = piece.model.loss_function(logits=leaving, labels=tokens, vocab_size=leaving.shape[-1])
        between = time.monotonic()
        leaving.backward(torch.randn_like(leaving) if leaving.dim() else None)
        forward.append(between - began)
        backward.append(time.monotonic() - between)
    return median(forward), median(backward)


def order(stage: int, stages: int, microbatches: int) -> list[tuple[str, int]]:
    """1F1B: as many forward passes ahead as there are stages from here on, then one of each in turn."""
    ahead = min(microbatches, stages - stage)
    passes = [("F", m) for m in range(ahead)]
    for m in range(microbatches):
        passes.append(("B", m))
        if m + ahead < microbatches:
            passes.append(("F", m + ahead))
    return passes


def ideal_seconds(seconds: list[tuple[float, float]], microbatches: int, cores: int) -> float:
    """How long the passes take in 1F1B's order, when those that run together share the cores evenly."""
    stages = len(seconds)
    todo = [order(stage, stages, microbatches) for stage in range(stages)]
    done: set[tuple[str, int, int]] = set()
    left: dict[int, float] = {}
    now = 0.0

    def ready(stage: int) -> bool:
        kind, m = todo[stage][0]
        if kind == "F":
            return stage == 0 or ("F", stage - 1, m) in done
        return (("F", stage, m) if stage == stages - 1 else ("B", stage + 1, m)) in done

    while any(todo):
        for stage in range(stages):
            if todo[stage] and stage not in left and ready(stage):
                left[stage] = seconds[stage][todo[stage][0][0] == "B"]
        speed = min(1.0, cores / len(left))
        passed = min(left.values()) / speed
        now += passed
        for stage in list(left):
            left[stage] -= passed * speed
            if left[stage] <= 1e-12:
                kind, m = todo[stage].pop(0)
                done.add((kind, stage, m))
                del left[stage]
    return now


def measured_seconds(config: Settings, steps: int) -> float:
    """The median over steps of the slowest process's time."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.toml"
        path.write_text(settings_toml(config))
        outputs = torch_everywhere(
            [LOOPBACK] * config.island.stages, ["-m", __name__, str(path), str(steps)], timeout_s=900
        )
    return median(max(map(float, step)) for step in zip(*(output.split() for output in outputs), strict=True))


def run(options: Options, store: Store) -> Iterator[Part]:
    config = settings(options)
    cores = len(os.sched_getaffinity(0))
    bubble = (options.stages - 1) / (options.microbatches + options.stages - 1)
    yield f"{options.model}, {options.stages} stages, {options.microbatches} microbatches, {cores} cores"
    yield f"the bubble of equal stages with a core each: {bubble:.1%}"
    alone, busy = all_pass_seconds(config, options.steps), busy_pass_seconds(config, options.steps, cores)
    took = measured_seconds(config, options.steps)

    def row(name: str, seconds: Passes) -> tuple[Cell, ...]:
        stages = " ".join(f"{forward:.3f}+{backward:.3f}" for forward, backward in seconds)
        ideal = ideal_seconds(seconds, options.microbatches, cores)
        return name, stages, options.microbatches * sum(map(sum, seconds)), ideal, took, took / ideal - 1

    columns = {"passes timed": "", "of each stage, forward + backward, s": "", "in a row": ".3f", "ideal": ".3f"}
    yield Table(columns | {"measured": ".3f", "more": "+.1%"}, [row("alone", alone), row("all cores busy", busy)])


if __name__ == "__main__":
    worker(read_settings(Path(sys.argv[1])), int(sys.argv[2]))
