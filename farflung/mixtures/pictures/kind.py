"""Mixtures of pictures, as the commands use them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from farflung.errors import UserError, counted, disk_errors
from farflung.lazy import Later
from farflung.mixtures.pictures.settings import PictureSplitSettings

if TYPE_CHECKING:
    from farflung.mixtures.pictures import folder as folders
    from farflung.mixtures.pictures import joined, split
    from farflung.mixtures.pictures.folder import PictureSplit
    from farflung.networks.base import Network
    from farflung.workloads.base import Score
    from farflung.workloads.images import network
else:
    network = Later("farflung.workloads.images.network")
    folders, joined, split = (Later(f"farflung.mixtures.pictures.{name}") for name in ("folder", "joined", "split"))


class PicturesKind:
    """See Kind."""

    noun = "picture"
    exported = "its README draws with it"
    Settings = PictureSplitSettings
    options = frozenset({"top", "all_above", "drawn_pictures", "grid"})

    def split(self, settings: PictureSplitSettings, seat: Network, tell: Callable[[str], object]) -> PictureSplit:
        """See Kind: one machine does it. Raises UserError for more."""
        if len(seat.members()) > 1:
            raise UserError("one machine splits pictures, which is quick; start it without torchrun")
        network.library()
        return split.split(settings, tell)

    def read(self, folder: Path) -> PictureSplit:
        """See Kind. Raises UserError without diffusers, too."""
        network.library()
        return folders.PictureSplit.read(folder)

    def train_flags(self, mixture: PictureSplit) -> str:
        """See Kind."""
        return f"--workload {mixture.workload}"

    def dealt(self, mixture: PictureSplit) -> Iterator[str]:
        """How many pictures each expert has, of each class."""
        for number, (dealt, judged) in enumerate(zip(mixture.dealt, mixture.held_out, strict=True)):
            each = sorted(zip(dealt, mixture.classes, strict=False), key=lambda one: -one[0])
            of = ", ".join(f"{count:,} of {name}" for count, name in each if count)
            yield f"expert {number}: {counted(sum(dealt), 'picture')} ({of}), {judged:,} held out"
        if mixture.purity is not None:
            yield f"purity: {mixture.purity:.3f} of the pictures are of the class that most of their part's are of"

    def picture(self, mixture: PictureSplit) -> bytes:
        """See Kind."""
        return mixture.examples.read_bytes()

    def told(self, mixture: PictureSplit) -> Iterator[str]:
        """Who got what, how well the router knows it, and where examples are."""
        yield from self.dealt(mixture)
        for share, hits in mixture.hits.items():
            yield f"router: knows the part of {hits:.0%} of the pictures held out, where noise has {float(share):.0%}"
        yield f"examples: {mixture.examples}, a row for each expert"

    def judged(
        self,
        mixture: PictureSplit,
        experts: Mapping[int, Path],
        dense: Path | None,
        top: int = 2,
        all_above: float = 0.5,
        drawn_pictures: int = 128,
        grid: Path | None = None,
    ) -> Iterator[str]:
        """Each expert's loss on its own part, and on all pictures that of one model and of the mixture in each way."""
        found = joined.evaluate(mixture, experts, dense, top=top, all_above=all_above, drawn=drawn_pictures)
        yield from (f"expert {number}, on its own part: {loss:.4f}" for number, loss in found.own.items())
        if found.instead:
            yield f"of missing experts: {counted(found.instead, 'picture')}, as the router sees them without noise"
        yield from (f"{way}: {_score(score)}" for way, score in found.ways.items())
        if grid:
            with disk_errors(f"write to {grid}", "give another file, or make room"):
                grid.write_bytes(found.grid)
            yield f"farflung: {grid} has a column for each: {'; '.join(found.ways)}"

    def join(self, mixture: PictureSplit, experts: Mapping[int, Path], target: Path) -> None:
        """See Kind."""
        joined.join(mixture, experts, target)


def _score(score: Score) -> str:
    more = (f", {name} {value:.2f}" for name, value in score.others.items())
    return f"{score.value:.4f} squared error a pixel{''.join(more)}"
