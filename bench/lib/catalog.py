"""The benches that there are: one module each, in a folder for each question. Nothing here names one."""

from __future__ import annotations

import ast
import importlib
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[1]
QUESTIONS = ("quality", "speed", "models", "resilience")


@dataclass(frozen=True)
class Bench:
    """One bench, by the file that it is.

    Its module has `Options`, a dataclass; `SMOKE`, options for its smallest form; and `run(options, store)`, which
    yields what it finds. It may have `needs()`, why this machine cannot run it ("" or None if it can);
    `tables(store, options)`, its tables by name, made of kept results alone; and `plots(store)`, pictures by name, each
    drawn into a given file.
    """

    path: Path

    @property
    def name(self) -> str:
        """As `python -m bench run` takes it."""
        return self.path.stem

    @property
    def question(self) -> str:
        """The folder that it is in."""
        return self.path.parent.name

    @property
    def docstring(self) -> str:
        """Of its module, which is not imported."""
        return docstring_of(self.path)

    @property
    def summary(self) -> str:
        """The docstring's first line."""
        return self.docstring.partition("\n")[0]

    def load(self) -> ModuleType:
        """Its module."""
        return importlib.import_module(f"bench.{self.question}.{self.name}")


def benches(root: Path = ROOT) -> dict[str, Bench]:
    """All benches by name, question by question."""
    paths = [path for question in QUESTIONS for path in sorted((root / question).glob("[!_]*.py"))]
    return {path.stem: Bench(path) for path in paths}


def docstring_of(path: Path) -> str:
    """Of a module in a file."""
    return ast.get_docstring(ast.parse(path.read_text())) or ""
