"""Tables of results: printed row by row as they come, kept as JSON, shown as text, Markdown and HTML."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

Cell = str | float | None

ROOM = {"<": 4, ">": 7}
"""The least width of a column of texts and of numbers, since later cells may be wider than the first."""


@dataclass
class Table:
    """Columns by name, each with the format of its numbers, and rows, which may be yet to come.

    A format is what follows the colon in an f-string, without a width: `.3f`, `+.1%`. Texts are shown as they are,
    None as nothing.
    """

    columns: dict[str, str]
    rows: Iterable[Sequence[Cell]]
    title: str = ""

    def lines(self) -> Iterator[str]:
        """As text, line by line; keeps the rows, so that they can be read again."""
        if self.title:
            yield self.title
        kept: list[Sequence[Cell]] = self.rows if isinstance(self.rows, list) else []
        names, widths = list(self.columns), list[int]()
        for row in self.rows:
            cells = self._shown(row)
            if kept is not self.rows:
                kept.append(row)
            if not widths:
                known = [self._shown(other) for other in kept]
                widths = [max(map(len, column)) for column in zip(names, *known, strict=True)]
                sides = ["<" if isinstance(cell, str) else ">" for cell in row]
                widths = [max(width, ROOM[side]) for width, side in zip(widths, sides, strict=True)]
                yield _joined(names, widths, sides)
            yield _joined(cells, widths, sides)
        self.rows = kept

    def markdown(self) -> str:
        """As Markdown; columns after the first are set to the right."""
        head = ["---", *["---:"] * (len(self.columns) - 1)]
        lines = [list(self.columns), head, *(self._shown(row) for row in self.rows)]
        table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
        return f"**{self.title}**\n\n{table}" if self.title else table

    def html(self) -> str:
        """As HTML."""
        head = "".join(f"<th>{escape(name)}</th>" for name in self.columns)
        rows = ["".join(f"<td>{escape(cell)}</td>" for cell in self._shown(row)) for row in self.rows]
        body = "".join(f"<tr>{row}</tr>" for row in rows)
        return f"<table><caption>{escape(self.title)}</caption><tr>{head}</tr>{body}</table>"

    def _shown(self, row: Sequence[Cell]) -> list[str]:
        return [_text(cell, spec) for cell, spec in zip(row, self.columns.values(), strict=True)]


Part = Table | str
"""What a bench tells: a table, or a line or paragraph between tables."""


def told(parts: Iterable[Part]) -> Iterator[Part]:
    """Prints parts as they come, and hands them on."""
    for part in parts:
        for line in part.lines() if isinstance(part, Table) else [part]:
            print(line, flush=True)
        print()
        yield part


def to_json(part: Part) -> Any:
    """As JSON takes it."""
    return part if isinstance(part, str) else {"title": part.title, "columns": part.columns, "rows": list(part.rows)}


def from_json(stored: Any) -> Part:
    """What `to_json` was given."""
    return stored if isinstance(stored, str) else Table(stored["columns"], stored["rows"], stored["title"])


def markdown(parts: Iterable[Part]) -> str:
    """Parts as paragraphs of Markdown."""
    return "\n\n".join(part if isinstance(part, str) else part.markdown() for part in parts)


def _text(cell: Cell, spec: str) -> str:
    if cell is None:
        return ""
    return cell if isinstance(cell, str) else format(cell, spec)


def _joined(cells: Sequence[str], widths: Sequence[int], sides: Sequence[str]) -> str:
    padded = (f"{cell:{side}{width}}" for cell, side, width in zip(cells, sides, widths, strict=True))
    return "  ".join(padded).rstrip()
