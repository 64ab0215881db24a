"""Tables for terminals and pages, with a unit in every column."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any


def figures(value: float) -> str:
    """A number with about three significant digits, without powers of ten."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.2f}" if abs(value) >= 1 else f"{value:.3g}"


def percent(value: float) -> str:
    """A share from 0 to 1 in per cent, without the sign."""
    return f"{100 * value:.1f}"


@dataclass(frozen=True)
class Column:
    """A column's name, its unit (empty for names), its value for an item, and how that is written."""

    name: str
    unit: str
    value: Callable[[Any], Any]
    written: Callable[[Any], str] = str


@dataclass(frozen=True)
class Table:
    """Columns, and an item for each row; a value of None is written as a dash."""

    columns: Sequence[Column]
    items: Sequence[Any]

    def text(self) -> str:
        """Aligned lines: names, units, then the rows; the first column is aligned left."""
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
        def cell(column: Column, item: Any) -> str:
            return "-" if (value := column.value(item)) is None else column.written(value)

        return [[cell(column, item) for column in self.columns] for item in self.items]
