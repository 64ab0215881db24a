"""Reads a run folder, also while the run is writing it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from farflung.errors import UserError, disk_errors
from farflung.events import EndEvent, EvaluationEvent, Event, ProgressEvent, StartEvent, StepEvent, events_in
from farflung.files import event_files, holds_no_run
from farflung.formats import OWN_LOOP
from farflung.report.facts import Axis, Facts, Line, What, place_of

E = TypeVar("E", bound=Event)
P = TypeVar("P", bound=ProgressEvent)


class EventReader:
    """Reads the new events of one file each time; a line that is not whole yet waits."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.spoilt = 0
        """Lines that could not be read so far."""
        self._position = 0
        self._file_number = path.stat().st_ino

    def restarted(self) -> bool:
        """Whether the file is another or shorter, as when a run resumes; it is then read from its beginning."""
        status = self.path.stat()
        changed = status.st_ino != self._file_number or status.st_size < self._position
        if changed:
            self._file_number, self._position, self.spoilt = status.st_ino, 0, 0
        return changed

    def read(self, chosen: Callable[[bytes], bytes] = bytes) -> list[Event]:
        """The events since the last call, of the lines `chosen` among them.

        Raises UserError for those of a format that cannot be read.
        """
        with self.path.open("rb") as file:
            file.seek(self._position)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._position += len(whole) + len(newline)
        whole = chosen(whole)
        events, spoilt = events_in(whole, str(self.path))
        self.spoilt += spoilt
        return events


def _same_at_first(before: Sequence[Event], now: Sequence[Event]) -> int:
    """How many events a file that goes on has kept; whoever has seen these knows them again, by identity."""
    pairs = enumerate(zip(before, now, strict=False))
    return next((number for number, (one, other) in pairs if one != other), min(len(before), len(now)))


@dataclass
class Run(Facts):
    """What is in a run folder so far: each replica's events in order, the settings, and at the end the summary."""

    events: dict[int, list[Event]] = field(default_factory=lambda: defaultdict(list))
    _parts: dict[tuple[int, int, int], list[Event]] = field(default_factory=lambda: defaultdict(list))
    _readers: dict[Path, EventReader] = field(default_factory=dict)

    @property
    def parts(self) -> dict[tuple[int, int], list[Event]]:
        """The events of the processes that do not lead their replica, by replica and part.

        Files of another layout, from before the run was resumed, are left out.
        """
        starts = {replica: self.of(replica, StartEvent) for replica in self.replicas}
        islands = {replica: told[-1].stages * told[-1].shards for replica, told in starts.items() if told}
        return {(r, part): events for (r, part, of), events in self._parts.items() if of == islands.get(r, 1)}

    @property
    def replicas(self) -> list[int]:
        """The replicas that have written events, sorted."""
        return sorted(replica for replica, events in self.events.items() if events)

    @property
    def boundary_bytes(self) -> int:
        """Bytes that have gone from stage to stage so far, in all replicas."""
        return sum(steps[-1].boundary_bytes for replica in self.replicas if (steps := self.of(replica, StepEvent)))

    def of(self, replica: int, kind: type[E]) -> list[E]:
        """One replica's events of one kind, in order."""
        return [event for event in self.events[replica] if isinstance(event, kind)]

    def all_of(self, kind: type[E]) -> list[E]:
        """All replicas' events of one kind, in order of time."""
        return sorted((e for replica in self.replicas for e in self.of(replica, kind)), key=lambda e: e.at)

    @property
    def starts(self) -> list[StartEvent]:
        """The replicas' events of starting, in order of time."""
        return self.all_of(StartEvent)

    @property
    def ranks(self) -> dict[int, int]:
        """The replicas by their numbers in rounds' groups."""
        places = [place_of(path, self.folder) for path in self._readers]
        return {place.rank: place.replica for place in places if place}

    def refresh(self) -> None:
        """Reads what has been written since the last call. Raises UserError for formats that cannot be read."""
        self.read_facts()
        for path in event_files(self.folder):
            if (place := place_of(path, self.folder)) is None:
                continue
            reader = self._readers.setdefault(path, EventReader(path))
            restarted, new = reader.restarted(), reader.read()
            if place.independent:
                new = [replace(event, replica=place.replica) for event in new]
            events = self._parts[place[:3]] if place.part else self.events[place.replica]
            same = _same_at_first(events, new) if restarted else len(events)
            events[:] = [*events[:same], *(new[same:] if restarted else new)]

    def unread(self) -> list[str]:
        """A line for each of the run's files of which lines could not be read."""
        readers = (reader for _, reader in sorted(self._readers.items()) if reader.spoilt)
        return [f"{r.path}: {r.spoilt} line{'s' if r.spoilt > 1 else ''} cannot be read, and left out" for r in readers]

    def died(self) -> dict[int, int]:
        """The replicas that have died, and their last steps."""
        ends = {replica: self.of(replica, EndEvent)[-1:] for replica in self.replicas}
        return {replica: end[0].step for replica, end in ends.items() if end and end[0].reason == "died"}

    @property
    def ended(self) -> bool:
        """Whether all replicas have come to the run's end, of which a loop of one's own writes no summary."""
        if self.settings.get("workload") != OWN_LOOP:
            return self.summary is not None
        ends = [event for replica in self.replicas for event in self.of(replica, EndEvent)[-1:]]
        return [end.reason for end in ends] == ["finished"] * len(self.replicas)

    @property
    def alive(self) -> list[int]:
        """The replicas that have not died."""
        died = self.died()
        return [replica for replica in self.replicas if replica not in died]

    def by_step(self, kind: type[E]) -> dict[int, list[E]]:
        """For each step at which every living replica has an event of a kind: these events, in order of replicas."""
        steps: dict[int, dict[int, E]] = defaultdict(dict)
        died = self.died()
        for replica in self.replicas:
            for event in self.of(replica, kind):
                steps[event.step][replica] = event
        complete = {}
        for step, seen in sorted(steps.items()):
            alive = [replica for replica in self.replicas if step <= died.get(replica, step)]
            if alive and all(replica in seen for replica in alive):
                complete[step] = [seen[replica] for replica in alive]
        return complete

    def up_to(self, step: int, events: Sequence[P], died: Mapping[int, int]) -> list[P]:
        """The given events of a step, and the last ones of the same kind of replicas that had `died` before."""
        gone = [replica for replica, last in died.items() if last < step]
        return [*events, *(event for replica in gone for event in self.of(replica, type(events[0]))[-1:])]

    def line(self, what: What, axis: Axis) -> Line:
        """See Facts."""
        if what == "distance":
            distances = self.consensus_distance()
            return list(distances), list(distances.values())
        if what == "training":
            return self._mean_line(StepEvent, lambda event: event.loss, axis)
        if what == "score":
            return self._mean_line(EvaluationEvent, lambda event: event.score, axis)
        points = [
            (place[axis], event.score)
            for place, events in self._places(EvaluationEvent)
            for event in events
            if event.replica == what
        ]
        return [x for x, _ in points], [y for _, y in points]

    def _mean_line(self, kind: type[P], value: Callable[[P], float | None], axis: Axis) -> Line:
        points = [(place[axis], mean([value(event) for event in events])) for place, events in self._places(kind)]
        told = [(x, y) for x, y in points if y is not None]
        return [x for x, _ in told], [y for _, y in told]

    def _places(self, kind: type[P]) -> Iterator[tuple[dict[Axis, float], list[P]]]:
        """The events of each step that all have come to, and where that is on each axis."""
        died = self.died()
        for step, events in self.by_step(kind).items():
            yield positions(step, events, self.up_to(step, events, died)), events

    def results(self) -> dict[str, Any]:
        """The summary of a run that has ended; before that, the figures of it that events give."""
        if self.summary is not None:
            return self.summary
        results: dict[str, Any] = {}
        for start in self.all_of(StartEvent)[:1]:
            results |= {"method": start.method, "replicas": start.replicas, "parameters": start.parameters}
            swarm = self.settings.get("swarm")  # each of whose peers knows of its own stage alone
            stages = self.settings.get("stages", start.stages) if swarm else start.stages
            results |= {"stages": stages, "shards": start.shards}
        for step, steps in list(self.by_step(StepEvent).items())[-1:]:
            everyone = self.up_to(step, steps, self.died())
            results |= {
                "steps": step,
                "tokens": sum(event.tokens for event in everyone),
                "bytes_sent": sum(event.bytes_sent for event in everyone),
                "boundary_bytes": self.boundary_bytes,
                "rounds": max(event.rounds for event in steps),
                "seconds": max(event.at for event in steps),
                "seconds_blocked": mean([event.seconds_blocked for event in steps]),
            }
        for step, evaluations in list(self.by_step(EvaluationEvent).items())[-1:]:
            scores, figure = [event.score for event in evaluations], self.figure
            results |= {figure.key: mean(scores), f"{figure.key}_per_replica": scores}
            by_source = [event.scores or {} for event in evaluations]
            if by_source[0] and len({*map(len, by_source)}) == 1:  # machines may name the same sources otherwise
                each = zip(*(own.values() for own in by_source), strict=True)
                results[figure.key_of_sources] = dict(zip(by_source[0], map(mean, each), strict=True))
            if (spread := self.consensus_distance().get(step)) is not None:
                results["weight_spread"] = spread
        return results

    def consensus_distance(self) -> dict[int, float]:
        """For each evaluated step, how far apart the replicas' weights are.

        The root mean square, over replicas and the sampled weights, of the deviation from the replicas' mean.
        """
        told = {step: distance_of(events) for step, events in self.by_step(EvaluationEvent).items()}
        return {step: distance for step, distance in told.items() if distance is not None}


def distance_of(events: Sequence[EvaluationEvent]) -> float | None:
    """The consensus distance of the replicas by their evaluations of one step; None where they have none."""
    samples = [np.frombuffer(event.weights, dtype="<f4") for event in events]
    if len(samples) < 2 or len({len(one) for one in samples}) > 1:
        return None  # one alone, or of other models
    stacked = np.stack(samples)
    return float(np.sqrt(np.square(stacked - stacked.mean(0, dtype=np.float64)).mean()))


def positions(step: int, events: Sequence[ProgressEvent], everyone: Sequence[ProgressEvent]) -> dict[Axis, float]:
    """Where the replicas were at a step, on each axis; `everyone` has the last events of those that are gone, too."""
    return {
        "steps": step,
        "tokens": sum(event.tokens for event in everyone),
        "bytes": sum(event.bytes_sent for event in everyone) / 1e6,
        "seconds": max(event.at for event in events),
    }


def mean(values: Sequence[float | None]) -> float | None:
    """Their mean; None if any is None, which events have for NaN and infinity."""
    finite = [value for value in values if value is not None]
    return sum(finite) / len(finite) if len(finite) == len(values) else None


def missing_from(summary: dict[str, Any]) -> str:
    """A line that says which replicas are in none of a summary's figures; "" for none."""
    missing = summary.get("missing")  # older summaries do not have it
    if not missing:
        return ""
    who = f"replica{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
    return f"all figures are without {who}, which the others could not reach at the end"


def read_run(folder: Path) -> Run:
    """The run in a folder. Raises UserError when there is none."""
    run = Run(folder)
    with disk_errors(f"read {folder}", "see that its files can be read"):
        run.refresh()
    if not run.replicas:
        raise UserError(holds_no_run(folder, "there are no events in it; give a folder that farflung train has made"))
    return run
