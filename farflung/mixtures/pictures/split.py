"""Pictures, split among experts: each gets a folder that `farflung train --workload images --data` takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from farflung.errors import UserError
from farflung.files import refuse_taken
from farflung.mixtures.folder import written_beside
from farflung.mixtures.pictures import router
from farflung.mixtures.pictures.clusters import two_levels
from farflung.mixtures.pictures.folder import PictureSplit
from farflung.mixtures.pictures.settings import PictureSplitSettings
from farflung.mixtures.seats import purity, table_of
from farflung.workloads.images import frechet
from farflung.workloads.images.folder import write_part, write_table
from farflung.workloads.images.pictures import Form, Pictures, grid
from farflung.workloads.images.workload import Images

SHOWN = 12
"""Examples of each part."""


def split(settings: PictureSplitSettings, tell: Callable[[str], object]) -> PictureSplit:
    """Finds the parts, trains the router, and writes the mixture's folder.

    Raises UserError: the folder is taken; pictures are of unlike sizes; an expert would have none; the router has
    collapsed.
    """
    refuse_taken(settings.out, "give another folder with --out")
    images = Images(settings.pictures)
    form, training, held_out = images.form, images.training, images.held_out
    looks = features(settings, form, training)
    clusters = two_levels(looks(training), settings.fine, settings.experts, settings.seed)
    parts, judged = (clusters.of(looks(some)) for some in (training, held_out))
    _refuse_empty(parts, judged, settings.experts)
    tell(f"k-means: {len(clusters.fine)} fine clusters, and {settings.experts} of these")
    model = router.trained(settings, form, training, parts, tell)
    router.refuse_collapsed(model, training, parts, settings.experts)
    return write(settings, form, (training, parts), (held_out, judged), model)


def features(settings: PictureSplitSettings, form: Form, training: Pictures) -> Callable[[Pictures], Tensor]:
    """What makes float64 features (n, d) of pictures for k-means. Raises UserError."""
    known = len(form.classes) > 1
    if (settings.features or ("classifier" if known else "pixels")) == "pixels":
        return lambda some: some.values().flatten(1).double()
    if not known:
        raise UserError("features is 'classifier', and the pictures are of one class; give pixels, or sub-folders")
    classifier = frechet.classifier_of(training, len(form.classes))
    return lambda some: classifier.features(some.values())


def write(
    settings: PictureSplitSettings,
    form: Form,
    training: tuple[Pictures, Tensor],
    held_out: tuple[Pictures, Tensor],
    model: Any,
) -> PictureSplit:
    """Writes a mixture of pictures whose parts (n,) are known, and its router."""
    (some, parts), (others, judged) = training, held_out
    made = PictureSplit(
        folder=settings.out,
        experts=settings.experts,
        dealt=table_of(parts.numpy(), some.labels.numpy()).tolist(),
        held_out=torch.bincount(judged, minlength=settings.experts).tolist(),
        classes=[*form.classes],
        purity=purity(parts.numpy(), some.labels.numpy()) if len(form.classes) > 1 else None,
        hits=router.hits(model, others, judged, settings.seed),
    )
    with written_beside(settings.out) as folder:
        there = PictureSplit(**{**vars(made), "folder": folder})
        for number in range(settings.experts):
            both = zip(some.at(parts == number), others.at(judged == number), strict=True)
            write_part(there.store(number), form.classes, Pictures(*map(torch.cat, both)))
        write_table(folder, form.classes, [there.store(number).name for number in range(settings.experts)])
        model.save_pretrained(there.router)
        there.examples.write_bytes(grid(_examples(some, parts, settings.experts)))
        there.write()
    return made


def _examples(some: Pictures, parts: Tensor, experts: int) -> Tensor:
    """(experts, SHOWN, channels, height, width) from -1 to 1: some of each part, evenly spread; white for none."""
    found = torch.ones(experts, SHOWN, *some.pixels.shape[1:])
    for number, row in enumerate(found):
        own = some.at(parts == number).evenly(SHOWN).values()
        row[: len(own)] = own
    return found


def _refuse_empty(parts: Tensor, judged: Tensor, experts: int) -> None:
    for what, numbers in (("to train on", parts), ("to be judged by", judged)):
        counts = torch.bincount(numbers, minlength=experts)
        if not counts.all():
            raise UserError(
                f"expert {int(counts.argmin())} would have no picture {what}, of {len(numbers)}; give more pictures, "
                "fewer --experts, or other --features"
            )
