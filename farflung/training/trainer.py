"""One replica's whole run, from its first step to its part of the summary."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import math
import socket
from pathlib import Path
from typing import Any

import numpy as np
import torch

from farflung import methods
from farflung.config import Config
from farflung.networks import Network
from farflung.outer import Attached, Round
from farflung.training import checkpoint
from farflung.training.events import EventLog
from farflung.training.stopping import Stop, Stopped
from farflung.workloads import data, models, tokenizers

SAMPLED_WEIGHTS = 1024
"""Weights that an evaluation writes down, by which reports estimate the spread between replicas."""


class Trainer:
    """Trains one replica.

    Args:
        config: the settings, the same for every replica.
        network: the replica's seat.
        folder: the run folder; events and checkpoints go there.
        stop: asked after each step whether it was the last.
        device: what the model trains on.
        resume_step: the checkpoint to go on from; 0 for the beginning of a run that has none, None for a new run.

    Raises:
        UserError: settings, data or folder cannot be used.
    """

    def __init__(
        self,
        config: Config,
        network: Network,
        folder: Path,
        stop: Stop,
        device: torch.device,
        resume_step: int | None = None,
    ) -> None:
        self.config = config
        self.network = network
        self.rank = network.rank
        self.folder = folder
        self.stop = stop
        self.device = device
        self.method = methods.from_config(config)
        self.tokenizer = tokenizers.load(config.tokenizer)
        self.data = data.load(config, self.tokenizer)
        self.held_out = self.data.held_out(config.eval_sequences)
        self.model = models.build(config, self.tokenizer).to(device).train()
        self.optimizer = self.method.inner(self.model.parameters(), lr=config.lr, weight_decay=config.weight_decay)
        torch.manual_seed(config.seed * 1_000_003 + self.rank)  # dropout differs between replicas
        self.step = resume_step or 0
        self.rounds = 0
        self._bytes_told = 0
        state = checkpoint.load(folder, self.step, self.rank) if self.step else None
        self.events = EventLog(
            folder,
            self.rank,
            network.now,
            keep=state["events_size"] if state else None if resume_step is None else 0,
            elapsed=state["elapsed"] if state else 0.0,
        )
        self._saved = state
        self._resumed = resume_step is not None
        self._rate = _Rate(network)

    def train(self) -> None:
        """Trains to the last step. Raises Stopped when asked to stop before, after a checkpoint where that can be."""
        self._describe()
        attached = self.method.attach(
            self.model,
            self.optimizer,
            self.network,
            outer_device=None if self.config.outer_device == "model" else self.config.outer_device,
            deadline=self.config.deadline,
            on_round=self._log_round,
        )
        with attached as outer:
            if self._saved:
                self._restore(self._saved, outer)
            while self.step < self.config.steps:
                self._train_step(outer)
        self.save(outer)
        self._evaluate()
        self.events.write("end", self.step, reason="finished")

    def _train_step(self, outer: Attached) -> None:
        config = self.config
        self.stop.begin_step(self.rank, self.step + 1)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(config, self.step)
        batch = self.data.batch(config.seed, self.rank, self.step, config.batch_size)
        loss = self._loss(batch)
        loss_value = float(loss.detach())
        if math.isfinite(loss_value):
            torch.autograd.backward(loss)
            if config.clip:
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), config.clip)
        else:
            # Without gradients the optimizer changes nothing, but the step still counts for the rounds.
            self._warn(f"loss is {loss_value} at step {self.step + 1}: no gradient taken from it")
            outer.spoil(f"loss is {loss_value} at step {self.step + 1}")
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        self._rate.count(config.tokens_per_step)

        last = self.step == config.steps
        if self.step % config.log_every == 0 or last:
            self._log_step(loss_value)
        if self.step % config.eval_every == 0 and not last:
            self._evaluate()
        if config.checkpoint_every and self.step % config.checkpoint_every == 0 and not last:
            self.save(outer)
        if self.stop.due_after(self.step) and not last:
            self.save(outer)
            self.events.write("end", self.step, reason="stopped")
            raise Stopped(f"stopped after step {self.step}")

    def validation_loss(self) -> float:
        """The mean loss of the held-out sequences, in nats a token."""
        size = self.config.batch_size
        self.model.eval()
        with torch.no_grad():
            losses = [float(self._loss(part)) * len(part) for part in torch.split(self.held_out, size)]
        self.model.train()
        return sum(losses) / len(self.held_out)

    def save(self, outer: Attached) -> None:
        """Writes this replica's part of a checkpoint."""
        with self._rate.paused():
            began = self.network.now()
            state = {
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "outer": outer.state_dict(),
                "random": torch.get_rng_state(),
                "random_cuda": torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None,
                "rounds": self.rounds,
                "traffic": dataclasses.asdict(self.network.traffic),
                "elapsed": self.events.elapsed(),
                "events_size": self.events.size(),
            }
            checkpoint.save(self.folder, self.step, self.rank, state)
            checkpoint.prune(self.folder, self.rank, self.config.keep_checkpoints)
            self.events.write("checkpoint", self.step, seconds=self.network.now() - began)

    def _restore(self, state: dict[str, Any], outer: Attached) -> None:
        checkpoint.forget_after(self.folder, self.rank, self.step)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        outer.load_state_dict(state["outer"])
        torch.set_rng_state(state["random"])
        if state["random_cuda"] is not None:
            torch.cuda.set_rng_state(state["random_cuda"], self.device)
        self.rounds = state["rounds"]
        for name, value in state["traffic"].items():
            setattr(self.network.traffic, name, value)
        self._bytes_told = self.network.traffic.bytes_sent
        self._saved = None

    def _loss(self, sequences: torch.Tensor) -> torch.Tensor:
        half = self.config.precision == "bfloat16"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=half):
            return models.sequence_loss(self.model, sequences.to(self.device))

    def _evaluate(self) -> None:
        with self._rate.paused():
            weights = torch.cat([p.detach().flatten() for p in self.model.parameters()])
            positions = torch.linspace(0, len(weights) - 1, min(SAMPLED_WEIGHTS, len(weights)), dtype=torch.float64)
            sample = weights[positions.long().to(weights.device)].float().cpu().numpy().astype(np.dtype("<f4"))
            self.events.write(
                "evaluation",
                self.step,
                tokens=self.step * self.config.tokens_per_step,
                bytes_sent=self.network.traffic.bytes_sent,
                validation_loss=self.validation_loss(),
                sample=base64.b64encode(sample.tobytes()).decode(),
            )

    def _describe(self) -> None:
        self.events.write(
            "start",
            self.step,
            method=self.config.method,
            replicas=self.config.replicas,
            steps=self.config.steps,
            parameters=sum(p.numel() for p in self.model.parameters()),
            network=self.config.network,
            host=socket.gethostname(),
            device=str(self.device),
            tokens_per_step=self.config.tokens_per_step,
            resumed=self._resumed,
        )

    def _log_step(self, loss: float) -> None:
        traffic = self.network.traffic
        self.events.write(
            "step",
            self.step,
            tokens=self.step * self.config.tokens_per_step,
            loss=loss,
            lr=self.optimizer.param_groups[0]["lr"],
            tokens_per_second=self._rate.take(),
            rounds=self.rounds,
            bytes_sent=traffic.bytes_sent,
            seconds_blocked=traffic.seconds_blocked,
        )

    def _log_round(self, round: Round) -> None:
        self.rounds += bool(round.group)
        values = dataclasses.asdict(round)
        for moment in ("started", "finished", "waited_from", "landed"):
            values[moment] = self.events.since_start(values[moment])
        sent, self._bytes_told = self.network.traffic.bytes_sent - self._bytes_told, self.network.traffic.bytes_sent
        self.events.write("round", values.pop("step"), **values, bytes_sent=sent)
        if round.reason:
            self._warn(f"round {round.round}: {round.outcome}: {round.reason}")

    def _warn(self, message: str) -> None:
        self.events.write("warning", self.step, message=message)


class _Rate:
    """Tokens a second of training, leaving out the time that evaluations and checkpoints take."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._tokens = 0
        self._since = network.now()

    def count(self, tokens: int) -> None:
        self._tokens += tokens

    @contextlib.contextmanager
    def paused(self) -> Any:
        began = self._network.now()
        yield
        self._since += self._network.now() - began

    def take(self) -> float:
        """The rate since this was last asked for."""
        now = self._network.now()
        rate = self._tokens / max(now - self._since, 1e-9)
        self._tokens, self._since = 0, now
        return rate


def learning_rate(config: Config, step: int) -> float:
    """The inner learning rate of a step (from 0): a linear rise, then a cosine to a tenth."""
    if step < config.warmup:
        return config.lr * (step + 1) / (config.warmup + 1)
    progress = (step - config.warmup) / max(config.steps - config.warmup, 1)
    return config.lr * (0.55 + 0.45 * math.cos(math.pi * progress))
