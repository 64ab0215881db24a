"""The router: a small U-Net that says of a noisy picture which part it may be of (arXiv 2501.05450)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from farflung.errors import UserError
from farflung.mixtures.pictures.modeling import MOMENTS, scores
from farflung.mixtures.pictures.settings import PictureSplitSettings
from farflung.workloads.images import network
from farflung.workloads.images.pictures import Form, Pictures
from farflung.workloads.images.workload import noisy

LEVELS = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Shares of noise at which a router is judged."""
TELLS = 5
"""How often training tells how it goes."""
LEAST_KNOWN = 0.1
"""Of the clear pictures of a part: a router that knows fewer has learnt nothing of it."""
AT_ONCE = 256
"""Pictures that a router judges at once."""


def trained(
    settings: PictureSplitSettings, form: Form, some: Pictures, parts: Tensor, tell: Callable[[str], object]
) -> Any:
    """A router that has learnt which of the parts (n,) noisy pictures are of, by cross-entropy; in evaluation mode.

    It has the noise and the shares that experts have, and is told the class as they are. Raises UserError.
    """
    outline = network.outline(form, settings.router_width, settings.experts)
    model = network.with_weights(outline, settings.seed).train()
    random = torch.Generator().manual_seed(settings.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr)
    falling = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, settings.router_steps)
    losses = []
    for step in range(1, settings.router_steps + 1):
        ids = torch.randint(len(parts), (settings.batch_size,), generator=random)
        shares = torch.rand(len(ids), generator=random)
        batch = noisy(some.at(ids), torch.randn(len(ids), *form.shape, generator=random), shares)
        loss = nn.functional.cross_entropy(_scores(model, batch), parts[ids])
        if not loss.isfinite():
            raise UserError(f"the router has diverged with --lr {settings.lr:g}; give a smaller one")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        falling.step()
        losses.append(float(loss.detach()))
        if step % max(1, settings.router_steps // TELLS) == 0:
            tell(f"router, step {step}: {sum(losses) / len(losses):.4f} nats a picture")
            losses.clear()
    return model.eval()


@torch.no_grad()
def posteriors(model: Any, some: Pictures, share: float, seed: int) -> Tensor:
    """(n, K) float32: a router's scores of pictures in which noise has a share."""
    noise = torch.randn(some.pixels.shape, generator=torch.Generator().manual_seed(seed))
    batch = noisy(some, noise, torch.full((len(some.labels),), share))
    rows = torch.arange(len(some.labels)).split(AT_ONCE)
    return torch.cat([_scores(model, {name: tensor[own] for name, tensor in batch.items()}) for own in rows])


def hits(model: Any, some: Pictures, parts: Tensor, seed: int) -> dict[str, float]:
    """By the share of noise in pictures, the share of them that a router knows the part of."""
    found = {level: posteriors(model, some, level, seed).argmax(dim=1) for level in LEVELS}
    return {f"{level:g}": float((own == parts).double().mean()) for level, own in found.items()}


def refuse_collapsed(model: Any, some: Pictures, parts: Tensor, experts: int) -> None:
    """Raises UserError where a router knows hardly any clear picture of a part as such."""
    known = posteriors(model, some, 0.0, 0).argmax(dim=1) == parts
    for number in range(experts):
        own = known[parts == number]
        if own.double().mean() < LEAST_KNOWN:
            raise UserError(
                f"the router has collapsed: of {len(own)} pictures of expert {number} it knows {int(own.sum())}, even "
                "without noise; give more --router-steps, another --lr or --seed, or fewer --experts"
            )


def _scores(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return scores(model, batch["noisy"], batch["shares"] * MOMENTS, batch["labels"])
