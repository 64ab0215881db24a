"""Pictures that a network learns to draw, by flow matching."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from farflung.errors import UserError, counted
from farflung.lazy import Later
from farflung.workloads.dealing import ALL, Deal
from farflung.workloads.images.settings import ImagesSettings

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import Tensor

    from farflung.workloads import base
    from farflung.workloads.base import Batch, Ids, Reshape
    from farflung.workloads.images import exported, folder, frechet, glyphs, network, pictures
    from farflung.workloads.images.pictures import Form, Pictures
else:
    np, torch, base = Later("numpy"), Later("torch"), Later("farflung.workloads.base")
    exported, folder, frechet, glyphs, network, pictures = (
        Later(f"farflung.workloads.images.{name}")
        for name in ("exported", "folder", "frechet", "glyphs", "network", "pictures")
    )

NOISES = 1 << 31
"""How many noises and moments there are for each picture."""
SAMPLE_ROWS, SAMPLE_COLUMNS = 4, 32
"""Pictures of each class in a sample, and its classes at most."""
FRECHET = "Frechet distance"
"""The name of the figure."""


class Images:
    """A network that draws pictures of a class, by flow matching (arXiv 2210.02747) on small pictures.

    A sample is a picture x, a share s of noise, and a noise z: of (1 - s) x + s z, the network learns z - x. It cannot
    be divided. See Workload.
    """

    Settings = ImagesSettings
    units = "pictures"
    measure = "squared error a pixel"
    units_per_sample = 1
    divisible = None

    def __init__(self, settings: ImagesSettings, deal: Deal = ALL) -> None:
        self.settings = settings
        self._deal = deal

    @cached_property
    def _source(self) -> glyphs.Glyphs | folder.Folder:
        given = self.settings
        if given.data == "glyphs":
            return glyphs.Glyphs(given.letters, given.resize or glyphs.SIDE, tuple(glyphs.font_folders()))
        return folder.Folder(Path(given.data).expanduser(), given.resize)

    @property
    def form(self) -> Form:
        """What is known of the pictures before they are read. Raises UserError."""
        return self._source.form

    @cached_property
    def _pictures(self) -> tuple[Pictures, Pictures]:
        """Those to train on, and those held out. Raises UserError."""
        found = self._source.read().split()
        if not all(len(part.labels) for part in found):
            count = counted(sum(len(part.labels) for part in found), "picture")
            raise UserError(
                f"data {self.settings.data}: holds {count}, too few to hold one in twenty out, where those that "
                "are the same count once; add some"
            )
        return found

    @property
    def training(self) -> Pictures:
        """The pictures to train on. Raises UserError."""
        return self._pictures[0]

    @cached_property
    def held_out(self) -> Pictures:
        """The pictures that models are judged by. Raises UserError."""
        return self._pictures[1].evenly(self.settings.eval_pictures)

    def check(self) -> None:
        """See Workload."""
        if self.form.height == self.form.width == 1:
            raise UserError(f"data {self.settings.data}: pictures are of one pixel; give larger ones, or --resize 8")
        self.outline()

    def outline(self) -> Any:
        """See Workload."""
        return network.outline(self.form, self.settings.width)

    def build(self, seed: int, reshape: Reshape | None = None) -> Any:
        """See Workload."""
        return network.build(self.form, self.settings.width, seed, reshape)

    @property
    def available(self) -> int:
        """See Workload."""
        return len(self.training.labels)

    @cached_property
    def known(self) -> dict[str, str]:
        """See Workload: a hash of the pictures, and of the names of their classes."""
        parts = [*self.form.classes, *(pictures.digest(part) for part in self._pictures)]
        return {self.settings.data: hashlib.sha256("\n".join(parts).encode()).hexdigest()}

    def operations(self, recompute: bool) -> float:
        """See Workload."""
        return network.operations(self.form, self.settings.width, recompute)

    def sample_ids(self, seed: int, replica: int, step: int, size: int) -> Ids:
        """See Workload: the number of a picture, and that of its noise times the number of pictures."""
        chosen = self._deal.ids(seed, replica, step, size, self.available)
        return chosen + self.available * np.random.default_rng((seed, replica, step)).integers(NOISES, size=size)

    def batch(self, ids: Ids) -> Batch:
        """Pictures with noise: see `noisy`."""
        some = self.training.at(torch.from_numpy(ids % self.available))
        noise, shares = torch.empty(len(ids), *self.form.shape), torch.empty(len(ids))
        for number, key in enumerate(ids.tolist()):
            random = np.random.default_rng(key)
            shares[number] = random.random()
            noise[number] = torch.from_numpy(random.standard_normal(self.form.shape, dtype=np.float32))
        return noisy(some, noise, shares)

    def loss(self, model: Any, batch: Batch) -> Tensor:
        """See Workload."""
        guess = network.flow(model, batch["noisy"], batch["shares"], batch["labels"])
        return torch.nn.functional.mse_loss(guess, batch["flow"])

    def evaluate(self, model: Any, size: int, device: torch.device) -> base.Score:
        """The mean loss of pictures held out, always with the same noise, and how far drawn ones are from them."""
        count = len(self.held_out.labels)
        noise = torch.randn(count, *self.form.shape, generator=torch.Generator().manual_seed(0))
        shares = (torch.arange(count) * 0.6180339887) % 1  # spread evenly, and so in each class
        whole, total = noisy(self.held_out, noise, shares), 0.0
        for numbers in torch.arange(count).split(size):
            batch = {name: tensor[numbers] for name, tensor in whole.items()}
            total += float(self.loss(model, base.to(batch, device))) * len(numbers)
        return base.Score(total / count, others=self._others(model, size))

    def _others(self, model: Any, size: int) -> dict[str, float]:
        """The Frechet distance, where there are classes for a classifier to tell apart, and it is asked for.

        One picture, drawn or held out, has no covariance.
        """
        drawn, labels = self.settings.drawn_pictures, self.held_out.labels
        if min(drawn, len(labels), len(self.form.classes)) < 2:
            return {}
        labels = labels[torch.from_numpy(np.linspace(0, len(labels) - 1, drawn).astype(np.int64))]
        return {FRECHET: self.distance(network.draw(model, labels, self.form, 0, size))}

    def distance(self, values: Tensor) -> float:
        """Frechet distance of pictures (n, channels, height, width) from -1 to 1 to those held out."""
        return frechet.distance(self._classifier.features(values), self._features)

    @cached_property
    def _classifier(self) -> frechet.Classifier:
        return frechet.classifier_of(self.training, len(self.form.classes))

    @cached_property
    def _features(self) -> Tensor:
        return self._classifier.features(self.held_out.values())

    def digest(self) -> str:
        """See Workload."""
        return hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in self.held_out)).hexdigest()

    def sample(self, model: Any, seed: int, device: torch.device) -> base.Picture:
        """A grid of pictures that a model draws: a column for each class, or for the first of them."""
        classes = self.form.classes[:SAMPLE_COLUMNS]
        labels = torch.arange(len(classes)).repeat(SAMPLE_ROWS)
        drawn = network.draw(model, labels, self.form, seed, len(labels))
        columns = ", ".join(classes) + ("" if len(classes) == len(self.form.classes) else ", …")
        shown = pictures.grid(drawn.unflatten(0, (SAMPLE_ROWS, len(classes))))
        return base.Picture(shown, f"a column for each class: {columns}")

    def export(self, weights: Mapping[str, Tensor], target: Path, seed: int, constrained_to: int = 0) -> None:
        """A folder that diffusers' UNet2DModel loads, with the classes' names and a README that draws."""
        shutil.rmtree(target, ignore_errors=True)
        model = self.build(seed)
        model.load_state_dict(weights)
        model.save_pretrained(target)
        exported.write_beside(target, self.form)


def noisy(some: Pictures, noise: Tensor, shares: Tensor) -> dict[str, Tensor]:
    """Pictures in which noise (n, channels, height, width) has (n,) shares, the flow, and the classes' numbers."""
    values, share = some.values(), shares[:, None, None, None]
    return {
        "noisy": torch.lerp(values, noise, share),
        "shares": shares,
        "labels": some.labels,
        "flow": noise - values,
    }
