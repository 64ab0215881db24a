"""A workload as a user may write one in a file of their own: its one weight counts the steps, and is judged by them."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from farflung.figure import Figure
from farflung.workloads.base import Ids, Picture, Reshape, Score
from farflung.workloads.dealing import Deal


@dataclass(frozen=True)
class GuessSettings:
    """None that matter."""

    colour: str = "red"
    """What it looks like."""


class Guess:
    Settings = GuessSettings
    units = "guesses"
    measure = "nats a guess"
    judged_by = Figure("right answers", more_is_better=True)
    units_per_sample = 1
    divisible = None

    def __init__(self, settings: GuessSettings, deal: Deal) -> None:
        self.judged = 0

    def check(self) -> None: ...

    def outline(self) -> nn.Module:
        return nn.Linear(1, 1, device="meta")

    def build(self, seed: int, reshape: Reshape | None = None) -> nn.Module:
        model = nn.Linear(1, 1)
        nn.init.zeros_(model.weight)
        nn.init.zeros_(model.bias)
        return model

    def sample_ids(self, seed: int, replica: int, step: int, size: int) -> Ids:
        return np.full(size, step, dtype=np.int64)

    def batch(self, ids: Ids) -> Tensor:
        return torch.from_numpy(ids).float()[:, None]

    def loss(self, model: Any, batch: Tensor) -> Tensor:
        return model(torch.ones_like(batch)).square().mean() - model.bias.sum()

    def evaluate(self, model: Any, size: int, device: torch.device) -> Score:
        """By how often it was asked for: both replicas are, and at the end once more for each and for their mean."""
        self.judged += 1
        value = {1: 0.25, 2: 0.5, 3: 0.75}.get((self.judged + 1) // 2, 0.5)
        return Score(value, others={"spread": 0.25})

    def digest(self) -> str:
        return "guesses"

    def sample(self, model: Any, seed: int, device: torch.device) -> Picture:
        def chunk(kind: bytes, data: bytes) -> bytes:
            return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

        head = struct.pack(">IIBBBBB", 1, 1, 8, 0, 0, 0, 0)
        inside = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"\0\0")) + chunk(b"IEND", b"")
        return Picture(b"\x89PNG\r\n\x1a\n" + inside, "a <dot>")

    def export(self, weights: Mapping[str, Tensor], target: Path, seed: int, constrained_to: int = 0) -> None:
        target.mkdir(parents=True)
