"""One network that learns from all experts of a mixture of pictures: distillation (arXiv 2501.05450)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from farflung.errors import UserError
from farflung.mixtures.pictures import joined
from farflung.mixtures.pictures.folder import PictureSplit
from farflung.workloads.images import network
from farflung.workloads.images.settings import ImagesSettings
from farflung.workloads.images.workload import Images

if TYPE_CHECKING:
    from farflung.mixtures.pictures.modeling import PictureMixture
    from farflung.workloads.base import Batch, Ids


@dataclass(frozen=True)
class StudentSettings(ImagesSettings):
    """The network, and whom it learns from."""

    data: str = "MIX"
    """The folder of a mixture of pictures, of which all parts are learnt from."""
    teacher: str = "OUT"
    """The folder that farflung mixture export has made of it, with all experts."""


class Student(Images):
    """Learns, of each noisy picture, the flow that the expert of the picture's own part says. See Images."""

    Settings = StudentSettings
    settings: StudentSettings

    def batch(self, ids: Ids) -> Batch:
        """See Images, and which expert's work each picture is."""
        return {**super().batch(ids), "experts": self._experts[torch.from_numpy(ids % self.available)]}

    def loss(self, model: Any, batch: Batch) -> Tensor:
        """See Workload: what is held out is judged by the true flow."""
        return super().loss(model, {**batch, "flow": self._taught(batch)} if "experts" in batch else batch)

    def check(self) -> None:
        """See Workload."""
        super().check()
        _ = self._teacher

    @cached_property
    def _experts(self) -> Tensor:
        """Which part each picture that is trained on is of."""
        found = PictureSplit.read(Path(self.settings.data)).numbers()
        if len(found) != self.available:
            raise UserError(
                f"data {self.settings.data}: {len(found)} pictures were split, and {self.available} are there to train "
                "on; split them again"
            )
        return found

    @cached_property
    def _teacher(self) -> PictureMixture:
        """The experts. Raises UserError where one is missing, or of another mixture."""
        return joined.teacher(PictureSplit.read(Path(self.settings.data)), Path(self.settings.teacher))

    @torch.no_grad()
    def _taught(self, batch: Batch) -> Tensor:
        """The flow of each picture, by the expert of its own part."""
        found = torch.empty_like(batch["flow"])
        for number, expert in enumerate(self._teacher.to(found.device).experts):
            rows = (batch["experts"] == number).nonzero()[:, 0]
            if len(rows):
                found[rows] = network.flow(expert, batch["noisy"][rows], batch["shares"][rows], batch["labels"][rows])
        return found
