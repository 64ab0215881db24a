"""A mixture's folder: the data of each expert, what routes between them, and what they are of.

MIX/mixture.json  MIX/experts.npy  MIX/expert-0/ …  MIX/router-0/ …  MIX/runs/0/ …

The last are the experts' runs, which may have been made elsewhere.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Self, get_args, get_origin

from farflung import formats
from farflung.errors import UserError
from farflung.files import new_beside, write_text
from farflung.tables import hints_of
from farflung.workloads import tokenizers
from farflung.workloads.tokenizers import Tokenizer

COPY_AGAIN = "copy the mixture's folder again from where it was split, or split the data again"
"""What helps where a part of it is missing."""
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
        table, hints = _table(folder), hints_of(cls)
        told = {one.name: table[one.name] for one in fields(cls) if one.name in table}
        if strange := [name for name, value in told.items() if not _is_of(hints[name], value)]:
            raise damaged(folder, f"its {strange[0]} is {told[strange[0]]!r}")
        try:
            found = cls(folder=folder, **told)
        except TypeError as error:
            raise damaged(folder, error) from error
        if not found.agrees():
            raise damaged(folder, f"what it says of {found.experts} experts does not agree with itself")
        return found

    def agrees(self) -> bool:
        """Whether what it says can be of one split."""
        return 0 < self.experts == len(self.dealt) == len(self.held_out) and min(self.held_out) > 0


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

    def agrees(self) -> bool:
        """See Split."""
        of_all_sources = all(len(row) == len(self.data) for row in self.dealt)
        return super().agrees() and of_all_sources and 0 < self.prefix <= self.sequence_length

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
        raise damaged(folder, error) from error
    return table


def damaged(folder: Path, error: Exception | str) -> UserError:
    """Says what is wrong with the manifest in a folder, and what to do."""
    return UserError(f"{folder / MANIFEST} is damaged ({error}); split the data again")


def _is_of(hint: Any, value: Any) -> bool:
    """Whether what JSON holds is of a type; a float may be whole."""
    inner = get_args(hint)
    if get_origin(hint) is list:
        return isinstance(value, list) and all(_is_of(inner[0], one) for one in value)
    if get_origin(hint) is dict:
        return isinstance(value, dict) and all(_is_of(inner[1], one) for one in value.values())
    return hint is Any or type(value) in (inner or (hint,)) or (float in (inner or (hint,)) and type(value) is int)


@contextmanager
def written_beside(folder: Path) -> Iterator[Path]:
    """A folder that is written beside its place and renamed at the end, unless another process was first.

    Raises UserError where the disk does not let it.
    """
    with new_beside(folder) as new:
        new.mkdir(parents=True)
        yield new
        try:
            new.rename(folder)
        except OSError:
            if not (folder.is_dir() and any(folder.iterdir())):
                raise
