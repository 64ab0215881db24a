"""One replica, as each of its processes sees it."""

from __future__ import annotations

import math
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from farflung.config import Config
from farflung.networks import Traffic
from farflung.pipeline.layout import Layout, Place
from farflung.workloads import models
from farflung.workloads.data import Data

TEMPERATURE = 0.7
"""Of the text that a trained model writes."""


class Island(Protocol):
    """A replica's training, whether one process has all of it or many have parts. All of them call alike.

    `model` is what this process trains, `traffic` what it has sent to other stages.
    """

    layout: Layout
    place: Place
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

    def loss_of(self, sequences: Tensor) -> float:
        """The mean loss of (n, length) sequences, in nats a token, nothing lost between stages.

        Raises PeerLostError.
        """
        ...

    def continued(self, prompt: Tensor, length: int, end: int) -> list[int]:
        """A (1, n) prompt and what the model writes after it, up to `length` tokens or `end`. Raises PeerLostError."""
        ...

    def total(self, values: Tensor) -> Tensor:
        """The sum over the replica's processes of flat float64 values. Raises PeerLostError."""
        ...


class Alone:
    """A replica that one process has all of.

    Args:
        config: the settings.
        model: on its device.
        data: where batches come from.
        replica: its number.
    """

    def __init__(self, config: Config, model: Any, data: Data, replica: int, device: torch.device) -> None:
        self.layout = Layout.of(config)
        self.place = Place(replica)
        self.model = model
        self.traffic = Traffic()
        self._config = config
        self._data = data
        self._device = device

    def gradients(self, step: int) -> tuple[float, str]:
        """See Island."""
        config = self._config
        batch = self._data.batch(config.seed, self.place.replica, step, config.batch_size)
        parts = batch.tensor_split(config.microbatches or 1)
        total = 0.0
        for part in parts:
            loss = self._loss(part) / len(parts)
            value = float(loss.detach())
            total += value
            if not math.isfinite(value):
                self.model.zero_grad()
                return total, f"loss is {total}"
            torch.autograd.backward(loss)
        if config.clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), config.clip)
        return total, ""

    def after_step(self) -> None:
        """See Island."""

    @torch.no_grad()
    def loss_of(self, sequences: Tensor) -> float:
        """See Island."""
        self.model.eval()
        losses = [float(self._loss(part)) * len(part) for part in torch.split(sequences, self._config.batch_size)]
        self.model.train()
        return sum(losses) / len(sequences)

    @torch.no_grad()
    def continued(self, prompt: Tensor, length: int, end: int) -> list[int]:
        """See Island."""
        torch.manual_seed(self._config.seed)
        self.model.eval()
        prompt = prompt.to(self._device)
        tokens = self.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_length=length,
            do_sample=True,
            temperature=TEMPERATURE,
            pad_token_id=end,
        )
        return tokens[0].tolist()  # type: ignore[no-any-return]

    def total(self, values: Tensor) -> Tensor:
        """See Island."""
        return values

    def _loss(self, sequences: Tensor) -> Tensor:
        half = self._config.precision == "bfloat16"
        with torch.autocast(self._device.type, torch.bfloat16, enabled=half):
            return models.sequence_loss(self.model, sequences.to(self._device))
