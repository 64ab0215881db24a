"""A run folder that is followed: each line is read once, and what is kept does not grow with the run."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from farflung.errors import UserError
from farflung.events import EndEvent, EvaluationEvent, Event, RoundEvent, StartEvent, StepEvent, TextEvent, WarningEvent
from farflung.files import event_files, lock_holders
from farflung.report.facts import Axis, Line, Place, What, place_of
from farflung.report.read import EventReader, distance_of, mean, positions
from farflung.report.rounds import Rounds
from farflung.report.watching import cards
from farflung.report.watching.curves import Curve, Together
from farflung.report.watching.replica import OVER, Replica, State
from farflung.report.watching.watched import Shown, Watched

STEPS_READ = 250
"""About so many lines on steps of each replica are read of what is there already; of the others only that they are."""
WARNINGS_KEPT = 20
ROUNDS_READ = 20
STEP_LINE, ROUND_LINE, STEP_KEY = b'{"event": "step"', b'{"event": "round"', b'"step": '


@dataclass
class Kept:
    """What is kept of a run's events; all of it is forgotten where the run goes back to a checkpoint."""

    readers: dict[Path, EventReader] = field(default_factory=dict)
    replicas: dict[int, Replica] = field(default_factory=dict)
    ranks: dict[int, int] = field(default_factory=dict)
    """The replicas by their numbers in rounds' groups."""
    starts: dict[int, StartEvent] = field(default_factory=dict)
    curves: dict[What, Curve] = field(default_factory=lambda: defaultdict(Curve))
    steps: Together[StepEvent] = field(default_factory=Together)
    evaluations: Together[EvaluationEvent] = field(default_factory=Together)
    rounds: Rounds = field(default_factory=Rounds)
    warnings: list[WarningEvent] = field(default_factory=list)
    text: TextEvent | None = None
    every: int = 0
    """Of what was there already, lines on steps are read once in so many steps; 0 as long as all are."""


class Followed(Watched):
    """A run that is followed by its events. Raises UserError as `refresh` does."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.kept = Kept()
        self.fault = ""
        """Why the folder cannot be read, in a line."""
        self.forgotten = 0
        """How often the run was read anew."""
        self.now = time.time()
        """When it was looked at last, as Unix time."""
        self._settings_of: tuple[float, ...] = ()

    @property
    def replicas(self) -> list[int]:
        """See Facts."""
        return sorted(self.kept.replicas)

    @property
    def starts(self) -> Sequence[StartEvent]:
        """See Facts."""
        return sorted(self.kept.starts.values(), key=lambda start: start.at)

    def line(self, what: What, axis: Axis) -> Line:
        """See Facts."""
        return self.kept.curves[what].line(axis)

    @property
    def generation(self) -> tuple[int, ...]:
        """See Watched."""
        return self.forgotten, sum(curve.thinned for curve in self.kept.curves.values())

    def shown(self) -> Shown:
        """See Watched."""
        return cards.shown(self)

    def state(self, replica: Replica) -> State:
        """What a replica does now."""
        return replica.state(self.now, self.settings.get("network") == "simulated")

    def refresh(self) -> None:
        """Reads what has been written since the last call; a fault of the folder is kept as a line."""
        self.now, self.fault = time.time(), ""
        try:
            self._read_settings()
            places = {path: place_of(path, self.folder) for path in event_files(self.folder)}
            self._read_events({path: place for path, place in places.items() if place and not place.part})
            if not places:
                self.fault = f"{self.folder} holds no events any more: it was moved or deleted"
        except UserError as error:
            self.fault = str(error)
        except OSError as error:
            self.fault = f"cannot read {self.folder}: {error.strerror or error}"
        self._fold()

    def _read_settings(self) -> None:
        paths = [self.folder / name for name in ("config.toml", "summary.json")]
        changed = tuple(path.stat().st_mtime if path.exists() else 0.0 for path in paths)
        if changed != self._settings_of:
            self.read_facts()
            self._settings_of = changed

    def _read_events(self, places: Mapping[Path, Place]) -> None:
        readers = self.kept.readers
        # Steps that all had come to are others where one more replica has begun, or a run goes on from a checkpoint.
        if readers and (readers.keys() != places.keys() or any(reader.restarted() for reader in readers.values())):
            self.kept = Kept()
            self.forgotten += 1
        holders = lock_holders()
        for path, place in places.items():
            if path not in self.kept.readers:
                self.kept.readers[path] = EventReader(path)
                self.kept.ranks[place.rank] = place.replica
            replica = self.kept.replicas.setdefault(place.replica, Replica(place.replica))
            status = path.stat()
            if replica.size != status.st_size:
                for event in self.kept.readers[path].read(self._chosen):
                    self._take(replica, replace(event, replica=place.replica) if place.independent else event)
            replica.look(status, holders)

    def _chosen(self, lines: bytes) -> bytes:
        """Where lines on steps are many: about the same steps of each replica, the last rounds, and all else."""
        if lines.count(STEP_LINE) <= 2 * STEPS_READ:
            return lines
        kept, steps, rounds, before = [], [], [], -1
        for line in lines.split(b"\n"):
            if line.startswith(ROUND_LINE):
                rounds.append(line)
            elif not line.startswith(STEP_LINE) or b"null" in line:
                kept.append(line)
            else:
                step = _step_of(line)
                self.kept.every = self.kept.every or max(1, (_last_step(lines) - step) // STEPS_READ)
                if step // self.kept.every != before:
                    kept.append(line)
                before = step // self.kept.every
                steps.append(line)
        # How long it takes between two lines is seen by the last ones.
        return b"\n".join([*kept[:-1], *rounds[-ROUNDS_READ:], *steps[-2:], kept[-1]])

    def _take(self, replica: Replica, event: Event) -> None:
        kept = self.kept
        replica.step, replica.at = event.step, event.at
        match event:
            case StartEvent():
                kept.starts.setdefault(event.replica, event)
                replica.ended = None
            case StepEvent():
                replica.take_step(event)
                kept.steps.add(event)
            case EvaluationEvent():
                replica.evaluation = event
                kept.evaluations.add(event)
            case RoundEvent():
                replica.round_steps.append(event.started_step)
                kept.rounds.add(event)
            case WarningEvent():
                kept.warnings.append(event)
            case TextEvent():
                kept.text = event
            case EndEvent():
                replica.ended = event

    def _fold(self) -> None:
        """Makes points of the steps that all replicas have come to."""
        kept, over = self.kept, (*OVER, "dead", "silent")
        kept.warnings = sorted(kept.warnings, key=lambda warning: warning.at)[-WARNINGS_KEPT:]
        gone = {number: one.step for number, one in kept.replicas.items() if self.state(one) in over}
        for step, events, everyone in kept.steps.complete(self.replicas, gone):
            if (loss := mean([event.loss for event in events])) is not None:
                kept.curves["training"].add(positions(step, events, everyone), loss)
        for step, judged, all_judged in kept.evaluations.complete(self.replicas, gone):
            place = positions(step, judged, all_judged)
            if (score := mean([event.score for event in judged])) is not None:
                kept.curves["score"].add(place, score)
            for event in judged:
                kept.curves[event.replica].add(place, event.score)
            if (distance := distance_of(judged)) is not None:
                kept.curves["distance"].add(place, distance)


def _step_of(line: bytes) -> int:
    """The step of a line; 0 where that is not to be seen at once."""
    digits = line[line.find(STEP_KEY) + len(STEP_KEY) :].partition(b",")[0]
    return int(digits) if digits.isdigit() else 0


def _last_step(lines: bytes) -> int:
    return _step_of(lines[lines.rfind(STEP_LINE) :].partition(b"\n")[0])
