"""What does training on parts of a graph lose, how the parts are made, and how the trainers average?
The packages of Debian and what they depend on; the baseline is one trainer on the whole graph, with the batches of all.
SuperTMA's and RandomTMA's parts, a minimal cut alone (PSGD-PA) and with a server's steps on the whole graph (LLCG), and
SuperTMA's parts under NoLoCo and DiLoCo; then trainers that are lost half-way, and one that is four times slower, with
rounds by the clock and by steps. It needs apt's lists (apt-get update). Takes about ten minutes for each task and
number of trainers on two cores.
"""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
import torch
from torch import nn

from bench.lib.runs import Runs
from bench.lib.store import Result, Settings, Store
from bench.lib.table import Cell, Part, Table
from bench.lib.training import outcome
from farflung import settings as run_settings
from farflung.figure import figure_of
from farflung.hooks.trained import trainable
from farflung.training.learning_rate import lr_scale
from farflung.workloads.dealing import Deal
from farflung.workloads.graph import Graph
from farflung.workloads.graph.reading import read

STEP_S = 0.1
"""Of an inner step on the simulated clock."""
MODEL = {"nodes": "sage", "links": "gcn"}
"""The better of the two kinds of networks for each task, by the first hundred steps of one trainer."""
SLOWER = 4
"""How many times."""
LOST = {2: 1, 4: 1, 8: 2}
"""How many trainers are lost, of how many."""


@dataclass(frozen=True)
class Options:
    trainers: tuple[int, ...] = (4, 8)
    """Replicas, each with a part of the graph."""
    tasks: tuple[str, ...] = ("nodes", "links")
    """What is learnt."""
    questions: tuple[str, ...] = ("parts", "lost", "slow")
    """parts: ways to make them and to average; lost: trainers that are lost half-way; slow: one that is slower."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """One run of each row for each; it is the seed of parts and of what is held out, too."""
    steps: int = 300
    """Inner steps of each trainer."""
    every: int = 10
    """Inner steps between rounds."""
    hidden: int = 32
    """Numbers that a node has after each layer."""
    super_nodes: int = 1000
    """Pieces that SuperTMA deals out."""
    server_steps: int = 2
    """Steps on the whole graph after each of LLCG's rounds."""
    data: str = "debian"
    """The graph; made: a small one with planted labels, on any machine."""


SMOKE = Options(trainers=(2,), tasks=("links",), seeds=(0,), steps=8, every=2, super_nodes=20, data="made")


def ways(options: Options) -> dict[str, Settings]:
    """The rows of the first table, by what is trained on and who averages."""
    average, every = {"method": "super-tma", "every": options.every}, {"every": options.every}
    return {
        "SuperTMA, all average": average | {"parts": "super"},
        "RandomTMA, all average": average | {"parts": "random"},
        "minimal cut, all average": average | {"parts": "min-cut"},
        "LLCG": average | {"parts": "min-cut", "server_steps": options.server_steps},
        "SuperTMA, NoLoCo's pairs": every | {"parts": "super", "method": "noloco"},
        "SuperTMA, DiLoCo": every | {"parts": "super", "method": "diloco"},
    }


def made(settings: Settings, seed: int) -> Result:
    """One run, with the processor seconds of a step of one trainer, evaluations included."""
    settings = settings | {"split_seed": seed}
    lost, slow, server_steps = (settings.pop(name, 0) for name in ("lost", "slow", "server_steps"))
    with tempfile.TemporaryDirectory() as name:
        settings["data"] = graph_of(settings["data"], Path(name))
        settings["conditions"] = conditions(Path(name) / "conditions.toml", lost, slow, settings)
        began = time.process_time()
        found = llcg(settings, seed, server_steps) if server_steps else outcome(settings, seed)
        seconds = time.process_time() - began
    return found | {"seconds_a_step": seconds / settings["steps"] / settings["replicas"]}


def conditions(path: Path, lost: int, slow: int, settings: Settings) -> str:
    """Fast links, under which the last trainers are lost half-way, and the first may be so many times slower."""
    last = range(settings["replicas"] - lost, settings["replicas"])
    tables = "".join(f"[[deaths]]\nreplica = {one}\nat_s = {STEP_S * settings['steps'] / 2}\n" for one in last)
    speeds = f"speeds = [{1 / slow}]\n" if slow else ""
    path.write_text(f"step_ms = {1000 * STEP_S}\nbandwidth_mbps = 1000\nlatency_ms = 1\n{speeds}{tables}")
    return str(path)


def graph_of(data: str, folder: Path) -> str:
    """What --data is to be; a made graph has 200 nodes, and its edges mostly join nodes of a label."""
    if data != "made":
        return data
    folder.mkdir(parents=True, exist_ok=True)
    rng, labels = np.random.default_rng(0), np.arange(200) % 4
    pairs = rng.integers(200, size=(4000, 2))
    np.save(folder / "edges.npy", pairs[(labels[pairs[:, 0]] == labels[pairs[:, 1]]) | (rng.random(4000) < 0.1)])
    np.save(folder / "features.npy", rng.normal(size=(200, 8)).astype(np.float32))
    np.save(folder / "labels.npy", labels)
    return str(folder)


def llcg(settings: Settings, seed: int, server_steps: int) -> Result:
    """Learn Locally, Correct Globally (arXiv 2111.08202): after each average, a server trains on the whole graph."""
    config = run_settings.Settings.of(**settings, seed=seed)
    parts, server = config.made_workload(), Server(config)
    trainers = [server.trainer(parts.build(seed)) for _ in range(config.run.replicas)]
    central = server.trainer(parts.build(seed))
    figure, scores, corrections = figure_of(parts), {}, 0
    for step in range(config.run.steps):
        for replica, trainer in enumerate(trainers):
            trainer.step(parts, replica, step, step)
        if (step + 1) % settings["every"] == 0:
            weights = [nn.utils.parameters_to_vector(trainer.model.parameters()) for trainer in trainers]
            nn.utils.vector_to_parameters(torch.stack(weights).mean(dim=0), central.model.parameters())
            for _ in range(server_steps):
                central.step(server.whole, 0, corrections, step)
                corrections += 1
            for trainer in trainers:
                trainer.model.load_state_dict(central.model.state_dict())
        if (step + 1) % settings["eval_every"] == 0 or step + 1 == config.run.steps:
            scores[step + 1] = server.judged(central.model)
    last = scores[config.run.steps]
    size = 4 * sum(one.numel() for one in central.model.parameters())
    sent = 2 * size * config.run.replicas * (config.run.steps // settings["every"])
    return {figure.key: last, f"{figure.key}_averaged": last, "bytes_sent": sent, "losses": scores}


class Server:
    """What LLCG's trainers and its server have in common: the run's settings, and the whole graph."""

    def __init__(self, config: run_settings.Settings) -> None:
        self.config = config
        self.whole = Graph(dataclasses.replace(config.workload, parts="whole"), Deal(1))

    def trainer(self, model: Any) -> Trainer:
        """With an inner optimizer of its own."""
        inner, chosen = self.config.method().inner, self.config.inner
        optimizer = inner.make(trainable(model).items(), lr=chosen.lr or inner.lr, weight_decay=chosen.weight_decay)
        return Trainer(self.config, model, optimizer)

    def judged(self, model: Any) -> float:
        """What a model reaches."""
        model.eval()
        with torch.no_grad():
            found = self.whole.evaluate(model, self.config.island.batch_size, torch.device("cpu")).value
        model.train()
        return found


@dataclass(frozen=True)
class Trainer:
    """A model and its optimizer, which steps as farflung's trainer does."""

    config: run_settings.Settings
    model: Any
    optimizer: torch.optim.Optimizer

    def step(self, workload: Any, replica: int, number: int, of_run: int) -> None:
        """The step of that number, with the learning rate of a step of the run."""
        run, chosen = self.config.run, self.config.inner
        for group in self.optimizer.param_groups:
            group["lr"] = (chosen.lr or self.config.method().inner.lr) * lr_scale(chosen, of_run, run.steps)
        ids = workload.sample_ids(run.seed, replica, number, self.config.island.batch_size)
        workload.loss(self.model, workload.batch(ids)).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.config.island.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()


def common(options: Options, task: str, trainers: int) -> Settings:
    """What all runs of a table have, unless a row says otherwise."""
    of_task: Settings = {"workload": "graph", "data": options.data, "task": task, "model": MODEL[task]}
    of_steps: Settings = {"steps": options.steps, "eval_every": max(1, options.steps // 6), "log_every": options.steps}
    sizes: Settings = {"replicas": trainers, "batch_size": 8, "hidden": options.hidden}
    return of_task | of_steps | sizes | {"super_nodes": options.super_nodes, "inner": "adamw", "lr": 0.01}


def run(options: Options, store: Store) -> Iterator[Part]:
    graph = read(graph_of(options.data, store.scratch))  # before there are processes, which have it then
    yield f"{options.data}: {graph.nodes:,} nodes, {len(graph.links):,} edges, checksum {graph.checksum[:16]}"
    questions: dict[str, Callable[[Runs, Options, int, str], Iterator[Part]]]
    questions = {"parts": parts, "lost": lost, "slow": slow}
    for task in options.tasks:
        for trainers in options.trainers:
            with Runs(store, common(options, task, trainers), made) as runs:
                for question in options.questions:
                    yield from questions[question](runs, options, trainers, task)


def parts(runs: Runs, options: Options, trainers: int, task: str) -> Iterator[Part]:
    """Ways to make parts and to average, beside the whole graph."""
    whole = {"method": "local", "parts": "whole", "replicas": 1, "batch_size": 8 * trainers}
    rows = {"one trainer, whole graph": whole} | ways(options)
    for settings in rows.values():
        runs.start_all(settings, options.seeds)
    base = [final(one) for one in runs.on_seeds(whole, options.seeds).values()]

    def told() -> Iterator[tuple[Cell, ...]]:
        for name, settings in rows.items():
            found = list(runs.on_seeds(settings, options.seeds).values())
            scores, seconds = [final(one) for one in found], mean(one["seconds_a_step"] for one in found)
            reached = [steps_to(one, 0.95 * mean(base)) for one in found]
            time_s = None if None in reached else seconds * mean(filter(None, reached))
            spread = stdev(scores) if len(scores) > 1 else 0.0
            sent = mean(one["bytes_sent"] for one in found) / 1e6
            shown = edges_kept(common(options, task, trainers) | settings, options.seeds[0], runs.store.scratch)
            yield name, shown, mean(scores), spread, mean(scores) / mean(base), time_s, sent

    columns = {"": "", "edges kept": ".0%", figure_name(task): ".4f", "+-": ".4f", "of the whole graph's": ".1%"}
    columns |= {"processor s of a trainer to 95% of it": ".1f", "MB sent": ".1f"}
    yield Table(columns, told(), title_of(options, trainers, task))


def lost(runs: Runs, options: Options, trainers: int, task: str) -> Iterator[Part]:
    """What trainers that are lost half-way cost."""
    gone = LOST[trainers]
    rows = {name: ways(options)[name] for name in ("SuperTMA, all average", "RandomTMA, all average")}
    for settings in rows.values():
        runs.start_all(settings | {"lost": gone}, options.seeds)

    def told() -> Iterator[tuple[Cell, ...]]:
        for name, settings in rows.items():
            whole, less = (
                [final(one) for one in runs.on_seeds(settings | more, options.seeds).values()]
                for more in ({}, {"lost": gone})
            )
            yield name, mean(whole), mean(less), 100 * (mean(less) - mean(whole))

    columns = {"": "", "none lost": ".4f", f"{gone} of {trainers} lost": ".4f", "points": "+.2f"}
    yield Table(columns, told(), f"{figure_name(task)}; {title_of(options, trainers, task)}")


def slow(runs: Runs, options: Options, trainers: int, task: str) -> Iterator[Part]:
    """What one slow trainer costs in the time in which the others take all of their steps."""
    short = options.steps // SLOWER
    rows: dict[str, Settings] = {
        "by the clock": {"every": f"{STEP_S * options.every:g}s", "rounds": options.steps // options.every},
        "by steps, in the same time": {"every": options.every, "steps": short, "eval_every": short, "log_every": short},
    }
    settings = {name: {"method": "super-tma", "parts": "super", "slow": SLOWER} | row for name, row in rows.items()}
    for one in settings.values():
        runs.start_all(one, options.seeds)

    def told() -> Iterator[tuple[Cell, ...]]:
        for name, one in settings.items():
            found = list(runs.on_seeds(one, options.seeds).values())
            blocked = mean(each["seconds_blocked"] for each in found)
            yield name, mean(map(final, found)), mean(each["seconds"] for each in found), blocked

    columns = {"rounds": "", figure_name(task): ".4f", "simulated s": ".1f", "blocked, a trainer": ".1f"}
    yield Table(columns, told(), f"one trainer {SLOWER} times slower; {title_of(options, trainers, task)}")


def edges_kept(settings: Settings, seed: int, scratch: Path) -> float:
    """The share of the edges that some replica sees."""
    chosen = {name: value for name, value in settings.items() if name != "server_steps"}
    made: Any = run_settings.Settings.of(
        **chosen | {"split_seed": seed, "data": graph_of(settings["data"], scratch)}
    ).made_workload()
    ends = made.part_of[made.task.edges]
    return float((ends[:, 0] == ends[:, 1]).mean())


def final(result: Result) -> float:
    """What the trainers' average reached, whatever it is called."""
    return float(next(value for name, value in result.items() if name.endswith("_averaged")))


def steps_to(result: Result, score: float) -> int | None:
    """The first step at which a run was judged to be as good."""
    return next((int(step) for step, reached in result["losses"].items() if reached >= score), None)


def figure_name(task: str) -> str:
    """What a task is judged by."""
    return figure_of(run_settings.Settings.of(workload="graph", task=task).made_workload()).name


def title_of(options: Options, trainers: int, task: str) -> str:
    """What a table is of."""
    return f"{options.data}, {task}, {trainers} trainers, {options.steps} steps, a round each {options.every}"
