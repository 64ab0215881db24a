"""What the page shows of a run, or of the peers that a ticket leads to."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from farflung.report.facts import Axis, Facts


@dataclass
class Shown:
    """What it shows beside pictures, as HTML."""

    facts: Mapping[str, str]
    """A column of the table that has one for each run."""
    warnings: Sequence[str]
    sections: Mapping[str, str]
    """By their titles, which stay the same; those that are empty do not show."""


@dataclass
class Watched(Facts):
    """What is looked at again and again."""

    axes: Sequence[Axis] = field(default=("tokens", "bytes", "seconds"), kw_only=True)
    """What losses are drawn against."""

    @abstractmethod
    def refresh(self) -> None:
        """Finds out what is new."""

    @abstractmethod
    def shown(self) -> Shown:
        """What it is like now."""

    @property
    @abstractmethod
    def generation(self) -> tuple[int, ...]:
        """Changes when points that lines had are there no more."""
