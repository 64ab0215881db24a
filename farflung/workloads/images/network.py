"""The network that draws: a U-Net of diffusers, which says for a noisy picture which way the noise lies."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from farflung.errors import UserError
from farflung.workloads.base import Reshape
from farflung.workloads.images.pictures import Form
from farflung.workloads.images.settings import GROUPS

SMALLEST = 4
"""Pixels of the shorter side at which the U-Net stops to halve pictures: small enough to lay out all of one there."""
WIDEST = 4
"""How many times as many channels as at the pictures' own size there are, at most."""
MOMENTS = 1000
"""What the network calls the moment at which a picture is all noise; 0 is that of the clear picture."""
STEPS = 16
"""Of the sampler, from noise to a picture."""


def library() -> Any:
    """diffusers. Raises UserError where it is not installed."""
    try:
        import diffusers
    except ImportError as error:
        raise UserError(
            "workload images needs diffusers, which is not installed; install it with: pip install 'farflung[images]'"
        ) from error
    return diffusers


def outline(form: Form, width: int, out_channels: int | None = None) -> Any:
    """The U-Net for such pictures, without memory for its weights; it gives as many channels as they have, or others.

    Raises UserError.
    """
    kind = library().UNet2DModel
    channels, height, across = [width], form.height, form.width
    while min(height, across) > SMALLEST and height % 2 == across % 2 == 0:
        height, across = height // 2, across // 2
        channels.append(min(2 * channels[-1], WIDEST * width))
    with torch.device("meta"):
        return kind(
            sample_size=(form.height, form.width),
            in_channels=form.channels,
            out_channels=out_channels or form.channels,
            block_out_channels=channels,
            layers_per_block=1,
            down_block_types=["DownBlock2D"] * len(channels),
            up_block_types=["UpBlock2D"] * len(channels),
            norm_num_groups=GROUPS,
            num_class_embeds=len(form.classes),
        )


def build(form: Form, width: int, seed: int, reshape: Reshape | None) -> Any:
    """The U-Net with random weights: see `with_weights`. Raises UserError."""
    model = outline(form, width)
    if reshape:
        reshape(model)
    return with_weights(model, seed)


def with_weights(model: Any, seed: int) -> Any:
    """A model without memory, with random weights, each module's from the seed and its name."""
    model.to_empty(device="cpu")
    with torch.random.fork_rng(devices=[]):
        for name, module in model.named_modules():
            if any(True for _ in module.parameters(recurse=False)):
                torch.manual_seed(zlib.crc32(f"{seed} {name}".encode()))
                module.reset_parameters()
    return model


def flow(model: Any, noisy: Tensor, share: Tensor, labels: Tensor) -> Tensor:
    """The network's guess of noise minus picture, of (n, channels, height, width) in which noise has (n,) shares."""
    found: Tensor = model(noisy, share * MOMENTS, labels).sample
    return found.float()


def operations(form: Form, width: int, recompute: bool) -> float:
    """Those of training on one picture: two for each of the forward pass in going back, which may take it once more."""
    with FlopCounterMode(display=False) as forward, torch.device("meta"):
        flow(outline(form, width), torch.empty(1, *form.shape), torch.empty(1), torch.zeros(1, dtype=torch.int64))
    found: float = forward.get_total_flops() * (4.0 if recompute else 3.0)
    return found


def draw(model: Any, labels: Tensor, form: Form, seed: int, size: int) -> Tensor:
    """(n, channels, height, width) on the CPU, from -1 to 1: a picture of each of these classes, `size` at a time.

    The noise that they begin with follows from the seed, and is the same on all devices.
    """
    noise = torch.randn(len(labels), *form.shape, generator=torch.Generator().manual_seed(seed))
    parts = zip(noise.split(size), labels.split(size), strict=True)
    return torch.cat([_drawn(model, *(tensor.to(model.device) for tensor in part)) for part in parts])


def _drawn(model: Any, pictures: Tensor, labels: Tensor) -> Tensor:
    scheduler = library().FlowMatchEulerDiscreteScheduler(num_train_timesteps=MOMENTS)
    scheduler.set_timesteps(sigmas=np.linspace(1, 1 / STEPS, STEPS), device=pictures.device)
    for moment in scheduler.timesteps:
        away = flow(model, pictures, (moment / MOMENTS).expand(len(pictures)), labels)
        pictures = scheduler.step(away, moment, pictures).prev_sample
    return pictures.clamp(-1, 1).cpu()
