"""Reads a run folder, also while the run is writing it."""

from __future__ import annotations

import contextlib
import json
import re
import tomllib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from farflung import formats
from farflung.errors import UserError, disk_errors
from farflung.events import EndEvent, EvaluationEvent, Event, ProgressEvent, StartEvent, StepEvent, events_in
from farflung.files import event_files, holds_no_run
from farflung.formats import OWN_LOOP, RUN_FOLDER
from farflung.tables import flattened

E = TypeVar("E", bound=Event)
P = TypeVar("P", bound=ProgressEvent)

_EVENTS_OF = re.compile(r"replica-(\d+)(?:-part-(\d+)-of-(\d+))?")


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

    def read(self) -> list[Event]:
        """The events since the last call. Raises UserError for those of a format that cannot be read."""
        with self.path.open("rb") as file:
            file.seek(self._position)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._position += len(whole) + len(newline)
        events, spoilt = events_in(whole, str(self.path))
        self.spoilt += spoilt
        return events


def _same_at_first(before: Sequence[Event], now: Sequence[Event]) -> int:
    """How many events a file that goes on has kept; whoever has seen these knows them again, by identity."""
    pairs = enumerate(zip(before, now, strict=False))
    return next((number for number, (one, other) in pairs if one != other), min(len(before), len(now)))


@dataclass
class Run:
    """What is in a run folder so far: each replica's events in order, the settings, and at the end the summary."""

    folder: Path
    settings: dict[str, Any] = field(default_factory=dict)
    events: dict[int, list[Event]] = field(default_factory=lambda: defaultdict(list))
    summary: dict[str, Any] | None = None
    _parts: dict[tuple[int, int, int], list[Event]] = field(default_factory=lambda: defaultdict(list))
    _readers: dict[Path, EventReader] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.folder.resolve().name

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

    def of(self, replica: int, kind: type[E]) -> list[E]:
        """One replica's events of one kind, in order."""
        return [event for event in self.events[replica] if isinstance(event, kind)]

    def all_of(self, kind: type[E]) -> list[E]:
        """All replicas' events of one kind, in order of time."""
        return sorted((e for replica in self.replicas for e in self.of(replica, kind)), key=lambda e: e.at)

    @property
    def is_one_peer(self) -> bool:
        """Whether it is what one peer on the internet does, whose number nobody knows it by."""
        return self.settings.get("network") == "internet"

    def called(self, replica: int) -> str:
        """What a replica is called in the report; a peer on the internet knows no other by its number."""
        return "this peer" if self.is_one_peer else f"replica {replica}"

    @property
    def units(self) -> str:
        """The units of the samples, such as tokens."""
        return next((start.units for start in self.all_of(StartEvent)), StartEvent.units)

    @property
    def measure(self) -> str:
        """What losses are measured in."""
        return next((start.measure for start in self.all_of(StartEvent)), StartEvent.measure)

    @property
    def tokenizer(self) -> str:
        """What makes tokens of text, where losses are measured for each token; "" elsewhere."""
        if self.measure != "nats a token":
            return ""
        return str(self.settings.get("tokenizer") or self.settings.get("model") or "bytes")

    @property
    def bytes_per_unit(self) -> float | None:
        """Bytes of text in a token, on average; None where that is not known."""
        told = next((start.bytes_per_unit for start in self.all_of(StartEvent) if start.bytes_per_unit), None)
        return told or (1.0 if self.tokenizer == "bytes" else None)

    def refresh(self) -> None:
        """Reads what has been written since the last call. Raises UserError for formats that cannot be read."""
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
        for path in event_files(self.folder):
            found = _EVENTS_OF.fullmatch(path.stem)
            if found is None:
                continue
            replica, part, island = (int(number or 0) for number in found.groups())
            reader = self._readers.setdefault(path, EventReader(path))
            restarted, new = reader.restarted(), reader.read()
            if independent := _EVENTS_OF.fullmatch(path.relative_to(self.folder).parts[0]):
                # On the internet network replicas have long numbers; here they are counted, as their folders are.
                replica = int(independent[1])
                new = [replace(event, replica=replica) for event in new]
            events = self._parts[replica, part, island] if part else self.events[replica]
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

    def up_to(self, step: int, events: Sequence[P]) -> list[P]:
        """The given events of a step, and the last ones of the same kind of replicas that had died before."""
        gone = [replica for replica, last in self.died().items() if last < step]
        return [*events, *(event for replica in gone for event in self.of(replica, type(events[0]))[-1:])]

    def results(self) -> dict[str, Any]:
        """The summary of a run that has ended; before that, the figures of it that events give."""
        if self.summary is not None:
            return self.summary
        results: dict[str, Any] = {}
        for start in self.all_of(StartEvent)[:1]:
            results |= {"method": start.method, "replicas": start.replicas, "parameters": start.parameters}
            results |= {"stages": start.stages, "shards": start.shards}
        for step, steps in list(self.by_step(StepEvent).items())[-1:]:
            everyone = self.up_to(step, steps)
            results |= {
                "steps": step,
                "tokens": sum(event.tokens for event in everyone),
                "bytes_sent": sum(event.bytes_sent for event in everyone),
                "rounds": max(event.rounds for event in steps),
                "seconds": max(event.at for event in steps),
                "seconds_blocked": mean([event.seconds_blocked for event in steps]),
            }
        for step, evaluations in list(self.by_step(EvaluationEvent).items())[-1:]:
            losses = [event.validation_loss for event in evaluations]
            results |= {"validation_loss": mean(losses), "validation_loss_per_replica": losses}
            if (spread := self.consensus_distance().get(step)) is not None:
                results["weight_spread"] = spread
        return results

    def consensus_distance(self) -> dict[int, float]:
        """For each evaluated step, how far apart the replicas' weights are.

        The root mean square, over replicas and the sampled weights, of the deviation from the replicas' mean.
        """
        distances = {}
        for step, events in self.by_step(EvaluationEvent).items():
            if len(events) < 2 or len({len(event.weights) for event in events}) > 1:
                continue  # one alone, or of other models, which have no distance
            samples = np.stack([np.frombuffer(event.weights, dtype="<f4") for event in events])
            distances[step] = float(np.sqrt(np.square(samples - samples.mean(0, dtype=np.float64)).mean()))
        return distances


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
