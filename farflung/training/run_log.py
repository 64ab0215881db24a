"""A process's log of its run: the events that reports and live views read."""

from __future__ import annotations

import base64
import dataclasses
import socket
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import torch

from farflung.events import (
    CheckpointEvent,
    EndEvent,
    EvaluationEvent,
    Event,
    JoinedEvent,
    RoundEvent,
    StartEvent,
    StepEvent,
    WarningEvent,
)
from farflung.networks import Network
from farflung.outer import Round
from farflung.pipeline import Island
from farflung.settings import Settings
from farflung.training.events import EventLog
from farflung.training.measures import Rate, peak_memory, sampled
from farflung.workloads import Workload

SAMPLED_WEIGHTS = 1024
"""Weights that an evaluation writes down, by which reports estimate the consensus distance of the replicas."""


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


class RunLog:
    """Writes one process's events.

    Args:
        settings: of the run.
        workload: what is trained.
        island: the process's part of its replica.
        network: with whom it holds rounds.
        events: where they go.
        progress: how far the replica has come, kept by its trainer.
    """

    def __init__(
        self,
        settings: Settings,
        workload: Workload,
        island: Island,
        network: Network,
        events: EventLog,
        progress: Progress,
    ) -> None:
        self.events = events
        self._settings = settings
        self._workload = workload
        self._island = island
        self._network = network
        self._progress = progress
        self._rate = Rate(network)

    @property
    def units_per_step(self) -> int:
        """Units of the workload, such as tokens, that the replica trains on in an inner step."""
        return self._settings.island.batch_size * self._workload.units_per_sample

    @property
    def units(self) -> int:
        """Those that it has trained on."""
        return self._progress.trained * self.units_per_step

    def start(self, device: torch.device, resumed: bool) -> None:
        """The process begins, or goes on."""
        settings, island = self._settings, self._island
        own = sum(p.numel() for p in island.model.parameters())
        self._write(
            StartEvent(
                step=self._progress.step,
                method=settings.rounds.method,
                replicas=settings.run.replicas,
                steps=settings.run.steps,
                parameters=self._total(own),
                own_parameters=own,
                stage=island.coordinates.stage,
                stages=island.mesh.stages,
                shard=island.coordinates.shard,
                shards=island.mesh.shards,
                network=settings.network.network,
                host=socket.gethostname(),
                device=str(device),
                tokens_per_step=self.units_per_step,
                units=self._workload.units,
                measure=self._workload.measure,
                resumed=resumed,
                clock=time.time() if self._network.elastic else None,
            )
        )

    def step(self, loss: float, lr: float, device: torch.device) -> None:
        """An inner step that is to be told of."""
        network, island, progress = self._network, self._island, self._progress
        speed, refused = self._rate.take(), {}
        if elastic := network.elastic:
            refused = dict(elastic.refused)
            told = {"loss": loss, "tokens_per_second": speed, "rounds": progress.rounds}
            elastic.tell_others(**told, refused=sum(refused.values()))
        traffic = network.traffic
        facts = torch.tensor([traffic.bytes_sent, island.traffic.bytes_sent, traffic.seconds_blocked]).double()
        sent, boundary, blocked = island.total(facts).tolist()
        self._write(
            StepEvent(
                step=progress.step,
                tokens=self.units,
                loss=loss,
                lr=lr,
                tokens_per_second=speed,
                rounds=progress.rounds,
                bytes_sent=round(sent),
                boundary_bytes=round(boundary),
                seconds_blocked=blocked / island.mesh.island,
                refused=refused or None,
                # Replicas that are simulated share their process's memory, and what it is differs from run to run.
                peak_memory=peak_memory(device) if self._settings.network.network == "torch" else None,
            )
        )

    def stepped(self) -> None:
        """Counts an inner step for the speed."""
        self._rate.count(self.units_per_step)

    def round(self, ended: Round) -> None:
        """A round has ended."""
        values = dataclasses.asdict(ended)
        for moment in ("started", "finished", "waited_from", "landed"):
            values[moment] = self.events.since_start(values[moment])
        before, self._progress.bytes_told = self._progress.bytes_told, self._network.traffic.bytes_sent
        self._write(RoundEvent(**values, bytes_sent=self._progress.bytes_told - before))
        if ended.reason:
            self.warn(f"round {ended.round}: {ended.outcome}: {ended.reason}")

    def evaluate(self) -> None:
        """Judges the weights as they are now, and writes some of them down."""
        with self._rate.paused():
            sample = self._sampled_weights().numpy().astype(np.dtype("<f4"))
            self._write(
                EvaluationEvent(
                    step=self._progress.step,
                    tokens=self.units,
                    bytes_sent=self._total(self._network.traffic.bytes_sent),
                    validation_loss=self._island.evaluate(),
                    sample=base64.b64encode(sample.tobytes()).decode(),
                )
            )

    def paused(self) -> AbstractContextManager[None]:
        """A context whose time does not count for the speed."""
        return self._rate.paused()

    def checkpoint(self, seconds: float) -> None:
        """A checkpoint was written, in so long."""
        self._write(CheckpointEvent(step=self._progress.step, seconds=seconds))

    def joined(self, seconds: float) -> None:
        """The others' state was taken."""
        self._write(JoinedEvent(step=self._progress.step, seconds=seconds))

    def warn(self, message: str) -> None:
        """Tells the user something."""
        self._write(WarningEvent(step=self._progress.step, message=message))

    def end(self, reason: str) -> None:
        """The process trains no more."""
        self._write(EndEvent(step=self._progress.step, reason=reason))

    def _write(self, event: Event) -> None:
        self.events.write(event)

    def _total(self, value: float) -> int:
        """The sum of a whole number over the replica's processes."""
        return round(float(self._island.total(torch.tensor([value], dtype=torch.float64))))

    def _sampled_weights(self) -> torch.Tensor:
        """Some of the replica's weights, always the same ones: from each of its processes as many."""
        mesh = self._island.mesh
        room = max(1, SAMPLED_WEIGHTS // mesh.island)
        own = sampled(list(self._island.model.parameters()), room)
        samples = torch.zeros(mesh.island, room, dtype=torch.float64)
        samples[mesh.part(self._island.coordinates), : len(own)] = own
        return self._island.total(samples.flatten())[: len(own) if mesh.island == 1 else None]
