"""Versions of what outlives a process or goes to another one. Each counts for itself, apart from the package's.

Each is written into what it versions: into `config.toml` of a run folder, into a checkpoint and the first line of a
file of events as `format`, and into what peers on the internet tell each other first as `protocol`. What has no
version is of version 0, from before they were written. Raise one when older releases could not read, or would misread,
what is written now; say in `last_releases` which release reads a version that this one no longer does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

from farflung.errors import UserError

KEY = "format"
"""Under this name, files say their version."""


def package_version() -> str:
    """The release of farflung, as in pyproject.toml; where it runs without having been installed, 0."""
    try:
        return metadata.version("farflung")
    except metadata.PackageNotFoundError:
        return "0"


@dataclass(frozen=True)
class Format:
    """How one kind of thing is written; this release writes a version from 1 on."""

    name: str
    version: int
    last_releases: Mapping[int, str] = field(default_factory=dict)
    """For each older version that this release does not read, the last release that does."""

    def check(self, table: Mapping[str, Any], where: str) -> int:
        """The version that a table was written in; 0 where it says none. Raises UserError for what cannot be read."""
        found = table.get(KEY, 0)
        if type(found) is not int or found < 0:
            raise UserError(f"{where}: {KEY} is {found!r}; it is damaged: take a copy from a backup")
        if found > self.version:
            raise UserError(
                f"{where}: {self.name} format {found} is newer than farflung {package_version()}, which reads up to "
                f"{self.version}; update farflung: pip install -U farflung"
            )
        if release := self.last_releases.get(found):
            raise UserError(
                f"{where}: {self.name} format {found} is no longer read; farflung {release} is the last that does: "
                f"pip install farflung=={release}"
            )
        return found


PROTOCOL = Format("internet protocol", 3)
"""What peers on the internet say to each other. All peers of a run speak the same version."""
CHECKPOINT = Format("checkpoint", 2)
"""What a file in `checkpoints/` holds; see training/checkpoint.py."""
ROUNDS = Format("rounds' state", 2, {0: "0.1.0", 1: "0.1.0"})
"""What a session's `state_dict` returns, for checkpoints of one's own; in those of the trainer, it is migrated."""
EVENTS = Format("events", 2)
"""The lines of `events/*.jsonl`; see events.py."""
RUN_FOLDER = Format("run folder", 2)
"""Which files a run folder has and what they are called, the settings in `config.toml`, and `summary.json`."""
STORE = Format("token store", 2)
"""The files of a folder of tokens; see workloads/store.py."""
MIXTURE = Format("mixture", 1)
"""`mixture.json` of a folder of experts' data and routers; see mixtures/folder.py."""
OWN_LOOP = "own loop"
"""The workload in the `config.toml` of a run that is a user's own training loop."""

FORMATS = (PROTOCOL, CHECKPOINT, ROUNDS, EVENTS, RUN_FOLDER, STORE, MIXTURE)
