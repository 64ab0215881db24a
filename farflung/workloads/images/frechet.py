"""How far drawn pictures are from real ones: a Frechet distance on the features of a small classifier.

The classifier is trained here, on the same pictures, so that distances can be compared between runs on the same data,
and not with published ones, which are on the features of a large network and of photographs.
"""

from __future__ import annotations

import contextlib
import math

import torch
from torch import Tensor, nn

from farflung.files import replacing
from farflung.workloads.images.pictures import Pictures, digest
from farflung.workloads.prepared import cache

FEATURES = 32
"""Numbers that the classifier makes of a picture, before it chooses a class."""
STEPS, BATCH, LR = 400, 128, 2e-3
"""Of the classifier's training."""
RECIPE = 2
"""Another number for another classifier, or another training of it, so that none is taken from the cache."""


class Classifier(nn.Sequential):
    """A small classifier of pictures (n, channels, height, width), whose last but one layer gives their features."""

    def __init__(self, channels: int, classes: int) -> None:
        features = nn.Sequential(
            *(nn.Conv2d(channels, 16, 3, padding=1), nn.SiLU(), nn.MaxPool2d(2, ceil_mode=True)),
            *(nn.Conv2d(16, 32, 3, padding=1), nn.SiLU(), nn.AdaptiveAvgPool2d(4)),
            *(nn.Flatten(), nn.Linear(32 * 16, FEATURES), nn.Tanh()),
        )
        super().__init__(features, nn.Linear(FEATURES, classes))

    @torch.no_grad()
    def features(self, values: Tensor) -> Tensor:
        """(n, FEATURES) float64 of pictures from -1 to 1, on the CPU."""
        with torch.autocast("cpu", enabled=False):
            found: Tensor = self[0](values)
        return found.double()


def classifier_of(pictures: Pictures, classes: int) -> Classifier:
    """The classifier of these pictures, from the cache, or trained and put there."""
    classifier = Classifier(pictures.pixels.shape[1], classes)
    path = cache() / "picture-classifiers" / f"{RECIPE}-{digest(pictures)[:32]}.pt"
    with contextlib.suppress(Exception):  # of whatever kind a damaged or an old file is: it is made anew
        classifier.load_state_dict(torch.load(path, weights_only=True))
        return classifier
    _train(classifier, pictures)
    with contextlib.suppress(OSError), replacing(path) as file:  # a folder that cannot be written to costs time only
        torch.save(classifier.state_dict(), file)
    return classifier


def distance(one: Tensor, other: Tensor) -> float:
    """Frechet distance of Gaussians with the means and covariances of features (n, FEATURES) float64.

    ‖μ - μ'‖² + tr(C + C' - 2 (C C')^½), arXiv 1706.08500. NaN where features are, as a spoilt
    model's are.
    """
    if not (one.isfinite().all() and other.isfinite().all()):
        return math.nan
    shift = (one.mean(0) - other.mean(0)).square().sum()
    first, second = (torch.cov(features.T) for features in (one, other))
    root = _root(first)
    shared = torch.linalg.eigvalsh(root @ second @ root).clamp(min=0).sqrt().sum()
    return float(shift + first.trace() + second.trace() - 2 * shared)


def _root(matrix: Tensor) -> Tensor:
    """The symmetric square root of a symmetric matrix without negative eigenvalues."""
    values, vectors = torch.linalg.eigh(matrix)
    root: Tensor = vectors * values.clamp(min=0).sqrt() @ vectors.T
    return root


@torch.enable_grad()
def _train(classifier: Classifier, pictures: Pictures) -> None:
    random = torch.Generator().manual_seed(0)
    for parameter in classifier.parameters():
        bound = parameter[0].numel() ** -0.5 if parameter.ndim > 1 else 0.0
        nn.init.uniform_(parameter, -bound, bound, generator=random)
    optimizer = torch.optim.AdamW(classifier.parameters(), lr=LR)
    with torch.autocast("cpu", enabled=False):
        for _ in range(STEPS):
            some = pictures.at(torch.randint(len(pictures.labels), (BATCH,), generator=random))
            nn.functional.cross_entropy(classifier(some.values()), some.labels).backward()
            optimizer.step()
            optimizer.zero_grad()
