"""A mixture of networks that draw: a router says of a noisy picture whose work it is.

It needs torch and diffusers alone. This file lies in each folder that farflung exports a mixture of pictures to.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, UNet2DModel
from diffusers.models.unets.unet_2d import UNet2DOutput
from torch import Tensor, nn

MOMENTS = 1000
"""What the networks call the moment at which a picture is all noise; 0 is that of the clear picture."""
TABLE = "experts.json"


def scores(router: nn.Module, sample: Tensor, timestep: Tensor, class_labels: Tensor) -> Tensor:
    """(n, K): a router's score of each part: the mean over all pixels. See `PictureMixture.forward`."""
    found: Tensor = router(sample, timestep, class_labels).sample
    return found.flatten(2).mean(dim=2)


class PictureMixture(nn.Module):
    """Experts and their router as one model, which is called as a UNet2DModel is.

    Exactly, the flow of all data is the mean of the flows of its parts: u(x, t) = Σ r_k(x, t) u_k(x, t), where r_k is
    the chance that a noisy picture x of moment t is of part k (arXiv 2501.05450). Fewer experts are cheaper.

    Args:
        router: gives (n, K, height, width), whose means over pixels are the parts' log-probabilities, but for a sum.
        experts: networks by the numbers of their parts; what is of the others is the work of those that there are.
        top: how many experts work on a picture, the most likely ones.
        all_above: the share of noise, from 0 to 1, above which all experts do.
    """

    def __init__(
        self, router: nn.Module, experts: Mapping[int, nn.Module], top: int = 1, all_above: float = 1.0
    ) -> None:
        super().__init__()
        self.router, self.numbers = router, sorted(experts)
        self.experts = nn.ModuleList(experts[number] for number in self.numbers)
        self.top, self.all_above = top, all_above

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> PictureMixture:
        """What farflung has exported, in evaluation mode."""
        table = json.loads((Path(folder) / TABLE).read_text("utf-8"))
        parts = {number: UNet2DModel.from_pretrained(Path(folder) / f"expert-{number}") for number in table["experts"]}
        router = UNet2DModel.from_pretrained(Path(folder) / "router")
        return cls(router, parts, table["top"], table["all_above"]).eval()

    @property
    def device(self) -> torch.device:
        """Where its weights are."""
        return next(self.parameters()).device

    def weights(self, scores: Tensor, timestep: Tensor) -> Tensor:
        """(n, experts there are): how much of each picture is each expert's work, of scores (n, K); 0 for none."""
        there = scores[:, self.numbers]
        ranks = there.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
        at_work = (ranks < self.top) | (timestep > self.all_above * MOMENTS)[:, None]
        return there.masked_fill(~at_work, -torch.inf).softmax(dim=1)

    def forward(self, sample: Tensor, timestep: Tensor | float, class_labels: Tensor) -> UNet2DOutput:
        """The flow, noise minus picture, of noisy pictures; only experts that have work compute.

        Args:
            sample: (n, channels, height, width).
            timestep: (n,) or one for all: the share of noise, times 1000.
            class_labels: (n,) int64.
        """
        moments = torch.as_tensor(timestep, device=sample.device).expand(len(sample))
        weights = self.weights(scores(self.router, sample, moments, class_labels), moments)
        found = torch.zeros_like(sample)
        for place, expert in enumerate(self.experts):
            rows = weights[:, place].nonzero()[:, 0]
            if len(rows):
                flow = expert(sample[rows], moments[rows], class_labels[rows]).sample
                found[rows] += (flow * weights[rows, place, None, None, None]).to(found.dtype)
        return UNet2DOutput(sample=found)

    @torch.no_grad()
    def draw(self, labels: Tensor, seed: int = 0, steps: int = 16) -> Tensor:
        """A picture of each of the classes (n,), from noise: (n, channels, height, width), from -1 to 1."""
        size: Any = self.router.config
        shape, dtype = (len(labels), size.in_channels, *size.sample_size), next(self.parameters()).dtype
        pictures = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(self.device)
        scheduler = FlowMatchEulerDiscreteScheduler(num_train_timesteps=MOMENTS)
        scheduler.set_timesteps(sigmas=np.linspace(1, 1 / steps, steps), device=self.device)
        for moment in scheduler.timesteps:
            flow = self(pictures.to(dtype), moment, labels.to(self.device)).sample.float()
            pictures = scheduler.step(flow, moment, pictures).prev_sample
        return pictures.clamp(-1, 1)
