"""The one store of results: a JSON file a bench, written result by result; what is in it is not made again."""

from __future__ import annotations

import functools
import json
import os
import platform
import shutil
import subprocess
import threading
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench.lib.table import Part, from_json, to_json
from farflung.files import write_text

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results"

Settings = dict[str, Any]
Result = dict[str, Any]


class Store:
    """What one bench has found: results by settings and seed, settings that a search has chosen, and tables as told.

    Args:
        name: of the bench, and of its file.
        folder: where the file is.
        scratch: for run folders and what else need not be kept.
    """

    def __init__(self, name: str, folder: Path = RESULTS, scratch: Path | None = None) -> None:
        self.path = folder / f"{name}.json"
        self.scratch = scratch or ROOT / "runs" / "bench" / name
        self._lock = threading.RLock()
        kept: dict[str, Any] = json.loads(self.path.read_text()) if self.path.exists() else {}
        self.chosen: dict[str, Settings] = kept.get("chosen", {})
        self._told: list[dict[str, Any]] = kept.get("told", [])
        self.runs: list[dict[str, Any]] = kept.get("runs", [])

    def results(self, settings: Settings) -> dict[int, Result]:
        """What there is of these settings, by seed."""
        wanted = _plain(settings)
        return {run["seed"]: run["result"] for run in self.runs if run["settings"] == wanted}

    def keep(self, settings: Settings, seed: int, result: Result) -> None:
        """Writes down one result."""
        with self._lock:
            self.runs.append({"settings": _plain(settings), "seed": seed, "result": result, **surroundings()})
            self._write()

    def once(self, settings: Settings, seed: int, make: Callable[[], Result]) -> Result:
        """A result: the kept one, or else what `make` returns, as JSON has it."""
        found = self.results(settings)
        if seed not in found:
            self.keep(settings, seed, _plain(make()))
        return self.results(settings)[seed]

    def choose(self, name: str, settings: Settings) -> None:
        """Notes what a search has found for a row."""
        with self._lock:
            self.chosen[name] = settings
            self._write()

    def chosen_as(self, name: str) -> Settings:
        """What a search has found for a row. Raises SystemExit if it has not been made."""
        if name not in self.chosen:
            raise SystemExit(f"{self.path} has no tuned {name!r} yet; first: python -m bench run {self.path.stem}")
        return self.chosen[name]

    def keep_told(self, options: Settings, parts: list[Part]) -> None:
        """Writes down what a bench told with these options, in place of what it told with them before."""
        options = _plain(options)
        self._told = [told for told in self._told if told["settings"] != options]
        self._told.append({"settings": options, "parts": [to_json(part) for part in parts], **surroundings()})
        self._write()

    def told(self) -> list[tuple[Settings, list[Part]]]:
        """What the bench has told, and with which options."""
        return [(told["settings"], [from_json(part) for part in told["parts"]]) for told in self._told]

    def made_on(self) -> list[str]:
        """Machines and versions that its results are from."""
        names = (
            f"{kept['machine']}; " + ", ".join(f"{name} {version}" for name, version in kept["versions"].items())
            for kept in (*self.runs, *self._told)
        )
        return list(dict.fromkeys(names))

    def _write(self) -> None:
        """Results one a line, so that what a later bench adds is seen as what it is."""
        before = f'"chosen": {json.dumps(self.chosen, indent=1)},\n' if self.chosen else ""
        told = ",\n".join(json.dumps(one) for one in self._told)
        runs = ",\n".join(json.dumps(run) for run in self.runs)
        write_text(self.path, f'{{{before}"told": [\n{told}\n],\n"runs": [\n{runs}\n]}}\n')


@functools.cache
def surroundings() -> dict[str, Any]:
    """Versions and machine."""
    ask = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(ask, cwd=ROOT, capture_output=True, text=True).stdout.strip() if shutil.which("git") else ""
    packages = {name: version(name) for name in ("torch", "transformers")}
    cpu = Path("/proc/cpuinfo")
    names = [line for line in cpu.read_text().splitlines() if line.startswith("model name")] if cpu.exists() else []
    processor = names[0].partition(": ")[2] if names else platform.processor()
    return {
        "versions": {"farflung": commit, "python": platform.python_version(), **packages},
        "machine": f"{os.cpu_count()} cores of {processor}, {platform.system()}",
    }


def _plain(settings: Any) -> Any:
    """As it comes back from JSON."""
    return json.loads(json.dumps(settings, default=str))
