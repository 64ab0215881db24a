"""A swarm in this process: its peers train in threads, each with a libp2p host of its own, on loopback."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from patience import patience, until
from test_internet import Run

from farflung.events import Event, events_in
from farflung.settings import Settings
from farflung.swarm.island import SwarmIsland
from farflung.swarm.seat import Seat
from farflung.training import launch
from farflung.training.island import coordination
from farflung.training.trainer import Trainer

SETTINGS: dict[str, Any] = {
    "network": "internet",
    "swarm": True,
    "stepping": "synchronous",
    "method": "local",
    "model": "micro",
    "sequence_length": 16,
    "batch_size": 4,
    "microbatches": 4,
    "max_tokens": 50_000,
    "eval_sequences": 2,
    "eval_every": 100_000,
    "log_every": 1,
    "lr": 0.003,
}


class SwarmHere:
    """Peers that serve some stages; `changed` are settings."""

    def __init__(self, folder: Path, serving: list[int], **changed: Any) -> None:
        self.run = Run(folder)
        self.settings = Settings.of(**{**SETTINGS, "stages": 1 + max(serving), "deadline": patience(15), **changed})
        self.trainers = [self.join(stage) for stage in serving]
        self._pool = ThreadPoolExecutor(8)
        until(lambda: all(len(one.peers.members.proven()) == len(serving) - 1 for one in self.run.peers))

    def join(self, stage: int) -> Trainer:
        """One more peer, that does not train yet."""
        network, folder = self.run.join(stage=stage), self.run.folder / f"peer-{len(self.run.peers)}"
        launch.prepare(self.settings, folder, False)
        return Trainer(self.settings, network, folder, coordination(None, self.settings.figure), torch.device("cpu"))

    def train(self, *trainers: Trainer) -> list[Future[None]]:
        """Has all peers train, unless some are given."""
        return [self._pool.submit(self._train, one) for one in trainers or self.trainers]

    def _train(self, trainer: Trainer) -> None:
        with trainer.stop.listening():
            trainer.train()

    def reached(self, step: int) -> None:
        """Waits until all have taken so many steps."""
        until(lambda: all(one.step >= step for one in self.trainers))

    @staticmethod
    def seat(trainer: Trainer) -> Seat:
        assert isinstance(trainer.island, SwarmIsland)
        return trainer.island._seat

    @staticmethod
    def events(trainer: Trainer) -> list[Event]:
        """What it says has happened, once all has ended."""
        (path,) = (trainer.folder / "events").iterdir()
        found, spoilt = events_in(path.read_bytes(), str(path))
        assert not spoilt
        return found

    def close(self) -> None:
        """Ends it all."""
        for one in self.trainers:
            one.stop.request()
        self.run.close()
        self._pool.shutdown()
        for one in self.trainers:
            one.log.events.close()
