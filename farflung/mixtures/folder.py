"""A mixture's folder: a store of tokens for each expert, a model for each router, and what they are of.

MIX/mixture.json  MIX/expert-0/ …  MIX/router-0/ …  MIX/runs/0/ …

The last are the experts' runs, which may have been made elsewhere.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from farflung import formats
from farflung.errors import UserError, disk_errors
from farflung.files import beside, write_text
from farflung.workloads import tokenizers
from farflung.workloads.tokenizers import Tokenizer

MANIFEST = "mixture.json"


@dataclass(frozen=True)
class Mixture:
    """A text that was split among experts."""

    folder: Path
    experts: int
    prefix: int
    """Tokens that the routers have learnt to read."""
    sequence_length: int
    tokenizer: str
    """Its name."""
    digest: str
    """Its hash."""
    data: list[str]
    """The sources."""
    dealt: list[list[int]]
    """For each expert, how many sequences of each source it is trained on."""
    held_out: list[int]
    """For each expert, how many sequences it is judged by."""
    rounds: list[dict[str, Any]]
    """How the routers have dealt sequences, round by round; see RouterRound."""

    def store(self, expert: int) -> Path:
        """The store that an expert is trained on."""
        return self.folder / f"expert-{expert}"

    def router(self, expert: int) -> Path:
        """The folder of an expert's router."""
        return self.folder / f"router-{expert}"

    def run(self, expert: int) -> Path:
        """Where an expert's run is looked for."""
        return self.folder / "runs" / str(expert)

    def read_tokenizer(self) -> Tokenizer:
        """What makes its tokens. Raises UserError where it is another one by now."""
        found = tokenizers.load(self.tokenizer)
        if found.digest != self.digest:
            raise UserError(
                f"{self.folder}: the tokenizer {self.tokenizer} is not the one that the text was split with; "
                "put that one there again"
            )
        return found

    def write(self) -> None:
        """Writes the manifest, with which the folder is whole."""
        table = {formats.KEY: formats.MIXTURE.version, **asdict(self)}
        del table["folder"]
        write_text(self.folder / MANIFEST, json.dumps(table, indent=1))


def read(folder: Path) -> Mixture:
    """The mixture in a folder. Raises UserError where there is none, or it is damaged or of another format."""
    where = folder / MANIFEST
    if not where.exists():
        raise UserError(f"{folder} holds no mixture; give a folder that farflung mixture split has made")
    try:
        table = json.loads(where.read_text("utf-8"))
        formats.MIXTURE.check(table, str(where))
        return Mixture(folder, **{name: table[name] for name in Mixture.__dataclass_fields__ if name != "folder"})
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{where} is damaged ({error}); split the text again") from error


@contextmanager
def written_beside(folder: Path) -> Iterator[Path]:
    """A folder that is written beside its place and renamed at the end, unless another process was first.

    Raises UserError where the disk does not let it.
    """
    new = beside(folder)
    with disk_errors(f"write to {folder}", "give another folder, or make room"):
        try:
            new.mkdir(parents=True)
            yield new
            try:
                new.rename(folder)
            except OSError:
                if not (folder.is_dir() and any(folder.iterdir())):
                    raise
        finally:
            shutil.rmtree(new, ignore_errors=True)
