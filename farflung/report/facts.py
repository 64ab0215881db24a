"""What all views of a run know of it as a whole, and the lines that pictures draw of it."""

from __future__ import annotations

import contextlib
import json
import re
import tomllib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from farflung import formats
from farflung.durations import TICKS_PER_SECOND
from farflung.events import EvaluationEvent, StartEvent
from farflung.figure import LOSS, Figure
from farflung.formats import RUN_FOLDER
from farflung.tables import flattened

Axis = Literal["tokens", "bytes", "seconds", "steps"]
What = Literal["training", "score", "distance"] | int
"""The mean training loss or score, the consensus distance, or one replica's score."""
Line = tuple[Sequence[float], Sequence[float | None]]
"""The x and y of a line's points; None interrupts the line."""

_EVENTS_OF = re.compile(r"replica-(\d+)(?:-part-(\d+)-of-(\d+))?")


class Place(NamedTuple):
    """Whose events a file has: of a replica, and of an island, of which of its processes."""

    replica: int
    part: int
    of: int
    independent: bool
    """Whether the replica has a run folder of its own, and is counted as this is."""
    rank: int
    """The replica's number in rounds' groups."""


def place_of(path: Path, folder: Path) -> Place | None:
    """Whose events a file in a run folder has; None where it is called as no such file is."""
    if (found := _EVENTS_OF.fullmatch(path.stem)) is None:
        return None
    replica, part, of = (int(number or 0) for number in found.groups())
    # On the internet network replicas have long numbers; here they are counted, as their folders are.
    own = _EVENTS_OF.fullmatch(path.relative_to(folder).parts[0])
    return Place(int(own[1]) if own else replica, part, of, own is not None, replica)


@dataclass
class Facts(ABC):
    """A run folder's settings, and at the end its summary; what a kind of reader adds are the events."""

    folder: Path
    settings: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] | None = None

    @property
    @abstractmethod
    def replicas(self) -> list[int]:
        """The replicas that have written events, sorted."""

    @property
    @abstractmethod
    def starts(self) -> Sequence[StartEvent]:
        """The replicas' events of starting, in order of time."""

    @abstractmethod
    def line(self, what: What, axis: Axis) -> Line:
        """A line against an axis: megabytes, seconds, or a number of units or steps."""

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.folder.resolve().name

    @property
    def is_one_peer(self) -> bool:
        """Whether it is what one peer on the internet does, whose number nobody knows it by."""
        return self.settings.get("network") in ("internet", "folder")

    @property
    def by_clock(self) -> bool:
        """Whether its rounds go by the clock, so that it counts tenths of a second, and not inner steps."""
        return isinstance(self.settings.get("every"), str)

    def at(self, step: int) -> str:
        """How a step, or a moment of a run by the clock, is called."""
        return f"{step / TICKS_PER_SECOND:.1f} s" if self.by_clock else f"step {step}"

    def span(self, steps: int) -> str:
        """How many steps, or how much time of a run by the clock, they are."""
        return f"{steps / TICKS_PER_SECOND:.1f} s" if self.by_clock else f"{steps} steps"

    @property
    def asked_for(self) -> int:
        """How many replicas the run has, on all machines."""
        return max((start.replicas for start in self.starts), default=0)

    @property
    def elsewhere(self) -> int:
        """How many of them have written their events on other machines, into other folders."""
        here = self.is_one_peer or self.settings.get("independent")
        return 0 if here else max(0, self.asked_for - len(self.replicas))

    def called(self, replica: int) -> str:
        """What a replica is called in the report; a peer on the internet knows no other by its number."""
        return "this peer" if self.is_one_peer else f"replica {replica}"

    @property
    def units(self) -> str:
        """The units of the samples, such as tokens."""
        return next((start.units for start in self.starts), StartEvent.units)

    @property
    def measure(self) -> str:
        """What training losses are measured in."""
        return next((start.measure for start in self.starts), StartEvent.measure)

    @property
    def figure(self) -> Figure:
        """What the run is judged by."""
        return next((start.figure for start in self.starts), LOSS._replace(unit=StartEvent.measure))

    @property
    def judged_by_loss(self) -> bool:
        """Whether what it is judged by can be drawn beside its training losses."""
        return self.figure.unit == self.measure and not self.figure.more_is_better

    @property
    def tokenizer(self) -> str:
        """What makes tokens of text, where losses are measured for each token; "" elsewhere."""
        if self.measure != "nats a token":
            return ""
        return str(self.settings.get("tokenizer") or self.settings.get("model") or "bytes")

    @property
    def bytes_per_unit(self) -> float | None:
        """Bytes of text in a token, on average; None where that is not known."""
        told = next((start.bytes_per_unit for start in self.starts if start.bytes_per_unit), None)
        return told or (1.0 if self.tokenizer == "bytes" else None)

    def read_facts(self) -> None:
        """Reads settings and summary as they are now. Raises UserError for a format that cannot be read."""
        for name, loads in (("config.toml", tomllib.loads), ("summary.json", json.loads)):
            path = self.folder / name
            # One that is being written, or is not there yet, is read the next time.
            with contextlib.suppress(OSError, ValueError):
                read = loads(path.read_text("utf-8"))
                if name == "config.toml":
                    self.settings = flattened(read)
                else:
                    self.summary = read if isinstance(read, dict) else None
        RUN_FOLDER.check(self.settings, str(self.folder))
        self.settings.pop(formats.KEY, None)


def more_figures(events: Iterable[EvaluationEvent]) -> dict[str, float]:
    """The figures beside what runs are judged by, by their names: the means of those that replicas have told."""
    told: dict[str, list[float]] = {}
    for event in events:
        for name, value in (event.others or {}).items():
            told.setdefault(name, []).extend([] if value is None else [value])
    return {name: sum(values) / len(values) for name, values in told.items() if values}
