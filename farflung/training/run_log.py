"""A process's log of its run: the events that reports and live views read."""

from __future__ import annotations

import base64
import dataclasses
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

import numpy as np
import torch
from torch import nn

from farflung.events import (
    CheckpointEvent,
    EndEvent,
    EvaluationEvent,
    JoinedEvent,
    LearntEvent,
    MemoryEvent,
    StartEvent,
    StepEvent,
    TextEvent,
    WarningEvent,
)
from farflung.figure import figure_of
from farflung.hooks.layouts import layout_of
from farflung.hooks.trained import trainable
from farflung.joint.maps import rest_of
from farflung.networks import Network
from farflung.networks.base import ALONE
from farflung.outer import Outcome, Round
from farflung.pipeline import Island
from farflung.pipeline.island import Ledger
from farflung.settings import Settings
from farflung.training.events import EventLog
from farflung.training.measures import Rate, Spent, peak_memory, peak_tflops, sampled
from farflung.training.writing import Writing, as_told
from farflung.workloads import Workload

SAMPLED_WEIGHTS = 1024
"""Weights that an evaluation writes down, by which reports estimate the consensus distance of the replicas."""

BY_CHANCE, ALONE_IN_A_ROW = ("nobody", "left over", "late"), 5
"""Why a peer may well be alone in a round, in words of ALONE; and after how many rounds in a row it is told of that."""


@dataclass
class Progress:
    """A replica's progress.

    Args:
        step: inner steps of the run.
        trained: those of them that it has computed itself; on an elastic network it may be counted at another step.
        rounds: with others.
        bytes_told: bytes sent when the events last told of a round.
    """

    step: int = 0
    trained: int = 0
    rounds: int = 0
    bytes_told: int = 0


@dataclass
class RunLog:
    """Writes one process's events. Its trainer keeps `progress`, and counts units in `rate`.

    `averaged` is the model, or the part of it that all replicas have.
    """

    settings: Settings
    workload: Workload
    island: Island
    network: Network
    events: EventLog
    progress: Progress
    averaged: nn.Module

    def __post_init__(self) -> None:
        self.rate = Rate(self.network)
        self.spent = Spent(self.network, self.island)
        self.fitted: MemoryEvent | None = None
        """How its steps fit into its memory, as last told."""
        self._share_of_peak = 0.0
        """The share of the devices' peak that a unit a second is; 0 where it is not known."""
        self._told_of_no_loss = False
        self._told_why_alone = set[str]()
        self._told_once = set[str]()
        self._alone = 0
        """Rounds in a row that it has sat out while others were there."""

    @property
    def units_per_step(self) -> int:
        """Units of the workload, such as tokens, that the replica trains on in an inner step."""
        return self.settings.island.batch_size * self.workload.units_per_sample

    @property
    def units(self) -> int:
        """Those that it has trained on."""
        return self.progress.trained * self.units_per_step

    def start(self, device: torch.device, resumed: bool) -> None:
        """The process begins, or goes on."""
        settings, island, figure = self.settings, self.island, figure_of(self.workload)
        self._share_of_peak = self._share_of(device)
        shape = island.mesh.shape(island.coordinates.replica)
        own = sum(p.numel() for p in trainable(island.model).values())
        self.events.write(
            StartEvent(
                step=self.progress.step,
                method=settings.rounds.method,
                replicas=settings.run.replicas,
                steps=settings.run.steps,
                parameters=self._total(own),
                own_parameters=own,
                stage=island.coordinates.stage,
                stages=shape.stages,
                shard=island.coordinates.shard,
                shards=shape.shards,
                network=settings.network.network,
                host=socket.gethostname(),
                device=str(device),
                tokens_per_step=self.units_per_step,
                units=self.workload.units,
                measure=self.workload.measure,
                judged_by=figure.name,
                judged_in=figure.unit,
                more_is_better=figure.more_is_better,
                bytes_per_unit=getattr(self.workload, "bytes_per_unit", None),
                resumed=resumed,
                clock=time.time() if self.network.elastic else None,
            )
        )

    def step(self, loss: float, lr: float, device: torch.device) -> None:
        """An inner step that is to be told of."""
        network, island, progress = self.network, self.island, self.progress
        speed, refused = self.rate.take(), {}
        spent = self.spent.take()
        if elastic := network.elastic:
            refused = dict(elastic.refused)
            told = {"loss": loss, "tokens_per_second": speed, "rounds": progress.rounds}
            told |= {"requests": network.traffic.requests} if network.traffic.requests else {}
            told |= {"processes": island.settings.processes} if island.settings.divided else {}
            elastic.tell_others(**told, refused=sum(refused.values()))
        traffic = network.traffic
        facts = torch.tensor([traffic.bytes_sent, island.traffic.bytes_sent, traffic.seconds_blocked]).double()
        sent, boundary, blocked = island.total(facts).tolist()
        self.events.write(
            StepEvent(
                step=progress.step,
                tokens=self.units,
                loss=loss,
                lr=lr,
                tokens_per_second=speed,
                rounds=progress.rounds,
                bytes_sent=round(sent),
                boundary_bytes=round(boundary),
                seconds_blocked=blocked / island.settings.processes,
                refused=refused or None,
                requests=traffic.requests or None,
                mfu=speed * self._share_of_peak or None,
                # Replicas that are simulated share their process, whose figures differ from run to run.
                spent=None if network.timed else spent,
                peak_memory=None if network.timed else peak_memory(device),
            )
        )

    def no_loss(self) -> None:
        """An inner step had nothing to learn from, which is told once; in a swarm what is to be learnt comes later."""
        if not (self._told_of_no_loss or self.settings.island.swarm):
            self._told_of_no_loss = True
            self.warn(f"all that step {self.progress.step} would learn from weighs 0, so that it changes nothing")

    def speed(self) -> dict[str, Any]:
        """The units a second since this process has started, the MFU where it is known, and where its time went."""
        speed = self.rate.mean()
        spent = {} if self.network.timed else {what: round(seconds, 3) for what, seconds in self.spent.told.items()}
        return {"speed": speed, "mfu": speed * self._share_of_peak or None, "spent": spent}

    def learnt(self, ledger: Ledger) -> None:
        """A step has learnt from microbatches that came from other processes."""
        if any(ledger):
            learnt, unlearnt = ledger
            event = LearntEvent(step=self.progress.step, microbatches=learnt, unlearnt=unlearnt or None)
            self.events.write(event)

    def round(self, ended: Round) -> None:
        """A round has ended."""
        before, self.progress.bytes_told = self.progress.bytes_told, self.network.traffic.bytes_sent
        self.events.round(dataclasses.replace(ended, bytes_sent=self.progress.bytes_told - before))
        if ended.outcome == Outcome.SAT_OUT:
            others = self.network.elastic is not None and len(self.network.members()) > 1
            self._alone = self._alone + 1 if others else 0
            if others and self._tells_why_alone(ended.reason):
                self.warn(f"round {ended.round}: {ended.outcome}: {ended.reason}")
            return
        self._alone = 0
        if ended.reason:
            self.warn(f"round {ended.round}: {ended.outcome}: {ended.reason}")

    def _tells_why_alone(self, reason: str) -> bool:
        """Once each; that others were missed by chance, only after some rounds: so it goes when a peer joins."""
        by_chance = reason in (ALONE[why] for why in BY_CHANCE) and self._alone < ALONE_IN_A_ROW
        if by_chance or reason in self._told_why_alone:
            return False
        self._told_why_alone.add(reason)
        return True

    def evaluate(self) -> float | None:
        """Judges the weights as they are now, and writes some of them down. Returns what they are judged by, if any."""
        with self.rate.paused(), self.spent.on("evaluations"):
            if (score := self.island.evaluate()) is None:
                return None
            sample = self._sampled_weights().numpy().astype(np.dtype("<f4"))
            self.events.write(
                EvaluationEvent(
                    step=self.progress.step,
                    tokens=self.units,
                    bytes_sent=self._total(self.network.traffic.bytes_sent),
                    score=score.value,
                    scores=_told(score.sources),
                    others=_told(score.others),
                    sample=base64.b64encode(sample.tobytes()).decode(),
                )
            )
        return score.value

    def text(self, writing: Writing, device: torch.device) -> None:
        """Has the model make something to look at, where it can."""
        with self.rate.paused(), self.spent.on("texts"):
            if made := writing.sample(device):
                self.events.write(TextEvent(step=self.progress.step, **as_told(made)))

    def checkpoint(self, step: int, seconds: float, delayed: float) -> None:
        """A checkpoint was written, in so long, of which its step waited so long."""
        if self.network.timed:  # whose runs are the same each time
            seconds = delayed = 0.0
        self.events.write(CheckpointEvent(step=step, seconds=seconds, delayed=delayed))

    def memory(self, told: MemoryEvent) -> None:
        """How the process's steps fit into its memory."""
        self.fitted = told
        self.events.write(told)

    def joined(self, seconds: float) -> None:
        """The others' state was taken."""
        self.events.write(JoinedEvent(step=self.progress.step, seconds=seconds))

    def warn(self, message: str) -> None:
        """Tells the user something."""
        self.events.write(WarningEvent(step=self.progress.step, message=message))

    def warn_once(self, message: str) -> None:
        """Tells the user something that this process has not told yet."""
        if message not in self._told_once:
            self._told_once.add(message)
            self.warn(message)

    def end(self, reason: str) -> None:
        """The process trains no more."""
        self.events.write(EndEvent(step=self.progress.step, reason=reason))

    def _share_of(self, device: torch.device) -> float:
        """The share of what the replica's devices compute at best that a unit a second is; 0 where it is not known."""
        island = self.settings.island
        peak = self.settings.run.device_tflops or peak_tflops(device, island.precision)
        count = getattr(self.workload, "operations", None)  # a swarm's peer does not compute a whole model
        if self.network.timed or not peak or count is None or island.swarm or self.settings.core.core:
            return 0.0
        return float(count(island.recompute) or 0.0) / (1e12 * peak * self.island.settings.processes)

    def _total(self, value: float) -> int:
        """The sum of a whole number over the replica's processes."""
        return round(float(self.island.total(torch.tensor([value], dtype=torch.float64))))

    def _sampled_weights(self) -> torch.Tensor:
        """Some of the replica's weights, always the same ones."""
        beside = rest_of(self.averaged)  # which not all replicas hold
        named = {name: p for name, p in trainable(self.averaged).items() if name not in beside}
        return self.island.total(sampled(named, layout_of(self.averaged, named), SAMPLED_WEIGHTS))


def _told(figures: Mapping[str, float]) -> dict[str, float | None] | None:
    """Figures as events have them; None for none."""
    return {name: value if isfinite(value) else None for name, value in figures.items()} or None
