"""Tables for terminals and pages, with a unit in every column."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

Written = Callable[[Any], str]


def figures(value: float) -> str:
    """A number with about three digits that count, and none in powers of ten."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.2f}" if abs(value) >= 1 else f"{value:.3g}"


def percent(value: float) -> str:
    """A share from 0 to 1; the unit is in the column's head."""
    return f"{100 * value:.1f}"


@dataclass(frozen=True)
class Column:
    """A column's name, its unit (empty for names), and how its values are written."""

    name: str
    unit: str = ""
    written: Written = str


@dataclass(frozen=True)
class Table:
    """Columns, and rows of their values; None is written as a dash."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[Any]]

    def text(self) -> str:
        """Aligned lines: names, units, then the rows; the first column to the left."""
        lines = [[c.name for c in self.columns], [c.unit for c in self.columns], *self._cells()]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        aligned = (
            [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))]
            for first, *others in lines
        )
        return "\n".join("  ".join(cells).rstrip() for cells in aligned)

    def html(self) -> str:
        """The same as a table element."""
        heads = (f"<th>{escape(c.name)}<br><small>{escape(c.unit)}</small></th>" for c in self.columns)
        rows = ("".join(f"<td>{escape(cell)}</td>" for cell in cells) for cells in self._cells())
        body = "".join(f"<tr>{row}</tr>" for row in rows)
        return f"<table><thead><tr>{''.join(heads)}</tr></thead><tbody>{body}</tbody></table>"

    def _cells(self) -> list[list[str]]:
        return [
            ["-" if value is None else column.written(value) for column, value in zip(self.columns, row, strict=True)]
            for row in self.rows
        ]
