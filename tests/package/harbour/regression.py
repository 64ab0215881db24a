"""A workload: a small net learns a random linear map."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from farflung.tables import BETWEEN_PEERS, Checked, setting
from farflung.workloads.base import Batch, Ids, Reshape
from farflung.workloads.dealing import Deal


@dataclass(frozen=True)
class RegressionSettings(Checked):
    """What is regressed."""

    features: int = setting(8, least=1)
    """Numbers of an example."""
    examples: int = setting(256, least=1, may_differ=BETWEEN_PEERS)
    """Examples to learn from; a quarter as many are held out."""
    noise: float = setting(0.1, least=0)
    """Standard deviation of what no map explains."""


class Regression:
    Settings = RegressionSettings
    units = "examples"
    measure = "squared error"
    units_per_sample = 1
    divisible = None

    def __init__(self, settings: RegressionSettings, deal: Deal) -> None:
        self.settings = settings
        self._deal = deal

    @cached_property
    def _data(self) -> tuple[Tensor, Tensor]:
        count, width = self.settings.examples * 5 // 4, self.settings.features
        generator = torch.Generator().manual_seed(1)
        given, weights = torch.randn(count, width, generator=generator), torch.randn(width, generator=generator)
        return given, given @ weights + self.settings.noise * torch.randn(count, generator=generator)

    def check(self) -> None: ...

    def outline(self) -> nn.Module:
        with torch.device("meta"):
            return nn.Sequential(nn.Linear(self.settings.features, 16), nn.Tanh(), nn.Linear(16, 1))

    def build(self, seed: int, reshape: Reshape | None = None) -> nn.Module:
        model = self.outline()
        if reshape:
            reshape(model)
        model.to_empty(device="cpu")
        generator = torch.Generator().manual_seed(seed)
        for parameter in model.parameters():
            nn.init.uniform_(parameter, -0.3, 0.3, generator=generator)
        return model

    def sample_ids(self, seed: int, replica: int, step: int, size: int) -> Ids:
        return self._deal.ids(seed, replica, step, size, self.settings.examples)

    def batch(self, ids: Ids) -> Batch:
        chosen = torch.from_numpy(ids)
        return {"given": self._data[0][chosen], "wanted": self._data[1][chosen]}

    def loss(self, model: Any, batch: Batch) -> Tensor:
        return (model(batch["given"])[:, 0] - batch["wanted"]).square().mean()

    def evaluate(self, model: Any, size: int, device: torch.device) -> float:
        given, wanted = (tensor[self.settings.examples :].to(device) for tensor in self._data)
        return float((model(given)[:, 0] - wanted).square().mean())

    def digest(self) -> str:
        return hashlib.sha256(self._data[1].numpy().tobytes()).hexdigest()

    def sample(self, model: Any, seed: int, device: torch.device) -> str:
        given, wanted = (tensor[-1:].to(device) for tensor in self._data)
        return f"{float(model(given)):.3f} for {float(wanted):.3f}"

    def export(self, weights: Mapping[str, Tensor], target: Path, seed: int, constrained_to: int = 0) -> None:
        target.mkdir(parents=True)
        (target / "weights.json").write_text(json.dumps({name: value.tolist() for name, value in weights.items()}))
