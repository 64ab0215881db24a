"""The end of a run: the mean of its replicas' weights, and how its results are written."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from farflung.durations import duration
from farflung.events import Event, MemoryEvent
from farflung.figure import figure_of
from farflung.files import replacing, write_text
from farflung.hooks.trained import trainable
from farflung.networks import (
    Group,
    Network,
    PeerLostError,
    SimulatedNetwork,
    TorchNetwork,
    among_survivors,
)
from farflung.outer.fragments import Fragment
from farflung.pipeline import Island, Mesh
from farflung.pipeline.assemble import assemble
from farflung.settings import Settings
from farflung.training import checkpoint
from farflung.training.agreement import facts_of_replicas
from farflung.training.averaged import Mean, PartByPart
from farflung.training.core import holders_of
from farflung.training.fitting import mean_home
from farflung.training.resharding import buffer_names, mean_weights, whole_weights
from farflung.training.summary import summary_of
from farflung.training.terminal import say
from farflung.training.trainer import Trainer
from farflung.training.writing import as_told
from farflung.workloads.base import Picture


class NoRoomError(RuntimeError):
    """A run's results could not be written, in all the time it was tried."""


TRY_EVERY_SECONDS, TRY_FOR_SECONDS = 5.0, 3600.0
"""Seconds between two attempts to write the results, and seconds until the last."""

SAMPLE = {"text": "sample", "picture": "sample_picture"}
"""What a summary calls a sample of what the model makes."""

DEADLINES_AT_THE_END = 10
"""The end waits this many times the deadline: replicas that never exchange may be far apart in time."""

Ended = tuple[list[Mean], list[dict[str, Any]]]
"""The mean weights of the replicas that end together, and the facts that each gives of its run."""
Together = Callable[[Callable[[Network], Ended]], Ended]
"""Calls a function with the network of the replicas that end together, and may call it again with fewer if it fails."""


def finish(trainer: Trainer, together: Together) -> dict[str, Any]:
    """Averages the replicas' weights, or tail averages of them, once, evaluates them, and returns the run's summary.

    Leaves the averaged weights in the trainer's model. Raises PeerLostError.
    """
    own = _own_facts(trainer)
    trainer.tail.apply()
    if trainer.dealt:
        trainer.dealt.gather()
    parts = holders_of(trainer.settings).fragments(trainer.model, 1, trainable(trainer.model))
    own["parameters"] = sum(part.numel for part in parts)

    means, facts = together(lambda network: _met(trainer, network, parts, own))
    for mean in means:  # there are none where the weights stay as they are
        mean.write(trainer.device)
    trainer.island.after_step()
    trainer.prune()
    scale = _assembled(trainer, len(facts))
    return summary_of(trainer.settings, trainer.island, trainer.workload, trainer.step, facts) | scale


def _assembled(trainer: Trainer, replicas: int) -> dict[str, float]:
    """Makes one model of what replicas have trained of it, where they have dealt it out."""
    if (dealing := trainer.method.dealing) is None:
        return {}
    figure = figure_of(trainer.workload)

    def badness() -> float:
        score = trainer.island.evaluate()
        assert score is not None, "a replica that is one process is judged"
        return figure.badness(score.value)

    return {"branch_scale": dealing.assemble_best(trainer.model, replicas, badness)}


def _own_facts(trainer: Trainer) -> dict[str, Any]:
    """What a replica tells of its run, as it is when its last step is over; all of its processes call alike."""
    island, traffic = trainer.island, trainer.network.traffic
    own = [traffic.bytes_sent, traffic.seconds_blocked, island.traffic.bytes_sent]
    seconds, score = trainer.log.events.elapsed_s(), island.evaluate()
    assert score is not None, "a run that has ended is judged"
    sent, blocked, boundary = island.total(torch.tensor(own, dtype=torch.float64)).tolist()
    return {
        "replica": island.coordinates.replica,
        "tokens": trainer.log.units,
        "score": score.value,
        "scores": dict(score.sources),
        "sent": round(sent),
        "boundary": round(boundary),
        "blocked": blocked / island.settings.processes,
        "rounds": trainer.progress.rounds,
        "seconds": seconds,
        **trainer.log.speed(),
        **({"memory": _memory(fitted)} if (fitted := trainer.log.fitted) else {}),
    }


def _memory(fitted: MemoryEvent) -> dict[str, Any]:
    """How a replica's steps have fitted into its memory."""
    names = [field.name for field in dataclasses.fields(MemoryEvent)][len(dataclasses.fields(Event)) :]
    return {name: getattr(fitted, name) for name in names}


def _met(trainer: Trainer, network: Network, parts: Sequence[Fragment], facts: dict[str, Any]) -> Ended:
    """The mean of the weights of those on a network, and what they tell; no mean for one who is alone.

    Raises PeerLostError.
    """
    settings, means = trainer.settings, list[Mean]()
    deadline = DEADLINES_AT_THE_END * settings.network.deadline
    if trainer.method.dealing:
        own = trainer.network
        trainer.settle(tuple(own.processes.index(one) for one in network.processes) or network.members())
    if len(network.members()) > 1:
        means = PartByPart(network, parts, mean_home(settings.island), deadline).means(bool(settings.core.core))
    off = sum(mean.apart for mean in means)
    numel, deviation = trainer.island.total(torch.tensor([facts["parameters"], off], dtype=torch.float64)).tolist()
    facts = {**facts, "parameters": round(numel), "deviation": deviation / max(numel, 1)}
    return means, facts_of_replicas(network, facts, "summary", deadline)


def finish_apart(settings: Settings, folder: Path, ended: Mapping[int, Path], device: torch.device) -> None:
    """Writes the results of independent replicas, by their numbers and the run folders in which they have ended.

    Raises NoRoomError, and UserError where their files are damaged.
    """
    workload, alone = settings.made_workload(), SimulatedNetwork.alone()
    seed, waits = settings.run.seed, settings.network
    island, _ = assemble(settings.island, workload, alone, settings.mesh(), seed, waits, device)
    files = {replica: checkpoint.averages(path) for replica, path in ended.items()}
    mean = mean_weights(list(files.values()))
    island.model.load_state_dict(mean)
    names, figure = trainable(island.model), figure_of(workload)
    numel = sum(mean[name].numel() for name in names)
    facts = []
    for replica, path in ended.items():
        own, told = whole_weights(files[replica]), json.loads((path / "summary.json").read_text("utf-8"))
        apart = sum(float((own[name] - mean[name]).square().sum()) for name in names)
        facts.append(
            {
                "replica": replica,
                "tokens": told["tokens"],
                "score": told[figure.key],
                "scores": told.get(figure.key_of_sources, {}),
                "sent": told["bytes_sent"],
                "boundary": told["boundary_bytes"],
                "blocked": told["seconds_blocked"],
                "rounds": told["rounds"],
                "seconds": told["seconds"],
                "parameters": told["parameters"],
                "deviation": apart / max(numel, 1),
                "speed": told.get("tokens_per_second", 0.0),
                "mfu": told.get("mfu"),
                "spent": told.get("spent", {}),
            }
        )
    summary = summary_of(settings, island, workload, settings.run.steps, facts)
    try:
        checkpoint.write(checkpoint.average_of(folder), _average(island))
        _write_summary(folder, summary, island.sample())
    except OSError as error:
        raise NoRoomError(f"cannot write to {folder}: {error.strerror}; make room") from error


def write_results(trainer: Trainer, summary: dict[str, Any], tells: bool) -> None:
    """Writes the averaged weights, and with `tells` the summary; all processes of a replica call it alike.

    Raises NoRoomError, when the disk stays full.
    """
    path, average = checkpoint.average_of(trainer.folder, trainer.island.part_stem), _average(trainer.island)
    _keep_trying(lambda: checkpoint.write(path, average), trainer, json.dumps(summary))
    sample = trainer.island.sample()  # which a workload of the user's own may fail to make
    if tells:
        _keep_trying(lambda: _write_summary(trainer.folder, summary, sample), trainer, json.dumps(summary))


def write_events(trainer: Trainer) -> None:
    """Writes the events that still wait for room, of which their log has told. Raises NoRoomError."""
    _keep_trying(trainer.log.events.flush, trainer)


def _write_summary(folder: Path, summary: Mapping[str, Any], sample: str | Picture) -> None:
    """Writes the summary with a sample of what the model makes; a picture has a file of its own, too."""
    told = {**summary, **{SAMPLE[name]: value for name, value in as_told(sample).items()}}
    if isinstance(sample, Picture):
        with replacing(folder / "sample.png") as file:
            file.write(sample.png)
    write_text(folder / "summary.json", json.dumps(told, indent=2) + "\n")


def _average(island: Island) -> checkpoint.Weights:
    """The weights that an island ends with, as they are written."""
    model = island.model
    return {"shard": island.coordinates.shard, "model": model.state_dict(), "buffers": buffer_names(model)}


def ended_together(ended: Callable[[Network], Ended], network: TorchNetwork, mesh: Mesh, deadline_s: float) -> Ended:
    """The result of `ended` among the replicas that have all of their processes. Raises PeerLostError.

    Args:
        ended: called by every process with the network of these replicas.
        network: that of all processes.
        deadline_s: of the run, in seconds.
    """

    def whole(processes: Group) -> Group:
        return tuple(p for p in processes if set(mesh.island_group(mesh.coordinates(p))) <= set(processes))

    def work(processes: Group) -> Ended:
        return ended(network.of_islands([island for island in mesh.islands if island[0] in processes]))

    return among_survivors(network, whole, work, DEADLINES_AT_THE_END * deadline_s)[1]


class Endings:
    """The ends of a simulated run: one for each side of a partition. The largest side's, or else the first, stays."""

    def __init__(self) -> None:
        self._largest: list[int] = []
        self._lost: PeerLostError | None = None

    def finish(self, trainer: Trainer) -> None:
        """Ends with the replicas that it can reach; one without which others end only says so. Raises NoRoomError."""
        try:
            summary = finish(trainer, partial(self._together, trainer))
        except PeerLostError as lost:
            self._lost = lost
            trainer.log.warn(f"ended without the others: {lost}")
            return
        left = [replica for replica in range(trainer.settings.run.replicas) if replica not in summary["missing"]]
        if len(left) <= len(self._largest):
            if left != self._largest:
                trainer.log.warn(
                    f"ended without the others: it could not reach {', '.join(map(str, summary['missing']))}"
                )
        elif trainer.network.rank == left[0]:
            self._largest = left
            write_results(trainer, summary, tells=True)
            trainer.show_the_end()

    def check(self) -> None:
        """Raises PeerLostError where no side has ended."""
        if self._lost and not self._largest:
            raise self._lost

    def _together(self, trainer: Trainer, ended: Callable[[Network], Ended]) -> Ended:
        network, settings = trainer.network, trainer.settings
        if not (isinstance(network, SimulatedNetwork) and network.simulation.cluster.faulty):
            return ended(network)

        def work(group: Group) -> Ended:
            return ended(network.among(group))

        return among_survivors(network, tuple, work, DEADLINES_AT_THE_END * settings.network.deadline)[1]


def _keep_trying(write: Callable[[], None], trainer: Trainer, summary: str = "") -> None:
    """Writes, if need be once there is room; the user, who may make some, is told the summary meanwhile, if any."""
    ends = time.monotonic() + TRY_FOR_SECONDS
    told = not summary
    while True:
        try:
            return write()
        except OSError as error:
            fault = f"cannot write to {trainer.folder}: {error.strerror}"
            if time.monotonic() > ends or trainer.stop.requested:
                raise NoRoomError(f"{fault}; the summary is: {summary}" if summary else fault) from error
        if not told:
            say(
                f"{fault}; make room: it is tried again for {duration(TRY_FOR_SECONDS)}, unless you press Ctrl-C. "
                f"The summary is: {summary}",
                urgent=True,
            )
            told = True
        time.sleep(TRY_EVERY_SECONDS)
