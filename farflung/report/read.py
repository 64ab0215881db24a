"""Reading a run folder, also while the run is writing it."""

from __future__ import annotations

import base64
import json
import tomllib
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from farflung.config import UserError

Event = dict[str, Any]


class EventReader:
    """The new events of one replica's file each time it is asked; a line that is not whole yet waits."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._position = 0
        self._file_number = path.stat().st_ino

    def restarted(self) -> bool:
        """Whether it is another file now, as when a run goes on from an earlier checkpoint; then reads that anew."""
        number = self.path.stat().st_ino
        changed = number != self._file_number
        if changed:
            self._file_number, self._position = number, 0
        return changed

    def read(self) -> list[Event]:
        """The events since the last call."""
        with self.path.open("rb") as file:
            file.seek(self._position)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._position += len(whole) + len(newline)
        return [json.loads(line) for line in whole.splitlines()]


@dataclass
class Run:
    """What a run folder says so far: each replica's events in order, the settings, and the summary at the end."""

    folder: Path
    settings: dict[str, Any] = field(default_factory=dict)
    events: dict[int, list[Event]] = field(default_factory=lambda: defaultdict(list))
    summary: dict[str, Any] | None = None
    _readers: dict[int, EventReader] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.folder.resolve().name

    @property
    def replicas(self) -> list[int]:
        """The replicas that have written something, sorted."""
        return sorted(self.events)

    def of(self, replica: int, kind: str) -> list[Event]:
        """One replica's events of one kind, in order."""
        return [event for event in self.events[replica] if event["event"] == kind]

    def all_of(self, kind: str) -> list[Event]:
        """All replicas' events of one kind, in order of time."""
        return sorted((e for replica in self.replicas for e in self.of(replica, kind)), key=lambda e: float(e["at"]))

    def refresh(self) -> None:
        """Reads what has been written since."""
        for path in sorted(self.folder.glob("events/replica-*.jsonl")):
            replica = int(path.stem.removeprefix("replica-"))
            reader = self._readers.setdefault(replica, EventReader(path))
            if reader.restarted():
                self.events[replica] = []
            self.events[replica] += reader.read()
        for name, loads in (("config.toml", tomllib.loads), ("summary.json", json.loads)):
            path = self.folder / name
            if path.exists():
                setattr(self, "settings" if name == "config.toml" else "summary", loads(path.read_text("utf-8")))

    def by_step(self, kind: str) -> dict[int, list[Event]]:
        """The events of the steps at which every replica has one, by replica."""
        steps: dict[int, dict[int, Event]] = defaultdict(dict)
        for replica in self.replicas:
            for event in self.of(replica, kind):
                steps[event["step"]][replica] = event
        complete = {step: seen for step, seen in steps.items() if len(seen) == len(self.replicas)}
        return {step: [seen[replica] for replica in self.replicas] for step, seen in sorted(complete.items())}

    def spread(self) -> dict[int, float]:
        """For each evaluated step, how far the replicas' weights are apart.

        The root mean square, over replicas and the sampled weights, of the deviation from the replicas' mean.
        """
        spreads = {}
        for step, events in self.by_step("evaluation").items():
            samples = np.stack([np.frombuffer(base64.b64decode(event["sample"]), dtype="<f4") for event in events])
            spreads[step] = float(np.sqrt(np.square(samples - samples.mean(0, dtype=np.float64)).mean()))
        return spreads


def read_run(folder: Path) -> Run:
    """The run in a folder. Raises UserError when there is none."""
    run = Run(folder)
    run.refresh()
    if not run.events:
        raise UserError(f"{folder} holds no run: there are no events in it; give a folder that farflung train has made")
    return run
