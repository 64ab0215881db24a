"""What does farflung cost an inner loop, on this machine?
First, one replica alone (`--method local --replicas 1`) beside a plain torch loop on the same model, batches and
optimizer: both take blocks of steps in turns, in one process, so that whatever else the machine does meets both. Then
what methods cost: tokens a second of real processes over torch.distributed, started in turns; the baseline is the same
loop without any rounds. On a machine that others use, too, speeds of different runs differ by more than what rounds
cost; what a run was blocked for is measured within it. Takes some twenty minutes; `--methods` with no name leaves out
the second part.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from torch import nn

from bench.lib.store import Store
from bench.lib.table import Cell, Part, Table
from farflung.events import StepEvent
from farflung.hooks.trained import trainable
from farflung.outer import Session
from farflung.pipeline.assemble import training
from farflung.report.read import read_run
from farflung.settings import Settings
from farflung.testing.hosts import torch_rendezvous
from farflung.training import launch
from farflung.training.kept import Coordination, Kept
from farflung.training.learning_rate import lr_scale
from farflung.training.stopping import Stop
from farflung.training.trainer import Trainer


@dataclass(frozen=True)
class Options:
    models: tuple[str, ...] = ("tiny", "small", "llama-125m")
    """What is trained beside a plain loop."""
    batch_sizes: tuple[int, ...] = (8, 8, 2)
    """Sequences in a step of each."""
    blocks: tuple[int, ...] = (20, 2, 1)
    """Steps in each block of each."""
    pairs: int = 8
    """Blocks of each loop."""
    sequence_length: int = 256
    """Tokens in a sequence beside a plain loop."""
    modes: tuple[str, ...] = ("float32", "bfloat16", "compile", "compile bfloat16")
    """How it is computed."""
    device: str = "cpu"
    """Where one replica and a plain loop compute."""
    steps: int = 200
    """Inner steps of each replica with a method."""
    every: int = 50
    """Inner steps between rounds."""
    replicas: int = os.cpu_count() or 1
    """Processes; more than there are cores would measure the scheduler."""
    repeats: int = 3
    """Runs of each method."""
    model: str = "tiny"
    """What is trained with a method."""
    methods: tuple[str, ...] = ("local", "noloco", "diloco")
    """What to measure, beside local."""


SMOKE = Options(
    models=("micro",),
    batch_sizes=(2,),
    blocks=(1,),
    pairs=2,
    sequence_length=16,
    modes=("float32",),
    steps=4,
    every=2,
    replicas=2,
    repeats=1,
    model="micro",
    methods=("local",),
)

WARM_UP = 2
"""Blocks of each loop before those that count."""


class Plain:
    """A plain loop on what a trainer trains on, from the same weights."""

    def __init__(self, trainer: Trainer) -> None:
        settings, self.workload = trainer.settings, trainer.workload
        self.settings, self.step, self.losses = settings, 0, list[float]()
        self.device = trainer.device
        self.model: Any = training(self.workload.build(settings.run.seed).to(self.device), settings.island)
        named, inner = trainable(self.model).items(), settings.inner
        self.optimizer = settings.method().inner.make(named, lr=trainer.lr, weight_decay=inner.weight_decay)
        self.lr = trainer.lr

    def train_step(self) -> None:
        settings, island, run = self.settings, self.settings.island, self.settings.run
        batch = self.workload.batch(self.workload.sample_ids(run.seed, 0, self.step, island.batch_size))
        batch = batch.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else batch
        with torch.autocast(self.device.type, torch.bfloat16, enabled=island.precision == "bfloat16"):
            loss = self.workload.loss(self.model, batch)
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(self.model.parameters(), island.clip)
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr * lr_scale(settings.inner, self.step, run.steps)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        if self.step % run.log_every == 0:
            self.losses.append(float(loss.detach()))


class Paced(Trainer):
    """After each block of its steps, a plain loop takes one, too; `seconds` are those of both, block by block."""

    block: int

    def train(self, catch_up: bool = False, at_the_end: Callable[[Session], object] = lambda _: None) -> None:
        """See Trainer."""
        self.plain, self.seconds = Plain(self), list[tuple[float, float]]()
        self._since = self._now()
        super().train(catch_up, at_the_end)

    def _now(self) -> float:
        """Once the device has done what it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def _train_step(self, session: Session) -> None:
        super()._train_step(session)
        if self.step % self.block == 0:
            began = self._now()
            own = began - self._since
            for _ in range(self.block):
                self.plain.train_step()
            self._since = self._now()
            self.seconds.append((own, self._since - began))


def beside_plain(model: str, mode: str, batch_size: int, block: int, options: Options) -> list[tuple[float, float]]:
    """Seconds of the blocks of one replica alone, and of a plain loop's; the first steps of both are left out."""
    steps = block * (options.pairs + WARM_UP)
    with tempfile.TemporaryDirectory() as folder:
        settings = Settings.of(
            method="local",
            inner="adamw",
            replicas=1,
            model=model,
            batch_size=batch_size,
            sequence_length=options.sequence_length,
            precision="bfloat16" if "bfloat16" in mode else "float32",
            compile="compile" in mode,
            steps=steps,
            eval_every=steps,
            eval_sequences=1,
            checkpoint_every=0,
            text_share=0.0,
            out=folder,
        )
        before = dict(os.environ)
        os.environ.update(torch_rendezvous(1), RANK="0", LOCAL_RANK="0", GLOO_SOCKET_IFNAME="lo")
        launch.use_cores_of(1)
        launch.check_settings(settings)
        network: Any = settings.network.kind.open(settings.network.starting, settings.network.deadline)
        stop = Stop(network.store, [0], [0])
        coordination = Coordination(stop, Kept(network.store, lambda: [0]))
        trainer = Paced(settings, network, Path(folder), coordination, torch.device(options.device))
        trainer.block = block
        with launch.stopping_on_signals(stop):
            trainer.train()
        trainer.log.events.close()
        network.close()
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
    return trainer.seconds[WARM_UP:]


def measure(method: str, options: Options) -> tuple[float, float]:
    """Tokens a second of all replicas from the first logged step to the last, and the share of time not blocked."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / method
        config = Settings.of(
            method=method,
            inner="adamw",
            every=None if method == "local" else options.every,
            steps=options.steps,
            model=options.model,
            log_every=max(1, min(10, options.steps // 4)),
            replicas=options.replicas,
            checkpoint_every=0,
            eval_every=options.steps,
            out=str(out),
        )
        launch.prepare(config, out, resume=False)
        launch.launch_torch(config, out, resume=False)
        steps = read_run(out).all_of(StepEvent)
    first, last = min(event.step for event in steps), options.steps
    began = max(event.at for event in steps if event.step == first)
    ends = [event for event in steps if event.step == last]
    tokens = (last - first) * config.island.batch_size * config.workload.sequence_length * options.replicas
    rate = tokens / (max(event.at for event in ends) - began)
    return rate, 1 - mean(event.seconds_blocked / event.at for event in ends)


def run(options: Options, store: Store) -> Iterator[Part]:
    def alone(model: str, mode: str, batch_size: int, block: int) -> tuple[Cell, ...]:
        seconds = beside_plain(model, mode, batch_size, block, options)
        tokens = block * batch_size * options.sequence_length
        own, plain = (tokens / median(column) for column in zip(*seconds, strict=True))
        ratios = sorted(plain / own for own, plain in seconds)
        spread = f"{ratios[0]:.1%} to {ratios[-1]:.1%}"
        return f"{model}, {mode}", own, plain, median(ratios), spread

    columns = {"model, mode": "", "tokens/s": ",.0f", "plain loop": ",.0f", "of the plain loop": ".1%", "pairs": ""}
    cases = zip(options.models, options.batch_sizes, options.blocks, strict=True)
    about = f"one replica alone, sequences of {options.sequence_length}, {options.pairs} pairs of blocks in turns"
    rows = (alone(model, mode, size, block) for model, size, block in cases for mode in options.modes)
    yield Table(columns, rows, f"{about}, {launch.cores_for(1)} threads")
    if options.methods:
        yield with_methods(options)


def with_methods(options: Options) -> Table:
    """What methods cost."""
    seen: dict[str, list[tuple[float, float]]] = {method: [] for method in options.methods}
    for _ in range(options.repeats):
        for method, measured in seen.items():
            measured.append(measure(method, options))
    alone = median(rate for rate, _ in seen["local"])

    def row(method: str, measured: list[tuple[float, float]]) -> tuple[Cell, ...]:
        rate, free = (median(column) for column in zip(*measured, strict=True))
        return method, rate, rate / alone, free, "  ".join(f"{rate:,.0f}" for rate, _ in measured)

    columns = {"method": "", "tokens/s": ",.0f", "of local": ".1%", "not blocked": ".1%", "tokens/s of each run": ""}
    about = f"{options.replicas} replicas, every={options.every}, {options.steps} steps, {options.model}"
    return Table(columns, [row(*one) for one in seen.items()], f"{about}, {options.repeats} runs each")
