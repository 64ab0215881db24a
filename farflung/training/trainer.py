"""One replica's whole run, from its first step to its part of the summary."""

from __future__ import annotations

import base64
import dataclasses
import socket
import time
from pathlib import Path

import numpy as np
import torch

from farflung import methods
from farflung.config import Config
from farflung.events import (
    CheckpointEvent,
    EndEvent,
    EvaluationEvent,
    JoinedEvent,
    RoundEvent,
    StartEvent,
    StepEvent,
    WarningEvent,
)
from farflung.networks import ElasticNetwork, Network, TimedNetwork
from farflung.outer import Round, Session
from farflung.pipeline import assemble
from farflung.training import checkpoint
from farflung.training.events import EventLog
from farflung.training.kept import Kept
from farflung.training.late import LateAverage
from farflung.training.layouts import buffer_names, load_state, own_names
from farflung.training.learning_rate import left_of_lr
from farflung.training.measures import Rate, peak_memory, sampled
from farflung.training.stopping import Stop, StoppedError
from farflung.workloads import data, tokenizers

SAMPLED_WEIGHTS = 1024
"""Weights that an evaluation writes down, by which reports estimate the spread between replicas."""

CATCH_UP_SECONDS = 24 * 3600.0
"""Longest wait for the state of a run; a transfer that stands still is given up long before."""


class Trainer:
    """Trains one replica.

    Args:
        config: the settings, the same for every replica.
        network: the seat of all of the run's processes.
        folder: the run folder; events and checkpoints go there.
        stop: asked after each step whether it was the last.
        kept: told of each checkpoint, and asked which can go.
        device: what the model trains on.
        resume_step: the checkpoint to go on from; 0 for the beginning of a run that has none, None for a new run.
        text: what to train on, where other replicas in this process have read it already.

    Raises:
        UserError: settings, data or folder cannot be used.
    """

    def __init__(
        self,
        config: Config,
        network: Network,
        folder: Path,
        stop: Stop,
        kept: Kept,
        device: torch.device,
        resume_step: int | None = None,
        text: data.Data | None = None,
    ) -> None:
        self.config = config
        self.folder = folder
        self.stop = stop
        self.kept = kept
        self.device = device
        self.method = methods.from_config(config)
        self.tokenizer = tokenizers.load(config.tokenizer)
        self.data = text or data.load(config, self.tokenizer)
        self.held_out = self.data.held_out(config.eval_sequences)
        self.island, self.network = assemble(config, self.tokenizer, self.data, network, device)
        self.model = self.island.model
        layout, place = self.island.layout, self.island.place
        self.process = layout.process(place.replica, place.stage, place.shard)
        self.speaks = layout.part(place) == 0
        """Whether this process's events stand for the replica's."""
        self.seat = layout.seat(place)
        """What this process's files are called, but for the replica's events."""
        self.lr = config.lr or self.method.inner.lr
        named = self.model.named_parameters()
        self.optimizer = self.method.inner.make(named, lr=self.lr, weight_decay=config.weight_decay)
        torch.manual_seed(config.seed * 1_000_003 + self.process)  # dropout differs between processes
        self.step = resume_step or 0
        self.trained = self.step
        """Inner steps that this replica has computed itself; on an open network it may be counted at another step."""
        self.rounds = 0
        self.late = LateAverage(self.model)
        self._bytes_told = 0
        parts = (self.model, self.optimizer, self.method.schedule.fragments)
        state = load_state(folder, self.step, layout, place, *parts) if self.step else None
        kept.tell(self.process, (step for step in checkpoint.steps_of(folder, place.replica) if step <= self.step))
        if state and isinstance(network, TimedNetwork):
            network.resume(state["clock"])
        self.events = EventLog(
            folder,
            place.replica,
            f"replica-{place.replica}" if self.speaks else self.seat,
            network.now,
            keep=state["events_size"] if state else None if resume_step is None else 0,
            elapsed=state["elapsed"] if state else 0.0,
        )
        self._saved = state
        self._resumed = resume_step is not None
        self._rate = Rate(network)

    def train(self, catch_up: bool = False) -> None:
        """Trains to the last step. Raises StoppedError when asked to stop before, after a checkpoint where that can be.

        To `catch_up` is to take the others' state first, on an open network where this replica was away.
        """
        for path in checkpoint.damaged(self.folder, self.island.place.replica, self.step) if self.speaks else ():
            self.warn(f"{path} is damaged, so this run goes on from step {self.step}")
        checkpoint.forget_after(self.folder, self.island.place.replica, self.step)
        self._describe()
        attached = self.method.attach(
            self.model,
            self.optimizer,
            self.network,
            outer_device=None if self.config.outer_device == "model" else self.config.outer_device,
            deadline=self.config.deadline,
            starting=self.config.starting,
            robust=self.config.robust,
            on_round=self._log_round,
        )
        with attached as outer:
            if self._saved:
                self._restore(self._saved, outer)
            if catch_up:
                self._catch_up(outer)
            while self.step < self.config.steps:
                self._train_step(outer)
        self.island.after_step()  # leaving has landed what was pending
        self.save(outer)
        self._evaluate()
        self.events.write(EndEvent(step=self.step, reason="finished"))

    def _train_step(self, outer: Session) -> None:
        config, before = self.config, self.step
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr * left_of_lr(config, self.step)
        loss, fault = self.island.gradients(self.trained)
        if fault:
            # Without gradients the optimizer changes nothing, but the step still counts for the rounds.
            self.warn(f"{fault} at step {self.step + 1}: no gradient taken from it")
            outer.spoil(f"{fault} at step {self.step + 1}")
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.island.after_step()
        self.step = min(outer.step, config.steps)  # others may have gone on
        self.trained += 1
        self._rate.count(config.tokens_per_step)

        def comes(every: int) -> bool:
            """Whether a multiple was reached, or jumped over."""
            return self.step // every > before // every

        last = self.step >= config.steps
        if self.trained % config.log_every == 0 or last:
            self._log_step(loss)
        if comes(config.eval_every) and not last:
            outer.average_buffers()
            self._evaluate()
        if config.checkpoint_every and comes(config.checkpoint_every) and not last:
            self.save(outer)
        if self.stop.due_after(self.process, self.step) and not last:
            self.save(outer)
            self.events.write(EndEvent(step=self.step, reason="stopped"))
            raise StoppedError(f"stopped after step {self.step}")

    def validation_loss(self) -> float:
        """The mean loss of the held-out sequences, in nats a token."""
        return self.island.loss_of(self.held_out)

    def save(self, outer: Session) -> None:
        """Writes this replica's part of a checkpoint."""
        with self._rate.paused():
            began = self.network.now()
            names = own_names(self.model, self.optimizer, self.method.schedule.fragments)
            state: checkpoint.Checkpoint = {
                "shard": self.island.place.shard,
                "names": names["names"],
                "fragments": names["fragments"],
                "model": self.model.state_dict(),
                "buffers": buffer_names(self.model),
                "optimizer": self.optimizer.state_dict(),
                "outer": outer.state_dict(),
                "random": torch.get_rng_state(),
                "random_cuda": torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None,
                "trained": self.trained,
                "rounds": self.rounds,
                "late": self.late.state_dict(),
                "traffic": dataclasses.asdict(self.network.traffic),
                "boundary_traffic": dataclasses.asdict(self.island.traffic),
                "clock": self.network.clock() if isinstance(self.network, TimedNetwork) else None,
                "bytes_told": self._bytes_told,
                "elapsed": self.events.elapsed(),
                "events_size": self.events.size(),
            }
            try:
                checkpoint.save(self.folder, self.step, self.seat, state)
            except OSError as error:
                self.warn(
                    f"no checkpoint of step {self.step}: {error.strerror}; see to {self.folder}; the last one stays"
                )
                return
            self.kept.add(self.process, self.step)
            self.prune()
            self.events.write(CheckpointEvent(step=self.step, seconds=self.network.now() - began))

    def prune(self) -> None:
        """Removes old checkpoints, once all are known to have as many newer ones as are to be kept."""
        oldest = self.kept.oldest_needed(self.process, self.config.keep_checkpoints)
        checkpoint.prune(self.folder, self.island.place.replica, before=oldest)

    def _restore(self, state: checkpoint.Checkpoint, outer: Session) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        outer.load_state_dict(state["outer"])
        torch.set_rng_state(state["random"])
        if state["random_cuda"] is not None:
            torch.cuda.set_rng_state(state["random_cuda"], self.device)
        if "reshaped" in state:
            self.warn("went on from another layout: rounds in flight and what codecs remembered are dropped")
        self.trained, self.rounds, self._bytes_told = state["trained"], state["rounds"], state["bytes_told"]
        self.late.load_state_dict(state["late"])
        saved = (state["traffic"], state["boundary_traffic"])
        for traffic, values in zip((self.network.traffic, self.island.traffic), saved, strict=True):
            for name, value in values.items():
                setattr(traffic, name, value)
        self.island.after_step()  # a tied head's copy is in no checkpoint
        self._saved = None

    def _catch_up(self, outer: Session) -> None:
        began = self.network.now()
        if outer.catch_up(CATCH_UP_SECONDS):
            self.step = outer.step
            self.events.write(JoinedEvent(step=self.step, seconds=self.network.now() - began))
        else:
            self.warn("no other peer had the run's state to give; goes on from its own")

    def _evaluate(self) -> None:
        with self._rate.paused():
            sample = self._sampled_weights().numpy().astype(np.dtype("<f4"))
            self.events.write(
                EvaluationEvent(
                    step=self.step,
                    tokens=self.trained * self.config.tokens_per_step,
                    bytes_sent=self.total(self.network.traffic.bytes_sent),
                    validation_loss=self.validation_loss(),
                    sample=base64.b64encode(sample.tobytes()).decode(),
                )
            )

    def total(self, value: float) -> int:
        """The sum of a whole number over the replica's processes."""
        return round(float(self.island.total(torch.tensor([value], dtype=torch.float64))))

    def _sampled_weights(self) -> torch.Tensor:
        """Some of the replica's weights, always the same ones: from each of its processes as many."""
        layout = self.island.layout
        room = max(1, SAMPLED_WEIGHTS // layout.island)
        own = sampled(list(self.model.parameters()), room)
        samples = torch.zeros(layout.island, room, dtype=torch.float64)
        samples[layout.part(self.island.place), : len(own)] = own
        return self.island.total(samples.flatten())[: len(own) if layout.island == 1 else None]

    def _describe(self) -> None:
        layout, place = self.island.layout, self.island.place
        own = sum(p.numel() for p in self.model.parameters())
        self.events.write(
            StartEvent(
                step=self.step,
                method=self.config.method,
                replicas=self.config.replicas,
                steps=self.config.steps,
                parameters=self.total(own),
                own_parameters=own,
                stage=place.stage,
                stages=layout.stages,
                shard=place.shard,
                shards=layout.shards,
                network=self.config.network,
                host=socket.gethostname(),
                device=str(self.device),
                tokens_per_step=self.config.tokens_per_step,
                resumed=self._resumed,
                clock=time.time() if isinstance(self.network, ElasticNetwork) else None,
            )
        )

    def _log_step(self, loss: float) -> None:
        traffic, island = self.network.traffic, self.island
        speed, refused = self._rate.take(), {}
        if isinstance(self.network, ElasticNetwork):
            refused = dict(self.network.refused)
            self.network.tell_others(
                loss=loss, tokens_per_second=speed, rounds=self.rounds, refused=sum(refused.values())
            )
        facts = torch.tensor([traffic.bytes_sent, island.traffic.bytes_sent, traffic.seconds_blocked]).double()
        sent, boundary, blocked = island.total(facts).tolist()
        self.events.write(
            StepEvent(
                step=self.step,
                tokens=self.trained * self.config.tokens_per_step,
                loss=loss,
                lr=self.optimizer.param_groups[0]["lr"],
                tokens_per_second=speed,
                rounds=self.rounds,
                bytes_sent=round(sent),
                boundary_bytes=round(boundary),
                seconds_blocked=blocked / island.layout.island,
                refused=refused or None,
                # Replicas that are simulated share their process's memory, and what it is differs from run to run.
                peak_memory=peak_memory(self.device) if self.config.network == "torch" else None,
            )
        )

    def _log_round(self, round: Round) -> None:
        self.rounds += bool(round.group)
        share = self.config.late_average
        if round.group and share and round.step > self.config.steps * (1 - share):
            self.late.add()
        values = dataclasses.asdict(round)
        for moment in ("started", "finished", "waited_from", "landed"):
            values[moment] = self.events.since_start(values[moment])
        sent, self._bytes_told = self.network.traffic.bytes_sent - self._bytes_told, self.network.traffic.bytes_sent
        self.events.write(RoundEvent(**values, bytes_sent=sent))
        if round.reason:
            self.warn(f"round {round.round}: {round.outcome}: {round.reason}")

    def warn(self, message: str) -> None:
        """Tells the user, by way of the events."""
        self.events.write(WarningEvent(step=self.step, message=message))
