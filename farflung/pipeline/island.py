"""One replica, as each of its processes sees it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from farflung.networks import Traffic
from farflung.pipeline.mesh import Mesh, MeshCoordinates
from farflung.pipeline.settings import IslandSettings
from farflung.workloads.base import Ids, Workload, to


class Island(Protocol):
    """A replica's training, whether one process has all of it or many have parts. All of them call alike.

    `model` is what this process trains, `traffic` what it has sent to other stages.
    """

    mesh: Mesh
    coordinates: MeshCoordinates
    model: nn.Module
    traffic: Traffic

    def gradients(self, step: int) -> tuple[float, str]:
        """Leaves each parameter the gradient of the replica's mean loss in a step, clipped.

        Returns the loss, and what is wrong with it, or ""; then there are no gradients. Raises PeerLostError.
        """
        ...

    def after_step(self) -> None:
        """What is to be done when the weights have changed. Raises PeerLostError."""
        ...

    def evaluate(self) -> float:
        """What the workload judges the model by, nothing lost between stages. Raises PeerLostError."""
        ...

    def sample(self) -> str:
        """Something to look at that the model makes. Raises PeerLostError."""
        ...

    def total(self, values: Tensor) -> Tensor:
        """The sum over the replica's processes of flat float64 values. Raises PeerLostError."""
        ...


class WholeIsland:
    """A replica that one process has all of.

    Args:
        settings: how it computes.
        workload: what is trained.
        model: on its device.
        mesh: who is where.
        replica: its number.
        seed: of batches and samples.
    """

    def __init__(
        self,
        settings: IslandSettings,
        workload: Workload,
        model: Any,
        mesh: Mesh,
        replica: int,
        seed: int,
        device: torch.device,
    ) -> None:
        self.mesh = mesh
        self.coordinates = MeshCoordinates(replica)
        self.model = model
        self.traffic = Traffic()
        self._settings = settings
        self._workload = workload
        self._seed = seed
        self._device = device

    def gradients(self, step: int) -> tuple[float, str]:
        """See Island."""
        settings = self._settings
        ids = self._workload.sample_ids(self._seed, self.coordinates.replica, step, settings.batch_size)
        parts = np.array_split(ids, settings.microbatches or 1)
        total = 0.0
        for part in parts:
            loss = self._loss(part) / len(parts)
            value = float(loss.detach())
            total += value
            if not math.isfinite(value):
                self.model.zero_grad()
                return total, f"loss is {total}"
            torch.autograd.backward(loss)
        if settings.clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), settings.clip)
        return total, ""

    def after_step(self) -> None:
        """See Island."""

    def evaluate(self) -> float:
        """See Island."""
        with self._evaluating(), self._precision():
            return self._workload.evaluate(self.model, self._settings.batch_size, self._device)

    def sample(self) -> str:
        """See Island."""
        with self._evaluating():
            return self._workload.sample(self.model, self._seed, self._device)

    def total(self, values: Tensor) -> Tensor:
        """See Island."""
        return values

    def _loss(self, ids: Ids) -> Tensor:
        with self._precision():
            return self._workload.loss(self.model, to(self._workload.batch(ids), self._device))

    def _precision(self) -> torch.autocast:
        return torch.autocast(self._device.type, torch.bfloat16, enabled=self._settings.precision == "bfloat16")

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        self.model.eval()
        with torch.no_grad():
            yield
        self.model.train()
