"""A mixture's folder: the data of each expert, what routes between them, and what they are of.

MIX/mixture.json  MIX/experts.npy  MIX/expert-0/ …  MIX/router-0/ …  MIX/runs/0/ …

The last are the experts' runs, which may have been made elsewhere.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Self

from farflung import formats
from farflung.errors import UserError, disk_errors
from farflung.files import beside, write_text
from farflung.workloads import tokenizers
from farflung.workloads.tokenizers import Tokenizer

MANIFEST = "mixture.json"
WORKLOAD = "workload"
"""Its key there."""


@dataclass(frozen=True, kw_only=True)
class Split:
    """Data that was split among experts, whatever it is."""

    workload: ClassVar[str]
    """What the experts are trained as."""
    folder: Path
    experts: int
    dealt: list[list[int]]
    """For each expert, how many samples of each source, or class, it is trained on."""
    held_out: list[int]
    """For each expert, how many samples it is judged by."""

    def store(self, expert: int) -> Path:
        """The data that an expert is trained on."""
        return self.folder / f"expert-{expert}"

    def run(self, expert: int) -> Path:
        """Where an expert's run is looked for."""
        return self.folder / "runs" / str(expert)

    def write(self) -> None:
        """Writes the manifest, with which the folder is whole."""
        table = {formats.KEY: formats.MIXTURE.version, WORKLOAD: self.workload, **asdict(self)}
        del table["folder"]
        write_text(self.folder / MANIFEST, json.dumps(table, indent=1))

    @classmethod
    def read(cls, folder: Path) -> Self:
        """That in a folder. Raises UserError where there is none, or it is damaged or of another format."""
        table = _table(folder)
        try:
            found = cls(folder=folder, **{one.name: table[one.name] for one in fields(cls) if one.name in table})
            parts = len(found.dealt), len(found.held_out)
        except TypeError as error:
            raise _damaged(folder, error) from error
        if parts != (found.experts, found.experts):
            raise _damaged(folder, f"it says experts {found.experts!r}, and what {min(parts)} have")
        return found


@dataclass(frozen=True, kw_only=True)
class Mixture(Split):
    """A text that was split among experts."""

    workload: ClassVar[str] = "language"
    prefix: int
    """Tokens that the routers have learnt to read."""
    sequence_length: int
    tokenizer: str
    """Its name."""
    digest: str
    """Its hash."""
    data: list[str]
    """The sources."""
    rounds: list[dict[str, Any]]
    """How the routers have dealt sequences, round by round; see RouterRound."""

    def router(self, expert: int) -> Path:
        """The folder of an expert's router."""
        return self.folder / f"router-{expert}"

    @property
    def who_got_what(self) -> Path:
        """The number of each sequence's expert: (n,) int32, the sources one after the other, each in its order."""
        return self.folder / "experts.npy"

    def read_tokenizer(self) -> Tokenizer:
        """What makes its tokens. Raises UserError where it is another one by now."""
        found = tokenizers.load(self.tokenizer)
        if found.digest != self.digest:
            raise UserError(
                f"{self.folder}: the tokenizer {self.tokenizer} is not the one that the text was split with; "
                "put that one there again"
            )
        return found


def workload_of(folder: Path) -> str:
    """What a mixture's experts are trained as. Raises UserError where there is none, or it is damaged."""
    return str(_table(folder).get(WORKLOAD, Mixture.workload))  # of old, there were mixtures of text alone


def _table(folder: Path) -> dict[str, Any]:
    where = folder / MANIFEST
    if not where.exists():
        raise UserError(f"{folder} holds no mixture; give a folder that farflung mixture split has made")
    try:
        table: dict[str, Any] = json.loads(where.read_text("utf-8"))
        formats.MIXTURE.check(table, str(where))
    except (OSError, ValueError, AttributeError) as error:
        if isinstance(error, UserError):
            raise
        raise _damaged(folder, error) from error
    return table


def _damaged(folder: Path, error: Exception | str) -> UserError:
    return UserError(f"{folder / MANIFEST} is damaged ({error}); split the data again")


@contextmanager
def written_beside(folder: Path) -> Iterator[Path]:
    """A folder that is written beside its place and renamed at the end, unless another process was first.

    Raises UserError where the disk does not let it.
    """
    new = beside(folder)
    with disk_errors(f"write to {folder}", "give another folder, or make room"):
        try:
            shutil.rmtree(new, ignore_errors=True)  # left by one of this number that was killed, as in a container
            new.mkdir(parents=True)
            yield new
            try:
                new.rename(folder)
            except OSError:
                if not (folder.is_dir() and any(folder.iterdir())):
                    raise
        finally:
            shutil.rmtree(new, ignore_errors=True)
