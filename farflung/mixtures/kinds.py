"""What a mixture can be of, by the workload that its experts are trained as."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from farflung.errors import UserError, suggestion
from farflung.mixtures.pictures.kind import PicturesKind
from farflung.mixtures.texts import TextKind

if TYPE_CHECKING:
    from farflung.networks.base import Network


class Kind(Protocol):
    """What the commands ask of a mixture, whatever it is of. What is told are lines for people."""

    noun: str
    """What is dealt."""
    exported: str
    """How what is exported is loaded."""
    Settings: Any
    """The dataclass of how it is split; it has `out` and `seed`."""
    options: frozenset[str]
    """What `told` and `judged` take, by name, beside what all do."""

    def split(self, settings: Any, network: Network, tell: Callable[[str], object]) -> Any:
        """Splits data, on each machine of a network, and writes the folder: the mixture. Raises UserError."""
        ...

    def read(self, folder: Path) -> Any:
        """The mixture in a folder. Raises UserError."""
        ...

    def train_flags(self, mixture: Any) -> str:
        """What farflung train is given beside an expert's data."""
        ...

    def dealt(self, mixture: Any) -> Iterator[str]:
        """Who got what."""
        ...

    def picture(self, mixture: Any) -> bytes | None:
        """A PNG file of examples, a row for each expert, where they are looked at."""
        ...

    @property
    def told(self) -> Callable[..., Iterator[str]]:
        """Takes a mixture and its own options: how the split went, or what is asked. Raises UserError."""
        ...

    @property
    def judged(self) -> Callable[..., Iterator[str]]:
        """Takes a mixture, exported experts by number, one model or None, and its own options: what all come to.

        Raises UserError.
        """
        ...

    def join(self, mixture: Any, experts: Mapping[int, Path], target: Path) -> None:
        """Writes one folder with exported experts and what routes between them. Raises UserError."""
        ...


KINDS: Mapping[str, Kind] = {"language": TextKind(), "images": PicturesKind()}


def kind_of(workload: str) -> Kind:
    """What mixtures of a workload's experts are. Raises UserError where there are none."""
    if workload not in KINDS:
        raise UserError(f"there are no mixtures of {workload!r}{suggestion(workload, [*KINDS])}")
    return KINDS[workload]
